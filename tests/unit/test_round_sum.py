"""A round's deltas become a checkpoint: the same bytes whatever happened on the way."""

import asyncio
import errno
import hashlib
import itertools
import os
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from covey.v1 import common_pb2, job_pb2
from covey.v1.checkpoint_pb2 import CheckpointHeader, DatasetPosition, WorkPosition
from covey.v1.package_pb2 import Parameter
from covey_coordinator.domain.aggregation import (
    Aggregation,
    Strategy,
    accumulate,
    optimizer_names,
    update_block,
)
from covey_coordinator.state import round_sum as module
from covey_coordinator.state.deltas import StoredDelta
from covey_coordinator.state.round_sum import AggregationDiverged, FinishedRound, RoundSum
from covey_kit.checkpoints import CheckpointReader, verify
from covey_kit.errors import DataLoss, InvalidArgument, Reason, ResourceExhausted

F32 = npt.NDArray[np.float32]

PARAMETERS = [Parameter(name="hidden.weight", shape=[30, 20]), Parameter(name="bias", shape=[7])]
COUNT = 607
STRATEGIES = [Aggregation.resolve(strategy) for strategy in Strategy]


def random_values(seed: int, count: int = COUNT) -> F32:
    """Returns some f32 values."""
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def header(round_number: int, units: int, aggregation: Aggregation) -> CheckpointHeader:
    """Returns a header as the coordinator makes it, without digests."""
    settings = job_pb2.AggregationSettings(
        strategy=job_pb2.AggregationStrategy.Value(f"AGGREGATION_STRATEGY_{aggregation.strategy}"),
        server_learning_rate=aggregation.server_learning_rate,
        momentum=aggregation.momentum,
        beta1=aggregation.beta1,
        beta2=aggregation.beta2,
        tau=aggregation.tau,
    )
    return CheckpointHeader(
        package_name="demo",
        package_version="1.0.0",
        module_sha256="ab" * 32,
        round=round_number,
        units=units,
        metrics=[common_pb2.MetricValue(name="loss", sum=12.5, count=units)] if round_number else [],
        aggregation=settings,
        position=WorkPosition(dataset=DatasetPosition(manifest_sha256="cd" * 32, next_index=round_number)),
    )


_numbers = itertools.count()


def stored(folder: Path, values: F32) -> StoredDelta:
    """Puts a delta on disk."""
    data = values.astype("<f4").tobytes()
    path = folder / f"delta-{next(_numbers)}.f32"
    path.write_bytes(data)
    return StoredDelta(path, hashlib.sha256(data).hexdigest(), len(data))


async def initial(folder: Path, aggregation: Aggregation, weights: F32) -> FinishedRound:
    """Makes the checkpoint of round 0."""
    rounds = RoundSum(weights.size)
    await rounds.add(0, stored(folder, weights), 0)
    return await rounds.finish(
        base=None,
        aggregation=aggregation,
        header=header(0, 0, aggregation),
        parameters=PARAMETERS,
        out=folder / "round-0.safetensors",
    )


async def train(
    base: FinishedRound,
    results: Sequence[tuple[StoredDelta, int]],
    aggregation: Aggregation,
    *,
    name: str = "",
) -> FinishedRound:
    """Makes the checkpoint of the round after `base`."""
    number = base.header.round + 1
    rounds = RoundSum(COUNT)
    for index, (delta, units) in enumerate(results):
        await rounds.add(index, delta, units)
    with CheckpointReader(base.path) as reader:
        return await rounds.finish(
            base=reader,
            aggregation=aggregation,
            header=header(number, rounds.units, aggregation),
            parameters=PARAMETERS,
            out=base.path.with_name(name or f"round-{number}.safetensors"),
        )


def contents(finished: FinishedRound) -> tuple[F32, Mapping[str, F32]]:
    """Returns weights and optimizer tensors of a checkpoint."""
    with CheckpointReader(finished.path) as reader:
        return reader.read_weights(), {name: reader.read_optimizer(name) for name in reader.optimizer_names}


def names(folder: Path, part: str) -> list[str]:
    """Returns the files whose names hold `part`, hidden ones too."""
    return sorted(path.name for path in folder.iterdir() if part in path.name)


@pytest.mark.parametrize("aggregation", STRATEGIES, ids=lambda a: a.strategy)
async def test_round_0_is_the_delta_itself(tmp_path: Path, aggregation: Aggregation) -> None:
    """The weights are the bytes that one participant sent, −0 and denormals too; the state is the initial."""
    weights = random_values(1)
    weights[:3] = [-0.0, 1e-45, 0.0]

    finished = await initial(tmp_path, aggregation, weights)

    got, state = contents(finished)
    assert got.tobytes() == weights.tobytes()
    assert not finished.no_units
    assert tuple(state) == optimizer_names(aggregation)
    tau = aggregation.tau or 0.0
    for name, values in state.items():
        expected = tau**2 if (aggregation.strategy, name) == (Strategy.FED_ADAM, "optimizer.v") else 0.0
        assert (values == np.float32(expected)).all()


@pytest.mark.parametrize("aggregation", STRATEGIES, ids=lambda a: a.strategy)
async def test_rounds_follow_the_arithmetic(tmp_path: Path, aggregation: Aggregation) -> None:
    """Three rounds through files have the same bits as the same arithmetic in memory."""
    weights = random_values(1)
    finished = await initial(tmp_path, aggregation, weights)
    state: Mapping[str, F32] = contents(finished)[1]
    for number in range(3):
        deltas = [random_values(10 * number + i) for i in range(4)]
        finished = await train(
            finished, [(stored(tmp_path, delta), 5 + i) for i, delta in enumerate(deltas)], aggregation
        )

        acc = np.zeros(COUNT)
        for index, delta in enumerate(deltas):
            accumulate(acc, delta, 5.0 + index)
        weights, state = update_block(aggregation, weights, acc / (5 + 6 + 7 + 8), state)
        got, got_state = contents(finished)
        assert got.tobytes() == weights.tobytes()
        assert {name: values.tobytes() for name, values in got_state.items()} == {
            name: values.tobytes() for name, values in state.items()
        }


async def test_the_digests_are_those_of_the_bytes(tmp_path: Path) -> None:
    """File and weights hash to what is returned, and the file passes the codec's verification."""
    aggregation = STRATEGIES[2]
    base = await initial(tmp_path, aggregation, random_values(1))

    finished = await train(base, [(stored(tmp_path, random_values(2)), 3)], aggregation)

    data = finished.path.read_bytes()
    assert (finished.size, finished.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    weights = hashlib.sha256(contents(finished)[0].tobytes()).hexdigest()
    assert finished.weights_sha256 == finished.header.weights_sha256 == weights
    assert list(verify(finished.path, None, finished.sha256)) == []
    assert finished.header.round == 1
    assert finished.header.units == 3


@pytest.mark.parametrize("aggregation", STRATEGIES, ids=lambda a: a.strategy)
@pytest.mark.parametrize("block", [1, 5, 64, 607])
async def test_bytes_are_independent_of_the_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aggregation: Aggregation, block: int
) -> None:
    """Blocks are for the memory alone."""
    base = await initial(tmp_path, aggregation, random_values(1))
    results = [(stored(tmp_path, random_values(2 + i)), 3 + i) for i in range(3)]
    expected = await train(base, results, aggregation)

    monkeypatch.setattr(module, "_BLOCK", block)
    finished = await train(base, results, aggregation, name="again.safetensors")

    assert finished.sha256 == expected.sha256


async def test_a_restart_gives_the_same_bytes(tmp_path: Path) -> None:
    """A new sum that is fed the same files again makes the same checkpoint, however far the first got."""
    aggregation = STRATEGIES[2]
    base = await initial(tmp_path, aggregation, random_values(1))
    results = [(stored(tmp_path, random_values(2 + i)), 3 + i) for i in range(4)]
    killed = RoundSum(COUNT)
    await killed.add(0, *results[0])
    await killed.add(1, *results[1])

    first = await train(base, results, aggregation)
    second = await train(base, results, aggregation, name="again.safetensors")

    assert first.sha256 == second.sha256
    assert first.path.read_bytes() == second.path.read_bytes()


async def test_concurrent_rounds_do_not_touch_each_other(tmp_path: Path) -> None:
    """Several jobs may aggregate at once; each has the bytes that it has alone."""
    aggregation = STRATEGIES[1]
    base = await initial(tmp_path, aggregation, random_values(1))
    many = [[(stored(tmp_path, random_values(10 * job + i)), 2 + i) for i in range(3)] for job in range(4)]
    alone = [await train(base, results, aggregation) for results in many]

    together = await asyncio.gather(
        *(train(base, results, aggregation, name=f"job-{job}") for job, results in enumerate(many))
    )

    assert [finished.sha256 for finished in together] == [finished.sha256 for finished in alone]


@pytest.mark.parametrize("aggregation", STRATEGIES, ids=lambda a: a.strategy)
async def test_a_round_without_units_changes_nothing(tmp_path: Path, aggregation: Aggregation) -> None:
    """Weights and optimizer state stay as they are, momentum included, and the result says so."""
    base = await initial(tmp_path, aggregation, random_values(1))
    base = await train(base, [(stored(tmp_path, random_values(2)), 5)], aggregation)
    results = [(stored(tmp_path, random_values(3 + i)), 0) for i in range(2)]

    finished = await train(base, results, aggregation)

    assert finished.no_units
    assert not base.no_units
    assert finished.weights_sha256 == base.weights_sha256
    assert [t.sha256 for t in finished.header.optimizer] == [t.sha256 for t in base.header.optimizer]


async def test_a_result_without_units_has_no_say(tmp_path: Path) -> None:
    """A delta of 0 units beside others changes neither the sum nor the total."""
    aggregation = STRATEGIES[0]
    base = await initial(tmp_path, aggregation, random_values(1))
    one, other = stored(tmp_path, random_values(2)), stored(tmp_path, random_values(3))

    with_it = await train(base, [(one, 5), (other, 0)], aggregation)
    without = await train(base, [(one, 5)], aggregation, name="without.safetensors")

    assert with_it.sha256 == without.sha256
    assert not with_it.no_units


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (0, 2), (0, 1)])
async def test_another_strategy_starts_with_its_own_state(tmp_path: Path, before: int, after: int) -> None:
    """FedAvgM's v and FedAdam's v have one name and two meanings: another strategy starts anew."""
    old, new = STRATEGIES[before], STRATEGIES[after]
    base = await initial(tmp_path, old, random_values(1))
    base = await train(base, [(stored(tmp_path, random_values(2)), 5)], old)
    fresh = await initial(tmp_path, new, contents(base)[0])
    delta = stored(tmp_path, random_values(3))

    continued = await train(base, [(delta, 5)], new)
    anew = await train(fresh, [(delta, 5)], new, name="anew.safetensors")

    assert continued.weights_sha256 == anew.weights_sha256
    assert [t.sha256 for t in continued.header.optimizer] == [t.sha256 for t in anew.header.optimizer]


async def test_divergence_names_the_place(tmp_path: Path) -> None:
    """Results that aren't finite are refused with round, parameter and index, and no file is left."""
    aggregation = Aggregation.resolve(Strategy.FED_AVG, server_learning_rate=1e30)
    base = await initial(tmp_path, aggregation, np.zeros(COUNT, dtype=np.float32))
    delta = np.zeros(COUNT, dtype=np.float32)
    delta[603], delta[605] = 1e20, -1e20

    with pytest.raises(AggregationDiverged, match="round 1 diverged: element 3 of bias is inf") as caught:
        await train(base, [(stored(tmp_path, delta), 5)], aggregation)

    assert (caught.value.round, caught.value.part, caught.value.parameter, caught.value.index) == (
        1,
        "weights",
        "bias",
        3,
    )
    assert caught.value.reason is Reason.RESULT_NOT_FINITE
    assert names(tmp_path, "round-1") == []


async def test_divergence_of_the_state_is_found_too(tmp_path: Path) -> None:
    """FedAdam's v may overflow while the weights are still finite."""
    aggregation = STRATEGIES[2]
    base = await initial(tmp_path, aggregation, np.zeros(COUNT, dtype=np.float32))

    results = [(stored(tmp_path, np.full(COUNT, 1e30, dtype=np.float32)), 5)]

    with pytest.raises(AggregationDiverged, match=r"0 of hidden\.weight is inf in the new optimizer\.v"):
        await train(base, results, aggregation)


async def test_only_the_next_assignment_may_be_added(tmp_path: Path) -> None:
    """The order of the sum is that of the assignments, and nobody else's."""
    rounds = RoundSum(COUNT)
    delta = stored(tmp_path, random_values(1))
    with pytest.raises(ValueError, match="expected the delta of assignment 0, found that of 1"):
        await rounds.add(1, delta, 1)
    await rounds.add(0, delta, 1)
    with pytest.raises(ValueError, match="expected the delta of assignment 1, found that of 0"):
        await rounds.add(0, delta, 1)

    assert (rounds.next_index, rounds.units) == (1, 1)


async def test_units_and_sizes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Negative counts and deltas of another model don't touch the sum."""
    rounds = RoundSum(COUNT)
    with pytest.raises(InvalidArgument, match="0 units or more, found -1") as caught:
        await rounds.add(0, stored(tmp_path, random_values(1)), -1)
    assert caught.value.reason is Reason.UNITS_INVALID
    with pytest.raises(InvalidArgument, match="expected a delta of 2428 bytes, found one of 2432") as caught:
        await rounds.add(0, stored(tmp_path, random_values(1, COUNT + 1)), 1)
    assert caught.value.reason is Reason.SIZE_MISMATCH

    await rounds.add(0, stored(tmp_path, random_values(1)), 1)


async def test_a_file_that_is_gone_leaves_the_sum_as_it_was(tmp_path: Path) -> None:
    """The assignment can be done again and added to the same sum."""
    rounds = RoundSum(COUNT)
    lost = stored(tmp_path, random_values(1))
    lost.path.unlink()
    with pytest.raises(DataLoss, match="has to be done again"):
        await rounds.add(0, lost, 1)
    cut = stored(tmp_path, random_values(1))
    cut.path.write_bytes(cut.path.read_bytes()[:-4])
    with pytest.raises(DataLoss, match="has 2424 bytes, not 2428"):
        await rounds.add(0, cut, 1)

    assert rounds.next_index == 0
    await rounds.add(0, stored(tmp_path, random_values(1)), 1)


async def test_a_damaged_delta_never_becomes_weights(tmp_path: Path) -> None:
    """Bytes that changed on the disk are found while they are folded; that sum can't be used any more."""
    rounds = RoundSum(COUNT)
    damaged = stored(tmp_path, random_values(1))
    damaged.path.write_bytes(random_values(2).tobytes())

    with pytest.raises(DataLoss, match="hashes to") as caught:
        await rounds.add(0, damaged, 1)

    assert caught.value.reason is Reason.DIGEST_MISMATCH
    with pytest.raises(ValueError, match="make a new RoundSum"):
        await rounds.add(0, stored(tmp_path, random_values(1)), 1)


async def test_damaged_initial_weights_never_become_a_checkpoint(tmp_path: Path) -> None:
    """Round 0 checks the bytes of its one delta too, and leaves no file."""
    rounds = RoundSum(COUNT)
    damaged = stored(tmp_path, random_values(1))
    await rounds.add(0, damaged, 0)
    damaged.path.write_bytes(random_values(2).tobytes())

    with pytest.raises(DataLoss, match="hashes to"):
        await rounds.finish(
            base=None,
            aggregation=STRATEGIES[0],
            header=header(0, 0, STRATEGIES[0]),
            parameters=PARAMETERS,
            out=tmp_path / "out",
        )

    assert names(tmp_path, "out") == []


async def test_a_read_that_fails_midway_spoils_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When some of a delta is in the sum and the rest isn't, every further call says to make it anew."""
    monkeypatch.setattr(module, "_BLOCK", 100)
    calls = itertools.count()

    def broken(acc: npt.NDArray[np.float64], delta: F32, weight: float) -> None:
        if next(calls) == 3:
            raise OSError("the disk doesn't answer")
        accumulate(acc, delta, weight)

    monkeypatch.setattr(module, "accumulate", broken)
    rounds = RoundSum(COUNT)
    delta = stored(tmp_path, random_values(1))
    with pytest.raises(OSError, match="doesn't answer"):
        await rounds.add(0, delta, 1)

    with pytest.raises(ValueError, match="make a new RoundSum"):
        await rounds.add(0, delta, 1)


async def test_a_full_disk_says_so_and_the_finish_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC while the checkpoint is written is STORAGE_FULL; nothing is left, and the sum is still there."""
    base = await initial(tmp_path, STRATEGIES[0], random_values(1))
    rounds = RoundSum(COUNT)
    await rounds.add(0, stored(tmp_path, random_values(2)), 5)

    def full(descriptor: int, data: bytes, offset: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with CheckpointReader(base.path) as reader:

        def finish() -> Awaitable[FinishedRound]:
            return rounds.finish(
                base=reader,
                aggregation=STRATEGIES[0],
                header=header(1, 5, STRATEGIES[0]),
                parameters=PARAMETERS,
                out=tmp_path / "out",
            )

        with monkeypatch.context() as patch:
            patch.setattr("covey_kit.checkpoints.writer.write_all", full)
            with pytest.raises(ResourceExhausted) as caught:
                await finish()
        assert caught.value.reason is Reason.STORAGE_FULL
        assert names(tmp_path, "out") == []

        assert (await finish()).header.round == 1


async def test_a_finished_round_is_finished(tmp_path: Path) -> None:
    """Nothing can be added behind the end."""
    aggregation = STRATEGIES[0]
    rounds = RoundSum(COUNT)
    delta = stored(tmp_path, random_values(1))
    await rounds.add(0, delta, 0)
    await rounds.finish(
        base=None,
        aggregation=aggregation,
        header=header(0, 0, aggregation),
        parameters=PARAMETERS,
        out=tmp_path / "0",
    )

    with pytest.raises(ValueError, match="the round is finished"):
        await rounds.add(1, delta, 0)


async def test_a_cancelled_finish_leaves_no_file_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelling stops the work between two blocks; the sum is still there for another try."""
    aggregation = STRATEGIES[0]
    base = await initial(tmp_path, aggregation, random_values(1))
    results = [(stored(tmp_path, random_values(2)), 5)]
    expected = await train(base, results, aggregation, name="expected.safetensors")
    rounds = RoundSum(COUNT)
    await rounds.add(0, *results[0])
    monkeypatch.setattr(module, "_BLOCK", 1)
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    def update(*arguments: object) -> object:
        loop.call_soon_threadsafe(begun.set)
        return update_block(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "update_block", update)
    with CheckpointReader(base.path) as reader:

        def finish() -> asyncio.Task[FinishedRound]:
            work = rounds.finish(
                base=reader,
                aggregation=aggregation,
                header=header(1, 5, aggregation),
                parameters=PARAMETERS,
                out=tmp_path / "out",
            )
            return asyncio.create_task(work)

        task = finish()
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert names(tmp_path, "out") == []

        assert (await finish()).sha256 == expected.sha256


async def test_what_does_not_fit_together_is_named(tmp_path: Path) -> None:
    """Parameters, base and header of another round are the coordinator's mistake and stop it."""
    aggregation = STRATEGIES[0]
    base = await initial(tmp_path, aggregation, random_values(1))
    rounds = RoundSum(COUNT)
    await rounds.add(0, stored(tmp_path, random_values(2)), 5)
    await rounds.add(1, stored(tmp_path, random_values(2)), 5)
    out = tmp_path / "out"
    with CheckpointReader(base.path) as reader:
        right = header(1, 10, aggregation)
        with pytest.raises(ValueError, match="expected parameters of 607 weights, found 600"):
            await rounds.finish(
                base=reader, aggregation=aggregation, header=right, parameters=PARAMETERS[:1], out=out
            )
        with pytest.raises(ValueError, match="expected a header of 10 units as added, found 9"):
            await rounds.finish(
                base=reader,
                aggregation=aggregation,
                header=header(1, 9, aggregation),
                parameters=PARAMETERS,
                out=out,
            )
    with pytest.raises(ValueError, match="round 0 has one delta"):
        await rounds.finish(base=None, aggregation=aggregation, header=right, parameters=PARAMETERS, out=out)
    with pytest.raises(ValueError, match="at least one weight"):
        RoundSum(0)

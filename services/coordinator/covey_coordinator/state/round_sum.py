"""The sum of a round's deltas, and the checkpoint made from it.

Deltas are folded one by one, in assignment order, into one f64 sum; the checkpoint is read, made and
written block by block. So memory is one f64 for each weight and a few blocks, however many
participants there are, and the bytes of the checkpoint depend on base, deltas, units and settings
alone: not on block sizes, threads, the order of arrival, or a restart in between.
"""

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import numpy as np

from covey.v1 import job_pb2
from covey.v1.checkpoint_pb2 import CheckpointHeader
from covey.v1.package_pb2 import Parameter
from covey_coordinator.domain.aggregation import (
    F32,
    F64,
    Aggregation,
    accumulate,
    initial_state,
    optimizer_names,
    update_block,
)
from covey_coordinator.state.deltas import StoredDelta
from covey_coordinator.state.disk import room_for
from covey_kit.bulk import digest_file
from covey_kit.checkpoints import CheckpointReader, CheckpointWriter, first_not_finite
from covey_kit.errors import DataLoss, FailedPrecondition, InvalidArgument, Reason
from covey_kit.memory import give_back

__all__ = ["AggregationDiverged", "FinishedRound", "RoundSum"]

# Elements read, computed and written at once: 1 MiB of f32.
_BLOCK: Final = 256 * 1024
_LARGE: Final = 8 << 20  # bytes of a delta from which memory is worth a thought
_F32_BYTES: Final = 4

_Block: TypeAlias = tuple[int, F32, Mapping[str, F32]]  # first element, weights, optimizer tensors
_T = TypeVar("_T")


@dataclass(frozen=True)
class FinishedRound:
    """A checkpoint that is on disk.

    Attributes:
        header: its header, digests filled in.
        path: the file.
        size: bytes of the file.
        sha256: digest of the file: its key in storage.
        weights_sha256: digest of the weights alone.
        no_units: True when no assignment had any unit: weights and optimizer state are the base's.
    """

    header: CheckpointHeader
    path: Path
    size: int
    sha256: str
    weights_sha256: str
    no_units: bool


class AggregationDiverged(FailedPrecondition):
    """The new weights or the optimizer's state aren't finite. The same round gives the same again.

    Attributes:
        round: the round.
        part: `weights`, or the optimizer's tensor.
        parameter: the parameter that the first such element belongs to.
        index: its place in that parameter, flat, counted from 0.
    """

    def __init__(self, round_number: int, part: str, parameter: str, index: int, value: float) -> None:
        super().__init__(
            Reason.RESULT_NOT_FINITE,
            f"the aggregation of round {round_number} diverged: element {index} of {parameter} is {value} "
            f"in the new {part}; a smaller server learning rate or learning rate often helps",
            metadata={"round": str(round_number), "part": part, "parameter": parameter, "index": str(index)},
        )
        self.round = round_number
        self.part = part
        self.parameter = parameter
        self.index = index


class RoundSum:
    """Sums the deltas of one round. To start again, as after a restart, make a new one and add all once more.

    Work is done in threads, one call at a time; a cancelled call ends before its exception is seen.
    """

    def __init__(self, weight_count: int) -> None:
        """Makes an empty sum. Memory is taken with the first delta that counts.

        Args:
            weight_count: number of weights.
        """
        if weight_count < 1:
            raise ValueError(f"expected at least one weight, found {weight_count}")
        self._count = weight_count
        self._acc: F64 | None = None
        self._units = 0
        self._deltas: list[StoredDelta] = []
        self._state = ""  # why nothing can be added any more; empty: it can
        self._lock = asyncio.Lock()

    @property
    def next_index(self) -> int:
        """The assignment whose delta comes next: how many were added."""
        return len(self._deltas)

    @property
    def units(self) -> int:
        """Units of all deltas added."""
        return self._units

    async def add(self, index: int, delta: StoredDelta, units: int) -> None:
        """Adds the delta of the next assignment, weighted by its units.

        A delta of 0 units counts as present, and for nothing else.

        Args:
            index: place of the assignment in the round; must be `next_index`.
            delta: the file, as `DeltaSink` returned it.
            units: units behind it, ≥ 0.

        Raises:
            ValueError: another index is next, or the round is finished.
            InvalidArgument: UNITS_INVALID; SIZE_MISMATCH, the delta is of another model.
            DataLoss: DIGEST_MISMATCH, the file is gone or isn't what it was. It's hashed again as it is read.

        After an error the sum is as it was, unless some of the delta is in it: then further calls say so.
        """
        async with self._lock:
            self._check_open()
            if index != self.next_index:
                raise ValueError(f"expected the delta of assignment {self.next_index}, found that of {index}")
            if units < 0:
                raise InvalidArgument(Reason.UNITS_INVALID, f"expected 0 units or more, found {units}")
            if delta.size != self._count * _F32_BYTES:
                raise InvalidArgument(
                    Reason.SIZE_MISMATCH,
                    f"expected a delta of {self._count * _F32_BYTES} bytes, found one of {delta.size}",
                )
            await _in_thread(lambda: self._add(delta, units))

    async def finish(
        self,
        *,
        base: CheckpointReader | None,
        aggregation: Aggregation,
        header: CheckpointHeader,
        parameters: Sequence[Parameter],
        out: Path,
    ) -> FinishedRound:
        """Makes the round's checkpoint and lets go of the sum. After an error it may be called again.

        A round without any units keeps weights and optimizer state as they are: its momentum, too,
        doesn't move on, since a step without evidence would be one. The optimizer's state is taken from
        the base if the base was made with the same strategy, else it starts anew: tensors of the same name
        mean different things to different strategies.

        Args:
            base: the checkpoint that the round trained from. None: round 0, whose weights are the bytes of
                its only delta and whose optimizer state is the initial one.
            aggregation: strategy and settings in force.
            header: what the checkpoint says of itself; weight count, names and digests are filled in here.
            parameters: the weight tensors in manifest order.
            out: where the checkpoint goes; its folder must exist.

        Raises:
            AggregationDiverged: a result isn't finite. Nothing is left at `out`.
            CheckpointError: base or header break the contract.
            DataLoss: CHECKPOINT_INVALID, the base lacks optimizer tensors that its own strategy has;
                DIGEST_MISMATCH, round 0's delta isn't what it was.
            ResourceExhausted: STORAGE_FULL.
            ValueError: base, header, parameters and sum don't fit each other, or the round is finished.
        """
        async with self._lock:
            self._check_open()
            self._check_fit(base, header, parameters)
            blocks = self._blocks(base, aggregation)
            stop = threading.Event()
            done = await _in_thread(
                lambda: _write(blocks, header, parameters, optimizer_names(aggregation), out, stop), stop
            )
            no_units = base is not None and self._units == 0
            self._acc = None
            self._state = "the round is finished"
        written, size, sha256 = done
        return FinishedRound(written, out, size, sha256, written.weights_sha256, no_units)

    def _check_open(self) -> None:
        if self._state:
            raise ValueError(f"{self._state}; make a new RoundSum and add every delta again")

    def _check_fit(
        self, base: CheckpointReader | None, header: CheckpointHeader, parameters: Sequence[Parameter]
    ) -> None:
        count = sum(prod(parameter.shape) for parameter in parameters)
        if count != self._count:
            raise ValueError(f"expected parameters of {self._count} weights, found {count}")
        if base is None:
            if len(self._deltas) != 1:
                raise ValueError(f"round 0 has one delta, the weights themselves; found {len(self._deltas)}")
            return
        if base.header.weight_count != self._count:
            raise ValueError(f"expected a base of {self._count} weights, found {base.header.weight_count}")
        if header.units != self._units:
            raise ValueError(f"expected a header of {self._units} units as added, found {header.units}")

    def _add(self, delta: StoredDelta, units: int) -> None:
        """Folds one file into the sum; the only thing that touches it."""
        if delta.size >= _LARGE:
            # What its arrival left in the heap would otherwise lie beside the sum for the rest of the round.
            give_back()
        if units:
            if self._acc is None:
                self._acc = np.zeros(self._count, dtype=np.float64)
            touched = False
            try:
                for start, block in _read_delta(delta):
                    touched = True
                    accumulate(self._acc[start : start + block.size], block, float(units))
            except BaseException:
                if touched:
                    self._state = "a delta turned out to be damaged, so the sum is of no more use"
                    self._acc = None
                raise
        self._units += units
        self._deltas.append(delta)

    def _blocks(self, base: CheckpointReader | None, aggregation: Aggregation) -> Iterator[_Block]:
        """Yields the new weights and optimizer tensors in order. Blocks the thread."""
        names = optimizer_names(aggregation)
        if base is None:
            for start, weights in _read_delta(self._deltas[0]):
                yield start, weights, {name: initial_state(aggregation, name, weights.size) for name in names}
            return
        kept = _keeps_state(base, aggregation)
        total = float(self._units)
        for start in range(0, self._count, _BLOCK):
            size = min(_BLOCK, self._count - start)
            weights = base.read_weights(start, size)
            state = {
                name: base.read_optimizer(name, start, size)
                if kept
                else initial_state(aggregation, name, size)
                for name in names
            }
            if self._acc is None:
                yield start, weights, state
            else:
                yield (
                    start,
                    *update_block(aggregation, weights, self._acc[start : start + size] / total, state),
                )


def _keeps_state(base: CheckpointReader, aggregation: Aggregation) -> bool:
    """Says whether the base's optimizer tensors are those of this strategy."""
    if not base.header.HasField("aggregation"):
        return False  # version 1
    name = job_pb2.AggregationStrategy.Name(base.header.aggregation.strategy)
    if name != f"AGGREGATION_STRATEGY_{aggregation.strategy}":
        return False
    missing = [name for name in optimizer_names(aggregation) if name not in base.optimizer_names]
    if missing:
        raise DataLoss(
            Reason.CHECKPOINT_INVALID,
            f"the base of round {base.header.round} was made with {aggregation.strategy}, but has no "
            f"{' and no '.join(missing)}",
        )
    return True


def _read_delta(delta: StoredDelta) -> Iterator[tuple[int, F32]]:
    """Yields a delta's elements block by block, in one buffer that is used over and over.

    Raises DataLoss at once where the size has changed, at the end where the bytes have.
    """
    buffer = np.empty(min(_BLOCK, delta.size // _F32_BYTES), dtype="<f4")
    view = buffer.view(np.uint8).data
    sha256 = hashlib.sha256()
    try:
        file = delta.path.open("rb", buffering=0)
    except FileNotFoundError:
        raise _lost(delta, "is gone") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        if size != delta.size:
            raise _lost(delta, f"has {size} bytes, not {delta.size}")
        for start in range(0, size, view.nbytes):
            part = view[: min(view.nbytes, size - start)]
            read = 0
            while read < part.nbytes:
                done = file.readinto(part[read:])
                if not done:
                    raise _lost(delta, f"ends after {start + read} bytes")
                read += done
            sha256.update(part)
            yield start // _F32_BYTES, buffer[: part.nbytes // _F32_BYTES]
    if sha256.hexdigest() != delta.sha256:
        raise _lost(delta, f"hashes to {sha256.hexdigest()}")


def _lost(delta: StoredDelta, what: str) -> DataLoss:
    return DataLoss(
        Reason.DIGEST_MISMATCH, f"the stored delta {delta.sha256} {what}; its assignment has to be done again"
    )


def _write(
    blocks: Iterator[_Block],
    header: CheckpointHeader,
    parameters: Sequence[Parameter],
    names: Sequence[str],
    out: Path,
    stop: threading.Event,
) -> tuple[CheckpointHeader, int, str]:
    """Writes the checkpoint; returns its header, the file's size and its SHA-256."""
    with room_for("the checkpoint"), CheckpointWriter(out, header, parameters, names) as writer:
        for start, weights, state in blocks:
            if stop.is_set():
                raise InterruptedError("the caller no longer waits for the checkpoint")
            for name, values in (("weights", weights), *state.items()):
                wrong = first_not_finite(values)
                if wrong is not None:
                    parameter, index = _locate(parameters, start + wrong)
                    raise AggregationDiverged(header.round, name, parameter, index, float(values[wrong]))
            writer.write_weights(weights, start)
            for name in names:
                writer.write_optimizer(name, state[name], start)
        finished = writer.finish()
    return finished, *digest_file(out)


def _locate(parameters: Sequence[Parameter], element: int) -> tuple[str, int]:
    """Returns the parameter that an element of the flat weights belongs to, and its place there."""
    for parameter in parameters:
        size = prod(parameter.shape)
        if element < size:
            return parameter.name, element
        element -= size
    raise ValueError("the element lies behind the last parameter")


async def _in_thread(work: Callable[[], _T], stop: threading.Event | None = None) -> _T:
    """Runs `work` in a thread and sees it through: when cancelled, it sets `stop` and waits for its end."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
            if stop is not None:
                stop.set()
    if cancelled is not None:
        running.exception()
        raise cancelled
    return running.result()

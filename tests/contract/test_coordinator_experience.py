"""Experience jobs over real servers: no data, units numbered on and on, the same job the same bytes."""

import asyncio
import random
from pathlib import Path

import pytest

from covey.v1 import coordinator_service_pb2 as pb
from covey.v1 import job_pb2, storage_service_pb2_grpc, work_service_pb2
from covey_coordinator.domain.plan import sequence_seed
from covey_kit.channel import connect
from covey_kit.errors import InvalidArgument, PermissionDenied, Reason
from covey_kit.status import rpc_errors
from support.coordinator import Mesh, dataset, digest, mesh, package, uploaded
from support.eventually import eventually
from support.experience_jobs import (
    OPPONENT,
    completed,
    create_experience,
    experience_request,
    player,
)
from support.scripted_participant import (
    Outcome,
    ScriptedParticipant,
    Weights,
    compute,
    metric,
    participants,
)
from support.storage import get

Assignment = work_service_pb2.Assignment


async def alone(folder: Path, **settings: object) -> list[str]:
    """The digests that the job has when one participant does everything."""
    async with mesh(folder) as running, participants(running.address, 1):
        job_id = await create_experience(running, **settings)  # type: ignore[arg-type]
        await running.begin(job_id, 1)
        return await completed(running, job_id)


async def test_units_are_numbered_on_and_on(tmp_path: Path) -> None:
    """Assignment i of round r has the units from ((r-1)·A + i)·U on, of one sequence; progress too."""
    async with mesh(tmp_path) as running, participants(running.address, 2) as devices:
        job_id = await create_experience(running, units=3, seed=7)
        await running.begin(job_id, 2)
        await completed(running, job_id)

        trained = [a for d in devices for a in d.assignments if a.kind == job_pb2.ASSIGNMENT_KIND_TRAIN]
        found = {(a.round, a.index): a.unit_range for a in trained}
        assert {place: (w.first_unit, w.units) for place, w in found.items()} == {
            (r, i): (((r - 1) * 2 + i) * 3, 3) for r in range(1, 5) for i in range(2)
        }
        assert {w.sequence_seed for w in found.values()} == {sequence_seed(7, 0)}
        assert len({a.config.seed for a in trained}) == 8
        assert not any(a.HasField("chunks") for a in trained)
        job = await running.job(job_id)
        assert (job.unit, job.progress.rounds_wanted) == ("episode", 4)
        assert (job.progress.units_done, job.progress.units_wanted) == (24, 24)
        assert not job.progress.HasField("passes_done")
        assert not job.progress.HasField("passes_wanted")
        assert job.settings.experience.units_per_assignment == 3
        assert job.has_module_file


@pytest.mark.parametrize("count", [2, 5])
async def test_bytes_do_not_depend_on_who_played(tmp_path: Path, count: int) -> None:
    """Several participants that finish in random order make the same checkpoints as one alone."""
    chance = random.Random(3)

    async def dawdle(_: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome:
        await asyncio.sleep(chance.random() * 0.05)
        return compute(assignment, base)

    expected = await alone(tmp_path / "one")
    async with mesh(tmp_path / "more") as running, participants(running.address, count, dawdle):
        job_id = await create_experience(running)
        await running.begin(job_id, count)

        assert await completed(running, job_id) == expected
        assert len(set(expected)) == 5


async def test_a_restart_in_the_middle_of_a_round_changes_nothing(tmp_path: Path) -> None:
    """Stopped with one result in and one out, the coordinator goes on with the same units and bytes."""
    expected = await alone(tmp_path / "one")
    running = Mesh(tmp_path / "two")
    await running.start()
    release = asyncio.Event()

    async def stall(_: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome:
        if (assignment.round, assignment.index) == (2, 0):
            await release.wait()
        return compute(assignment, base)

    async with participants(running.address, 2, stall) as devices:
        job_id = await create_experience(running)
        await running.begin(job_id, 2)

        async def one_is_out() -> bool:
            opened = (await running.job(job_id)).current_round
            done = [a.status == job_pb2.ASSIGNMENT_STATUS_DONE for a in opened.assignments]
            return opened.round == 2 and done == [False, True]

        await eventually(one_is_out)
        await running.stop()
        await running.start()
        await asyncio.gather(*(device.join() for device in devices))
        release.set()
        assert await completed(running, job_id) == expected
    await running.stop()


async def test_the_checkpoint_says_where_the_sequence_stands(tmp_path: Path) -> None:
    """Its header has the sequence's seed, the next unit, and the digests of the auxiliary weights."""
    async with mesh(tmp_path) as running, participants(running.address, 1):
        job_id = await create_experience(running, seed=-5)
        await running.begin(job_id, 1)
        await completed(running, job_id)

        request = pb.CoordinatorServiceListCheckpointsRequest(job_id=job_id)
        headers = [c.header for c in (await running.call("ListCheckpoints", request)).checkpoints]

        places = [h.position.experience for h in headers]
        assert [p.next_unit for p in places] == [0, 6, 12, 18, 24]
        assert {p.sequence_seed for p in places} == {sequence_seed(-5, 0)}
        assert [(a.name, a.sha256) for a in headers[-1].auxiliary_weights] == [("opponent", digest(OPPONENT))]


async def test_evaluations_play_the_same_units_for_every_round(tmp_path: Path) -> None:
    """Every interval, the last round, and on request: always evaluationUnits units with the same seeds."""
    async with mesh(tmp_path) as running, participants(running.address, 2) as devices:
        job_id = await create_experience(running, validation_interval=3)
        await running.begin(job_id, 2)
        await completed(running, job_id)
        assert (await running.job(job_id)).can_validate
        await running.call("RunValidation", pb.RunValidationRequest(job_id=job_id, round=0))

        async def validated() -> list[int]:
            found = [r.round for r in await running.rounds(job_id) if r.validation_metrics]
            return found if len(found) == 3 else []

        assert await eventually(validated) == [0, 3, 4]
        asked = [a for d in devices for a in d.assignments if a.kind == job_pb2.ASSIGNMENT_KIND_EVALUATE]
        assert {a.round for a in asked} == {0, 3, 4}
        assert {(a.unit_range.first_unit, a.unit_range.units) for a in asked} == {(0, 6)}
        assert {(a.unit_range.sequence_seed, a.config.seed) for a in asked} == {(0, 0)}
        assert not any(a.HasField("held_out") for a in asked)


async def test_more_units_than_assigned_are_refused(tmp_path: Path) -> None:
    """A result over more units than its range has is refused, in training and in evaluation."""

    async def too_many(_: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome:
        outcome = compute(assignment, base)
        if assignment.round == 1 and assignment.attempt == 1:
            outcome.units += 1
        return outcome

    async with mesh(tmp_path) as running, participants(running.address, 2, too_many) as devices:
        job_id = await create_experience(running, epochs=1, validation_interval=1)
        await running.begin(job_id, 2)
        await completed(running, job_id)

        errors = [e for d in devices for e in d.errors]
        assert {e.reason for e in errors} == {Reason.UNITS_INVALID}
        assert {e.message for e in errors} == {
            "expected at most 3 units, all that was assigned; found 4",
            "expected at most 6 units, all that was assigned; found 7",
        }


async def test_auxiliary_weights_are_held_and_can_be_read_with_a_grant(tmp_path: Path) -> None:
    """The file stays while the job is there; who accepted the job may read it, others may not."""
    async with mesh(tmp_path) as running, participants(running.address, 1) as (device,):
        job_id = await create_experience(running)
        assert (await running.inventory()).unreferenced_count == 0
        await running.begin(job_id, 1)
        await completed(running, job_id)

        assignment = device.assignments[-1]
        declared = assignment.package.auxiliary_weights[0].sha256
        async with connect(running.address, assignment.grant) as channel:
            _, data, _ = await get(storage_service_pb2_grpc.StorageServiceStub(channel), declared)
        assert data == OPPONENT
        async with connect(running.address, device.token) as channel:
            with pytest.raises(PermissionDenied), rpc_errors():
                await get(storage_service_pb2_grpc.StorageServiceStub(channel), declared)


async def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    """Data, a held-out file, units out of bounds, a file that differs: each rule and bound is named."""
    async with mesh(tmp_path) as running:
        request = experience_request(units=51, validation_interval=1)
        request.dataset.CopyFrom(dataset((5,)))
        work = {"kind": "EXPERIENCE", "inputs": "none", "unit": "episode", "minUnits": 2, "maxUnits": 50}
        held_out = {"fileName": "validation.bin", "bytes": 8, "sha256": "a" * 64}
        request.package.CopyFrom(player(workSource=work, validation=held_out))
        request.settings.chunk_order = job_pb2.CHUNK_ORDER_MANIFEST
        del request.files[1]
        request.files.append(uploaded("opponent.bin", b"another opponent"))
        request.files.append(uploaded("validation.bin", b"held out"))

        with pytest.raises(InvalidArgument) as caught:
            await running.call("CreateJob", request)

        found = {v.field: v.description for v in caught.value.violations}
        assert set(found) == {
            "package.validation",
            "package.validation.sha256",
            "package.auxiliary_weights[0].bytes",
            "package.auxiliary_weights[0].sha256",
            "dataset.chunks",
            "settings.experience.units_per_assignment",
            "settings.chunk_order",
            "settings.validation_interval",
        }
        assert "expected none, because the package makes its own episodes" in found["package.validation"]
        assert "expected no chunks" in found["dataset.chunks"]
        assert found["settings.experience.units_per_assignment"] == (
            "expected 2 to 50 (the package's min_units and max_units), found 51"
        )
        assert "has no evaluation_units" in found["settings.validation_interval"]
        assert f"declared {digest(OPPONENT)}, found" in found["package.auxiliary_weights[0].sha256"]


async def test_experience_over_data_is_refused_with_the_reason(tmp_path: Path) -> None:
    """An assignment carries either chunks or units, so a package that wants both is refused, and told why."""
    async with mesh(tmp_path) as running:
        request = experience_request()
        work = {"kind": "EXPERIENCE", "inputs": "dataset", "unit": "episode"}
        request.package.CopyFrom(player(workSource=work, dataFormats=["small-v1"]))

        with pytest.raises(InvalidArgument, match="either chunks or units") as caught:
            await running.call("CreateJob", request)
        assert caught.value.violations[0].field == "package.work_source.inputs"


async def test_settings_of_experience_do_not_fit_a_dataset_job(tmp_path: Path) -> None:
    """Giving them to a package that trains on chunks is an error that says so."""
    async with mesh(tmp_path) as running:
        request = experience_request()
        request.package.CopyFrom(package())

        with pytest.raises(InvalidArgument) as caught:
            await running.call("CreateJob", request)
        found = {v.field: v.description for v in caught.value.violations}
        assert found["settings.experience"] == "expected nothing: the package's work is chunks of a dataset"


@pytest.mark.parametrize(("least", "most", "units"), [(2, 50, 32), (40, 50, 40), (1, 8, 8), (None, None, 32)])
async def test_the_default_of_units_is_as_near_to_32_as_the_package_allows(
    tmp_path: Path, least: int | None, most: int | None, units: int
) -> None:
    """Without experience settings an assignment has 32 units, or the bound next to that."""
    async with mesh(tmp_path) as running:
        await create_experience(running)  # its files
        request = experience_request(units=None)
        request.validate_only = True
        for name, value in (("min_units", least), ("max_units", most)):
            if value is None:
                request.package.work_source.ClearField(name)  # type: ignore[arg-type]  # by name
            else:
                setattr(request.package.work_source, name, value)

        job = (await running.call("CreateJob", request)).job
        assert job.settings.experience.units_per_assignment == units


async def test_a_metric_that_was_not_measured_stays_absent(tmp_path: Path) -> None:
    """An evaluation without a sum is a validation with an absent value, beside the training's."""

    async def silent(_: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome:
        outcome = compute(assignment, base)
        if assignment.kind == job_pb2.ASSIGNMENT_KIND_EVALUATE:
            outcome.metrics = [metric("loss", None, 0)]
        return outcome

    async with mesh(tmp_path) as running, participants(running.address, 1, silent):
        job_id = await create_experience(running, epochs=1, validation_interval=1)
        await running.begin(job_id, 1)
        await completed(running, job_id)
        last = (await running.rounds(job_id))[-1]

        assert last.metrics[0].HasField("sum")
        assert not last.validation_metrics[0].HasField("sum")

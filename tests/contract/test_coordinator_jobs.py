"""CoordinatorService, method by method, over a real server."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from covey.v1 import common_pb2, coordinator_service_pb2_grpc, job_pb2, work_service_pb2_grpc
from covey.v1 import coordinator_service_pb2 as pb
from covey_coordinator.transport.coordinator import CoordinatorServicer
from covey_coordinator.transport.work import WorkServicer
from covey_kit.caller import Role
from covey_kit.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Reason,
    Unavailable,
)
from covey_kit.status import rpc_errors
from support.coordinator import MODULE, Mesh, dataset, digest, job_request, mesh, package, uploaded
from support.eventually import eventually
from support.scripted_participant import (
    Outcome,
    ScriptedParticipant,
    Weights,
    compute,
    participants,
)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Mesh]:
    """A coordinator and a storage."""
    async with mesh(tmp_path) as found:
        yield found


async def done_job(running: Mesh, **settings: Any) -> str:
    """A job that is completed."""
    async with participants(running.address, 1):
        job_id = await running.create((5, 6, 7), **settings)
        await running.begin(job_id, 1)
        job = await running.ended(job_id)
        assert job.state == job_pb2.JOB_STATE_COMPLETED
    return job_id


async def test_every_method_is_served() -> None:
    """No method of the two services is left to the generated base class, which answers UNIMPLEMENTED."""
    for servicer, base in (
        (CoordinatorServicer, coordinator_service_pb2_grpc.CoordinatorServiceServicer),
        (WorkServicer, work_service_pb2_grpc.WorkServiceServicer),
    ):
        names = [name for name in vars(base) if not name.startswith("_")]
        assert names
        assert [n for n in names if getattr(servicer, n) is getattr(base, n)] == []


# ---- CreateJob


async def test_create_fills_in_the_defaults(running: Mesh) -> None:
    """A job without settings has the package's and the contract's defaults, and shows them."""
    await running.upload(3)
    request = job_request()
    request.ClearField("settings")
    job = (await running.call("CreateJob", request)).job

    assert job.state == job_pb2.JOB_STATE_CREATED
    assert job.display_name == "small"
    assert (job.settings.epochs, job.settings.assignments_per_round, job.settings.seed) == (1, 8, 0)
    assert (job.settings.batch_size, job.settings.learning_rate, job.settings.local_epochs) == (4, 0.1, 1)
    assert dict(job.settings.hyperparameters) == {"momentum": 0.5}
    assert job.settings.chunk_order == job_pb2.CHUNK_ORDER_SEEDED
    assert job.settings.aggregation.server_learning_rate == 1
    assert not job.settings.aggregation.HasField("momentum")
    assert (job.settings.silence_timeout.seconds, job.settings.assignment_timeout.seconds) == (15, 600)
    assert (job.progress.rounds_wanted, job.can_validate) == (1, True)
    assert "0 accepted so far" in job.waits[0].message
    assert not job.waits[0].HasField("until")


async def test_create_reports_everything_that_is_wrong(running: Mesh) -> None:
    """All violations come at once, each with its field, what was declared and what was found."""
    request = job_request((5, 6), validation_interval=1, learning_rate=2.0, hyperparameters={"nope": 1.0})
    request.package.CopyFrom(package(validation=None, validationExampleCount=None))
    request.dataset.chunks[1].format = "other-v1"
    request.files[0].blob.size_bytes = 9
    request.files[0].blob.sha256 = "0" * 64
    del request.files[2]
    with pytest.raises(InvalidArgument) as caught:
        await running.call("CreateJob", request)

    fields = {v.field for v in caught.value.violations}
    assert caught.value.reason is Reason.PACKAGE_MISMATCH
    assert fields == {
        "package.module.bytes",
        "package.module.sha256",
        "dataset.chunks[0]",
        "dataset.chunks[1].format",
        "settings.learning_rate",
        "settings.hyperparameters['nope']",
        "settings.validation_interval",
    }
    text = " ".join(v.description for v in caught.value.violations)
    assert f"declared {digest(MODULE)}, found {'0' * 64}" in text


async def test_create_names_files_that_are_not_in_storage(running: Mesh) -> None:
    """Files that were never written are all named; nothing is made."""
    with pytest.raises(FailedPrecondition, match="validation.bin") as caught:
        await running.call("CreateJob", job_request())

    assert caught.value.reason is Reason.BLOB_MISSING
    assert "5 files aren't in storage" in caught.value.message
    assert not (await running.call("ListJobs", pb.ListJobsRequest())).jobs


async def test_validate_only_makes_nothing(running: Mesh) -> None:
    """With validate_only everything is checked and the job comes without an id."""
    await running.upload(3)
    request = job_request()
    request.validate_only = True
    request.request_id = "once"
    job = (await running.call("CreateJob", request)).job

    assert (job.job_id, job.package_name) == ("", "small")
    assert not (await running.call("ListJobs", pb.ListJobsRequest())).jobs
    assert (await running.inventory()).unreferenced_count == 5


async def test_create_is_idempotent_by_request_id(running: Mesh) -> None:
    """The same request gets the same job, also when both run at once; another request is refused."""
    await running.upload(3)
    request = job_request()
    request.request_id = "once"
    answers = await asyncio.gather(*(running.call("CreateJob", request) for _ in range(3)))

    assert len({answer.job.job_id for answer in answers}) == 1
    assert (await running.call("CreateJob", request)).job.job_id == answers[0].job.job_id
    request.settings.seed = 9
    with pytest.raises(AlreadyExists) as caught:
        await running.call("CreateJob", request)
    assert caught.value.reason is Reason.REQUEST_ID_REUSED
    assert len((await running.call("ListJobs", pb.ListJobsRequest())).jobs) == 1


async def test_files_of_a_job_are_held(running: Mesh) -> None:
    """A job's files can't be deleted while it is there, and are gone when it is deleted."""
    job_id = await running.create()
    assert (await running.inventory()).unreferenced_count == 0
    await running.call("DeleteJob", pb.DeleteJobRequest(job_id=job_id))

    assert (await running.inventory()).blob_count == 0
    with pytest.raises(NotFound):
        await running.job(job_id)


# ---- Lists


async def test_jobs_are_listed_newest_first_in_pages(running: Mesh) -> None:
    """Pages go on where the one before ended; tokens of others are refused."""
    ids = [await running.create() for _ in range(3)]
    first = await running.call("ListJobs", pb.ListJobsRequest(page_size=2))
    rest = await running.call("ListJobs", pb.ListJobsRequest(page_size=2, page_token=first.next_page_token))

    assert [j.job_id for j in (*first.jobs, *rest.jobs)] == ids[::-1]
    assert not rest.next_page_token
    for token in ("nonsense", first.next_page_token[:-4] + "AAAA"):
        with pytest.raises(InvalidArgument) as caught:
            await running.call("ListJobs", pb.ListJobsRequest(page_token=token))
        assert caught.value.reason is Reason.PAGE_TOKEN
    other = pb.ListJobsRequest(page_token=first.next_page_token, states=[job_pb2.JOB_STATE_RUNNING])
    with pytest.raises(InvalidArgument):  # made for other arguments
        await running.call("ListJobs", other)
    only = pb.ListJobsRequest(states=[job_pb2.JOB_STATE_RUNNING])
    assert not (await running.call("ListJobs", only)).jobs


async def test_rounds_and_checkpoints_are_listed_in_order(running: Mesh) -> None:
    """Rounds and checkpoints come by round, page by page, with what they hold."""
    job_id = await done_job(running)
    first = await running.call("ListRounds", pb.ListRoundsRequest(job_id=job_id, page_size=2))
    request = pb.ListRoundsRequest(job_id=job_id, page_size=2, page_token=first.next_page_token)
    rest = await running.call("ListRounds", request)
    assert [r.round for r in (*first.rounds, *rest.rounds)] == [0, 1, 2]
    assert not rest.next_page_token
    assert (first.rounds[0].units, first.rounds[0].assignments) == (0, 1)
    assert sum(r.units for r in (*first.rounds, *rest.rounds)) == 18
    assert rest.rounds[0].participant_ids == ["p1"]

    listing = pb.CoordinatorServiceListCheckpointsRequest(job_id=job_id)
    found = (await running.call("ListCheckpoints", listing)).checkpoints
    assert [c.round for c in found] == [0, 1, 2]
    header = found[2].header
    assert [c.header.weights_sha256 for c in found] == [
        r.weights_sha256 for r in (*first.rounds, *rest.rounds)
    ]
    assert (header.package_name, header.round, header.seed) == ("small", 2, 0)
    assert getattr(header.position.dataset, "pass") == 1
    assert header.position.dataset.next_index == 0
    assert found[1].header.position.dataset.next_index == 2


async def test_unknown_jobs_are_not_found(running: Mesh) -> None:
    """Every method that names a job says so when there is none."""
    for method, request in (
        ("GetJob", pb.GetJobRequest(job_id="x")),
        ("ListRounds", pb.ListRoundsRequest(job_id="x")),
        ("StartJob", pb.StartJobRequest(job_id="x")),
        ("PauseJob", pb.PauseJobRequest(job_id="x")),
        ("ResumeJob", pb.ResumeJobRequest(job_id="x")),
        ("StopJob", pb.StopJobRequest(job_id="x")),
        ("DeleteJob", pb.DeleteJobRequest(job_id="x")),
        ("InviteParticipants", pb.InviteParticipantsRequest(job_id="x")),
        ("RunValidation", pb.RunValidationRequest(job_id="x")),
        ("ListCheckpoints", pb.CoordinatorServiceListCheckpointsRequest(job_id="x")),
    ):
        with pytest.raises(NotFound) as caught:
            await running.call(method, request)
        assert caught.value.reason is Reason.JOB_NOT_FOUND, method
    for stream in (
        running.stub.WatchJob(pb.WatchJobRequest(job_id="x")),
        running.stub.ExportModule(pb.ExportModuleRequest(job_id="x")),
        running.stub.ExportCheckpoint(pb.ExportCheckpointRequest(job_id="x")),
    ):
        with pytest.raises(NotFound), rpc_errors():
            await stream.read()


async def test_roles_are_enforced(running: Mesh) -> None:
    """A viewer reads state and changes nothing."""
    job_id = await running.create()
    async with running.channel(Role.VIEWER) as channel:
        stub: Any = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
        with rpc_errors():
            assert (await stub.GetJob(pb.GetJobRequest(job_id=job_id))).job.job_id == job_id
        with pytest.raises(PermissionDenied), rpc_errors():
            await stub.StartJob(pb.StartJobRequest(job_id=job_id))


# ---- A job's life


async def test_a_job_needs_its_participants_to_start(running: Mesh) -> None:
    """Starting with fewer accepted than min_participants names both numbers."""
    async with participants(running.address, 1):
        job_id = await running.create(min_participants=2)
        await running.invite_all(job_id, 1)
        with pytest.raises(
            FailedPrecondition, match="needs 2 participants that accepted, it has 1"
        ) as caught:
            await running.call("StartJob", pb.StartJobRequest(job_id=job_id))

        assert caught.value.reason is Reason.NOT_ENOUGH_PARTICIPANTS
        assert "needs 2 participants, 1 accepted" in (await running.job(job_id)).waits[0].message


async def test_commands_check_the_state(running: Mesh) -> None:
    """A command that the state forbids names the state; one that changes nothing succeeds."""
    job_id = await running.create()
    for method, request in (
        ("PauseJob", pb.PauseJobRequest(job_id=job_id)),
        ("ResumeJob", pb.ResumeJobRequest(job_id=job_id)),
    ):
        with pytest.raises(FailedPrecondition, match="is CREATED") as caught:
            await running.call(method, request)
        assert caught.value.reason is Reason.JOB_STATE

    async with participants(running.address, 1, hold):
        await running.begin(job_id, 1)
        await running.call("StartJob", pb.StartJobRequest(job_id=job_id))  # changes nothing
        with pytest.raises(FailedPrecondition, match="stop it first"):
            await running.call("DeleteJob", pb.DeleteJobRequest(job_id=job_id))
        await running.call("StopJob", pb.StopJobRequest(job_id=job_id))
        job = (await running.call("StopJob", pb.StopJobRequest(job_id=job_id))).job
        assert job.state == job_pb2.JOB_STATE_STOPPED
        with pytest.raises(FailedPrecondition, match="is STOPPED"):
            await running.call("StartJob", pb.StartJobRequest(job_id=job_id))
        with pytest.raises(FailedPrecondition, match="nobody can be invited"):
            await running.call("InviteParticipants", pb.InviteParticipantsRequest(job_id=job_id))
    assert job.HasField("end_time")
    assert not job.HasField("current_round")


async def hold(_: ScriptedParticipant, assignment: Any, base: Weights | None) -> Outcome | None:
    """Makes the initial weights and nothing else."""
    return compute(assignment, base) if assignment.round == 0 else None


async def test_a_stopped_job_keeps_its_checkpoints(running: Mesh) -> None:
    """What was made before a stop can be exported; what was out is cancelled."""
    async with participants(running.address, 1, hold) as (device,):
        job_id = await running.create()
        await running.begin(job_id, 1)
        await eventually(lambda: any(a.round == 1 for a in device.assignments))
        await running.call("StopJob", pb.StopJobRequest(job_id=job_id))
        await eventually(lambda: device.of_kind("cancel"))

    checkpoint, data = await export(running.stub.ExportCheckpoint(pb.ExportCheckpointRequest(job_id=job_id)))
    assert checkpoint.checkpoint.round == 0
    assert hashlib.sha256(data).hexdigest() == checkpoint.checkpoint.blob.sha256


async def export(call: Any) -> tuple[Any, bytes]:
    """Reads an export: its first message, and its data."""
    with rpc_errors():
        first = await call.read()
        data = [message.data async for message in rest(call)]
    return first, b"".join(data)


async def rest(call: Any) -> AsyncIterator[Any]:
    """What follows the first message."""
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message


async def test_exports_are_the_files(running: Mesh) -> None:
    """The module and each round's checkpoint come as they were stored, preceded by what they are."""
    job_id = await done_job(running)
    first, data = await export(running.stub.ExportModule(pb.ExportModuleRequest(job_id=job_id)))
    assert (first.blob.sha256, data) == (digest(MODULE), MODULE)

    for wanted, number in ((None, 2), (1, 1), (0, 0)):
        request = pb.ExportCheckpointRequest(job_id=job_id, round=wanted)
        first, data = await export(running.stub.ExportCheckpoint(request))
        assert first.checkpoint.round == number
        assert digest(data) == first.checkpoint.blob.sha256
        assert len(data) == first.checkpoint.blob.size_bytes
    with pytest.raises(NotFound) as caught:
        await export(running.stub.ExportCheckpoint(pb.ExportCheckpointRequest(job_id=job_id, round=9)))
    assert caught.value.reason is Reason.CHECKPOINT_NOT_FOUND


async def test_deleting_a_job_deletes_its_checkpoints(running: Mesh) -> None:
    """Nothing of a deleted job stays in storage, and its participants are told to forget it."""
    async with participants(running.address, 1) as (device,):
        job_id = await running.create()
        await running.begin(job_id, 1)
        await running.ended(job_id)
        await running.call("DeleteJob", pb.DeleteJobRequest(job_id=job_id))

        ended = await eventually(lambda: device.of_kind("invitation_ended"))
        assert (ended[0].job_id, ended[0].reason) == (job_id, "the job was deleted")
        inventory = await running.inventory()
        assert (inventory.blob_count, inventory.checkpoint_count) == (0, 0)


async def test_watching_shows_the_newest_state_until_the_end(running: Mesh) -> None:
    """A watch begins with the state now, never goes back, and ends with the end."""
    async with participants(running.address, 1):
        job_id = await running.create(epochs=5)
        call = running.stub.WatchJob(pb.WatchJobRequest(job_id=job_id))
        first = await call.read()
        assert first.job.state == job_pb2.JOB_STATE_CREATED
        await running.begin(job_id, 1)
        states = [message.job async for message in rest(call)]

        assert states[-1].state == job_pb2.JOB_STATE_COMPLETED
        done = [job.progress.rounds_done for job in states]
        assert done == sorted(done)
        assert done[-1] == 10
        again = [
            message.job async for message in rest(running.stub.WatchJob(pb.WatchJobRequest(job_id=job_id)))
        ]
        assert [job.state for job in again] == [job_pb2.JOB_STATE_COMPLETED]


async def test_a_watch_ends_when_the_server_stops(tmp_path: Path) -> None:
    """A server that stops ends watches with UNAVAILABLE, so that watchers come back."""
    running = Mesh(tmp_path)
    await running.start()
    job_id = await running.create()
    call = running.stub.WatchJob(pb.WatchJobRequest(job_id=job_id))
    await call.read()
    stopping = asyncio.create_task(running.host.stop(grace=2))
    with pytest.raises(Unavailable) as caught, rpc_errors():
        await call.read()
    assert caught.value.reason is Reason.SHUTTING_DOWN
    await stopping
    await running.stop()


# ---- Participants


async def test_participants_are_listed(running: Mesh) -> None:
    """Everyone that ever joined is there, with what it told of itself, and whether it is connected."""
    async with participants(running.address, 2):
        job_id = await running.create()
        await running.invite_all(job_id, 2)
        first = await running.call("ListParticipants", pb.ListParticipantsRequest(page_size=1))
        request = pb.ListParticipantsRequest(page_size=1, page_token=first.next_page_token)
        second = await running.call("ListParticipants", request)
        found = [*first.participants, *second.participants]
        assert [p.participant_id for p in found] == ["p1", "p2"]
        assert not second.next_page_token
        assert found[0].connected
        assert found[0].device.runtime == "numpy"
        assert list(found[0].job_ids) == [job_id]

    async def gone() -> bool:
        request = pb.ListParticipantsRequest(connected_only=True)
        return not (await running.call("ListParticipants", request)).participants

    await eventually(gone)


async def test_inviting_strangers_invites_nobody(running: Mesh) -> None:
    """All unknown ids are named, and those known aren't invited either."""
    async with participants(running.address, 1):
        job_id = await running.create()
        request = pb.InviteParticipantsRequest(job_id=job_id, participant_ids=["p1", "q1", "q2"])
        with pytest.raises(NotFound, match="q1, q2") as caught:
            await running.call("InviteParticipants", request)

        assert caught.value.reason is Reason.PARTICIPANT_NOT_FOUND
        assert not (await running.job(job_id)).participants


async def test_who_declined_is_asked_again(running: Mesh) -> None:
    """Inviting twice changes nothing; one that declined gets a new invitation."""
    async with participants(running.address, 1, accept=False) as (device,):
        job_id = await running.create()
        request = pb.InviteParticipantsRequest(job_id=job_id, participant_ids=["p1"])
        await running.call("InviteParticipants", request)

        async def declined() -> bool:
            states = [p.invitation for p in (await running.job(job_id)).participants]
            return states == [job_pb2.INVITATION_STATE_DECLINED]

        await eventually(declined)
        device.accept = None
        job = (await running.call("InviteParticipants", request)).job
        assert job.participants[0].invitation == job_pb2.INVITATION_STATE_PENDING
        again = (await running.call("InviteParticipants", request)).job
        assert again.participants[0].invitation_id == job.participants[0].invitation_id
        await eventually(lambda: len(device.of_kind("invitation")) == 2)
        first, second = device.of_kind("invitation")
        assert first.invitation_id != second.invitation_id
        assert second.total_bytes == sum(len(x) for x in (MODULE, b"held out")) + 3 * len(b"chunk 0")


async def test_a_revoked_participant_loses_its_work(running: Mesh) -> None:
    """Taking an invitation back cancels what its participant has; another does it."""

    async def stuck(me: ScriptedParticipant, assignment: Any, base: Weights | None) -> Outcome | None:
        return None if me.name == "p1" and assignment.round else compute(assignment, base)

    async with participants(running.address, 2, stuck) as (p1, _):
        job_id = await running.create((5, 6))
        await running.begin(job_id, 2)
        await eventually(lambda: any(a.round == 1 for a in p1.assignments))
        invitation = next(p for p in (await running.job(job_id)).participants if p.participant_id == "p1")
        request = pb.RevokeInvitationRequest(invitation_id=invitation.invitation_id)
        for _ in range(2):
            await running.call("RevokeInvitation", request)

        assert (await running.ended(job_id)).state == job_pb2.JOB_STATE_COMPLETED
        assert p1.of_kind("cancel")
        assert len(p1.of_kind("invitation_ended")) == 1
    with pytest.raises(NotFound) as caught:
        await running.call("RevokeInvitation", pb.RevokeInvitationRequest(invitation_id="inv-nope"))
    assert caught.value.reason is Reason.INVITATION_NOT_FOUND


# ---- Validation


async def test_validation_on_request(running: Mesh) -> None:
    """Any round of an ended job can be validated, once; the result stands with the round."""
    async with participants(running.address, 1) as (device,):
        job_id = await running.create()
        await running.begin(job_id, 1)
        await running.ended(job_id)
        for wanted, number in ((None, 2), (0, 0)):
            answer = await running.call("RunValidation", pb.RunValidationRequest(job_id=job_id, round=wanted))
            assert (answer.round, answer.done) == (number, False)

        async def validated() -> bool:
            return [bool(r.validation_metrics) for r in await running.rounds(job_id)] == [True, False, True]

        await eventually(validated)
        again = await running.call("RunValidation", pb.RunValidationRequest(job_id=job_id))
        assert again.done
        work = [a for a in device.assignments if a.kind == job_pb2.ASSIGNMENT_KIND_EVALUATE]
        assert [a.round for a in work] == [2, 0] or [a.round for a in work] == [0, 2]
        assert (work[0].held_out.units, work[0].held_out.first_unit) == (10, 0)
        with pytest.raises(NotFound) as caught:
            await running.call("RunValidation", pb.RunValidationRequest(job_id=job_id, round=7))
        assert caught.value.reason is Reason.ROUND_NOT_FOUND


async def test_what_cannot_be_validated(running: Mesh) -> None:
    """A package without held-out data, and a job that nobody accepted, can't be validated."""
    job_id = await running.create()
    with pytest.raises(FailedPrecondition, match="nobody accepted"):
        await running.call("RunValidation", pb.RunValidationRequest(job_id=job_id))
    request = job_request()
    request.package.CopyFrom(package(validation=None, validationExampleCount=None))
    job = (await running.call("CreateJob", request)).job
    assert not job.can_validate
    with pytest.raises(FailedPrecondition, match="can't be validated"):
        await running.call("RunValidation", pb.RunValidationRequest(job_id=job.job_id))


async def test_a_validation_that_fails_does_not_hold_up_the_job(running: Mesh) -> None:
    """After a bounded number of tries it is given up; the job completes and shows the error."""

    async def blind(_: ScriptedParticipant, assignment: Any, base: Weights | None) -> Outcome:
        if assignment.kind == job_pb2.ASSIGNMENT_KIND_EVALUATE:
            return Outcome(failure="can't see", package_fault=True)
        return compute(assignment, base)

    async with participants(running.address, 1, blind):
        job_id = await running.create((5, 6), validation_interval=1)
        await running.begin(job_id, 1)
        job = await running.ended(job_id)

        assert job.state == job_pb2.JOB_STATE_COMPLETED
        assert "the validation of round 1 was given up" in job.last_error.message
        assert "can't see" in job.last_error.message
        assert not job.HasField("failure")


async def test_two_files_of_one_name_are_told_apart(running: Mesh) -> None:
    """A package file and a chunk may have the same name: each is compared with the upload that fits."""
    await running.upload(1)
    request = job_request((5,))
    request.dataset.CopyFrom(dataset((5,)))
    request.dataset.chunks[0].file_name = "validation.bin"
    request.files[-1].CopyFrom(uploaded("validation.bin", b"chunk 0"))

    assert (await running.call("CreateJob", request)).job.job_id
    assert isinstance(request.files[0], common_pb2.UploadedFile)

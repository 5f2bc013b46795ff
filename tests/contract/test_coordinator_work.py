"""WorkService, method by method, over a real server."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.v1 import common_pb2, job_pb2
from covey.v1 import coordinator_service_pb2 as coordinator
from covey.v1 import work_service_pb2 as pb
from covey_kit.errors import (
    Aborted,
    CoveyError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Reason,
    ResourceExhausted,
)
from covey_kit.status import rpc_errors
from covey_kit.uploads import Upload
from support.coordinator import QUICK, Mesh, ShiftClock, digest, mesh
from support.eventually import eventually
from support.scripted_participant import (
    Outcome,
    ScriptedParticipant,
    Weights,
    compute,
    metric,
    participants,
)

Assignment = pb.Assignment


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Mesh]:
    """A coordinator and a storage."""
    async with mesh(tmp_path) as found:
        yield found


async def keep(_: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome | None:
    """Makes the initial weights; what comes afterwards the test does itself."""
    return compute(assignment, base) if assignment.kind == job_pb2.ASSIGNMENT_KIND_INITIALIZE else None


async def in_training(running: Mesh, device: ScriptedParticipant) -> Assignment:
    """Starts a job of one chunk a round and returns the device's training assignment."""
    job_id = await running.create((5,), epochs=3)
    await running.begin(job_id, 1)
    return (await eventually(lambda: [a for a in device.assignments if a.round == 1]))[0]


def result(assignment: Assignment) -> tuple[Weights, int, list[common_pb2.MetricValue]]:
    """Something valid to send for a training assignment."""
    return np.ones(7, np.float32), 5, [metric("loss", 1.0, 5)]


# ---- Join


async def test_welcome_comes_first(running: Mesh) -> None:
    """The first command has the token, the version and how often to report; no address: the server's own."""
    async with participants(running.address, 1) as (device,):
        welcome = device.commands[0].welcome

        assert welcome.session_token
        assert welcome.contract_version == "1.0"
        assert welcome.progress_interval.ToMilliseconds() == 200
        assert (welcome.storage_address, welcome.diagnostics_address) == ("", "")
        assert welcome.expire_time.ToSeconds() > 0


async def test_an_id_belongs_to_its_first_credential(running: Mesh) -> None:
    """Another device can't take an id, also after the first has left."""
    async with participants(running.address, 1):
        pass
    thief = ScriptedParticipant(running.address, "p1", credential=b"t" * 32)
    with pytest.raises(PermissionDenied, match="choose another id") as caught:
        await thief.join()
    assert caught.value.reason is Reason.CREDENTIAL_MISMATCH
    await thief.die()


async def test_a_second_stream_ends_the_first(running: Mesh) -> None:
    """One stream a participant: the newer wins, and keeps what the participant has in hand."""
    async with participants(running.address, 1, keep) as (first,):
        mine = await in_training(running, first)
        second = ScriptedParticipant(running.address, "p1")
        second.in_hand = [mine]
        await second.join()
        await eventually(lambda: first.ended)

        assert isinstance(first.ended, Aborted)
        assert first.ended.reason is Reason.SESSION_REPLACED
        assert not (await second.push(mine, *result(mine))).already_accepted
        await second.die()


async def test_another_contract_version_is_refused(running: Mesh) -> None:
    """Another major version doesn't fit; both versions are told."""
    device = ScriptedParticipant(running.address, "p1")
    with pytest.raises(FailedPrecondition) as caught, rpc_errors():
        await device.stub.Join(device.request("9.0")).read()
    assert caught.value.reason is Reason.CONTRACT_VERSION
    assert caught.value.metadata == {"client": "9.0", "server": "1.0"}
    await device.die()


async def test_a_stream_ends_before_its_token_does(tmp_path: Path) -> None:
    """A participant that stays for long is asked to join again in time, and gets a new token."""
    clock = ShiftClock()
    async with mesh(tmp_path, clock=clock) as running, participants(running.address, 1) as (device,):
        clock.shift += 7 * 86400 - 300
        await eventually(lambda: device.ended)
        assert device.ended is not None
        assert device.ended.reason is Reason.TOKEN_EXPIRED
        await device.join()


async def test_invitations_come_again_with_each_stream(running: Mesh) -> None:
    """A participant that comes back is told of its invitations and where they stand."""
    async with participants(running.address, 1, accept=None) as (device,):
        job_id = await running.create()
        request = coordinator.InviteParticipantsRequest(job_id=job_id, participant_ids=["p1"])
        await running.call("InviteParticipants", request)
        invitation = (await eventually(lambda: device.of_kind("invitation")))[0]
        await device.join()
        await eventually(lambda: len(device.of_kind("invitation")) == 2)
        await device.stub.RespondToInvitation(
            pb.RespondToInvitationRequest(invitation_id=invitation.invitation_id, accept=True)
        )
        await device.join()
        await eventually(lambda: len(device.of_kind("invitation")) == 3)

        states = [i.state for i in device.of_kind("invitation")]
        assert states == [
            job_pb2.INVITATION_STATE_PENDING,
            job_pb2.INVITATION_STATE_PENDING,
            job_pb2.INVITATION_STATE_ACCEPTED,
        ]


async def test_a_short_disconnection_costs_nothing(running: Mesh) -> None:
    """Who is back within the grace with its work in hand keeps it."""
    async with participants(running.address, 2, keep) as devices:
        job_id = await running.create((5,))
        await running.begin(job_id, 2)
        device = (
            await eventually(lambda: [d for d in devices if d.assignments and d.assignments[-1].round])
        )[0]
        mine = device.assignments[-1]
        device.in_hand = [mine]
        await device.join()

        assert not (await device.push(mine, *result(mine))).already_accepted
        assert (await running.ended(job_id)).state == job_pb2.JOB_STATE_COMPLETED


async def test_what_is_held_for_nothing_is_cancelled(running: Mesh) -> None:
    """A participant that holds what isn't its own is told to drop it; what it lost goes to the queue."""
    async with participants(running.address, 1, keep) as (device,):
        mine = await in_training(running, device)
        device.in_hand = [Assignment(assignment_id=mine.assignment_id, attempt=9)]
        await device.join()

        cancel = (await eventually(lambda: device.of_kind("cancel")))[0]
        assert (cancel.assignment_id, cancel.attempt) == (mine.assignment_id, 9)
        again = await eventually(lambda: [a for a in device.assignments if a.attempt == 2])
        assert again[0].assignment_id == mine.assignment_id


# ---- Invitations


async def test_answers_are_final_and_idempotent(running: Mesh) -> None:
    """The same answer again changes nothing; another is refused; others' invitations aren't found."""
    async with participants(running.address, 2, accept=None) as (p1, p2):
        job_id = await running.create()
        request = coordinator.InviteParticipantsRequest(job_id=job_id, participant_ids=["p1"])
        await running.call("InviteParticipants", request)
        invitation = (await eventually(lambda: p1.of_kind("invitation")))[0]
        accept = pb.RespondToInvitationRequest(invitation_id=invitation.invitation_id, accept=True)
        decline = pb.RespondToInvitationRequest(invitation_id=invitation.invitation_id)

        for _ in range(2):
            answer = await p1.stub.RespondToInvitation(accept)
            assert (answer.job_id, answer.state) == (job_id, job_pb2.INVITATION_STATE_ACCEPTED)
            assert answer.grant
        with pytest.raises(FailedPrecondition) as caught, rpc_errors():
            await p1.stub.RespondToInvitation(decline)
        assert caught.value.reason is Reason.INVITATION_STATE
        with pytest.raises(NotFound) as missing, rpc_errors():
            await p2.stub.RespondToInvitation(accept)
        assert missing.value.reason is Reason.INVITATION_NOT_FOUND


async def test_an_ended_job_cannot_be_accepted(running: Mesh) -> None:
    """An invitation ends with its job."""
    async with participants(running.address, 1, accept=None) as (device,):
        job_id = await running.create()
        request = coordinator.InviteParticipantsRequest(job_id=job_id, participant_ids=["p1"])
        await running.call("InviteParticipants", request)
        invitation = (await eventually(lambda: device.of_kind("invitation")))[0]
        await running.call("StopJob", coordinator.StopJobRequest(job_id=job_id))
        ended = (await eventually(lambda: device.of_kind("invitation_ended")))[0]
        assert ended.invitation_id == invitation.invitation_id
        with pytest.raises(FailedPrecondition) as caught, rpc_errors():
            await device.stub.RespondToInvitation(
                pb.RespondToInvitationRequest(invitation_id=invitation.invitation_id, accept=True)
            )
        assert caught.value.reason is Reason.JOB_STATE


async def test_a_grant_reads_the_job_and_nothing_else(running: Mesh) -> None:
    """The grant of an assignment opens that job's files; a session token opens none."""
    async with participants(running.address, 1, keep) as (device,):
        mine = await in_training(running, device)
        assert (await device.base(mine)).size == 7
        mine.grant = device.token
        with pytest.raises(PermissionDenied) as caught:
            await device.base(mine)
        assert caught.value.reason is Reason.NO_GRANT


async def test_leaving_gives_the_work_to_another(running: Mesh) -> None:
    """Who leaves a job has its assignment taken, and may leave again; who isn't part of it is told so."""

    async def stuck(me: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome | None:
        return None if me.name == "p1" and assignment.round else compute(assignment, base)

    async with participants(running.address, 2, stuck) as (p1, _):
        job_id = await running.create((5, 6))
        await running.begin(job_id, 2)
        await eventually(lambda: any(a.round == 1 for a in p1.assignments))
        for _ in range(2):
            await p1.stub.LeaveJob(pb.LeaveJobRequest(job_id=job_id))
        job = await running.ended(job_id)
        assert job.state == job_pb2.JOB_STATE_COMPLETED
        assert job.participants[0].invitation == job_pb2.INVITATION_STATE_LEFT
        with pytest.raises(NotFound), rpc_errors():
            await p1.stub.LeaveJob(pb.LeaveJobRequest(job_id="other"))


# ---- Assignments and progress


async def test_an_assignment_has_all_that_it_needs(running: Mesh) -> None:
    """Package, configuration, base weights, chunks, bounds: nothing else has to be asked for."""
    async with participants(running.address, 1, keep) as (device,):
        mine = await in_training(running, device)

        assert mine.kind == job_pb2.ASSIGNMENT_KIND_TRAIN
        assert (mine.round, mine.index, mine.attempt) == (1, 0, 1)
        assert mine.package.name == "small"
        assert (mine.config.batch_size, mine.config.local_epochs) == (4, 1)
        assert list(mine.config.hyperparameters) == [0.5]
        assert [c.id for c in mine.chunks.chunks] == ["c0"]
        assert mine.weights.size_bytes == 28
        assert mine.silence_timeout.seconds == 15
        assert mine.HasField("deadline")
        first = device.assignments[0]
        assert first.kind == job_pb2.ASSIGNMENT_KIND_INITIALIZE
        assert not first.HasField("weights")
        assert first.config.seed != mine.config.seed


async def test_progress_shows_in_the_job(running: Mesh) -> None:
    """What a participant reports is what owners see; what it doesn't know stays absent."""
    async with participants(running.address, 1, keep) as (device,):
        mine = await in_training(running, device)
        await device.progress(
            mine, stage=common_pb2.STAGE_TRAINING, units_done=3, workers=2, backend=common_pb2.CPU_WASM
        )
        job = await running.job(mine.job_id)

        (state,) = job.current_round.assignments
        assert (state.stage, state.units_done, state.units) == (common_pb2.STAGE_TRAINING, 3, 5)
        assert (job.progress.round_units_done, job.progress.round_units_wanted) == (3, 5)
        (one,) = job.participants
        assert (one.assignment_id, one.workers) == (mine.assignment_id, 2)
        assert not one.HasField("transfer_bytes_done")
        assert job.waits[0].message.startswith("round 1 waits for p1: assignment 0, training, ")
        with pytest.raises(Aborted):
            await device.progress(Assignment(assignment_id=mine.assignment_id, attempt=2))


# ---- PushDelta


async def test_a_delta_counts_once(running: Mesh) -> None:
    """A repeated result gets the old answer, also when its round is long finished."""
    async with participants(running.address, 1, keep) as (device,):
        mine = await in_training(running, device)
        assert not (await device.push(mine, *result(mine))).already_accepted
        assert (await device.push(mine, *result(mine))).already_accepted
        await eventually(lambda: device.assignments[-1].round == 2)
        assert (await device.push(mine, *result(mine))).already_accepted
        (one,) = (await running.job(mine.job_id)).participants
        assert one.assignments_done == 2


async def test_two_streams_of_one_result_count_once(running: Mesh) -> None:
    """The same result sent twice at the same time is accepted by one call and known to the other."""
    async with participants(running.address, 1, keep) as (device,):
        mine = await in_training(running, device)
        answers = await asyncio.gather(*(device.push(mine, *result(mine)) for _ in range(4)))

        assert sorted(a.already_accepted for a in answers) == [False, True, True, True]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"size_bytes": 24}, Reason.SIZE_MISMATCH),
        ({"sha256": "0" * 64}, Reason.DIGEST_MISMATCH),
        ({"units": 6}, Reason.UNITS_INVALID),
        ({"metrics": []}, Reason.METRIC_INVALID),
        ({"metrics": [metric("loss", 1.0, 1), metric("nope", 1.0, 1)]}, Reason.METRIC_INVALID),
        ({"metrics": [metric("loss", 1.0, 1), metric("loss", 1.0, 1)]}, Reason.METRIC_INVALID),
    ],
)
async def test_a_delta_that_is_wrong_is_refused(running: Mesh, changes: Any, reason: Reason) -> None:
    """What a delta is announced with must fit the assignment and the bytes; a refusal is a failed attempt."""
    async with participants(running.address, 1, keep) as (device,):
        mine = await in_training(running, device)
        sent = {"units": 5, "metrics": [metric("loss", 1.0, 5)]}
        with pytest.raises(InvalidArgument) as caught:
            await device.push(mine, np.ones(7, np.float32), **{**sent, **changes})
        assert caught.value.reason is reason
        job = await running.job(mine.job_id)
        assert job.participants[0].failures == 1
        assert job.last_error.assignment_id == mine.assignment_id
        with pytest.raises(Aborted):
            await device.push(mine, *result(mine))
        again = (await eventually(lambda: [a for a in device.assignments if a.attempt == 2]))[0]
        assert not (await device.push(again, *result(again))).already_accepted


@pytest.mark.parametrize("metrics", [[metric("loss", float("nan"), 1)], [metric("loss", 1.0, -1)]])
async def test_headers_are_bounded_by_the_contract(running: Mesh, metrics: Any) -> None:
    """Numbers that aren't finite and negative counts don't pass the edge."""
    async with participants(running.address, 1, keep) as (device,):
        mine = await in_training(running, device)
        with pytest.raises(InvalidArgument) as caught:
            await device.push(mine, np.ones(7, np.float32), 5, metrics)
        assert caught.value.reason is Reason.INVALID_FIELD
        with pytest.raises(InvalidArgument, match="units"):
            await device.push(mine, np.ones(7, np.float32), None, [metric("loss", 1.0, 5)])


@pytest.mark.parametrize("values", [[np.nan] * 7, [np.inf] + [0.0] * 6])
async def test_a_delta_that_is_not_finite_is_refused(running: Mesh, values: list[float]) -> None:
    """NaN and infinity are refused, and the round isn't touched."""
    async with participants(running.address, 1, keep) as (device,):
        mine = await in_training(running, device)
        with pytest.raises(InvalidArgument) as caught:
            await device.push(mine, np.array(values, np.float32), 5, [metric("loss", 1.0, 5)])
        assert caught.value.reason is Reason.DELTA_NOT_FINITE


async def test_a_delta_that_is_cut_short_is_no_failure(running: Mesh) -> None:
    """A stream that breaks leaves the lease as it is, and the result can be sent again."""
    async with participants(running.address, 1, keep) as (device,):
        mine = await in_training(running, device)
        call = device.stub.PushDelta()
        header = pb.PushDeltaHeader(
            assignment_id=mine.assignment_id,
            attempt=1,
            units=5,
            size_bytes=28,
            sha256="0" * 64,
            metrics=[metric("loss", 1.0, 5)],
            backend=common_pb2.CPU_WASM,
        )
        await call.write(pb.PushDeltaRequest(header=header))
        await call.write(pb.PushDeltaRequest(data=b"\0" * 8))
        call.cancel()

        assert not (await device.push(mine, *result(mine))).already_accepted
        assert not (await running.job(mine.job_id)).HasField("last_error")


async def test_the_header_comes_first_and_once(running: Mesh) -> None:
    """A stream that begins with data, or has two headers, is refused."""
    async with participants(running.address, 1, keep) as (device,):
        await in_training(running, device)
        upload: Upload[pb.PushDeltaRequest, pb.PushDeltaResponse] = Upload(device.stub.PushDelta())
        await upload.write(pb.PushDeltaRequest(data=b"1234"))
        with pytest.raises(InvalidArgument, match="first message must carry the header"), rpc_errors():
            await upload.finish()


async def test_results_of_others_are_refused(running: Mesh) -> None:
    """Only who has the lease may send a result, report or fail an assignment."""
    async with participants(running.address, 2, keep) as devices:
        job_id = await running.create((5,))
        await running.begin(job_id, 2)
        owner = (await eventually(lambda: [d for d in devices if d.assignments and d.assignments[-1].round]))[
            0
        ]
        other = next(d for d in devices if d is not owner)
        mine = owner.assignments[-1]
        for call in (
            other.push(mine, *result(mine)),
            other.progress(mine),
            other.fail(mine, "mine!", package_fault=True),
        ):
            with pytest.raises(Aborted) as caught:
                await call
            assert caught.value.reason is Reason.ASSIGNMENT_LOST
        assert not (await running.job(job_id)).HasField("last_error")


# ---- ReportFailure, PushEvaluation


async def test_a_failure_counts_once(running: Mesh) -> None:
    """The same report again changes nothing; the assignment is handed out again."""
    async with participants(running.address, 1, keep) as (device,):
        mine = await in_training(running, device)
        for _ in range(2):
            await device.fail(mine, "trapped at 0x12", package_fault=True)
        job = await running.job(mine.job_id)
        assert job.participants[0].failures == 1
        assert re.fullmatch(r"trapped at 0x12 \(chunk .+\)", job.last_error.message)
        assert job.last_error.participant_id == "p1"
        again = (await eventually(lambda: [a for a in device.assignments if a.attempt == 2]))[0]
        await device.push(again, *result(again))
        await device.fail(mine, "trapped at 0x12", package_fault=True)  # late, and known


async def test_an_evaluation_counts_once(running: Mesh) -> None:
    """An evaluation is taken once, checked like every result, and refused in the wrong shape."""

    async def train_only(
        _: ScriptedParticipant, assignment: Assignment, base: Weights | None
    ) -> Outcome | None:
        evaluation = assignment.kind == job_pb2.ASSIGNMENT_KIND_EVALUATE
        return None if evaluation else compute(assignment, base)

    async with participants(running.address, 1, train_only) as (device,):
        job_id = await running.create((5,), validation_interval=1)
        await running.begin(job_id, 1)
        found = await eventually(lambda: device.assignments if len(device.assignments) == 3 else None)
        assert found is not None
        mine = found[-1]
        assert mine.kind == job_pb2.ASSIGNMENT_KIND_EVALUATE
        assert "the validation of round 1 waits for p1" in (await running.job(job_id)).waits[0].message
        with pytest.raises(InvalidArgument) as caught:
            await device.evaluate(mine, 11, [metric("loss", 1.0, 10)])
        assert caught.value.reason is Reason.UNITS_INVALID
        again = (await eventually(lambda: [a for a in device.assignments if a.attempt == 2]))[0]
        assert not (await device.evaluate(again, 10, [metric("loss", 2.0, 10)])).already_accepted
        assert (await device.evaluate(again, 10, [metric("loss", 2.0, 10)])).already_accepted
        await running.ended(job_id)
        (value,) = (await running.rounds(job_id))[1].validation_metrics
        assert (value.sum, value.count) == (2.0, 10)


async def test_results_of_the_wrong_kind_are_refused(running: Mesh) -> None:
    """A training assignment has a delta, not an evaluation."""
    async with participants(running.address, 1, keep) as (device,):
        mine = await in_training(running, device)
        with pytest.raises(InvalidArgument, match="send its result with PushDelta"):
            await device.evaluate(mine, 5, [metric("loss", 1.0, 5)])


async def test_nobody_works_without_having_accepted(running: Mesh) -> None:
    """Assignments of a job go to those that accepted it, and its wait says when nobody is there."""
    async with participants(running.address, 2, accept=None) as (p1, p2):
        job_id = await running.create((5,))
        await running.call(
            "InviteParticipants",
            coordinator.InviteParticipantsRequest(job_id=job_id, participant_ids=["p1"]),
        )
        invitation = (await eventually(lambda: p1.of_kind("invitation")))[0]
        await p1.stub.RespondToInvitation(
            pb.RespondToInvitationRequest(invitation_id=invitation.invitation_id, accept=True)
        )
        await running.call("StartJob", coordinator.StartJobRequest(job_id=job_id))
        await running.ended(job_id)
        assert not p2.assignments
        assert len(p1.assignments) == 2


async def test_calls_need_a_session(running: Mesh) -> None:
    """Every method but Join needs the token that Welcome brought."""
    device = ScriptedParticipant(running.address, "p9")
    with pytest.raises(CoveyError) as caught:
        await device.progress(Assignment(assignment_id="a", attempt=1))
    assert caught.value.reason is Reason.TOKEN_MISSING
    await device.die()


async def test_streams_of_one_result_are_bounded(running: Mesh) -> None:
    """A participant can't open any number of streams for one result; those there are go on."""
    async with participants(running.address, 1, keep) as (device,):
        mine = await in_training(running, device)
        delta, units, metrics = result(mine)
        data = delta.tobytes()
        header = pb.PushDeltaHeader(
            assignment_id=mine.assignment_id,
            attempt=1,
            units=units,
            size_bytes=len(data),
            sha256=digest(data),
            metrics=metrics,
            backend=common_pb2.CPU_WASM,
        )
        calls = [device.stub.PushDelta() for _ in range(4)]
        for call in calls:
            await call.write(pb.PushDeltaRequest(header=header))
            await call.write(pb.PushDeltaRequest(data=data[:8]))

        async def refused() -> bool:
            try:
                await device.push(mine, delta, units, metrics)
            except ResourceExhausted as error:
                return error.reason is Reason.LIMIT_EXCEEDED
            return False

        assert await refused()
        for call in calls:
            call.cancel()

        async def taken() -> bool:
            try:
                return not (await device.push(mine, delta, units, metrics)).already_accepted
            except ResourceExhausted:
                return False

        assert await eventually(taken)


async def test_a_mesh_has_a_bound_of_devices(tmp_path: Path) -> None:
    """A device more than there may be is refused; those that are known may always come back."""
    options = replace(QUICK, max_participants=1, max_jobs=1)
    async with mesh(tmp_path, options) as running, participants(running.address, 1) as (first,):
        second = ScriptedParticipant(running.address, "p2")
        with pytest.raises(ResourceExhausted, match="knows 1 devices"):
            await second.join()
        await second.die()
        await first.join()

        await running.create()
        with pytest.raises(ResourceExhausted, match="1 jobs haven't ended"):
            await running.create()

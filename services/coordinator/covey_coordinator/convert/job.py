"""Jobs, rounds and participants as owners see them."""

from covey.v1 import common_pb2, coordinator_service_pb2, job_pb2
from covey_coordinator.convert.spec import (
    chunk_from_proto,
    package_from_proto,
    settings_request_from_proto,
    settings_to_proto,
    uploads_from_proto,
)
from covey_coordinator.convert.values import (
    backend_to_proto,
    failure_to_proto,
    lineage_to_proto,
    metrics_to_proto,
    stage_to_proto,
    time_to_proto,
)
from covey_coordinator.domain.continuing import Continuation
from covey_coordinator.domain.jobs import NewJob
from covey_coordinator.domain.model import Assignment, JobState, OpenRound, RoundRecord
from covey_coordinator.domain.view import JobView, ParticipantView, ProgressView
from covey_coordinator.domain.waits import Wait
from covey_coordinator.domain.world import Member

__all__ = [
    "continuation_from_proto",
    "job_state_from_proto",
    "job_to_proto",
    "new_job_from_proto",
    "participant_to_proto",
    "round_to_proto",
]


def new_job_from_proto(request: coordinator_service_pb2.CreateJobRequest, fingerprint: str) -> NewJob:
    """Returns a job to be. Takes microseconds a chunk; call it in a thread."""
    return NewJob(
        request_id=request.request_id,
        fingerprint=fingerprint,
        validate_only=request.validate_only,
        display_name=request.display_name,
        package=package_from_proto(request.package),
        chunks=tuple(chunk_from_proto(chunk) for chunk in request.dataset.chunks),
        settings=settings_request_from_proto(request.settings),
        files=uploads_from_proto(request),
    )


def continuation_from_proto(
    request: coordinator_service_pb2.ContinueJobRequest, fingerprint: str
) -> Continuation:
    """Returns a job to be that goes on from a checkpoint. Takes microseconds a chunk; call it in a thread."""
    blob = request.checkpoint
    return Continuation(
        request_id=request.request_id,
        fingerprint=fingerprint,
        validate_only=request.validate_only,
        display_name=request.display_name,
        source_job_id=request.source_job_id,
        round=request.round if request.HasField("round") else None,
        checkpoint=(blob.sha256, blob.size_bytes) if request.HasField("checkpoint") else None,
        target_round=request.target_round,
        settings=settings_request_from_proto(request.settings),
        chunks=tuple(chunk_from_proto(chunk) for chunk in request.dataset.chunks)
        if request.HasField("dataset")
        else None,
        package=package_from_proto(request.package) if request.HasField("package") else None,
        files=uploads_from_proto(request),
        new_queue=request.new_queue,
    )


def job_state_from_proto(value: job_pb2.JobState.ValueType) -> JobState:
    """Returns a job's state."""
    return JobState(job_pb2.JobState.Name(value).removeprefix("JOB_STATE_"))


def round_to_proto(record: RoundRecord) -> job_pb2.RoundSummary:
    """Returns a finished round."""
    return job_pb2.RoundSummary(
        round=record.round,
        metrics=metrics_to_proto(record.metrics),
        validation_metrics=metrics_to_proto(record.validation_metrics),
        units=record.units,
        assignments=record.assignments,
        participant_ids=record.participant_ids,
        checkpoint=common_pb2.BlobRef(sha256=record.checkpoint.sha256, size_bytes=record.checkpoint.size),
        weights_sha256=record.checkpoint.weights_sha256,
        start_time=time_to_proto(record.start_time),
        end_time=time_to_proto(record.end_time),
        no_units=record.no_units,
    )


def _assignment(assignment: Assignment, lease_end: float | None) -> job_pb2.AssignmentState:
    message = job_pb2.AssignmentState(
        assignment_id=assignment.id,
        index=assignment.index,
        kind=job_pb2.AssignmentKind.Value(f"ASSIGNMENT_KIND_{assignment.kind}"),
        status=job_pb2.AssignmentStatus.Value(f"ASSIGNMENT_STATUS_{assignment.status}"),
        attempt=assignment.attempt,
        participant_id=assignment.participant_id,
        units=assignment.units or 0,
        chunk_ids=[chunk.id for chunk in assignment.chunks],
    )
    if assignment.result is not None:
        message.units_done = assignment.result.units
    if assignment.lease is not None:
        message.stage = stage_to_proto(assignment.lease.progress.stage)
        if assignment.lease.progress.units_done is not None:
            message.units_done = assignment.lease.progress.units_done
        message.lease_time.CopyFrom(time_to_proto(assignment.lease.start_time))
        if lease_end is not None:
            message.lease_expire_time.CopyFrom(time_to_proto(lease_end))
    return message


def _open_round(opened: OpenRound, lease_ends: dict[str, float]) -> job_pb2.RoundState:
    return job_pb2.RoundState(
        round=opened.round,
        assignments=[_assignment(a, lease_ends.get(a.id)) for a in opened.assignments],
        start_time=time_to_proto(opened.start_time),
        aggregating=opened.aggregating_since is not None,
    )


def _participant(view: ParticipantView) -> job_pb2.JobParticipant:
    invitation = view.invitation
    message = job_pb2.JobParticipant(
        participant_id=invitation.participant_id,
        display_name=view.display_name,
        invitation=job_pb2.InvitationState.Value(f"INVITATION_STATE_{invitation.state}"),
        connected=view.connected,
        assignments_done=invitation.assignments_done,
        failures=invitation.failures,
        invitation_id=invitation.invitation_id,
        backend=backend_to_proto(invitation.backend),
    )
    if view.assignment is not None and view.assignment.lease is not None:
        progress = view.assignment.lease.progress
        message.assignment_id = view.assignment.id
        message.stage = stage_to_proto(progress.stage)
        if progress.transfer_bytes_done is not None:
            message.transfer_bytes_done = progress.transfer_bytes_done
        if progress.transfer_bytes_total is not None:
            message.transfer_bytes_total = progress.transfer_bytes_total
        if progress.workers is not None:
            message.workers = progress.workers
        if progress.backend is not None:
            message.backend = backend_to_proto(progress.backend)
    return message


def _wait(wait: Wait) -> job_pb2.Wait:
    message = job_pb2.Wait(
        message=wait.message,
        participant_id=wait.participant_id,
        assignment_id=wait.assignment_id,
        since=time_to_proto(wait.since),
    )
    if wait.until is not None:
        message.until.CopyFrom(time_to_proto(wait.until))
    return message


def _progress(view: ProgressView) -> job_pb2.JobProgress:
    return job_pb2.JobProgress(
        rounds_done=view.rounds_done,
        rounds_wanted=view.rounds_wanted,
        passes_done=view.passes_done,
        passes_wanted=view.passes_wanted,
        units_done=view.units_done,
        round_units_done=view.round_units_done,
        round_units_wanted=view.round_units_wanted,
        units_wanted=view.units_wanted,
    )


def job_to_proto(view: JobView) -> job_pb2.Job:
    """Returns a job as it is now."""
    sight = view.sight
    record = sight.record
    message = job_pb2.Job(
        job_id=record.job_id,
        display_name=record.display_name,
        state=job_pb2.JobState.Value(f"JOB_STATE_{record.state}"),
        create_time=time_to_proto(record.create_time),
        package_name=record.package_name,
        package_version=record.package_version,
        unit=record.unit,
        settings=settings_to_proto(record.settings),
        progress=_progress(view.progress),
        participants=[_participant(participant) for participant in view.participants],
        waits=[_wait(wait) for wait in view.waits],
        pending_validation_rounds=sorted(sight.validations),
        can_validate=record.can_validate,
        has_module_file=True,  # no job is made without its module, and its holder keeps it in storage
    )
    if record.start_time is not None:
        message.start_time.CopyFrom(time_to_proto(record.start_time))
    if record.end_time is not None:
        message.end_time.CopyFrom(time_to_proto(record.end_time))
    if sight.open_round is not None:
        message.current_round.CopyFrom(_open_round(sight.open_round, view.lease_ends))
    if sight.latest is not None:
        message.latest_round.CopyFrom(round_to_proto(sight.latest))
    if record.failure is not None:
        message.failure.CopyFrom(failure_to_proto(record.failure))
    if record.lineage is not None:
        message.lineage.CopyFrom(lineage_to_proto(record.lineage))
    if record.last_error is not None:
        message.last_error.CopyFrom(failure_to_proto(record.last_error))
    return message


def participant_to_proto(member: Member, job_ids: list[str]) -> job_pb2.Participant:
    """Returns a device that joined."""
    record = member.record
    return job_pb2.Participant(
        participant_id=record.participant_id,
        display_name=record.display_name,
        connected=member.session is not None,
        join_time=time_to_proto(record.join_time),
        last_seen_time=time_to_proto(record.last_seen_time),
        device=job_pb2.DeviceInfo.FromString(record.device),
        job_ids=job_ids,
        assignment_id=member.assignment.id if member.assignment is not None else "",
    )

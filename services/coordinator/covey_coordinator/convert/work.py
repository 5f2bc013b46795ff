"""What goes to and comes from participants, from messages and back."""

from covey.v1 import common_pb2, errors_pb2, job_pb2, package_pb2, work_service_pb2
from covey_coordinator.convert.spec import chunk_to_proto, duration_to_proto, package_to_proto
from covey_coordinator.convert.values import (
    backend_from_proto,
    metrics_from_proto,
    stage_from_proto,
    time_to_proto,
    weights_to_proto,
)
from covey_coordinator.domain.commands import (
    AssignmentCommand,
    CancelCommand,
    Command,
    DrainCommand,
    InvitationCommand,
    InvitationEndedCommand,
    WelcomeCommand,
)
from covey_coordinator.domain.mesh import Held, Joining
from covey_coordinator.domain.model import AssignmentKind, Progress
from covey_coordinator.domain.results import DeltaHeader, EvaluationReport, FailureReport
from covey_coordinator.domain.settings import own_hyperparameters
from covey_kit.errors import Reason
from covey_kit.version import CONTRACT_VERSION

__all__ = [
    "Addresses",
    "command_to_proto",
    "delta_header_from_proto",
    "evaluation_from_proto",
    "failure_report_from_proto",
    "joining_from_proto",
    "progress_from_proto",
]

Addresses = tuple[str, str]
"""Addresses of storage and diagnostics for participants; empty: the coordinator's own."""


def _assignment(command: AssignmentCommand) -> work_service_pb2.Assignment:
    spec = command.spec
    values = dict(spec.settings.hyperparameters)
    message = work_service_pb2.Assignment(
        assignment_id=command.assignment_id,
        attempt=command.attempt,
        job_id=command.job_id,
        round=command.round,
        index=command.index,
        kind=job_pb2.AssignmentKind.Value(f"ASSIGNMENT_KIND_{command.kind}"),
        package=package_to_proto(spec.package),
        config=package_pb2.ModelConfig(
            seed=command.seed,
            batch_size=spec.settings.batch_size,
            learning_rate=spec.settings.learning_rate,
            local_epochs=spec.settings.local_epochs,
            hyperparameters=[values[h.name] for h in own_hyperparameters(spec.package)],
        ),
        grant=command.grant,
        silence_timeout=duration_to_proto(command.silence_timeout),
        deadline=time_to_proto(command.deadline),
    )
    if command.weights is not None:
        message.weights.CopyFrom(weights_to_proto(command.weights))
    if command.unit_range is not None:
        message.unit_range.CopyFrom(
            work_service_pb2.UnitWork(
                first_unit=command.unit_range.first,
                units=command.unit_range.units,
                sequence_seed=command.unit_range.sequence_seed,
            )
        )
    elif command.kind is AssignmentKind.TRAIN:
        message.chunks.chunks.extend(chunk_to_proto(chunk) for chunk in command.chunks)
    elif command.kind is AssignmentKind.EVALUATE:
        file = spec.package.validation
        assert file is not None
        message.held_out.file.CopyFrom(common_pb2.BlobRef(sha256=file.sha256, size_bytes=file.size))
        if spec.package.validation_examples is not None:
            message.held_out.units = spec.package.validation_examples
    return message


def _invitation(command: InvitationCommand) -> work_service_pb2.Invitation:
    invitation = command.invitation
    return work_service_pb2.Invitation(
        invitation_id=invitation.invitation_id,
        job_id=invitation.job_id,
        job_display_name=command.job_display_name,
        package_name=command.package_name,
        package_version=command.package_version,
        package_description=command.package_description,
        module_sha256=command.module_sha256,
        total_bytes=command.total_bytes,
        create_time=time_to_proto(invitation.create_time),
        state=job_pb2.InvitationState.Value(f"INVITATION_STATE_{invitation.state}"),
    )


def _welcome(command: WelcomeCommand, addresses: Addresses) -> work_service_pb2.Welcome:
    storage, diagnostics = addresses
    return work_service_pb2.Welcome(
        session_token=command.session_token,
        expire_time=time_to_proto(command.expire_time),
        storage_address=storage,
        diagnostics_address=diagnostics,
        progress_interval=duration_to_proto(command.progress_interval),
        contract_version=CONTRACT_VERSION,
    )


def command_to_proto(command: Command, addresses: Addresses) -> work_service_pb2.JoinResponse:
    """Returns a command as it goes down the stream."""
    response = work_service_pb2.JoinResponse
    match command:
        case WelcomeCommand():
            return response(welcome=_welcome(command, addresses))
        case InvitationCommand():
            return response(invitation=_invitation(command))
        case InvitationEndedCommand(invitation_id, job_id, reason):
            ended = work_service_pb2.InvitationEnded(
                invitation_id=invitation_id, job_id=job_id, reason=reason
            )
            return response(invitation_ended=ended)
        case AssignmentCommand():
            return response(assignment=_assignment(command))
        case CancelCommand(assignment_id, attempt, reason):
            cancel = work_service_pb2.CancelAssignment(
                assignment_id=assignment_id, attempt=attempt, reason=reason
            )
            return response(cancel=cancel)
        case DrainCommand(reason):
            return response(drain=work_service_pb2.Drain(reason=reason))


def joining_from_proto(message: work_service_pb2.JoinRequest) -> Joining:
    """Returns who joins."""
    return Joining(
        participant_id=message.participant_id,
        display_name=message.display_name,
        credential=message.credential,
        device=message.device.SerializeToString(deterministic=True),
        held=[Held(item.assignment_id, item.attempt) for item in message.held],
    )


def delta_header_from_proto(message: work_service_pb2.PushDeltaHeader) -> DeltaHeader:
    """Returns what a delta is announced with."""
    backend = backend_from_proto(message.backend)
    assert backend is not None  # the contract's bounds
    return DeltaHeader(
        assignment_id=message.assignment_id,
        attempt=message.attempt,
        units=message.units,
        size=message.size_bytes,
        sha256=message.sha256,
        metrics=metrics_from_proto(message.metrics),
        backend=backend,
        compute_seconds=message.compute_seconds if message.HasField("compute_seconds") else None,
    )


def evaluation_from_proto(message: work_service_pb2.PushEvaluationRequest) -> EvaluationReport:
    """Returns the result of an evaluation."""
    backend = backend_from_proto(message.backend)
    assert backend is not None  # the contract's bounds
    return EvaluationReport(
        message.assignment_id, message.attempt, message.units, metrics_from_proto(message.metrics), backend
    )


def failure_report_from_proto(message: work_service_pb2.ReportFailureRequest) -> FailureReport:
    """Returns a failed attempt. A cause that isn't named is the device's."""
    name = errors_pb2.ErrorReason.Name(message.failure.reason).removeprefix("ERROR_REASON_")
    reason = Reason.DEVICE if name == "UNSPECIFIED" else Reason(name)
    return FailureReport(
        message.assignment_id, message.attempt, reason, message.failure.message, message.package_fault
    )


def progress_from_proto(message: work_service_pb2.ReportProgressRequest) -> Progress:
    """Returns how far an assignment is; what wasn't said is None."""

    def said(field: str) -> int | None:
        return getattr(message, field) if message.HasField(field) else None  # type: ignore[arg-type]  # by name

    return Progress(
        stage=stage_from_proto(message.stage),
        units_done=said("units_done"),
        transfer_bytes_done=said("transfer_bytes_done"),
        transfer_bytes_total=said("transfer_bytes_total"),
        workers=said("workers"),
        backend=backend_from_proto(message.backend),
    )

"""Between the contract's messages and the words of the domain: pairs of functions, one direction each."""

import math
from datetime import UTC, datetime

from google.protobuf import duration_pb2, timestamp_pb2

from covey.v1 import (
    common_pb2,
    errors_pb2,
    job_pb2,
    package_pb2,
    participant_service_pb2,
    snapshot_pb2,
    work_service_pb2,
)
from covey_kit.errors import Reason
from covey_participant.domain.backend import Choice
from covey_participant.domain.execution import Execution, Stage
from covey_participant.domain.failure import bounded
from covey_participant.domain.invitations import Invitation, InvitationState
from covey_participant.domain.values import (
    Adapter,
    Assignment,
    Backend,
    Blob,
    Chunk,
    Config,
    Device,
    DeviceSettings,
    GpuNeeds,
    HeldOut,
    Kind,
    Metric,
    Package,
    Preference,
    Result,
    UnitRange,
    Weights,
)

# --- time -------------------------------------------------------------------------------------


def time_to_proto(seconds: float) -> timestamp_pb2.Timestamp:
    """Returns unix seconds as a timestamp."""
    message = timestamp_pb2.Timestamp()
    message.FromDatetime(datetime.fromtimestamp(seconds, UTC))
    return message


def time_from_proto(message: timestamp_pb2.Timestamp) -> float:
    """Returns a timestamp as unix seconds."""
    return message.seconds + message.nanos / 1e9


CONFIG_FIELDS = ("batchSize", "learningRate", "localEpochs")
"""Hyperparameters with fields of their own in a configuration; all others are the model's."""


def duration_to_proto(seconds: float) -> duration_pb2.Duration:
    """Returns seconds as a duration."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(max(seconds, 0.0) * 1e9))
    return message


# --- packages and assignments -----------------------------------------------------------------


def package_from_proto(message: package_pb2.ModelPackage) -> Package:
    """Returns what the device must know of a manifest."""
    gpu = next((b for b in message.backends if b.kind == common_pb2.GPU_WGPU), None)
    archive = message.shader_archive
    limits, source = message.limits, message.work_source
    return Package(
        name=message.name,
        version=message.version,
        module=Blob(message.module.sha256, message.module.bytes),
        weights=sum(math.prod(parameter.shape) for parameter in message.parameters),
        metrics=tuple(metric.name for metric in message.metrics),
        dataset_inputs=source.inputs == "dataset",
        experience=source.kind == package_pb2.WorkSource.EXPERIENCE,
        training=message.capabilities.training,
        evaluation=message.capabilities.evaluation,
        inference=message.capabilities.inference,
        memory_pages=limits.memory_pages if limits.HasField("memory_pages") else None,
        step_seconds=limits.step_seconds if limits.HasField("step_seconds") else None,
        validation_examples=message.validation_example_count
        if message.HasField("validation_example_count")
        else None,
        gpu=_gpu_needs(message, gpu) if gpu else None,
        shader_archive=Blob(archive.sha256, archive.bytes) if message.HasField("shader_archive") else None,
        max_workers=source.max_workers or 1,
    )


def default_config(message: package_pb2.ModelPackage) -> Config:
    """Returns the configuration with the manifest's defaults, and seed 0."""
    values = {parameter.name: parameter.default for parameter in message.hyperparameters}
    batch_size, learning_rate, epochs = (values.pop(name, 1.0) for name in CONFIG_FIELDS)
    return Config(0, max(int(batch_size), 1), learning_rate, max(int(epochs), 1), tuple(values.values()))


def _gpu_needs(message: package_pb2.ModelPackage, backend: package_pb2.BackendSpec) -> GpuNeeds:
    return GpuNeeds(
        limits=dict(backend.requires.limits),
        features=tuple(backend.requires.features),
        parameters=tuple((parameter.name, math.prod(parameter.shape)) for parameter in message.parameters),
        hyperparameters=tuple(
            item.name for item in message.hyperparameters if item.name not in CONFIG_FIELDS
        ),
    )


def assignment_from_proto(message: work_service_pb2.Assignment) -> Assignment:
    """Returns an assignment. Raises ValueError for a kind that this version doesn't know."""
    weights = message.weights
    return Assignment(
        assignment_id=message.assignment_id,
        attempt=message.attempt,
        job_id=message.job_id,
        round=message.round,
        kind=Kind(job_pb2.AssignmentKind.Name(message.kind).removeprefix("ASSIGNMENT_KIND_")),
        package=package_from_proto(message.package),
        config=Config(
            seed=message.config.seed,
            batch_size=message.config.batch_size,
            learning_rate=message.config.learning_rate,
            local_epochs=message.config.local_epochs,
            hyperparameters=tuple(message.config.hyperparameters),
        ),
        weights=Weights(_blob(weights.blob), weights.offset, weights.size_bytes, weights.sha256)
        if message.HasField("weights")
        else None,
        chunks=tuple(
            Chunk(chunk.id, Blob(chunk.sha256, chunk.bytes), chunk.example_count)
            for chunk in message.chunks.chunks
        ),
        held_out=_held_out(message.held_out) if message.HasField("held_out") else None,
        unit_range=_unit_range(message.unit_range) if message.HasField("unit_range") else None,
        grant=message.grant,
        deadline=time_from_proto(message.deadline) if message.HasField("deadline") else None,
    )


def _blob(message: common_pb2.BlobRef) -> Blob:
    return Blob(message.sha256, message.size_bytes)


def _held_out(message: work_service_pb2.HeldOutWork) -> HeldOut:
    units = message.units if message.HasField("units") else None
    return HeldOut(_blob(message.file), message.first_unit, units)


def _unit_range(message: work_service_pb2.UnitWork) -> UnitRange:
    return UnitRange(message.first_unit, message.units, message.sequence_seed)


# --- results ----------------------------------------------------------------------------------


def backend_to_proto(backend: Backend | None) -> "common_pb2.Backend.ValueType":
    """Returns the contract's name of a backend; None: not chosen yet."""
    return common_pb2.BACKEND_UNSPECIFIED if backend is None else common_pb2.Backend.Value(backend.value)


def stage_to_proto(stage: Stage) -> "common_pb2.Stage.ValueType":
    """Returns the contract's name of a stage."""
    return common_pb2.Stage.Value(f"STAGE_{stage.value}")


def metric_to_proto(metric: Metric) -> common_pb2.MetricValue:
    """Returns a metric; one that wasn't measured has no sum."""
    return common_pb2.MetricValue(name=metric.name, sum=metric.total, count=metric.count)


def delta_header_to_proto(assignment: Assignment, result: Result) -> work_service_pb2.PushDeltaHeader:
    """Returns what is said before the bytes of a delta."""
    return work_service_pb2.PushDeltaHeader(
        assignment_id=assignment.assignment_id,
        attempt=assignment.attempt,
        units=result.units,
        size_bytes=result.size,
        sha256=result.sha256,
        metrics=[metric_to_proto(metric) for metric in result.metrics],
        backend=backend_to_proto(result.backend),
        compute_seconds=result.compute_seconds,
    )


def evaluation_to_proto(assignment: Assignment, result: Result) -> work_service_pb2.PushEvaluationRequest:
    """Returns the result of an evaluation."""
    return work_service_pb2.PushEvaluationRequest(
        assignment_id=assignment.assignment_id,
        attempt=assignment.attempt,
        units=result.units,
        metrics=[metric_to_proto(metric) for metric in result.metrics],
        backend=backend_to_proto(result.backend),
    )


def progress_to_proto(execution: Execution) -> work_service_pb2.ReportProgressRequest:
    """Returns how far an assignment is."""
    done, total = execution.transfer or (None, None)
    return work_service_pb2.ReportProgressRequest(
        assignment_id=execution.assignment.assignment_id,
        attempt=execution.assignment.attempt,
        stage=stage_to_proto(execution.stage),
        units_done=execution.units_done,
        transfer_bytes_done=done,
        transfer_bytes_total=total,
        workers=execution.workers,
        backend=backend_to_proto(execution.choice.backend if execution.choice else None),
    )


def failure_to_proto(
    key: tuple[str, int], reason: Reason, message: str, *, package: bool, participant_id: str
) -> work_service_pb2.ReportFailureRequest:
    """Returns the report that gives an assignment back."""
    name = f"ERROR_REASON_{reason.value}"
    known = name in errors_pb2.ErrorReason.keys()  # noqa: SIM118 - an enum wrapper, not a dict
    return work_service_pb2.ReportFailureRequest(
        assignment_id=key[0],
        attempt=key[1],
        failure=common_pb2.Failure(
            reason=errors_pb2.ErrorReason.Value(name if known else "ERROR_REASON_DEVICE"),
            message=bounded(message),
            participant_id=participant_id,
            assignment_id=key[0],
        ),
        package_fault=package,
    )


# --- the device -------------------------------------------------------------------------------


def settings_to_proto(settings: DeviceSettings) -> participant_service_pb2.ParticipantSettings:
    """Returns what is set."""
    return participant_service_pb2.ParticipantSettings(
        backend_preference=common_pb2.BackendPreference.Value(
            f"BACKEND_PREFERENCE_{settings.preference.value}"
        ),
        max_local_workers=settings.max_local_workers,
        gpu_memory_budget_mib=settings.gpu_memory_budget_mib,
        accept_all=settings.accept_all,
    )


def preference_from_proto(value: "common_pb2.BackendPreference.ValueType") -> Preference:
    """Returns a preference; unspecified is AUTO."""
    name = common_pb2.BackendPreference.Name(value).removeprefix("BACKEND_PREFERENCE_")
    return Preference.AUTO if name == "UNSPECIFIED" else Preference(name)


def invitation_from_proto(message: work_service_pb2.Invitation) -> Invitation:
    """Returns an invitation."""
    return Invitation(
        invitation_id=message.invitation_id,
        job_id=message.job_id,
        job_display_name=message.job_display_name,
        package_name=message.package_name,
        package_version=message.package_version,
        package_description=message.package_description,
        module_sha256=message.module_sha256,
        total_bytes=message.total_bytes,
        create_time=time_from_proto(message.create_time),
        state=invitation_state_from_proto(message.state),
    )


def invitation_state_from_proto(value: "job_pb2.InvitationState.ValueType") -> InvitationState:
    """Returns where an invitation stands; unspecified is PENDING."""
    name = job_pb2.InvitationState.Name(value).removeprefix("INVITATION_STATE_")
    return InvitationState.PENDING if name == "UNSPECIFIED" else InvitationState(name)


def invitation_to_proto(invitation: Invitation) -> work_service_pb2.Invitation:
    """Returns an invitation as the contract has it."""
    return work_service_pb2.Invitation(
        invitation_id=invitation.invitation_id,
        job_id=invitation.job_id,
        job_display_name=invitation.job_display_name,
        package_name=invitation.package_name,
        package_version=invitation.package_version,
        package_description=invitation.package_description,
        module_sha256=invitation.module_sha256,
        total_bytes=invitation.total_bytes,
        create_time=time_to_proto(invitation.create_time),
        state=job_pb2.InvitationState.Value(f"INVITATION_STATE_{invitation.state.value}"),
    )


def adapter_to_proto(adapter: Adapter) -> common_pb2.GpuAdapter:
    """Returns a GPU."""
    return common_pb2.GpuAdapter(name=adapter.name, adapter_type=adapter.adapter_type, api=adapter.api)


def choice_fallback(choice: Choice | None) -> "common_pb2.FallbackReason.ValueType":
    """Returns why not the GPU; unspecified when there is nothing to explain."""
    if choice is None or choice.fallback is None:
        return common_pb2.FALLBACK_REASON_UNSPECIFIED
    return common_pb2.FallbackReason.Value(f"FALLBACK_REASON_{choice.fallback.value}")


def execution_into_snapshot(execution: Execution, now: float, snapshot: snapshot_pb2.Snapshot) -> None:
    """Fills in what a running assignment says. `now`: monotonic seconds."""
    assignment = execution.assignment
    snapshot.stage = stage_to_proto(execution.stage)
    snapshot.job_id = assignment.job_id
    snapshot.assignment_id = assignment.assignment_id
    snapshot.round = assignment.round
    for stage, seconds in execution.durations(now).items():
        snapshot.stage_durations.add(stage=stage_to_proto(stage), duration=duration_to_proto(seconds))
    snapshot.batch_size = assignment.config.batch_size
    snapshot.local_epochs = assignment.config.local_epochs
    if assignment.units is not None:
        snapshot.units = assignment.units
    if execution.units_done is not None:
        snapshot.units_done = execution.units_done
    if execution.work_rate is not None:
        snapshot.units_per_second = execution.work_rate
    if execution.transfer is not None:
        snapshot.transfer_bytes_done, snapshot.transfer_bytes_total = execution.transfer
    if execution.workers is not None:
        snapshot.workers = execution.workers
    if execution.module_loaded:
        snapshot.module_sha256 = assignment.package.module.sha256
    choice = execution.choice
    if choice is None:
        return
    snapshot.backend = backend_to_proto(choice.backend)
    snapshot.fallback_reason = choice_fallback(choice)
    if choice.adapter is not None:
        snapshot.adapter.CopyFrom(adapter_to_proto(choice.adapter))
    archive = assignment.package.shader_archive
    if choice.backend is not Backend.CPU_WASM and archive is not None and execution.module_loaded:
        snapshot.shader_archive_sha256 = archive.sha256


def execution_to_last_run(execution: Execution) -> participant_service_pb2.LastRun:
    """Returns what an assignment ran on that is over."""
    assignment, choice = execution.assignment, execution.choice
    message = participant_service_pb2.LastRun(
        job_id=assignment.job_id,
        assignment_id=assignment.assignment_id,
        backend=backend_to_proto(choice.backend if choice else None),
        fallback_reason=choice_fallback(choice),
        message=bounded(choice.message) if choice else "",
    )
    if choice is not None and choice.adapter is not None:
        message.adapter.CopyFrom(adapter_to_proto(choice.adapter))
        archive = assignment.package.shader_archive
        message.shader_archive_sha256 = archive.sha256 if archive else ""
    return message


def device_to_proto(device: Device) -> job_pb2.DeviceInfo:
    """Returns what the device is."""
    return job_pb2.DeviceInfo(
        platform=device.platform,
        runtime=device.runtime,
        cpu_cores=device.cpus,
        memory_bytes=device.memory_bytes,
        adapters=[adapter_to_proto(adapter) for adapter in device.adapters],
        program_version=device.program_version,
    )

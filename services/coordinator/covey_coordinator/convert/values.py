"""Small values that many messages share, from messages and back."""

from collections.abc import Iterable

from google.protobuf import timestamp_pb2

from covey.v1 import checkpoint_pb2, common_pb2, errors_pb2, job_pb2
from covey_coordinator.domain.model import CheckpointRef, FailureRecord, Lineage, Metric
from covey_coordinator.domain.spec import Backend, Stage
from covey_kit.errors import Reason

__all__ = [
    "backend_from_proto",
    "backend_to_proto",
    "checkpoint_from_proto",
    "failure_from_proto",
    "failure_to_proto",
    "lineage_from_proto",
    "lineage_to_proto",
    "metrics_from_proto",
    "metrics_to_proto",
    "stage_from_proto",
    "stage_to_proto",
    "time_from_proto",
    "time_to_proto",
    "weights_to_proto",
]


def time_to_proto(seconds: float) -> timestamp_pb2.Timestamp:
    """Returns unix seconds as a Timestamp, to the microsecond."""
    message = timestamp_pb2.Timestamp()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


def time_from_proto(message: timestamp_pb2.Timestamp) -> float:
    """Returns a Timestamp as unix seconds."""
    return message.ToMicroseconds() / 1e6


def metrics_from_proto(messages: Iterable[common_pb2.MetricValue]) -> tuple[Metric, ...]:
    """Returns metrics in their order; an absent sum is None."""
    return tuple(Metric(m.name, m.sum if m.HasField("sum") else None, m.count) for m in messages)


def metrics_to_proto(metrics: Iterable[Metric]) -> list[common_pb2.MetricValue]:
    """Returns metrics in their order; a sum of None stays absent."""
    return [common_pb2.MetricValue(name=m.name, sum=m.sum, count=m.count) for m in metrics]


def backend_from_proto(value: common_pb2.Backend.ValueType) -> Backend | None:
    """Returns a backend; None when unspecified."""
    return None if value == common_pb2.BACKEND_UNSPECIFIED else Backend(common_pb2.Backend.Name(value))


def backend_to_proto(backend: Backend | None) -> common_pb2.Backend.ValueType:
    """Returns a backend; unspecified for None."""
    return common_pb2.BACKEND_UNSPECIFIED if backend is None else common_pb2.Backend.Value(backend)


def stage_from_proto(value: common_pb2.Stage.ValueType) -> Stage | None:
    """Returns a stage; None when unspecified."""
    name = common_pb2.Stage.Name(value).removeprefix("STAGE_")
    return None if name == "UNSPECIFIED" else Stage(name)


def stage_to_proto(stage: Stage | None) -> common_pb2.Stage.ValueType:
    """Returns a stage; unspecified for None."""
    return common_pb2.STAGE_UNSPECIFIED if stage is None else common_pb2.Stage.Value(f"STAGE_{stage}")


def failure_to_proto(failure: FailureRecord) -> common_pb2.Failure:
    """Returns a failure as records show it."""
    return common_pb2.Failure(
        reason=errors_pb2.ErrorReason.Value(f"ERROR_REASON_{failure.reason}"),
        message=failure.message,
        participant_id=failure.participant_id,
        assignment_id=failure.assignment_id,
        time=time_to_proto(failure.time),
    )


def failure_from_proto(message: common_pb2.Failure) -> FailureRecord:
    """Returns a failure as `failure_to_proto` wrote it."""
    name = errors_pb2.ErrorReason.Name(message.reason).removeprefix("ERROR_REASON_")
    return FailureRecord(
        Reason(name),
        message.message,
        message.participant_id,
        message.assignment_id,
        time_from_proto(message.time),
    )


def lineage_to_proto(lineage: Lineage) -> job_pb2.JobLineage:
    """Returns where a continued job came from."""
    return job_pb2.JobLineage(
        source_job_id=lineage.source_job_id,
        round=lineage.round,
        checkpoint_sha256=lineage.checkpoint_sha256,
        new_queue=lineage.new_queue,
    )


def lineage_from_proto(message: job_pb2.JobLineage) -> Lineage:
    """Returns where a continued job came from, as `lineage_to_proto` wrote it."""
    return Lineage(message.source_job_id, message.round, message.checkpoint_sha256, message.new_queue)


def weights_to_proto(checkpoint: CheckpointRef) -> common_pb2.WeightsRef:
    """Returns where the weights of a checkpoint lie."""
    return common_pb2.WeightsRef(
        blob=common_pb2.BlobRef(sha256=checkpoint.sha256, size_bytes=checkpoint.size),
        offset=checkpoint.weights_offset,
        size_bytes=checkpoint.weights_size,
        sha256=checkpoint.weights_sha256,
    )


def checkpoint_from_proto(message: checkpoint_pb2.Checkpoint) -> CheckpointRef:
    """Returns a checkpoint as storage recorded it."""
    return CheckpointRef(
        sha256=message.blob.sha256,
        size=message.blob.size_bytes,
        weights_offset=message.weights.offset,
        weights_size=message.weights.size_bytes,
        weights_sha256=message.weights.sha256,
    )

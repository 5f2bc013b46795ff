"""Numbers and the contract's enums as people read them. What isn't known is `—`, never 0."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.v1.common_pb2 import Backend, FallbackReason, MetricValue, Stage
    from covey.v1.job_pb2 import InvitationState, Job, JobState

__all__ = [
    "ABSENT",
    "backend_text",
    "duration",
    "invitation_word",
    "lineage_text",
    "mean",
    "mean_text",
    "metric_text",
    "number",
    "size",
    "stage_word",
    "state_word",
    "trained",
]

ABSENT = "—"
"""What stands where something isn't known."""


def number(value: float | None, digits: int = 4) -> str:
    """Returns a measured value."""
    return ABSENT if value is None else f"{value:.{digits}f}"


def size(count: float | None) -> str:
    """Returns bytes, such as `1.5 MiB`."""
    if count is None:
        return ABSENT
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float | None) -> str:
    """Returns seconds, such as `2 m 05 s`."""
    if seconds is None:
        return ABSENT
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m"


def mean(metrics: "Iterable[MetricValue]", name: str) -> float | None:
    """Returns a metric's mean over its count; None when it is absent or was measured over nothing."""
    for metric in metrics:
        if metric.name == name and metric.HasField("sum") and metric.count > 0:
            return metric.sum / metric.count
    return None


def mean_text(metrics: "Iterable[MetricValue]", name: str) -> str:
    """Returns a metric's mean in words."""
    return number(mean(metrics, name))


def metric_text(metrics: "Iterable[MetricValue]") -> str | None:
    """Returns all metrics in one line, such as `loss 0.2391, accuracy 0.9312`; None when there are none."""
    metrics = list(metrics)
    return ", ".join(f"{metric.name} {mean_text([metric], metric.name)}" for metric in metrics) or None


def trained(job: "Job") -> str:
    """Returns how much was trained in the model's unit, such as `1,240 of 4,000 episodes`."""
    progress = job.progress
    done = f"{progress.units_done + progress.round_units_done:,}"
    if progress.HasField("units_wanted"):
        done += f" of {progress.units_wanted:,}"
    return f"{done} {job.unit}s"


def lineage_text(job: "Job") -> str | None:
    """Returns where a continued job came from; None when it began with initial weights."""
    if not job.HasField("lineage"):
        return None
    lineage = job.lineage
    anew = ", with a new queue" if lineage.new_queue else ""
    return f"round {lineage.round} of {lineage.source_job_id} ({lineage.checkpoint_sha256[:12]}){anew}"


def state_word(state: "JobState.ValueType") -> str:
    """Returns a job's state, such as `running`."""
    from covey.v1 import job_pb2

    return job_pb2.JobState.Name(state).removeprefix("JOB_STATE_").lower()


def invitation_word(state: "InvitationState.ValueType") -> str:
    """Returns where an invitation stands, such as `accepted`."""
    from covey.v1 import job_pb2

    return job_pb2.InvitationState.Name(state).removeprefix("INVITATION_STATE_").lower()


def backend_text(
    backend: "Backend.ValueType",
    fallback: "FallbackReason.ValueType",
    adapter: str = "",
    message: str = "",
) -> str:
    """Returns what something runs on and why not the GPU, such as `CPU_WASM (NO_ADAPTER: …)`."""
    from covey.v1 import common_pb2

    if backend == common_pb2.BACKEND_UNSPECIFIED:
        return ABSENT
    name = common_pb2.Backend.Name(backend)
    if fallback != common_pb2.FALLBACK_REASON_UNSPECIFIED:
        reason = common_pb2.FallbackReason.Name(fallback).removeprefix("FALLBACK_REASON_")
        return f"{name} ({reason}: {message})" if message else f"{name} ({reason})"
    return f"{name} ({adapter})" if adapter and backend != common_pb2.CPU_WASM else name


def stage_word(stage: "Stage.ValueType") -> str:
    """Returns what a device is doing, such as `training`."""
    from covey.v1 import common_pb2

    if stage == common_pb2.STAGE_UNSPECIFIED:
        return ABSENT
    return common_pb2.Stage.Name(stage).removeprefix("STAGE_").lower()

"""What the parent and a GPU worker say to each other beyond `runtime/protocol.py`."""

from dataclasses import dataclass, field
from typing import Any

from covey_kit.errors import Reason
from covey_participant.domain.backend import Fallback
from covey_participant.domain.failure import WorkFailure
from covey_participant.runtime.protocol import Job, ProtocolError, failure_frame

from .facts import PackageFacts
from .failure import GpuFailure


@dataclass(frozen=True)
class GpuSpec:
    """What a job needs to run on the GPU.

    Attributes:
        archive, archive_sha256: the shader archive's file and digest.
        facts: what the plan is checked against and run with.
        adapter, api: the adapter to use, as `Adapter.name` and `.api`.
        features: WebGPU features that the package requires.
        budget_bytes: most GPU memory; None: no bound of ours.
    """

    archive: str
    archive_sha256: str
    facts: PackageFacts
    adapter: str
    api: str
    features: list[str] = field(default_factory=list)
    budget_bytes: int | None = None


@dataclass(frozen=True)
class GpuJob(Job):
    """A job with its GPU half. Without one it is done as on the CPU."""

    gpu: GpuSpec | None = None

    @classmethod
    def decode(cls, frame: dict[str, Any]) -> "GpuJob":
        """Returns the job of a frame that the parent encoded."""
        values = dict(frame)
        gpu = values.pop("gpu", None)
        plain = Job.decode(values)
        if gpu is not None:
            gpu["facts"] = PackageFacts(**gpu["facts"])
        return cls(**vars(plain), gpu=GpuSpec(**gpu) if gpu is not None else None)


def encode_failure(failure: WorkFailure) -> dict[str, Any]:
    """Returns the frame that reports a failure, and whether the GPU had a part in it."""
    fallback = failure.fallback.value if isinstance(failure, GpuFailure) else None
    return {**failure_frame(failure), "fallback": fallback}


def gpu_failure(frame: dict[str, Any]) -> GpuFailure | None:
    """Returns the failure of a frame, if it is one of the GPU.

    Raises:
        ProtocolError: the frame has another shape.
    """
    if frame["type"] != "failed" or frame.get("fallback") is None:
        return None
    message = frame.get("message")
    try:
        reason, fallback = Reason(str(frame.get("reason"))), Fallback(frame["fallback"])
    except ValueError as error:
        raise ProtocolError("a failure must have reasons that are known") from error
    if not isinstance(message, str):
        raise ProtocolError("a failure must have a message")
    package_fault = bool(frame.get("package_fault"))
    return GpuFailure(reason, message, package_fault=package_fault, fallback=fallback)

"""What the parent and a GPU worker say to each other beyond `runtime/protocol.py`."""

from dataclasses import dataclass, field
from typing import Any

from covey_kit.errors import Reason
from covey_participant.domain.failure import WorkFailure
from covey_participant.runtime.protocol import Job, ProtocolError, failure_frame

from .facts import PackageFacts
from .failure import GpuFailure


@dataclass(frozen=True)
class GpuSpec:
    """What a job needs to run on the GPU.

    Attributes:
        archive, archive_sha256: the shader archive's file and digest.
        parameters: (name, elements) in manifest order.
        hyperparameters: the values in force by name, with `batchSize`, `learningRate` and `localEpochs`.
        adapter, api: the adapter to use, as `Adapter.name` and `.api`.
        features: WebGPU features that the package requires.
        budget_bytes: most GPU memory; None: no bound of ours.
    """

    archive: str
    archive_sha256: str
    parameters: list[tuple[str, int]]
    hyperparameters: dict[str, float]
    adapter: str
    api: str
    features: list[str] = field(default_factory=list)
    budget_bytes: int | None = None
    training: bool = True
    evaluation: bool = True

    def facts(self, metrics: int, *, experience: bool) -> PackageFacts:
        """Returns what the plan is checked against."""
        return PackageFacts(
            parameters=dict(self.parameters),
            hyperparameters=self.hyperparameters,
            metrics=metrics,
            training=self.training,
            evaluation=self.evaluation,
            experience=experience,
        )


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
            gpu["parameters"] = [(name, count) for name, count in gpu["parameters"]]
        return cls(**vars(plain), gpu=GpuSpec(**gpu) if gpu is not None else None)


def encode_failure(failure: WorkFailure) -> dict[str, Any]:
    """Returns the frame that reports a failure, and whether the GPU had a part in it."""
    return {**failure_frame(failure), "gpu": isinstance(failure, GpuFailure)}


def gpu_failure(frame: dict[str, Any]) -> GpuFailure | None:
    """Returns the failure of a frame, if it is one of the GPU.

    Raises:
        ProtocolError: the frame has another shape.
    """
    if frame["type"] != "failed" or frame.get("gpu") is not True:
        return None
    reason, message = frame.get("reason"), frame.get("message")
    if reason not in set(Reason) or not isinstance(message, str):
        raise ProtocolError("a failure must have a reason that is known, and a message")
    return GpuFailure(Reason(reason), message, package_fault=bool(frame.get("package_fault")))

"""What the parent and a worker process say to each other, over a socket pair.

A frame is a little-endian u32 length and so many bytes of JSON (an object with `type`). Bulk goes by file.
The parent believes nothing: frames are bounded, and every field is checked for its type as it is taken out.
"""

import json
import math
import struct
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from covey_kit.errors import Reason
from covey_participant.domain.failure import Cancelled, WorkFailure, bounded

E = TypeVar("E", bound=StrEnum)

MOST_FRAME = 4 << 20
HEADER = struct.Struct("<I")


class ProtocolError(Exception):
    """The other side sent something that isn't of this protocol."""


class Task(StrEnum):
    """What a worker can be asked to do."""

    INITIALIZE = "initialize"
    TRAIN = "train"
    EVALUATE = "evaluate"
    CHECK = "check"
    COUNT = "count"
    PLAY = "play"
    PREDICT = "predict"


class Step(StrEnum):
    """Where a worker is. `HOST` is its own work (files, hashes); the others compile or run the module."""

    COMPILE = "compile"
    LOAD = "load"
    WORK = "work"
    HOST = "host"


@dataclass(frozen=True)
class FileRange:
    """A byte range of a file."""

    path: str
    offset: int
    size: int


@dataclass(frozen=True)
class ChunkFile:
    """A chunk to load. `examples`: the count that the manifest promises; None: not known."""

    path: str
    examples: int | None = None


@dataclass(frozen=True)
class ModuleSpec:
    """A module and what it must export.

    Attributes:
        path: the WebAssembly file, already verified.
        sha256: its digest.
        compiled: folder for compiled code (0700).
        memory_bytes: most linear memory.
        weights: f32 numbers in the weights.
        metrics: number of metrics.
    """

    path: str
    sha256: str
    compiled: str
    memory_bytes: int
    weights: int
    metrics: int
    dataset: bool = True
    work: bool = True
    inference: bool = False
    experience: bool = False


@dataclass(frozen=True)
class ConfigSpec:
    """What `covey_configure` gets."""

    seed: int = 0
    batch_size: int = 1
    learning_rate: float = 1.0
    local_epochs: int = 1
    hyperparameters: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """One thing to do.

    Attributes:
        weights: base weights; None for `INITIALIZE`, `CHECK` and `COUNT`.
        weights_sha256: digest of that range; the same digest again is not mapped again.
        chunks: chunks in order (for `EVALUATE`: the held-out file).
        first_unit, units: the units of an evaluation (None: all that follow) or of an experience range.
        sequence_seed: seeds the units of experience; None: the configuration's seed does.
        records: files of what others played, in unit order, to train on. Empty: the job plays itself.
        output: where the delta (the record, the prediction) goes; made anew.
        input: bytes for a prediction, as a file.
        output_bytes: most bytes of a prediction.
    """

    task: Task
    module: ModuleSpec
    config: ConfigSpec = ConfigSpec()
    weights: FileRange | None = None
    weights_sha256: str = ""
    chunks: list[ChunkFile] = field(default_factory=list)
    first_unit: int = 0
    units: int | None = None
    sequence_seed: int | None = None
    records: list[str] = field(default_factory=list)
    output: str = ""
    input: str = ""
    output_bytes: int = 0

    def encode(self) -> dict[str, Any]:
        """Returns the frame's object."""
        return {"type": "job", **asdict(self)}

    @classmethod
    def decode(cls, frame: dict[str, Any]) -> "Job":
        """Returns the job of a frame that the parent encoded."""
        values = {name: value for name, value in frame.items() if name != "type"}
        values["task"] = Task(values["task"])
        values["module"] = ModuleSpec(**values["module"])
        values["config"] = ConfigSpec(**values["config"])
        values["weights"] = FileRange(**values["weights"]) if values["weights"] else None
        values["chunks"] = [ChunkFile(**chunk) for chunk in values["chunks"]]
        return cls(**values)


@dataclass(frozen=True)
class Progress:
    """A sign of life: what is being done, and how far it is.

    Attributes:
        units_done: units done so far, each once; None: not known there.
        work_units: units of work done so far: a unit counts once in each local epoch.
        compute_seconds: what they took, in the module alone.
        playing: experience is being played.
    """

    step: Step
    units_done: int | None = None
    work_units: int | None = None
    compute_seconds: float | None = None
    playing: bool = False

    def encode(self) -> dict[str, Any]:
        """Returns the frame's object."""
        return {"type": "progress", **asdict(self)}


@dataclass(frozen=True)
class Outcome:
    """What a job came to.

    Attributes:
        units: units worked on, each once.
        work_units: units of work done: a unit counts once in each local epoch.
        metrics: (sum, count) in manifest order.
        sha256, size: of the output file.
        compute_seconds: time in the module's begin and step calls.
        memory_bytes: linear memory at the end.
        problems: for `CHECK`: everything that is wrong with the module.
    """

    units: int = 0
    work_units: int = 0
    metrics: list[tuple[float, float]] = field(default_factory=list)
    sha256: str = ""
    size: int = 0
    compute_seconds: float = 0.0
    memory_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    def encode(self) -> dict[str, Any]:
        """Returns the frame's object."""
        return {"type": "done", **asdict(self)}


Event = Progress | Outcome | tuple[str, str]


def encode(frame: dict[str, Any]) -> bytes:
    """Returns a frame's bytes."""
    body = json.dumps(frame, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MOST_FRAME:
        raise ProtocolError(f"a frame of {len(body)} bytes is over the bound of {MOST_FRAME}")
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """Returns the object of a frame's body."""
    try:
        frame = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a frame isn't JSON") from error
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise ProtocolError("a frame must be an object with a type")
    return frame


def failure_frame(failure: WorkFailure) -> dict[str, Any]:
    """Returns the frame that reports a failure."""
    return {
        "type": "failed",
        "reason": failure.reason.value,
        "message": failure.message,
        "package_fault": failure.package_fault,
    }


def parse_event(frame: dict[str, Any]) -> Event:
    """Returns what a worker reported: progress, an outcome, or a log line as (level, text).

    Raises:
        WorkFailure: the job failed.
        Cancelled: the job was cancelled.
        ProtocolError: the frame has another shape.
    """
    kind = frame["type"]
    if kind == "progress":
        return Progress(
            _named(Step, frame, "step"),
            _maybe_count(frame, "units_done"),
            _maybe_count(frame, "work_units"),
            _maybe_number(frame, "compute_seconds"),
            playing=frame.get("playing") is True,
        )
    if kind == "done":
        return _outcome(frame)
    if kind == "log":
        return _text(frame, "level"), bounded(_text(frame, "text"), 2048)
    if kind == "failed":
        raise WorkFailure(
            _named(Reason, frame, "reason"),
            _text(frame, "message"),
            package_fault=bool(frame.get("package_fault")),
        )
    if kind == "cancelled":
        raise Cancelled
    raise ProtocolError(f"a frame of type {kind[:40]!r} isn't known")


def _outcome(frame: dict[str, Any]) -> Outcome:
    pairs = frame.get("metrics")
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ProtocolError("metrics must be pairs")
    return Outcome(
        units=_count(frame, "units"),
        work_units=_count(frame, "work_units"),
        metrics=[(_finite(total), _finite(count)) for total, count in pairs],
        sha256=_text(frame, "sha256"),
        size=_count(frame, "size"),
        compute_seconds=_finite(frame.get("compute_seconds")),
        memory_bytes=_count(frame, "memory_bytes"),
        problems=_texts(frame, "problems"),
    )


def _text(frame: dict[str, Any], name: str) -> str:
    value = frame.get(name)
    if not isinstance(value, str):
        raise ProtocolError(f"{name} must be text")
    return value


def _named(names: type[E], frame: dict[str, Any], name: str) -> E:
    try:
        return names(_text(frame, name))
    except ValueError as error:
        raise ProtocolError(f"{name} isn't known") from error


def _texts(frame: dict[str, Any], name: str) -> list[str]:
    value = frame.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ProtocolError(f"{name} must be texts")
    return [bounded(item) for item in value]


def _count(frame: dict[str, Any], name: str) -> int:
    value = frame.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ProtocolError(f"{name} must be a count")
    return value


def _maybe_count(frame: dict[str, Any], name: str) -> int | None:
    return None if frame.get(name) is None else _count(frame, name)


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ProtocolError("a number must be finite")
    return float(value)


def _maybe_number(frame: dict[str, Any], name: str) -> float | None:
    return None if frame.get(name) is None else _finite(frame[name])

"""The words of the device side: what an assignment asks for, what came of it, what is set."""

from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True)
class Identity:
    """A device's lasting id and the 32 secret bytes that the coordinator binds it to."""

    participant_id: str
    credential: bytes

    def __repr__(self) -> str:
        """Leaves the credential out: representations end up in logs."""
        return f"Identity({self.participant_id!r})"


class Kind(StrEnum):
    """What an assignment is about."""

    INITIALIZE = "INITIALIZE"
    TRAIN = "TRAIN"
    EVALUATE = "EVALUATE"


class Backend(StrEnum):
    """How a package runs here."""

    CPU_WASM = "CPU_WASM"
    GPU_WGPU = "GPU_WGPU"
    HYBRID = "HYBRID"


class Preference(StrEnum):
    """What the device would rather run on."""

    AUTO = "AUTO"
    CPU = "CPU"
    GPU = "GPU"


@dataclass(frozen=True)
class Blob:
    """Bytes by their SHA-256 (64 lower-case hex digits)."""

    sha256: str
    size: int


@dataclass(frozen=True)
class GpuNeeds:
    """What a package asks of a GPU, and what its shader plan is checked against.

    Attributes:
        limits, features: WebGPU limit name to its least value; feature names.
        parameters: (name, elements) in manifest order.
        hyperparameters: names of the model's own, in the order of `Config.hyperparameters`.
    """

    limits: dict[str, int] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    parameters: tuple[tuple[str, int], ...] = ()
    hyperparameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Package:
    """What the device must know of a model package.

    Attributes:
        weights: f32 numbers in all parameters together.
        metrics: names in manifest order.
        dataset_inputs: it reads chunks.
        experience: its work comes from units that it generates.
        memory_pages, step_seconds: its own limits; None: the device's alone.
        validation_examples: units of its held-out data; None: not declared.
        gpu: what it asks of a GPU; None: it doesn't run on one.
        shader_archive: the archive of the job; None: none.
    """

    name: str
    version: str
    module: Blob
    weights: int
    metrics: tuple[str, ...] = ()
    dataset_inputs: bool = True
    experience: bool = False
    training: bool = True
    evaluation: bool = False
    inference: bool = False
    memory_pages: int | None = None
    step_seconds: float | None = None
    validation_examples: int | None = None
    gpu: GpuNeeds | None = None
    shader_archive: Blob | None = None
    max_workers: int = 1


@dataclass(frozen=True)
class Config:
    """What the module is configured with."""

    seed: int
    batch_size: int
    learning_rate: float
    local_epochs: int
    hyperparameters: tuple[float, ...] = ()


@dataclass(frozen=True)
class Weights:
    """Base weights: a byte range of a checkpoint blob, with the digest of exactly that range."""

    blob: Blob
    offset: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Chunk:
    """A chunk of the dataset and the number of examples that its manifest promises."""

    id: str
    blob: Blob
    examples: int


@dataclass(frozen=True)
class HeldOut:
    """Units of the held-out file; `units` None: all that follow `first`."""

    file: Blob
    first: int
    units: int | None


@dataclass(frozen=True)
class UnitRange:
    """Units that the model generates, of the sequence with this seed."""

    first: int
    units: int
    sequence_seed: int


@dataclass(frozen=True)
class Assignment:
    """Work for this device.

    Attributes:
        deadline: unix seconds by the coordinator's clock; None: none.
    """

    assignment_id: str
    attempt: int
    job_id: str
    round: int
    kind: Kind
    package: Package
    config: Config
    weights: Weights | None = None
    chunks: tuple[Chunk, ...] = ()
    held_out: HeldOut | None = None
    unit_range: UnitRange | None = None
    grant: str = ""
    deadline: float | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What results are keyed by."""
        return self.assignment_id, self.attempt

    @property
    def units(self) -> int | None:
        """Units of the work, each counted once; None: not known before the data is loaded."""
        if self.kind is Kind.INITIALIZE:
            return 0
        if self.unit_range is not None:
            return self.unit_range.units
        if self.held_out is not None:
            known = self.package.validation_examples
            rest = None if known is None else max(known - self.held_out.first, 0)
            return self.held_out.units if self.held_out.units is not None else rest
        return sum(chunk.examples for chunk in self.chunks)


@dataclass(frozen=True)
class Metric:
    """A metric summed over `count`; `total` None: the module had nothing to measure."""

    name: str
    total: float | None
    count: float


@dataclass(frozen=True)
class Result:
    """What an assignment came to.

    Attributes:
        path: file of the delta; empty for an evaluation.
        size, sha256: of that file.
    """

    units: int
    metrics: tuple[Metric, ...]
    backend: Backend
    compute_seconds: float
    path: str = ""
    size: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class DeviceSettings:
    """What is set on the device; taken at the next assignment. None: no bound of ours."""

    preference: Preference = Preference.AUTO
    max_local_workers: int | None = None
    gpu_memory_budget_mib: int | None = None
    accept_all: bool = False


@dataclass(frozen=True)
class Adapter:
    """A GPU that the device found, with its WebGPU limits and features."""

    name: str
    adapter_type: str
    api: str
    limits: dict[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Device:
    """What the device is, as far as it could be found out."""

    platform: str
    cpus: int
    memory_bytes: int | None
    runtime: str
    program_version: str
    adapters: tuple[Adapter, ...] = ()

"""What a job is made of: the package, the data and the settings, as plain values."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from covey_coordinator.domain.aggregation import Aggregation

__all__ = [
    "BEGINNING",
    "Backend",
    "Chunk",
    "ChunkOrder",
    "FileSpec",
    "HyperparameterSpec",
    "JobSpec",
    "NamedFileSpec",
    "Origin",
    "PackageSpec",
    "ParameterSpec",
    "Settings",
    "SettingsRequest",
    "Stage",
    "UploadedFile",
    "manifest_sha256",
]


class ChunkOrder(StrEnum):
    """In which order a pass takes the chunks."""

    SEEDED = "SEEDED"
    MANIFEST = "MANIFEST"


class Backend(StrEnum):
    """What a package runs on; names as in the contract."""

    CPU_WASM = "CPU_WASM"
    GPU_WGPU = "GPU_WGPU"
    HYBRID = "HYBRID"


class Stage(StrEnum):
    """What a device is doing; names as in the contract."""

    IDLE = "IDLE"
    FETCHING = "FETCHING"
    COMPILING = "COMPILING"
    LOADING = "LOADING"
    PLAYING = "PLAYING"
    TRAINING = "TRAINING"
    EVALUATING = "EVALUATING"
    UPLOADING = "UPLOADING"


@dataclass(frozen=True)
class FileSpec:
    """A file that a manifest declares."""

    file_name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class NamedFileSpec:
    """A file that the module asks for by name."""

    name: str
    file: FileSpec


@dataclass(frozen=True)
class ParameterSpec:
    """One trained tensor, f32."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements; 1 for a scalar."""
        count = 1
        for dimension in self.shape:
            count *= dimension
        return count


@dataclass(frozen=True)
class HyperparameterSpec:
    """One thing that can be set, with its bounds."""

    name: str
    default: float
    minimum: float
    maximum: float


@dataclass(frozen=True)
class PackageSpec:
    """What the coordinator needs to know of a package.

    Attributes:
        experience: True when the model generates its own work.
        inputs: `dataset` or `none`.
        describes_inference: whether the manifest says what a prediction takes and gives.
        min_units: fewest units of one assignment; None: no bound.
        max_units: most units of one assignment; None: no bound.
        metrics: names in manifest order.
        gpu: True when the package declares `GPU_WGPU`.
        validation_examples: examples of the held-out file; None: the device counts.
        manifest: the whole manifest as its serialized message, passed on to participants untouched.
        evaluation_units: fixed units on which an experience package is evaluated; None or 0: none.
    """

    name: str
    version: str
    description: str
    unit: str
    experience: bool
    inputs: str
    module: FileSpec
    parameters: tuple[ParameterSpec, ...]
    data_formats: tuple[str, ...]
    training: bool
    evaluation: bool
    inference: bool
    describes_inference: bool
    min_units: int | None
    max_units: int | None
    metrics: tuple[str, ...]
    hyperparameters: tuple[HyperparameterSpec, ...]
    gpu: bool
    shader_archive: FileSpec | None
    validation: FileSpec | None
    auxiliary_weights: tuple[NamedFileSpec, ...]
    auxiliary_files: tuple[NamedFileSpec, ...]
    validation_examples: int | None
    manifest: bytes
    evaluation_units: int | None = None

    @property
    def weight_count(self) -> int:
        """Number of trained weights."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def can_validate(self) -> bool:
        """Whether there is something to validate on: a held-out file, or units that the model generates."""
        there = bool(self.evaluation_units) if self.experience else self.validation is not None
        return self.evaluation and there

    def files(self) -> list[tuple[str, FileSpec]]:
        """Every file of the package with the path of its field."""
        found = [("package.module", self.module)]
        if self.shader_archive is not None:
            found.append(("package.shader_archive", self.shader_archive))
        if self.validation is not None:
            found.append(("package.validation", self.validation))
        found += [(f"package.auxiliary_weights[{i}]", n.file) for i, n in enumerate(self.auxiliary_weights)]
        found += [(f"package.auxiliary_files[{i}]", n.file) for i, n in enumerate(self.auxiliary_files)]
        return found


@dataclass(frozen=True, slots=True)
class Chunk:
    """One self-contained piece of a dataset."""

    id: str
    file_name: str
    size: int
    sha256: str
    format: str
    examples: int


def manifest_sha256(chunks: Iterable[Chunk]) -> str:
    """Returns which dataset it is: SHA-256 over the chunks' raw digests (32 bytes), in manifest order."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(bytes.fromhex(chunk.sha256))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A file as its owner wrote it to storage."""

    file_name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class SettingsRequest:
    """Settings as the owner gave them; None where the owner gave nothing. Durations in seconds."""

    epochs: int | None = None
    target_round: int | None = None
    assignments_per_round: int | None = None
    seed: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    local_epochs: int | None = None
    hyperparameters: tuple[tuple[str, float], ...] = ()
    chunk_order: ChunkOrder | None = None
    strategy: str | None = None
    server_learning_rate: float | None = None
    momentum: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    tau: float | None = None
    min_participants: int | None = None
    validation_interval: int | None = None
    silence_timeout: float | None = None
    assignment_timeout: float | None = None
    experience: bool = False
    units_per_assignment: int | None = None


@dataclass(frozen=True)
class Settings:
    """Settings in force. Durations in seconds.

    Attributes:
        epochs: passes (rounds of an experience job) wanted; None when `target_round` decides.
        target_round: the final round; None when `epochs` decides.
        hyperparameters: the model's own, name and value, in manifest order.
        chunk_order: means nothing in an experience job.
        units_per_assignment: units of an experience job's assignment; None: a dataset job.
    """

    epochs: int | None
    target_round: int | None
    assignments_per_round: int
    seed: int
    batch_size: int
    learning_rate: float
    local_epochs: int
    hyperparameters: tuple[tuple[str, float], ...]
    chunk_order: ChunkOrder
    aggregation: Aggregation
    min_participants: int
    validation_interval: int
    silence_timeout: float
    assignment_timeout: float
    units_per_assignment: int | None = None


@dataclass(frozen=True)
class Origin:
    """Where a job's work begins.

    Attributes:
        round: the round whose checkpoint it starts from; 0: the initial weights.
        pass_number: pass of the first chunk (dataset jobs).
        next_index: place of the first chunk in that pass's order.
        sequence_seed: seeds the units (experience jobs).
        next_unit: number of the first unit.
    """

    round: int = 0
    pass_number: int = 0
    next_index: int = 0
    sequence_seed: int = 0
    next_unit: int = 0


BEGINNING = Origin()
"""Where a new dataset job begins."""


@dataclass(frozen=True)
class JobSpec:
    """All that decides the bytes of a job's checkpoints."""

    package: PackageSpec
    chunks: tuple[Chunk, ...]
    settings: Settings
    origin: Origin = BEGINNING

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of the package's files and of all chunks."""
        files = sum(file.size for _, file in self.package.files())
        return files + sum(chunk.size for chunk in self.chunks)

"""A shader plan with everything worked out: what the executor runs, and what selection asks about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from covey_kit.errors import InvalidArgument, Violation
from covey_participant.domain.backend import Fallback

from .archive import invalid

SLOT_ALIGNMENT = 256
"""Offsets of bindings are multiples of it on every adapter; WebGPU promises no less."""

MOST_SLOTS = 16
"""Minibatches that one submission holds at most."""

PIECE_BYTES = 16 << 20
"""Weights travel in pieces, so that what lies in between is bounded."""


class Phase(Enum):
    """A list of dispatches for one minibatch."""

    TRAIN = "train"
    UPDATE = "update"
    EVALUATE = "evaluate"


class Role(Enum):
    """What a buffer is for."""

    PARAMETER = "parameter"
    TENSOR = "tensor"
    UNIFORM = "uniform"
    METRICS = "metrics"
    SCRATCH = "scratch"

    @property
    def per_minibatch(self) -> bool:
        """Whether each minibatch of a submission has its own copy."""
        return self in (Role.TENSOR, Role.UNIFORM, Role.METRICS)


class Access(Enum):
    """How a shader may use a buffer."""

    READ = "read-only-storage"
    READ_WRITE = "storage"
    UNIFORM = "uniform"


@dataclass(frozen=True)
class Buffer:
    """One buffer.

    Attributes:
        element: `F32`, `I32` or `U32`; all have 4 bytes.
        count: elements of one copy.
        parameter: with `Role.PARAMETER`, its name; `tensor` and `uniform` likewise.
    """

    name: str
    element: str
    count: int
    role: Role
    parameter: str = ""
    tensor: int = 0
    uniform: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of one copy."""
        return 4 * self.count

    @property
    def stride(self) -> int:
        """Bytes from one copy to the next."""
        return -(-self.size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def total(self, slots: int) -> int:
        """Bytes on the GPU."""
        return slots * self.stride if self.role.per_minibatch else self.size


@dataclass(frozen=True)
class Binding:
    """One binding of group 0."""

    number: int
    buffer: Buffer
    access: Access


@dataclass(frozen=True)
class Pipeline:
    """One compute pipeline."""

    name: str
    module: str
    entry_point: str
    bindings: tuple[Binding, ...]
    workgroups: tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
    """A plan that was checked.

    Attributes:
        phases: the pipelines of one minibatch, in order. A phase that the plan doesn't have is empty.
        modules: WGSL source by file name.
        parameters: names in manifest order.
        slots: minibatches that one submission may hold.
        memory_bytes: what it takes with so many slots.
    """

    buffers: tuple[Buffer, ...]
    pipelines: tuple[Pipeline, ...]
    phases: Mapping[Phase, tuple[Pipeline, ...]]
    modules: Mapping[str, str]
    parameters: tuple[str, ...]
    metrics: int
    batch_size: int
    slots: int = 1
    memory_bytes: int = 0

    def used(self, phase: Phase) -> set[str]:
        """Returns the names of the buffers that a phase touches."""
        return {binding.buffer.name for pipeline in self.phases[phase] for binding in pipeline.bindings}

    @property
    def metrics_buffer(self) -> Buffer | None:
        """The buffer that holds the metrics of a minibatch."""
        return next((buffer for buffer in self.buffers if buffer.role is Role.METRICS), None)


def memory_bytes(buffers: tuple[Buffer, ...], slots: int) -> int:
    """Returns an upper bound of the GPU memory that a plan takes, in bytes.

    Counted: the buffers; once more what moves with each minibatch, for its way there or back; and one piece
    in which weights travel. Drivers add their own; shaders and pipelines are small.
    """
    moved = sum(buffer.total(slots) for buffer in buffers if buffer.role.per_minibatch)
    weights = sum(buffer.size for buffer in buffers if buffer.role is Role.PARAMETER)
    return sum(buffer.total(slots) for buffer in buffers) + moved + min(weights, PIECE_BYTES)


class Kind(StrEnum):
    """Who has to change something for a plan to run; the names are those of the fallback reasons."""

    PLAN = "PLAN"
    """The package's author: the plan is wrong on every device."""
    LIMITS = "LIMITS"
    """This adapter is too small."""
    BUDGET = "BUDGET"
    """The memory budget is too small."""


@dataclass(frozen=True)
class PlanViolation:
    """One thing that is wrong.

    Attributes:
        kind: who has to change something.
        place: where in the plan, such as `plan.json:pipelines[3].workgroups[0]`.
        description: what was expected and what was found.
    """

    kind: Kind
    place: str
    description: str


@dataclass(frozen=True)
class Assessment:
    """What came of checking a plan.

    Attributes:
        violations: everything that is wrong; empty: `plan` can run.
        memory_bytes: least memory that it takes (one minibatch a submission); None: a size isn't known.
        plan: None when there are violations.
    """

    violations: tuple[PlanViolation, ...] = ()
    memory_bytes: int | None = None
    plan: Plan | None = None
    by_kind: Mapping[Kind, tuple[PlanViolation, ...]] = field(init=False)

    def __post_init__(self) -> None:
        sorted_out = {kind: tuple(v for v in self.violations if v.kind is kind) for kind in Kind}
        object.__setattr__(self, "by_kind", sorted_out)

    @property
    def fallback(self) -> Fallback:
        """Why the CPU must do it: limits or budget of this device, or else the plan is wrong anywhere."""
        kinds = {violation.kind for violation in self.violations}
        if Kind.PLAN in kinds:
            return Fallback.DEVICE_ERROR
        return Fallback.LIMITS if Kind.LIMITS in kinds else Fallback.BUDGET

    def error(self) -> InvalidArgument:
        """Returns the violations as one error."""
        wrong = [Violation(v.place, v.description) for v in self.violations]
        return invalid("the shader plan can't run here", wrong)

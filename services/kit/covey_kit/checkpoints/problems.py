"""How a damaged checkpoint is spoken of."""

from collections.abc import Sequence

from covey.v1 import checkpoint_pb2
from covey_kit.errors import InvalidArgument, Reason, Violation

__all__ = ["CheckpointError", "Kind", "checkpoint_error", "kind_name", "problem"]

Kind = checkpoint_pb2.CheckpointProblem.Kind


def kind_name(kind: Kind.ValueType) -> str:
    """Returns a kind's name without its prefix, such as `WEIGHTS_DIGEST`."""
    return Kind.Name(kind).removeprefix("KIND_")


def problem(kind: Kind.ValueType, message: str, tensor: str = "") -> checkpoint_pb2.CheckpointProblem:
    """Returns one problem. `tensor` is the name of the tensor it's about, where there is one."""
    return checkpoint_pb2.CheckpointProblem(kind=kind, message=message, tensor=tensor)


class CheckpointError(InvalidArgument):
    """The file isn't a valid checkpoint. `problems` says everything that was found.

    The same facts are in `violations`: the field is the kind (and the tensor), the description the message.
    """

    def __init__(self, what: str, problems: Sequence[checkpoint_pb2.CheckpointProblem]) -> None:
        self.problems = tuple(problems)
        violations = [
            Violation(kind_name(p.kind) + (f"[{p.tensor}]" if p.tensor else ""), p.message)
            for p in self.problems
        ]
        told = "; ".join(f"{v.field}: {v.description}" for v in violations[:8])
        more = f"; and {len(violations) - 8} more" if len(violations) > 8 else ""
        super().__init__(Reason.CHECKPOINT_INVALID, f"{what}: {told}{more}", violations=violations)


def checkpoint_error(what: str, *problems: checkpoint_pb2.CheckpointProblem) -> CheckpointError:
    """Returns the error for these problems."""
    return CheckpointError(what, problems)

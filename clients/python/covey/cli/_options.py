"""Options that several commands have: what a device may use."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from covey_participant.domain.values import Preference

__all__ = ["BackendOption", "GpuMemoryOption", "WorkersOption", "check_backend", "preference_of"]

BACKENDS = ("auto", "cpu", "gpu")

BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend", metavar="auto|cpu|gpu", help="What to run on.  [default: as before, at first auto]"
    ),
]
GpuMemoryOption = Annotated[
    int | None,
    typer.Option(
        "--gpu-memory",
        "--gpu-budget-mib",
        metavar="MIB",
        min=1,
        help="GPU memory of one assignment.  [default: as before, at first any]",
    ),
]
WorkersOption = Annotated[
    int | None, typer.Option("--max-workers", min=1, max=1024, help="Local workers of one assignment.")
]


def check_backend(backend: str | None) -> str | None:
    """Returns the backend in lower case; None: none was given. Anything else is wrong usage."""
    if backend is not None and backend.lower() not in BACKENDS:
        raise typer.BadParameter(f"expected auto, cpu or gpu, found {backend!r}", param_hint="--backend")
    return backend.lower() if backend is not None else None


def preference_of(backend: str | None) -> "Preference | None":
    """Returns the preference that an option asks for."""
    from covey_participant.domain.values import Preference

    chosen = check_backend(backend)
    return Preference[chosen.upper()] if chosen is not None else None

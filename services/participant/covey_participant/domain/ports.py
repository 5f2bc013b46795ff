"""What the domain needs from the outside, as Protocols."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from covey_kit.errors import Reason
from covey_participant.domain.backend import Choice
from covey_participant.domain.execution import Execution, Stage
from covey_participant.domain.failure import BackendFailure
from covey_participant.domain.values import Assignment, Blob, Result

OnTransfer = Callable[[int, int], None]
"""Takes (bytes done, bytes in all)."""


Fetch = Callable[[Path], Awaitable[None]]
"""Brings a blob to a path, whole or not at all."""


class Cache(Protocol):
    """Blobs on the device, by their SHA-256."""

    def hold(self, blob: Blob, fetch: Fetch) -> AbstractAsyncContextManager[Path]:
        """Holds a verified blob, fetching it if it isn't there; raises CoveyError."""
        ...

    def path(self, sha256: str) -> Path:
        """Returns where a blob lies while it is held."""
        ...


@dataclass(frozen=True)
class Inputs:
    """The files of an assignment, verified and held until it is over.

    Attributes:
        weights: a file of exactly the base weights; None when there are none.
        shader_archive: the job's; None when it isn't needed.
        chunks: in the assignment's order; for an evaluation the held-out file.
    """

    module: Path
    weights: Path | None
    chunks: tuple[Path, ...]
    shader_archive: Path | None = None


class Files(Protocol):
    """Brings what an assignment needs onto the device."""

    def hold(
        self, assignment: Assignment, choice: Choice, on_transfer: OnTransfer
    ) -> AbstractAsyncContextManager[Inputs]:
        """Fetches what isn't there and holds all of it; raises CoveyError or WorkFailure."""
        ...


@dataclass(frozen=True)
class RunnerReport:
    """How far a runner is."""

    stage: Stage
    units_done: int | None = None
    work_rate: float | None = None
    workers: int = 1


class Runner(Protocol):
    """Runs a package."""

    async def run(
        self,
        assignment: Assignment,
        inputs: Inputs,
        choice: Choice,
        on_report: Callable[[RunnerReport], None],
    ) -> Result:
        """Does the work; raises WorkFailure. Cancelling it stops it within a second."""
        ...

    async def discard(self, result: Result) -> None:
        """Removes a result's file."""
        ...


class Results(Protocol):
    """Says to the coordinator how it goes. Each raises CoveyError; retries are the caller's."""

    async def progress(self, execution: Execution) -> None:
        """Reports progress and renews the lease."""
        ...

    async def deliver(self, assignment: Assignment, result: Result, on_transfer: OnTransfer) -> None:
        """Sends the result; the same again counts once."""
        ...

    async def failure(self, key: tuple[str, int], reason: Reason, message: str, *, package: bool) -> None:
        """Gives the assignment (its id and attempt) back."""
        ...


class Chooser(Protocol):
    """Picks the backend for an assignment."""

    async def choose(self, assignment: Assignment, failure: BackendFailure | None = None) -> Choice:
        """Returns the backend under the settings in force now; after a failure of the GPU it is the CPU."""
        ...

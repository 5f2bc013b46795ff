"""What the coordinator tells a participant, and the stream it tells it on."""

import asyncio
from collections import deque
from dataclasses import dataclass

from covey_coordinator.domain.model import AssignmentKind, CheckpointRef, Invitation
from covey_coordinator.domain.plan import UnitRange
from covey_coordinator.domain.spec import Chunk, JobSpec
from covey_kit.errors import CoveyError, Reason, ResourceExhausted

__all__ = [
    "AssignmentCommand",
    "CancelCommand",
    "Command",
    "DrainCommand",
    "InvitationCommand",
    "InvitationEndedCommand",
    "Session",
    "WelcomeCommand",
]


@dataclass(frozen=True)
class WelcomeCommand:
    """The first command: what the participant needs to go on. Times in seconds."""

    session_token: str
    expire_time: float
    progress_interval: float


@dataclass(frozen=True)
class InvitationCommand:
    """Please take part in a job."""

    invitation: Invitation
    job_display_name: str
    package_name: str
    package_version: str
    package_description: str
    module_sha256: str
    total_bytes: int


@dataclass(frozen=True)
class InvitationEndedCommand:
    """An invitation or an accepted job ended."""

    invitation_id: str
    job_id: str
    reason: str


@dataclass(frozen=True)
class AssignmentCommand:
    """Please do this.

    Attributes:
        seed: seeds everything random in it.
        weights: the base weights; None for INITIALIZE.
        unit_range: units that the model generates; None: the work is data.
        deadline: unix seconds when it is taken away whatever happens.
    """

    assignment_id: str
    attempt: int
    job_id: str
    round: int
    index: int
    kind: AssignmentKind
    spec: JobSpec
    seed: int
    weights: CheckpointRef | None
    chunks: tuple[Chunk, ...]
    unit_range: UnitRange | None
    grant: str
    silence_timeout: float
    deadline: float


@dataclass(frozen=True)
class CancelCommand:
    """Stop doing that."""

    assignment_id: str
    attempt: int
    reason: str


@dataclass(frozen=True)
class DrainCommand:
    """The coordinator stops soon."""

    reason: str


Command = (
    WelcomeCommand
    | InvitationCommand
    | InvitationEndedCommand
    | AssignmentCommand
    | CancelCommand
    | DrainCommand
)

_BOUND = 1024


class Session:
    """One participant's command stream: a bounded queue that ends with an error.

    Args:
        participant_id: whose it is.
        expires: monotonic time when its token expires.
    """

    def __init__(self, participant_id: str, expires: float) -> None:
        self.participant_id = participant_id
        self.expires = expires
        self._commands: deque[Command] = deque()
        self._error: CoveyError | None = None
        self._news = asyncio.Event()

    def send(self, command: Command) -> None:
        """Queues a command. A reader that lets too many pile up loses its stream (and joins again)."""
        if self._error is not None:
            return
        if len(self._commands) >= _BOUND:
            self._commands.clear()
            self.close(
                ResourceExhausted(
                    Reason.LIMIT_EXCEEDED,
                    f"{_BOUND} commands wait to be read; join again and read faster",
                    retry_after=1.0,
                )
            )
            return
        self._commands.append(command)
        self._news.set()

    def close(self, error: CoveyError) -> None:
        """Ends the stream with `error` once what is queued has been read."""
        if self._error is None:
            self._error = error
        self._news.set()

    async def next(self) -> Command:
        """Returns the next command.

        Raises:
            CoveyError: the stream was ended, and everything before has been read.
        """
        while not self._commands:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._commands.popleft()

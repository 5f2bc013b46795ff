"""Everything in hand, in memory: the jobs that live, the devices, and who watches them.

The database is the truth; this is its mirror plus what needn't last (connections, leases' clocks,
progress). A change is first committed, then made here, then told. `Exclusive` makes changes one at a
time and sees each to its end even when the call that wanted it has gone: otherwise a client that
hangs up in the middle of a commit would leave the mirror behind the database.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from covey_coordinator.domain.commands import Command, Session
from covey_coordinator.domain.leases import LeaseEnd, Presence, lease_end
from covey_coordinator.domain.model import (
    Assignment,
    Invitation,
    InvitationState,
    JobRecord,
    OpenRound,
    ParticipantRecord,
    RoundRecord,
    Validation,
)
from covey_coordinator.domain.ports import Store
from covey_coordinator.domain.spec import JobSpec
from covey_kit.clock import Clock
from covey_kit.errors import NotFound, Reason

__all__ = ["Exclusive", "JobRun", "JobSight", "Member", "Options", "Trouble", "World", "job_not_found"]

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What the operator decides. Times in seconds.

    Attributes:
        grace: how long a participant's assignment waits for it after its connection broke.
        return_time: how long, after a start, participants of the run before have to come back.
        progress_interval: how often participants are asked to report.
        aggregate_timeout: longest time for putting a round together before it is tried again.
        max_participants: devices that may ever join.
        max_jobs: jobs that may live (not ended, or waiting for a validation) at a time.
    """

    grace: float = 2.0
    return_time: float = 8.0
    progress_interval: float = 2.0
    aggregate_timeout: float = 600.0
    max_participants: int = 100_000
    max_jobs: int = 1_000


@dataclass(frozen=True)
class Trouble:
    """Something that a job waits for beside its participants, until it is tried again. Unix seconds."""

    message: str
    since: float
    until: float


@dataclass
class JobSight:
    """What there is to see of a job.

    Attributes:
        invitations: by participant.
        validations: those not done, by round.
    """

    record: JobRecord
    invitations: dict[str, Invitation] = field(default_factory=dict)
    open_round: OpenRound | None = None
    latest: RoundRecord | None = None
    validations: dict[int, Validation] = field(default_factory=dict)
    trouble: Trouble | None = None

    def accepted(self) -> list[str]:
        """Returns the participants that accepted, sorted."""
        return sorted(p for p, i in self.invitations.items() if i.state is InvitationState.ACCEPTED)

    def assignments(self) -> Iterator[Assignment]:
        """Yields everything that is or could be handed out: the open round's, then validations by round."""
        if self.open_round is not None:
            yield from self.open_round.assignments
        for number in sorted(self.validations):
            yield self.validations[number].assignment

    def assignment(self, assignment_id: str) -> Assignment | None:
        """Returns one of them."""
        return next((a for a in self.assignments() if a.id == assignment_id), None)


@dataclass
class JobRun(JobSight):
    """A job that lives.

    Attributes:
        wake: set whenever its driver should look again.
        driver: the task that drives its rounds.
    """

    spec: JobSpec = field(kw_only=True)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    driver: asyncio.Task[None] | None = None
    last_served: float = 0.0


@dataclass
class Member:
    """A device that joined.

    Attributes:
        session: its command stream; None when it isn't connected.
        disconnected_at: monotonic time since when it isn't.
        idle_since: monotonic time since when it has nothing to do.
        assignment: what it has.
    """

    record: ParticipantRecord
    session: Session | None = None
    disconnected_at: float = 0.0
    idle_since: float = 0.0
    assignment: Assignment | None = None

    def send(self, command: Command) -> None:
        """Tells it something, if it is connected."""
        if self.session is not None:
            self.session.send(command)


class Exclusive:
    """Makes state changes one at a time, each to its end."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[object]] = set()

    async def __call__(self, change: Callable[[], Awaitable[T]]) -> T:
        """Runs `change` when no other runs. It goes on when the caller is cancelled."""

        async def locked() -> T:
            async with self._lock:
                return await change()

        task = asyncio.create_task(locked())
        self._running.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[T]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen: the caller got it, or has gone

    async def idle(self) -> None:
        """Waits until nothing runs."""
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)


class World:
    """Everything in hand."""

    def __init__(self, store: Store, clock: Clock, options: Options) -> None:
        self.store = store
        self.clock = clock
        self.options = options
        self.exclusive = Exclusive()
        self.jobs: dict[str, JobRun] = {}
        self.members: dict[str, Member] = {}
        self.desk_wake = asyncio.Event()
        self._watchers: dict[str, set[asyncio.Event]] = defaultdict(set)

    def job(self, job_id: str) -> JobRun:
        """Returns a job that lives.

        Raises:
            NotFound: JOB_NOT_FOUND.
        """
        job = self.jobs.get(job_id)
        if job is None:
            raise job_not_found(job_id)
        return job

    def changed(self, job: JobSight) -> None:
        """Tells everyone who watches a job, its driver, and the desk, that something changed."""
        self.show(job)
        if isinstance(job, JobRun):
            job.wake.set()
        self.desk_wake.set()

    def show(self, job: JobSight) -> None:
        """Tells those who watch a job that there is something new to see, and nothing to do about it."""
        for watcher in self._watchers.get(job.record.job_id, ()):
            watcher.set()

    @contextmanager
    def watching(self, job_id: str) -> Iterator[asyncio.Event]:
        """Gives an event that is set at each change of the job."""
        event = asyncio.Event()
        self._watchers[job_id].add(event)
        try:
            yield event
        finally:
            self._watchers[job_id].discard(event)
            if not self._watchers[job_id]:
                del self._watchers[job_id]

    def connected(self, participant_id: str) -> bool:
        """Says whether a participant has its command stream open."""
        member = self.members.get(participant_id)
        return member is not None and member.session is not None

    def present(self, job: JobSight) -> frozenset[str]:
        """Returns the participants that accepted a job and are connected."""
        return frozenset(p for p in job.accepted() if self.connected(p))

    def lease_end(self, job: JobSight, assignment: Assignment) -> LeaseEnd | None:
        """Returns when (monotonic) and why an assignment's lease ends unless something happens."""
        lease = assignment.lease
        if lease is None:
            return None
        member = self.members[lease.participant_id]
        presence = Presence(member.session is not None, member.disconnected_at)
        return lease_end(lease, job.record.settings, presence, self.options.grace)

    def let_go(self, job: JobRun) -> None:
        """Forgets a job that ended and has nothing left to do; its database rows stay."""
        if job.record.state.ended and not job.validations:
            self.jobs.pop(job.record.job_id, None)

    def wall(self, monotonic: float) -> float:
        """Returns a monotonic time as unix seconds."""
        return self.clock.now() + (monotonic - self.clock.monotonic())


def job_not_found(job_id: str) -> NotFound:
    """Returns the error for a job that isn't there."""
    return NotFound(
        Reason.JOB_NOT_FOUND,
        f"there is no job {job_id}; list the jobs for their ids",
        resource=("job", job_id),
    )

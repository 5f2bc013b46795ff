"""The desk: hands open assignments to idle participants and takes back what is overdue."""

import asyncio
from collections.abc import Iterator

import structlog

from covey_coordinator.domain.commands import AssignmentCommand
from covey_coordinator.domain.leases import LeaseEnd, Why
from covey_coordinator.domain.model import (
    Assignment,
    AssignmentKind,
    AssignmentStatus,
    CheckpointRef,
    FailureRecord,
    Fault,
    JobState,
    Lease,
)
from covey_coordinator.domain.moves import count_failure, take_back
from covey_coordinator.domain.plan import EVALUATION_SEED, assignment_seed, validation_seed
from covey_coordinator.domain.ports import Tokens
from covey_coordinator.domain.scheduler import Handout, JobQueue, schedule
from covey_coordinator.domain.world import JobRun, World
from covey_kit.errors import Reason, Unavailable

__all__ = ["Desk", "lost_message"]

log = structlog.get_logger(__name__)

_LONGEST_NAP = 0.5
_SHORTEST_NAP = 0.02
_RENEW_BEFORE = 600.0


def lost_message(job: JobRun, assignment: Assignment, why: Why) -> str:
    """Says why an assignment was taken away."""
    settings = job.record.settings
    who = f"{assignment.participant_id} has {assignment.id} (attempt {assignment.attempt})"
    match why:
        case Why.GONE:
            return f"{who} and is disconnected"
        case Why.SILENT:
            return f"{who} and said nothing for {settings.silence_timeout:g} s (silence_timeout)"
        case Why.DEADLINE:
            return f"{who} and didn't finish within {settings.assignment_timeout:g} s (assignment_timeout)"


class Desk:
    """Hands out and takes back.

    Args:
        world: everything in hand.
        tokens: makes grants.
    """

    def __init__(self, world: World, tokens: Tokens) -> None:
        self._world = world
        self._tokens = tokens
        self.open = True
        """Whether anything is handed out; closed while the server drains."""

    async def run(self) -> None:
        """Works until cancelled: whenever something changed, and when a lease may have ended."""
        while True:
            self._world.desk_wake.clear()
            try:
                await self.tick()
            except Exception:  # the desk must outlive whatever one tick ran into, such as a full disk
                log.exception("the desk failed; it goes on")
                await asyncio.sleep(_LONGEST_NAP)
            try:
                async with asyncio.timeout(self._nap()):
                    await self._world.desk_wake.wait()
            except TimeoutError:
                pass

    def _leases(self) -> Iterator[tuple[JobRun, Assignment, LeaseEnd]]:
        """Yields what is out, and when it ends: one for each busy participant, however many are pending."""
        for member in self._world.members.values():
            if member.assignment is not None:
                job = self._world.jobs.get(member.assignment.job_id)
                end = self._world.lease_end(job, member.assignment) if job is not None else None
                if job is not None and end is not None:
                    yield job, member.assignment, end

    def _nap(self) -> float:
        """Returns the seconds until a lease may end; a retry after a failure is noticed soon enough."""
        now = self._world.clock.monotonic()
        nap = min((end.at - now for _, _, end in self._leases()), default=_LONGEST_NAP)
        return min(max(nap, _SHORTEST_NAP), _LONGEST_NAP)

    async def tick(self) -> None:
        """Takes back what is overdue, then hands out what is open."""
        if self._overdue():
            await self._world.exclusive(self._expire)
        if self._plan():
            await self._world.exclusive(self._dispatch)
        self._renew_sessions()

    def _renew_sessions(self) -> None:
        """Ends streams whose token is about to expire; a new one comes with the next join."""
        now = self._world.clock.monotonic()
        for member in self._world.members.values():
            if member.session is not None and now >= member.session.expires - _RENEW_BEFORE:
                member.session.close(
                    Unavailable(Reason.TOKEN_EXPIRED, "the session token is about to expire; join again")
                )

    def _overdue(self) -> list[tuple[JobRun, Assignment, Why]]:
        now = self._world.clock.monotonic()
        return [(job, assignment, end.why) for job, assignment, end in self._leases() if now >= end.at]

    async def _expire(self) -> None:
        for job, assignment, why in self._overdue():
            if assignment.lease is None:  # an earlier one ended the job
                continue
            message = lost_message(job, assignment, why)
            log.info("assignment taken back", assignment=assignment.id, why=why.value)
            if why is Why.GONE:  # what became of the device isn't the work's fault
                await take_back(self._world, job, [assignment], message, tell=False)
                continue
            who = assignment.lease.participant_id
            failure = FailureRecord(Reason.DEADLINE, message, who, assignment.id, self._world.clock.now())
            fault = Fault(who, assignment.attempt, package=False, failure=failure)
            await count_failure(self._world, job, assignment, fault, tell=True)

    def _queue(self, job: JobRun) -> JobQueue | None:
        state = job.record.state
        if state in (JobState.CREATED, JobState.PAUSED):
            return None
        pending = [a for a in job.assignments() if a.status is AssignmentStatus.PENDING]
        if not pending:
            return None
        running = sum(a.lease is not None for a in job.assignments())
        return JobQueue(job.record.job_id, self._world.present(job), pending, running, job.last_served)

    def _plan(self) -> list[Handout]:
        if not self.open:
            return []
        idle = [m for m in self._world.members.values() if m.session is not None and m.assignment is None]
        if not idle:
            return []
        idle.sort(key=lambda m: (m.idle_since, m.record.participant_id))
        queues = [q for job in self._world.jobs.values() if (q := self._queue(job)) is not None]
        ids = [m.record.participant_id for m in idle]
        return schedule(queues, ids, self._world.clock.monotonic())

    async def _dispatch(self) -> None:
        handouts = self._plan()
        if not handouts:
            return
        now = self._world.clock.now()
        async with self._world.store.begin() as tx:
            given = [(h.assignment.id, h.assignment.attempt + 1, h.participant_id) for h in handouts]
            await tx.assignments.lease(given, now)
        for handout in handouts:
            self._hand_out(handout, now)
        for job_id in {handout.assignment.job_id for handout in handouts}:
            self._world.changed(self._world.jobs[job_id])

    def _hand_out(self, handout: Handout, now: float) -> None:
        job = self._world.jobs[handout.assignment.job_id]
        member = self._world.members[handout.participant_id]
        assignment = handout.assignment
        monotonic = self._world.clock.monotonic()
        assignment.attempt += 1
        assignment.lease = Lease(handout.participant_id, now, monotonic, monotonic)
        member.assignment = assignment
        job.last_served = monotonic
        member.send(self.command(job, assignment))

    def command(self, job: JobRun, assignment: Assignment) -> AssignmentCommand:
        """Returns what tells a leased assignment's participant to do it."""
        lease = assignment.lease
        assert lease is not None
        settings = job.record.settings
        weights: CheckpointRef | None
        if assignment.kind is AssignmentKind.EVALUATE:
            weights = job.validations[assignment.round].checkpoint
            generated = assignment.unit_range is not None
            seed = EVALUATION_SEED if generated else validation_seed(settings.seed, assignment.round)
        else:
            weights = job.latest.checkpoint if job.latest is not None else None
            seed = assignment_seed(settings.seed, assignment.round, assignment.index)
        return AssignmentCommand(
            assignment_id=assignment.id,
            attempt=assignment.attempt,
            job_id=assignment.job_id,
            round=assignment.round,
            index=assignment.index,
            kind=assignment.kind,
            spec=job.spec,
            seed=seed,
            weights=weights,
            chunks=assignment.chunks,
            unit_range=assignment.unit_range,
            grant=self._tokens.grant(lease.participant_id, assignment.job_id),
            silence_timeout=settings.silence_timeout,
            deadline=lease.start_time + settings.assignment_timeout,
        )

"""What comes back from participants: progress, failures, deltas, evaluations.

Each call names (assignment, attempt). It is the caller's while it holds the lease on exactly that
attempt; everything else is answered with ABORTED, except a repeated call, which gets its old answer.
"""

from collections import Counter
from dataclasses import dataclass, replace

from covey_coordinator.domain.metrics import metric_problems
from covey_coordinator.domain.model import (
    Assignment,
    AssignmentKind,
    DeltaFile,
    FailureRecord,
    Fault,
    Lease,
    Metric,
    Progress,
    Result,
    parse_assignment_id,
)
from covey_coordinator.domain.moves import bounded, count_failure, free
from covey_coordinator.domain.spec import Backend
from covey_coordinator.domain.world import JobRun, World
from covey_kit.errors import Aborted, CoveyError, InvalidArgument, Reason, ResourceExhausted

__all__ = ["DeltaHeader", "EvaluationReport", "FailureReport", "Push", "Results"]

_MAX_STREAMS = 4
"""Streams that may bring the same result at once: a retry overlaps the call that was given up, no more."""

_PACKAGE_REASONS = frozenset({Reason.DELTA_NOT_FINITE, Reason.METRIC_INVALID})
"""Refusals that are the package's doing; the others are the device's."""


@dataclass(frozen=True)
class DeltaHeader:
    """What a delta is announced with."""

    assignment_id: str
    attempt: int
    units: int
    size: int
    sha256: str
    metrics: tuple[Metric, ...]
    backend: Backend
    compute_seconds: float | None


@dataclass(frozen=True)
class EvaluationReport:
    """The result of an evaluation."""

    assignment_id: str
    attempt: int
    units: int
    metrics: tuple[Metric, ...]
    backend: Backend


@dataclass(frozen=True)
class FailureReport:
    """An attempt that failed, as its participant tells it."""

    assignment_id: str
    attempt: int
    reason: Reason
    message: str
    package_fault: bool


@dataclass(frozen=True)
class Push:
    """A delta that is being received."""

    participant_id: str
    header: DeltaHeader
    weight_count: int


def _lost(assignment_id: str, attempt: int, why: str) -> Aborted:
    return Aborted(
        Reason.ASSIGNMENT_LOST,
        f"{assignment_id} (attempt {attempt}) is no longer yours: {why}; drop it",
        resource=("assignment", assignment_id),
    )


class Results:
    """Takes what participants send."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._streams: Counter[str] = Counter()

    def _claim(self, who: str, assignment_id: str, attempt: int) -> tuple[JobRun, Assignment, Lease]:
        """Returns the assignment if it is the caller's.

        Raises:
            Aborted: ASSIGNMENT_LOST.
        """
        job = self._world.jobs.get(parse_assignment_id(assignment_id))
        assignment = job.assignment(assignment_id) if job is not None else None
        if job is None or assignment is None:
            raise _lost(assignment_id, attempt, "it isn't in work any more")
        if assignment.result is not None:
            raise _lost(assignment_id, attempt, f"{assignment.result.participant_id} did it")
        lease = assignment.lease
        if lease is None or lease.participant_id != who or assignment.attempt != attempt:
            now = f"{lease.participant_id} has" if lease is not None else "nobody has"
            raise _lost(assignment_id, attempt, f"{now} attempt {assignment.attempt}")
        return job, assignment, lease

    async def _accepted_before(self, who: str, assignment_id: str, attempt: int) -> bool:
        """Says whether exactly this result was accepted already."""
        job = self._world.jobs.get(parse_assignment_id(assignment_id))
        assignment = job.assignment(assignment_id) if job is not None else None
        if assignment is not None:
            result = assignment.result
        else:
            stored = await self._world.store.read(lambda tx: tx.assignments.get(assignment_id))
            result = stored.result if stored is not None else None
        return result is not None and (result.participant_id, result.attempt) == (who, attempt)

    def _heard(self, who: str, lease: Lease) -> None:
        lease.heard = self._world.clock.monotonic()
        member = self._world.members[who]
        member.record = replace(member.record, last_seen_time=self._world.clock.now())

    def progress(self, who: str, assignment_id: str, attempt: int, progress: Progress) -> float:
        """Takes a report and renews the lease; returns the unix time when it ends unless another comes.

        Raises:
            Aborted: ASSIGNMENT_LOST.
        """
        job, assignment, lease = self._claim(who, assignment_id, attempt)
        self._heard(who, lease)
        lease.progress = progress
        self._world.show(job)
        end = self._world.lease_end(job, assignment)
        assert end is not None
        return self._world.wall(end.at)

    async def failure(self, who: str, report: FailureReport) -> None:
        """Takes a failure report; the same again changes nothing.

        Raises:
            Aborted: ASSIGNMENT_LOST.
        """
        await self._world.exclusive(lambda: self._failure(who, report))

    async def _failure(self, who: str, report: FailureReport) -> None:
        try:
            job, assignment, _ = self._claim(who, report.assignment_id, report.attempt)
        except Aborted:
            stored = await self._world.store.read(lambda tx: tx.assignments.get(report.assignment_id))
            faults = stored.faults if stored is not None else ()
            if any((f.participant_id, f.attempt) == (who, report.attempt) for f in faults):
                return
            raise
        await self._count(who, job, assignment, report)

    async def _count(self, who: str, job: JobRun, assignment: Assignment, report: FailureReport) -> None:
        chunks = ", ".join(chunk.id for chunk in assignment.chunks)
        message = f"{report.message} (chunk {chunks})" if chunks else report.message
        failure = FailureRecord(report.reason, bounded(message), who, assignment.id, self._world.clock.now())
        fault = Fault(who, report.attempt, report.package_fault, failure)
        await count_failure(self._world, job, assignment, fault, tell=False)

    async def _refuse(self, who: str, assignment_id: str, attempt: int, error: CoveyError) -> None:
        """Counts a result that was refused as a failure of its attempt."""
        report = FailureReport(
            assignment_id, attempt, error.reason, error.message, error.reason in _PACKAGE_REASONS
        )

        async def change() -> None:
            try:
                job, assignment, _ = self._claim(who, assignment_id, attempt)
            except Aborted:
                return
            await self._count(who, job, assignment, report)

        await self._world.exclusive(change)

    async def open_push(self, who: str, header: DeltaHeader) -> Push | None:
        """Begins to receive a delta. None: it was accepted before, no need to send it.

        Raises:
            Aborted: ASSIGNMENT_LOST.
            InvalidArgument: SIZE_MISMATCH, UNITS_INVALID, METRIC_INVALID; counts as a failure of the attempt.
            ResourceExhausted: LIMIT_EXCEEDED, too many streams bring this result.
        """
        if await self._accepted_before(who, header.assignment_id, header.attempt):
            return None
        job, assignment, lease = self._claim(who, header.assignment_id, header.attempt)
        self._heard(who, lease)
        error = _header_error(job, assignment, header)
        if error is not None:
            await self._refuse(who, header.assignment_id, header.attempt, error)
            raise error
        if self._streams[assignment.id] >= _MAX_STREAMS:
            raise ResourceExhausted(
                Reason.LIMIT_EXCEEDED,
                f"{_MAX_STREAMS} streams already bring the result of {assignment.id}; wait for their answers",
                retry_after=1.0,
            )
        self._streams[assignment.id] += 1
        return Push(who, header, job.spec.package.weight_count)

    def close_push(self, push: Push) -> None:
        """Notes that a stream that `open_push` began is over, whatever came of it."""
        self._streams[push.header.assignment_id] -= 1
        if not self._streams[push.header.assignment_id]:
            del self._streams[push.header.assignment_id]

    def heard(self, push: Push) -> None:
        """Renews the lease while bytes come.

        Raises:
            Aborted: ASSIGNMENT_LOST: the rest needn't be sent.
        """
        _, _, lease = self._claim(push.participant_id, push.header.assignment_id, push.header.attempt)
        lease.heard = self._world.clock.monotonic()

    async def refuse(self, push: Push, error: InvalidArgument) -> None:
        """Counts a delta that failed its checks as a failure of the attempt."""
        await self._refuse(push.participant_id, push.header.assignment_id, push.header.attempt, error)

    async def accept(self, push: Push, delta: DeltaFile) -> bool:
        """Takes a delta that is verified and on disk. True: another call brought the same result before.

        Raises:
            Aborted: ASSIGNMENT_LOST: in the meantime.
        """
        header = push.header
        result = Result(
            push.participant_id,
            header.attempt,
            header.units,
            header.metrics,
            header.backend,
            header.compute_seconds,
            delta,
        )
        return await self._world.exclusive(lambda: self._finish(header.assignment_id, result))

    async def evaluation(self, who: str, report: EvaluationReport) -> bool:
        """Takes the result of an evaluation. True: it was there before.

        Raises:
            Aborted: ASSIGNMENT_LOST.
            InvalidArgument: UNITS_INVALID, METRIC_INVALID; counts as a failure of the attempt.
        """
        if await self._accepted_before(who, report.assignment_id, report.attempt):
            return True
        job, assignment, _ = self._claim(who, report.assignment_id, report.attempt)
        error = _evaluation_error(job, assignment, report)
        if error is not None:
            await self._refuse(who, report.assignment_id, report.attempt, error)
            raise error
        result = Result(who, report.attempt, report.units, report.metrics, report.backend, None, None)
        return await self._world.exclusive(lambda: self._finish(report.assignment_id, result))

    async def _finish(self, assignment_id: str, result: Result) -> bool:
        if await self._accepted_before(result.participant_id, assignment_id, result.attempt):
            return True
        job, assignment, _ = self._claim(result.participant_id, assignment_id, result.attempt)
        invitation = job.invitations[result.participant_id]
        invitation = replace(
            invitation, assignments_done=invitation.assignments_done + 1, backend=result.backend
        )
        evaluation = assignment.kind is AssignmentKind.EVALUATE
        async with self._world.store.begin() as tx:
            await tx.assignments.finish(assignment_id, result)
            await tx.invitations.save(invitation)
            if evaluation:
                await tx.validations.finish(job.record.job_id, assignment.round, result.metrics)
        job.invitations[result.participant_id] = invitation
        free(self._world, assignment)
        assignment.result = result
        if evaluation:
            del job.validations[assignment.round]
            if job.latest is not None and job.latest.round == assignment.round:
                job.latest = replace(job.latest, validation_metrics=result.metrics)
            self._world.let_go(job)
        self._world.changed(job)
        return False


def _units_error(units: int, most: int | None) -> InvalidArgument | None:
    if most is None or units <= most:
        return None
    return InvalidArgument(
        Reason.UNITS_INVALID, f"expected at most {most} units, all that was assigned; found {units}"
    )


def _metrics_error(problems: list[str]) -> InvalidArgument | None:
    if not problems:
        return None
    return InvalidArgument(Reason.METRIC_INVALID, f"the metrics are refused: {'; '.join(problems)}")


def _header_error(job: JobRun, assignment: Assignment, header: DeltaHeader) -> InvalidArgument | None:
    """Says what is wrong with an announced delta before its bytes come."""
    if assignment.kind is AssignmentKind.EVALUATE:
        return InvalidArgument(
            Reason.INVALID_FIELD, f"{assignment.id} is an evaluation: send its result with PushEvaluation"
        )
    expected = 4 * job.spec.package.weight_count
    if header.size != expected:
        return InvalidArgument(
            Reason.SIZE_MISMATCH,
            f"expected {expected} bytes (4 × {job.spec.package.weight_count} weights), "
            f"{header.size} were announced",
        )
    initialize = assignment.kind is AssignmentKind.INITIALIZE
    names = () if initialize else job.spec.package.metrics
    most = None if initialize else assignment.units
    return _units_error(header.units, most) or _metrics_error(metric_problems(names, header.metrics))


def _evaluation_error(
    job: JobRun, assignment: Assignment, report: EvaluationReport
) -> InvalidArgument | None:
    if assignment.kind is not AssignmentKind.EVALUATE:
        return InvalidArgument(
            Reason.INVALID_FIELD, f"{assignment.id} isn't an evaluation: send its result with PushDelta"
        )
    problems = metric_problems(job.spec.package.metrics, report.metrics)
    return _units_error(report.units, assignment.units) or _metrics_error(problems)

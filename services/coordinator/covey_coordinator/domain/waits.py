"""What a job waits for, in words and in data. A pure function of the job and the time.

Each wait has an `until` (it ends by itself by then), or its sentence says which person's act ends it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from covey_coordinator.domain.model import (
    Assignment,
    AssignmentStatus,
    InvitationState,
    JobState,
    OpenRound,
)
from covey_coordinator.domain.world import JobSight

__all__ = ["Scene", "Wait", "waits"]


@dataclass(frozen=True)
class Wait:
    """One thing that is waited for. Times are unix seconds; `until` None: a person must act."""

    message: str
    since: float
    until: float | None = None
    participant_id: str = ""
    assignment_id: str = ""


@dataclass(frozen=True)
class Scene:
    """What beside the job decides what it waits for.

    Attributes:
        now: unix seconds.
        connected: whether a participant is.
        idle: participants of this job that are connected and have nothing to do.
        lease_end: unix time when an assignment's lease ends unless something happens.
        retry_at: unix time before which an assignment doesn't go back to who failed on it.
        aggregate_bound: seconds that putting a round together may take.
    """

    now: float
    connected: Callable[[str], bool]
    idle: frozenset[str]
    lease_end: Callable[[Assignment], float | None]
    retry_at: Callable[[Assignment], float]
    aggregate_bound: float


def waits(job: JobSight, scene: Scene) -> list[Wait]:
    """Returns everything that a job waits for now."""
    match job.record.state:
        case JobState.CREATED:
            return [_start(job)]
        case JobState.PAUSED:
            since = job.record.paused_time or job.record.create_time
            return [Wait("the job is paused until its owner resumes it", since)]
        case JobState.RUNNING:
            return _running(job, scene)
        case _:
            return _validations(job, scene)


def _start(job: JobSight) -> Wait:
    accepted, wanted = len(job.accepted()), job.record.settings.min_participants
    since = job.record.create_time
    if accepted >= wanted:
        return Wait("the job waits for its owner to start it", since)
    asked = sum(i.state is InvitationState.PENDING for i in job.invitations.values())
    return Wait(
        f"the job needs {wanted} participants, {accepted} accepted so far: {asked} invitations wait for "
        "an answer; its owner invites more, and then starts it",
        since,
    )


def _running(job: JobSight, scene: Scene) -> list[Wait]:
    found = []
    if job.trouble is not None:
        found.append(Wait(job.trouble.message, job.trouble.since, job.trouble.until))
    opened = job.open_round
    if opened is not None:
        if opened.aggregating_since is not None and job.trouble is None:
            bound = opened.aggregating_since + scene.aggregate_bound
            message = f"round {opened.round} is complete and is being put together and stored"
            found.append(Wait(message, opened.aggregating_since, bound))
        found += _work(job, opened.assignments, f"round {opened.round}", scene)
        found += _idle(job, opened, scene)
    return found + _validations(job, scene)


def _validations(job: JobSight, scene: Scene) -> list[Wait]:
    return [
        wait
        for number in sorted(job.validations)
        for wait in _work(
            job, [job.validations[number].assignment], f"the validation of round {number}", scene
        )
    ]


def _work(job: JobSight, assignments: Sequence[Assignment], what: str, scene: Scene) -> list[Wait]:
    """Returns a wait for each assignment that is out, and one for all that nobody has.

    (Two, when some of those only wait for another try.)
    """
    out = [a for a in assignments if a.status is AssignmentStatus.RUNNING]
    pending = [a for a in assignments if a.status is AssignmentStatus.PENDING]
    found = [_lease(assignment, what, scene) for assignment in out]
    if not pending:
        return found
    crowd = _Crowd.of(job, scene)
    retried = [a for a in pending if crowd.failed_on(a) and scene.retry_at(a) > scene.now]
    if retried:
        failures = sum(len(a.faults) for a in retried)
        message = f"{what} waits for another try of {_names(retried)}: {failures} attempts failed"
        until = min(scene.retry_at(a) for a in retried)
        found.append(Wait(message, _since(retried), until, "", retried[0].id))
    again = {a.id for a in retried}
    fresh = [a for a in pending if a.id not in again]
    if fresh:
        message, until_ = _pending(job, crowd, scene)
        message = f"{what} waits for somebody to take {_names(fresh)}: {message}"
        found.append(Wait(message, _since(fresh), until_, "", fresh[0].id))
    return found


def _since(assignments: Sequence[Assignment]) -> float:
    return min(a.pending_since for a in assignments)


def _names(assignments: Sequence[Assignment]) -> str:
    """Names assignments by their places: "assignment 7", "assignments 3, 4, 5 and 12 more"."""
    listed = ", ".join(str(a.index) for a in assignments[:3])
    more = f" and {len(assignments) - 3} more" if len(assignments) > 3 else ""
    return f"assignment{'s' if len(assignments) > 1 else ''} {listed}{more}"


def _lease(assignment: Assignment, what: str, scene: Scene) -> Wait:
    lease = assignment.lease
    assert lease is not None
    stage = lease.progress.stage.value.lower() if lease.progress.stage is not None else "not heard of yet"
    if not scene.connected(lease.participant_id):
        stage = "disconnected"
    seconds = max(scene.now - lease.start_time, 0.0)
    return Wait(
        f"{what} waits for {lease.participant_id}: assignment {assignment.index}, {stage}, {seconds:.0f} s",
        lease.start_time,
        scene.lease_end(assignment),
        lease.participant_id,
        assignment.id,
    )


@dataclass(frozen=True)
class _Crowd:
    """Who takes part in a job.

    Attributes:
        accepted: those that accepted, sorted.
        present: those of them that are connected.
        busy: how many of those have something to do, for this job or another.
    """

    accepted: list[str]
    present: list[str]
    busy: int

    @classmethod
    def of(cls, job: JobSight, scene: Scene) -> Self:
        """Looks at a job's participants."""
        accepted = job.accepted()
        present = [p for p in accepted if scene.connected(p)]
        return cls(accepted, present, sum(p not in scene.idle for p in present))

    def failed_on(self, assignment: Assignment) -> bool:
        """Says whether everyone here failed on an assignment."""
        if not assignment.faults or not self.present:
            return False
        failed = {fault.participant_id for fault in assignment.faults}
        return all(p in failed for p in self.present)


def _pending(job: JobSight, crowd: _Crowd, scene: Scene) -> tuple[str, float | None]:
    """Says why nobody has an assignment, and until when that lasts at most."""
    if not crowd.accepted:
        return "nobody accepted the job; its owner invites participants", None
    if not crowd.present:
        names = ", ".join(crowd.accepted[:5]) + (", …" if len(crowd.accepted) > 5 else "")
        return f"none of its participants is connected; somebody connects {names}, or invites more", None
    if crowd.busy:
        ends = [end for a in job.assignments() if (end := scene.lease_end(a)) is not None]
        # What they do for another job is bounded in the same way.
        bound = min(ends, default=scene.now + job.record.settings.assignment_timeout)
        return f"{crowd.busy} of {len(crowd.present)} participants are busy", bound
    return "it is being handed out", scene.now + 1.0


def _idle(job: JobSight, opened: OpenRound, scene: Scene) -> list[Wait]:
    """Says when participants stand idle because a round has fewer assignments than there are devices."""
    if not scene.idle or opened.round == 0:
        return []
    out = [a for a in opened.assignments if a.status is AssignmentStatus.RUNNING]
    if not out or any(a.status is AssignmentStatus.PENDING for a in job.assignments()):
        return []
    ends = [end for a in out if (end := scene.lease_end(a)) is not None]
    since = max(a.lease.start_time for a in out if a.lease is not None)
    names = ", ".join(sorted(scene.idle)[:5]) + (", …" if len(scene.idle) > 5 else "")
    message = (
        f"{len(scene.idle)} participants stand idle ({names}): round {opened.round} has "
        f"{len(opened.assignments)} assignments (assignmentsPerRound) and all are taken or done"
    )
    return [Wait(message, since, max(ends, default=None))]

"""What a job waits for, in words and in data. A pure function of the job and the time.

Each wait has an `until` (it ends by itself by then), or its sentence says which person's act ends it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from covey_coordinator.domain.model import (
    Assignment,
    AssignmentKind,
    AssignmentStatus,
    InvitationState,
    JobState,
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
            return [w for v in job.validations.values() for w in _assignment(job, v.assignment, scene)]


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
        for assignment in opened.assignments:
            found += _assignment(job, assignment, scene)
        found += _idle(job, scene)
    for number in sorted(job.validations):
        found += _assignment(job, job.validations[number].assignment, scene)
    return found


def _what(assignment: Assignment) -> str:
    if assignment.kind is AssignmentKind.EVALUATE:
        return f"the validation of round {assignment.round}"
    return f"round {assignment.round}"


def _assignment(job: JobSight, assignment: Assignment, scene: Scene) -> list[Wait]:
    match assignment.status:
        case AssignmentStatus.DONE:
            return []
        case AssignmentStatus.RUNNING:
            return [_lease(assignment, scene)]
        case AssignmentStatus.PENDING:
            return [_pending(job, assignment, scene)]


def _lease(assignment: Assignment, scene: Scene) -> Wait:
    lease = assignment.lease
    assert lease is not None
    stage = lease.progress.stage.value.lower() if lease.progress.stage is not None else "not heard of yet"
    if not scene.connected(lease.participant_id):
        stage = "disconnected"
    seconds = max(scene.now - lease.start_time, 0.0)
    return Wait(
        f"{_what(assignment)} waits for {lease.participant_id}: assignment {assignment.index}, {stage}, "
        f"{seconds:.0f} s",
        lease.start_time,
        scene.lease_end(assignment),
        lease.participant_id,
        assignment.id,
    )


def _pending(job: JobSight, assignment: Assignment, scene: Scene) -> Wait:
    """Says why nobody has an assignment, and what will change that."""
    what = f"{_what(assignment)} waits for somebody to take assignment {assignment.index}"
    since = assignment.pending_since
    accepted = job.accepted()
    present = [p for p in accepted if scene.connected(p)]
    if not accepted:
        return Wait(
            f"{what}: nobody accepted the job; its owner invites participants", since, None, "", assignment.id
        )
    if not present:
        names = ", ".join(accepted[:5]) + (", …" if len(accepted) > 5 else "")
        message = (
            f"{what}: none of its participants is connected; somebody connects {names}, "
            "or the owner invites more"
        )
        return Wait(message, since, None, "", assignment.id)
    failed = {fault.participant_id for fault in assignment.faults}
    if all(p in failed for p in present) and scene.retry_at(assignment) > scene.now:
        return Wait(
            f"{what}: {len(assignment.faults)} attempts failed, it is tried again soon",
            since,
            scene.retry_at(assignment),
            "",
            assignment.id,
        )
    busy = [p for p in present if p not in scene.idle]
    ends = [end for a in job.assignments() if (end := scene.lease_end(a)) is not None]
    if busy:  # a lease of another job is bounded like ours: by its timeout
        bound = min(ends, default=scene.now + job.record.settings.assignment_timeout)
        return Wait(
            f"{what}: {len(busy)} of {len(present)} participants are busy", since, bound, "", assignment.id
        )
    return Wait(f"{what}: it is being handed out", since, scene.now + 1.0, "", assignment.id)


def _idle(job: JobSight, scene: Scene) -> list[Wait]:
    """Says when participants stand idle because a round has fewer assignments than there are devices."""
    opened = job.open_round
    assert opened is not None
    out = [a for a in opened.assignments if a.status is AssignmentStatus.RUNNING]
    pending = any(a.status is AssignmentStatus.PENDING for a in job.assignments())
    if not scene.idle or pending or not out or opened.round == 0:
        return []
    ends = [end for a in out if (end := scene.lease_end(a)) is not None]
    since = max(a.lease.start_time for a in out if a.lease is not None)
    names = ", ".join(sorted(scene.idle)[:5]) + (", …" if len(scene.idle) > 5 else "")
    message = (
        f"{len(scene.idle)} participants stand idle ({names}): round {opened.round} has "
        f"{len(opened.assignments)} assignments (assignmentsPerRound) and all are taken or done"
    )
    return [Wait(message, since, max(ends, default=None))]

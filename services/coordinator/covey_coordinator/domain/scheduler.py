"""Who gets what. A pure function of who is idle and what is open."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from covey_coordinator.domain.model import Assignment

__all__ = ["Handout", "JobQueue", "eligible", "schedule"]


@dataclass
class JobQueue:
    """What of one job is open.

    Attributes:
        present: participants that accepted the job and are connected, busy or not.
        pending: assignments that nobody has, in the order in which they should go; training comes before
            validations, so that a validation takes the gaps and never holds up a round.
        running: assignments of the job that are out.
        last_served: monotonic time of its last handout.
    """

    job_id: str
    present: frozenset[str]
    pending: list[Assignment]
    running: int
    last_served: float


@dataclass(frozen=True)
class Handout:
    """One decision: this participant gets this assignment."""

    participant_id: str
    assignment: Assignment


def eligible(assignment: Assignment, participant_id: str, present: Iterable[str], now: float) -> bool:
    """Says whether a participant may get an assignment now.

    One on which it failed goes to those that haven't failed on it while there are any, even if they
    are busy; when there are none, it comes back after its backoff.
    """
    failed = {fault.participant_id for fault in assignment.faults}
    if participant_id not in failed:
        return True
    if any(other not in failed for other in present):
        return False
    return now >= assignment.not_before


def schedule(queues: Sequence[JobQueue], idle: Sequence[str], now: float) -> list[Handout]:
    """Hands open assignments to idle participants, one each.

    Args:
        queues: what is open; consumed by the call.
        idle: connected participants without an assignment, the longest idle first.
        now: monotonic time.

    Fair over jobs: each participant gets work of the job, among those it accepted, that has the fewest
    assignments out; of the one served least recently when they are equal.
    """
    handouts = []
    for participant_id in idle:
        candidates = [queue for queue in queues if queue.pending and participant_id in queue.present]
        candidates.sort(key=lambda queue: (queue.running, queue.last_served, queue.job_id))
        for queue in candidates:
            found = next(
                (i for i, a in enumerate(queue.pending) if eligible(a, participant_id, queue.present, now)),
                None,
            )
            if found is not None:
                handouts.append(Handout(participant_id, queue.pending.pop(found)))
                queue.running += 1
                queue.last_served = now
                break
    return handouts

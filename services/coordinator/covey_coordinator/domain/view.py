"""How a job looks from outside, now."""

from dataclasses import dataclass

from covey_coordinator.domain.model import Assignment, Invitation, JobState
from covey_coordinator.domain.plan import next_unit, position_after
from covey_coordinator.domain.waits import Scene, Wait, waits
from covey_coordinator.domain.world import JobSight, World

__all__ = ["JobView", "ParticipantView", "ProgressView", "view_job"]


@dataclass(frozen=True)
class ProgressView:
    """How far a job is."""

    rounds_done: int
    rounds_wanted: int
    passes_done: int | None
    passes_wanted: int | None
    units_done: int
    round_units_done: int
    round_units_wanted: int | None
    units_wanted: int | None


@dataclass(frozen=True)
class ParticipantView:
    """One participant as a job sees it."""

    invitation: Invitation
    display_name: str
    connected: bool
    assignment: Assignment | None


@dataclass(frozen=True)
class JobView:
    """A job with everything that is computed about it.

    Attributes:
        lease_ends: unix times by assignment id.
    """

    sight: JobSight
    progress: ProgressView
    participants: tuple[ParticipantView, ...]
    waits: tuple[Wait, ...]
    lease_ends: dict[str, float]


def _progress(job: JobSight) -> ProgressView:
    record = job.record
    done = max(record.rounds_done, 0)
    round_done, wanted = 0, None
    if job.open_round is not None:
        wanted = sum(a.units or 0 for a in job.open_round.assignments)
        for assignment in job.open_round.assignments:
            if assignment.result is not None:
                round_done += assignment.result.units
            elif assignment.lease is not None:
                round_done += assignment.lease.progress.units_done or 0
    passes, all_units = None, None
    if record.settings.units_per_assignment is not None:
        end = next_unit(record.settings, record.rounds_wanted, record.origin)
        all_units = end - record.origin.next_unit
    else:
        at = max(done, record.origin.round)
        passes = position_after(record.settings, at, record.chunk_count, record.origin).pass_number
    return ProgressView(
        rounds_done=done,
        rounds_wanted=record.rounds_wanted,
        passes_done=passes,
        passes_wanted=record.settings.epochs if passes is not None else None,
        units_done=record.units_done,
        round_units_done=round_done,
        round_units_wanted=wanted,
        units_wanted=all_units,
    )


def view_job(world: World, job: JobSight) -> JobView:
    """Returns how a job looks now."""
    now = world.clock.now()
    his = {a.participant_id: a for a in job.assignments() if a.lease is not None}
    ends = {}
    for assignment in his.values():
        end = world.lease_end(job, assignment)
        if end is not None:
            ends[assignment.id] = world.wall(end.at)
    participants = []
    for participant_id in sorted(job.invitations):
        member = world.members[participant_id]
        participants.append(
            ParticipantView(
                job.invitations[participant_id],
                member.record.display_name,
                member.session is not None,
                his.get(participant_id),
            )
        )
    idle = frozenset(p for p in world.present(job) if world.members[p].assignment is None)
    scene = Scene(
        now=now,
        connected=world.connected,
        idle=idle,
        lease_end=lambda a: ends.get(a.id),
        retry_at=lambda a: world.wall(a.not_before),
        aggregate_bound=world.options.aggregate_timeout,
    )
    found = tuple(waits(job, scene)) if job.record.state is not JobState.FAILED else ()
    return JobView(job, _progress(job), tuple(participants), found, ends)

"""What a job waits for: every wait ends by itself by a time, or names whose act ends it."""

from dataclasses import replace

from covey_coordinator.domain.model import (
    Assignment,
    AssignmentKind,
    FailureRecord,
    Fault,
    Invitation,
    InvitationState,
    JobRecord,
    JobState,
    Lease,
    OpenRound,
    Progress,
    Result,
)
from covey_coordinator.domain.spec import Backend, Stage
from covey_coordinator.domain.waits import Scene, Wait, waits
from covey_coordinator.domain.world import JobSight, Trouble
from covey_kit.errors import Reason
from support.coordinator_domain import settings

RECORD = JobRecord(
    job_id="a",
    display_name="a",
    state=JobState.RUNNING,
    create_time=100.0,
    package_name="small",
    package_version="1",
    unit="example",
    settings=settings(),
    chunk_count=3,
    can_validate=True,
    rounds_wanted=3,
    rounds_done=2,
)


def work(index: int) -> Assignment:
    """An assignment of round 3 that nobody has."""
    return Assignment(f"a.r3.a{index}", "a", 3, index, AssignmentKind.TRAIN, (), 5, pending_since=150.0)


def job(assignments: list[Assignment], accepted: str = "pq", **changes: object) -> JobSight:
    """A running job in round 3 that these participants accepted."""
    invitations = {p: Invitation(f"inv-{p}", "a", p, InvitationState.ACCEPTED, 100.0) for p in accepted}
    record = replace(RECORD, **changes)  # type: ignore[arg-type]  # any field
    return JobSight(record, invitations, OpenRound(3, 140.0, assignments))


def scene(connected: str = "pq", idle: str = "") -> Scene:
    """At second 200; leases end at 210, retries begin at 205."""
    return Scene(
        now=200.0,
        connected=lambda p: p in connected,
        idle=frozenset(idle),
        lease_end=lambda a: 210.0 if a.lease is not None else None,
        retry_at=lambda a: a.not_before,
        aggregate_bound=600.0,
    )


def the(found: list[Wait]) -> Wait:
    """The only wait."""
    assert len(found) == 1, found
    return found[0]


def test_who_is_waited_for_and_how_long() -> None:
    """A lease: who, what, the stage last reported, since when, and until when at most."""
    mine = work(7)
    mine.lease = Lease("p", 188.0, 0.0, 0.0, Progress(stage=Stage.TRAINING))
    wait = the(waits(job([mine]), scene()))
    assert wait.message == "round 3 waits for p: assignment 7, training, 12 s"
    assert (wait.since, wait.until) == (188.0, 210.0)
    assert (wait.participant_id, wait.assignment_id) == ("p", "a.r3.a7")

    assert "assignment 7, disconnected, 12 s" in the(waits(job([mine]), scene(""))).message
    mine.lease.progress = Progress()
    assert "assignment 7, not heard of yet, 12 s" in the(waits(job([mine]), scene())).message


def test_persons_are_named_where_only_they_can_act() -> None:
    """Created, paused, without participants: no time ends these, so the sentence says who does."""
    created = job([], "", state=JobState.CREATED)
    created.open_round = None
    for sight, words in (
        (created, "its owner invites more"),
        (job([], state=JobState.PAUSED, paused_time=170.0), "until its owner resumes it"),
        (job([work(0)], ""), "its owner invites participants"),
    ):
        wait = the(waits(sight, scene()))
        assert words in wait.message
        assert wait.until is None
    wait = the(waits(job([work(0)]), scene(connected="")))
    assert "somebody connects p, q" in wait.message
    ready = job([], state=JobState.CREATED)
    assert "waits for its owner to start it" in the(waits(ready, scene())).message


def test_pending_work_says_why() -> None:
    """Everybody busy, failed and about to be tried again, or just being handed out."""
    mine, out = work(0), work(1)
    out.lease = Lease("q", 190.0, 0.0, 0.0)
    busy = waits(job([mine, out], "q"), scene("q"))[1]
    assert "1 of 1 participants are busy" in busy.message
    assert busy.until == 210.0

    mine.faults = [Fault("q", 1, False, FailureRecord(Reason.DEVICE, "", "q", mine.id, 0.0))]
    mine.not_before = 205.0
    again, other = waits(job([mine, work(1)], "q"), scene("q", idle="q"))
    assert again.message == "round 3 waits for another try of assignment 0: 1 attempts failed"
    assert again.until == 205.0
    assert "take assignment 1: it is being handed out" in other.message

    fresh = the(waits(job([work(n) for n in range(9)]), scene(idle="pq")))
    assert "take assignments 0, 1, 2 and 6 more: it is being handed out" in fresh.message
    assert fresh.until == 201.0


def test_idle_participants_are_explained() -> None:
    """When a round has fewer assignments than there are devices, the state says that it's the setting."""
    out, done = work(0), work(1)
    out.lease = Lease("p", 190.0, 0.0, 0.0)
    done.result = Result("q", 1, 5, (), Backend.CPU_WASM, None, None)
    idle = waits(job([out, done]), scene(idle="q"))[-1]

    assert "1 participants stand idle (q): round 3 has 2 assignments (assignmentsPerRound)" in idle.message
    assert idle.until == 210.0


def test_aggregation_and_trouble_are_bounded() -> None:
    """Putting a round together has a bound; what is tried again says when."""
    sight = job([])
    assert sight.open_round is not None
    sight.open_round.aggregating_since = 195.0
    wait = the(waits(sight, scene()))
    assert "is being put together and stored" in wait.message
    assert wait.until == 795.0

    sight.trouble = Trouble("storage can't be reached", 190.0, 203.0)
    wait = the(waits(sight, scene()))
    assert (wait.message, wait.since, wait.until) == ("storage can't be reached", 190.0, 203.0)


def test_an_ended_job_waits_for_nothing() -> None:
    """What ended waits for nothing but validations that were asked for."""
    sight = job([], state=JobState.COMPLETED)
    sight.open_round = None

    assert waits(sight, scene()) == []

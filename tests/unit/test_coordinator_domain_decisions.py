"""The coordinator's decisions: pure functions of what is known, each with a reason."""

import asyncio
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey_coordinator.domain.commands import DrainCommand, Session
from covey_coordinator.domain.failures import MAX_ATTEMPTS, backoff, judge
from covey_coordinator.domain.leases import Presence, Why, lease_end
from covey_coordinator.domain.lifecycle import Command, next_state, require_deletable
from covey_coordinator.domain.metrics import merge, metric_problems
from covey_coordinator.domain.model import (
    Assignment,
    AssignmentKind,
    FailureRecord,
    Fault,
    JobState,
    Lease,
    Metric,
    Result,
    assignment_id,
    parse_assignment_id,
    validation_id,
)
from covey_coordinator.domain.pages import PageTokens
from covey_coordinator.domain.scheduler import JobQueue, eligible, schedule
from covey_coordinator.domain.spec import Backend
from covey_kit.errors import Aborted, FailedPrecondition, InvalidArgument, Reason, ResourceExhausted
from support.coordinator_domain import settings


def work(index: int = 0, job_id: str = "a", faults: Sequence[Fault] = ()) -> Assignment:
    """A training assignment of round 1."""
    found = Assignment(
        assignment_id(job_id, 1, index), job_id, 1, index, AssignmentKind.TRAIN, (), 5, pending_since=0.0
    )
    found.faults = list(faults)
    return found


def fault(participant_id: str, *, package: bool = False, attempt: int = 1) -> Fault:
    """An attempt that failed."""
    failure = FailureRecord(Reason.MODULE_TRAP, "trapped", participant_id, "x", 0.0)
    return Fault(participant_id, attempt, package, failure)


def queue(job_id: str, pending: int, present: set[str], running: int = 0, served: float = 0.0) -> JobQueue:
    """A job with so many open assignments."""
    return JobQueue(job_id, frozenset(present), [work(i, job_id) for i in range(pending)], running, served)


# ---- Scheduler


def test_assignments_go_in_order_to_the_longest_idle() -> None:
    """The first open assignment goes to who has waited longest; one each."""
    handouts = schedule([queue("a", 3, {"p", "q"})], ["q", "p"], now=1.0)

    assert [(h.participant_id, h.assignment.index) for h in handouts] == [("q", 0), ("p", 1)]


def test_jobs_share_participants() -> None:
    """Each participant goes to the job with the fewest assignments out, then to that served longest ago."""
    jobs = [queue("a", 9, {"p", "q", "r", "s"}, served=5.0), queue("b", 9, {"p", "q", "r", "s"}, served=1.0)]
    handouts = schedule(jobs, ["p", "q", "r", "s"], now=6.0)

    assert [h.assignment.job_id for h in handouts] == ["b", "a", "a", "b"]


def test_only_who_accepted_gets_work() -> None:
    """A participant gets work of jobs that it accepted, whatever else is open."""
    handouts = schedule([queue("a", 1, {"q"}), queue("b", 1, {"p"})], ["p"], now=0.0)

    assert [(h.participant_id, h.assignment.job_id) for h in handouts] == [("p", "b")]


def test_what_failed_waits_for_another() -> None:
    """An assignment goes back to who failed on it when all others have failed on it too, after a pause."""
    failed = work(faults=[fault("p")])
    failed.not_before = 10.0

    assert not eligible(failed, "p", ["p", "q"], now=99.0)
    assert eligible(failed, "q", ["p", "q"], now=0.0)
    assert not eligible(failed, "p", ["p"], now=9.0)
    assert eligible(failed, "p", ["p"], now=10.0)
    assert eligible(work(faults=[fault("p"), fault("q")]), "p", ["p", "q"], now=0.0)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sets(st.sampled_from("pqrst"))), max_size=4),
    st.lists(st.sampled_from("pqrst"), unique=True),
)
def test_the_schedule_is_sound_and_wastes_nobody(jobs: list[tuple[int, set[str]]], idle: list[str]) -> None:
    """Nobody gets two, nothing is given twice, only accepted work; whoever is left has nothing open to do."""
    queues = [queue(f"j{i}", pending, present) for i, (pending, present) in enumerate(jobs)]
    handouts = schedule(queues, idle, now=0.0)

    given_to = [h.participant_id for h in handouts]
    assert len(given_to) == len(set(given_to))
    assert len({h.assignment.id for h in handouts}) == len(handouts)
    accepted = {f"j{i}": present for i, (_, present) in enumerate(jobs)}
    assert all(h.participant_id in accepted[h.assignment.job_id] for h in handouts)
    for left in set(idle) - set(given_to):
        assert not any(q.pending and left in q.present for q in queues)


# ---- Leases


@pytest.mark.parametrize(
    ("heard", "presence", "expected"),
    [
        (0.0, Presence(connected=True, disconnected_at=0.0), (15.0, Why.SILENT)),
        (100.0, Presence(connected=True, disconnected_at=0.0), (115.0, Why.SILENT)),
        (595.0, Presence(connected=True, disconnected_at=0.0), (600.0, Why.DEADLINE)),
        (5.0, Presence(connected=False, disconnected_at=7.0), (9.0, Why.GONE)),
        (8.0, Presence(connected=False, disconnected_at=7.0), (10.0, Why.GONE)),
        (599.0, Presence(connected=False, disconnected_at=599.5), (600.0, Why.DEADLINE)),
    ],
)
def test_the_earliest_bound_ends_a_lease(
    heard: float, presence: Presence, expected: tuple[float, Why]
) -> None:
    """Silence, the deadline and a disconnection each end a lease; words renew the silence alone."""
    end = lease_end(Lease("p", 0.0, 0.0, heard), settings(), presence, grace=2.0)

    assert (end.at, end.why) == expected


# ---- Failures


def test_three_participants_convict_a_package() -> None:
    """Package faults on three different participants end the work, on whatever assignments they were."""
    first, second = (
        work(0, faults=[fault("p", package=True), fault("q", package=True)]),
        work(1, faults=[fault("r", package=True)]),
    )
    verdict = judge(second, [first, second], {"p", "q", "r", "s"})

    assert verdict.give_up
    assert "3 different participants" in verdict.reason
    assert not judge(second, [second], {"p", "q", "r", "s"}).give_up


def test_a_success_elsewhere_acquits() -> None:
    """Faults on an assignment that another participant did since count no more."""
    done = work(0, faults=[fault("p", package=True), fault("q", package=True)])
    done.result = Result("s", 3, 5, (), Backend.CPU_WASM, None, None)

    assert not judge(work(1, faults=[fault("r", package=True)]), [done], {"s"}).give_up


def test_one_participant_has_three_tries() -> None:
    """Where nobody else could try, three package faults are enough; where somebody could, they aren't."""
    thrice = work(faults=[fault("p", package=True, attempt=n) for n in (1, 2, 3)])

    assert judge(thrice, [thrice], {"p"}).give_up
    assert not judge(thrice, [thrice], {"p", "q"}).give_up
    twice = work(faults=thrice.faults[:2])
    assert not judge(twice, [twice], {"p"}).give_up


def test_device_faults_are_bounded() -> None:
    """Devices may fail often, but not for ever."""
    faults = [fault("p", attempt=n) for n in range(MAX_ATTEMPTS)]

    assert not judge(work(faults=faults[1:]), [], {"p"}).give_up
    assert judge(work(faults=faults), [], {"p"}).give_up


def test_backoff_doubles_up_to_a_bound() -> None:
    """Waits double, from half a second to half a minute."""
    assert [backoff(n) for n in range(1, 5)] == [0.5, 1.0, 2.0, 4.0]
    assert backoff(10_000) == 30.0


# ---- Lifecycle


@given(st.sampled_from(list(JobState)), st.sampled_from(list(Command)))
def test_commands_move_or_explain(state: JobState, command: Command) -> None:
    """Each command leads to its state, or is refused with the state in the words."""
    goal = {
        Command.START: JobState.RUNNING,
        Command.RESUME: JobState.RUNNING,
        Command.PAUSE: JobState.PAUSED,
        Command.STOP: JobState.STOPPED,
    }
    allowed = {
        Command.START: {JobState.CREATED, JobState.RUNNING},
        Command.PAUSE: {JobState.RUNNING, JobState.PAUSED},
        Command.RESUME: {JobState.RUNNING, JobState.PAUSED},
        Command.STOP: {JobState.CREATED, JobState.RUNNING, JobState.PAUSED, JobState.STOPPED},
    }
    if state in allowed[command]:
        assert next_state("j", state, command) is goal[command]
        return
    with pytest.raises(FailedPrecondition, match=state.value) as caught:
        next_state("j", state, command)
    assert caught.value.reason is Reason.JOB_STATE


@pytest.mark.parametrize("state", list(JobState))
def test_what_works_cannot_be_deleted(state: JobState) -> None:
    """Only jobs that ended, or never started, can be deleted."""
    if state in (JobState.RUNNING, JobState.PAUSED):
        with pytest.raises(FailedPrecondition, match="stop it first"):
            require_deletable("j", state)
    else:
        require_deletable("j", state)


# ---- Metrics

COUNTS = st.floats(0, 1e9)
SUMS = st.none() | st.floats(-1e9, 1e9)
REPORTS = st.lists(
    st.tuples(SUMS, COUNTS, SUMS, COUNTS).map(lambda t: (Metric("a", t[0], t[1]), Metric("b", t[2], t[3])))
)


@given(REPORTS)
def test_metrics_are_sums_in_order(reports: list[tuple[Metric, Metric]]) -> None:
    """Sums and counts add up in the order given; what nobody measured stays unknown."""
    merged = merge(["b", "a"], reports)

    assert [metric.name for metric in merged] == ["b", "a"]
    for place, metric in ((1, merged[0]), (0, merged[1])):
        known = [report[place] for report in reports if report[place].sum is not None]
        if not known:
            assert (metric.sum, metric.count) == (None, 0.0)
            continue
        total, count = 0.0, 0.0
        for one in known:
            assert one.sum is not None
            total, count = total + one.sum, count + one.count
        assert (metric.sum, metric.count) == (total, count)


def test_a_sum_out_of_range_is_unknown() -> None:
    """Infinity is never shown as a metric."""
    assert merge(["a"], [(Metric("a", 1.7e308, 1.0),)] * 2) == (Metric("a", None, 2.0),)


def test_all_problems_of_metrics_are_told() -> None:
    """Missing, unknown, repeated and not finite metrics are all named."""
    problems = metric_problems(
        ["a", "b"], [Metric("c", 1.0, 1.0), Metric("b", math.nan, 1.0), Metric("b", 1.0, math.inf)]
    )

    assert [p.partition(":")[0] for p in problems] == ["missing", "unknown", "given twice", "b", "b"]
    assert not metric_problems(["a"], [Metric("a", None, 0.0)])


# ---- Page tokens and ids


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_page_tokens_open_only_where_they_were_made(scope: str, place: str, other: str) -> None:
    """A token gives its place back in its own list, and nowhere else."""
    tokens = PageTokens(b"secret")
    token = tokens.make(scope, place)

    assert tokens.open(scope, token) == place
    assert tokens.open(scope, "") is None
    for maker, chosen in ((PageTokens(b"other"), scope), (tokens, scope + "/")):
        with pytest.raises(InvalidArgument):
            maker.open(chosen, token)
    if other:
        with pytest.raises(InvalidArgument):
            tokens.open(scope, other)


def test_assignment_ids_tell_their_job() -> None:
    """Ids are the same for the same work, and tell which job they belong to."""
    assert assignment_id("digits-2b", 3, 7) == "digits-2b.r3.a7"
    assert validation_id("digits-2b", 3) == "digits-2b.v3"
    assert parse_assignment_id("digits-2b.r3.a7") == "digits-2b"
    assert parse_assignment_id("nonsense") == "nonsense"


# ---- Command streams


async def test_commands_come_in_order_and_the_end_last() -> None:
    """What was queued before a stream was closed is still read; then comes the reason of its end."""
    session = Session("p", expires=0.0)
    waiting = asyncio.create_task(session.next())
    await asyncio.sleep(0)
    commands = [DrainCommand(str(n)) for n in range(3)]
    for command in commands:
        session.send(command)
    session.close(Aborted(Reason.SESSION_REPLACED, "first"))
    session.close(Aborted(Reason.SESSION_REPLACED, "second"))
    session.send(DrainCommand("too late"))

    assert [await waiting, await session.next(), await session.next()] == commands
    for _ in range(2):
        with pytest.raises(Aborted, match="first"):
            await session.next()


async def test_a_stream_that_is_not_read_ends() -> None:
    """Commands that pile up don't fill the memory: the stream ends, and its participant joins again."""
    session = Session("p", expires=0.0)
    for n in range(2000):
        session.send(DrainCommand(str(n)))

    with pytest.raises(ResourceExhausted, match="read faster"):
        await session.next()

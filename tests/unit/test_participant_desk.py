"""The desk with scripted surroundings: order, retries, loss, and giving back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from covey_kit.clock import SystemClock
from covey_kit.errors import (
    Aborted,
    CoveyError,
    InvalidArgument,
    PermissionDenied,
    Reason,
    ResourceExhausted,
    Unavailable,
)
from covey_participant.domain.backend import Choice
from covey_participant.domain.backoff import Backoff
from covey_participant.domain.desk import Desk
from covey_participant.domain.execution import Execution, Stage
from covey_participant.domain.failure import BackendFailure, WorkFailure
from covey_participant.domain.ports import Inputs, OnTransfer, RunnerReport
from covey_participant.domain.values import Assignment, Backend, Blob, Config, Kind, Package, Result
from support.eventually import eventually

PACKAGE = Package("adder", "1", Blob("a" * 64, 10), 8)
CHOICE = Choice(Backend.CPU_WASM, None, "")


def assignment(name: str = "r1.a0", attempt: int = 1) -> Assignment:
    """An assignment to train."""
    return Assignment(name, attempt, "job", 1, Kind.TRAIN, PACKAGE, Config(0, 1, 1.0, 1))


class World:
    """Everything around a desk, by script."""

    def __init__(self) -> None:
        self.delivered: list[tuple[str, int]] = []
        self.failed: list[tuple[tuple[str, int], Reason, str, bool]] = []
        self.reported: list[Stage] = []
        self.discarded = 0
        self.running: list[str] = []
        self.deliver_errors: list[CoveyError] = []
        self.progress_error: CoveyError | None = None
        self.fetch_error: Exception | None = None
        self.run_error: Exception | None = None
        self.run_errors: list[Exception] = []
        self.gate: asyncio.Event | None = None
        self.changes = 0
        self.chosen: list[str] = []
        self.desk = Desk(
            files=self,
            runner=self,
            results=self,
            chooser=self,
            clock=SystemClock(),
            make_backoff=lambda: Backoff(0.001, 0.002, lambda: 0.0),
            on_change=self.changed,
        )
        self.desk.progress_interval = 0.05

    def changed(self) -> None:
        """A change of stage."""
        self.changes += 1

    @asynccontextmanager
    async def hold(self, work: Assignment, choice: Choice, on_transfer: OnTransfer) -> AsyncIterator[Inputs]:
        """Files."""
        if self.fetch_error is not None:
            raise self.fetch_error
        on_transfer(1, 2)
        yield Inputs(Path("m"), None, ())

    async def choose(self, work: Assignment, failure: BackendFailure | None = None) -> Choice:
        """Chooser."""
        self.chosen.append(failure.message if failure else "")
        return CHOICE

    async def run(
        self, work: Assignment, inputs: Inputs, choice: Choice, on_report: Callable[[RunnerReport], None]
    ) -> Result:
        """Runner."""
        self.running.append(work.assignment_id)
        try:
            on_report(RunnerReport(Stage.TRAINING, 1, 2.0))
            if self.gate is not None:
                await self.gate.wait()
            if self.run_errors:
                raise self.run_errors.pop(0)
            if self.run_error is not None:
                raise self.run_error
        finally:
            self.running.remove(work.assignment_id)
        return Result(1, (), Backend.CPU_WASM, 0.1, "delta", 4, "d")

    async def discard(self, result: Result) -> None:
        """Runner."""
        self.discarded += 1

    async def progress(self, execution: Execution) -> None:
        """Results."""
        self.reported.append(execution.stage)
        if self.progress_error is not None:
            raise self.progress_error

    async def deliver(self, work: Assignment, result: Result, on_transfer: OnTransfer) -> None:
        """Results."""
        if self.deliver_errors:
            raise self.deliver_errors.pop(0)
        self.delivered.append(work.key)

    async def failure(self, key: tuple[str, int], reason: Reason, message: str, *, package: bool) -> None:
        """Results."""
        self.failed.append((key, reason, message, package))

    async def idle(self) -> None:
        """Waits until nothing is in hand."""
        await eventually(lambda: not self.desk.held)


async def test_assignments_are_done_in_order_one_at_a_time() -> None:
    """The same command twice is one assignment."""
    world = World()
    for name in ("a", "b", "b", "c"):
        world.desk.accept(assignment(name))
    assert world.desk.held == [("a", 1), ("b", 1), ("c", 1)]
    await world.idle()

    assert world.delivered == [("a", 1), ("b", 1), ("c", 1)]
    assert world.discarded == 3
    assert world.desk.execution is None
    assert world.changes > 6


async def test_a_delivery_is_repeated_until_it_is_answered() -> None:
    """A lost answer, an expired token and a full disk are tried again with the same result."""
    world = World()
    world.deliver_errors = [
        Unavailable(Reason.UNREACHABLE, "gone"),
        ResourceExhausted(Reason.STORAGE_FULL, "full"),
        Unavailable(Reason.SHUTTING_DOWN, "stops"),
    ]
    world.desk.accept(assignment())
    await world.idle()

    assert world.delivered == [("r1.a0", 1)]
    assert not world.failed


async def test_a_lost_assignment_is_dropped_without_a_word() -> None:
    """ABORTED at delivery: it has another owner now."""
    world = World()
    world.deliver_errors = [Aborted(Reason.ASSIGNMENT_LOST, "another has it")]
    world.desk.accept(assignment())
    await world.idle()

    assert (world.delivered, world.failed, world.discarded) == ([], [], 1)


async def test_a_lost_assignment_stops_its_work() -> None:
    """ABORTED at a progress report ends work that is still running."""
    world = World()
    world.gate = asyncio.Event()
    world.progress_error = Aborted(Reason.ASSIGNMENT_LOST, "another has it")
    world.desk.accept(assignment())
    await world.idle()

    assert (world.running, world.delivered, world.failed) == ([], [], [])


@pytest.mark.parametrize(
    ("error", "reason", "package"),
    [
        (WorkFailure(Reason.MODULE_TRAP, "trap"), Reason.MODULE_TRAP, True),
        (WorkFailure(Reason.DEVICE, "disk"), Reason.DEVICE, False),
        (PermissionDenied(Reason.NO_GRANT, "no grant"), Reason.NO_GRANT, False),
    ],
)
async def test_failures_are_reported_with_their_fault(
    error: Exception, reason: Reason, package: bool
) -> None:
    """Whether the package is blamed is the failure's own word; errors of services never blame it."""
    world = World()
    world.run_error = error
    world.desk.accept(assignment())
    await world.idle()
    world.run_error, world.fetch_error = None, error
    world.desk.accept(assignment("other"))
    await world.idle()

    assert [failed[0] for failed in world.failed] == [("r1.a0", 1), ("other", 1)]
    assert {failed[1:2] + failed[3:] for failed in world.failed} == {(reason, package)}


async def test_a_fault_of_our_own_gives_the_assignment_back() -> None:
    """Whatever goes wrong in the participant, the assignment isn't kept until it is taken away."""
    world = World()
    world.run_error = KeyError("bug")
    world.desk.accept(assignment())
    await world.idle()

    assert [(failed[1], failed[3]) for failed in world.failed] == [(Reason.INTERNAL, False)]


async def test_work_that_failed_on_the_gpu_is_done_on_the_cpu() -> None:
    """The chooser hears what the GPU failed with; the CPU's result is delivered, nothing is reported."""
    world = World()
    world.run_errors = [BackendFailure(Reason.DEVICE, "device lost")]
    world.desk.accept(assignment())
    await world.idle()

    assert world.chosen == ["", "device lost"]
    assert (world.delivered, world.failed) == ([("r1.a0", 1)], [])


async def test_a_refused_delta_is_reported_once() -> None:
    """INVALID_ARGUMENT isn't retried."""
    world = World()
    world.deliver_errors = [InvalidArgument(Reason.DELTA_NOT_FINITE, "NaN")]
    world.desk.accept(assignment())
    await world.idle()

    assert [failed[1] for failed in world.failed] == [Reason.DELTA_NOT_FINITE]
    assert world.delivered == []


async def test_a_cancelled_assignment_makes_way() -> None:
    """The running one stops, the next in line goes on; an unknown one is no error."""
    world = World()
    world.gate = asyncio.Event()
    world.desk.accept(assignment("a"))
    world.desk.accept(assignment("b"))
    await eventually(lambda: world.running == ["a"])
    world.desk.cancel("nothing", 1, "no")
    world.desk.cancel("a", 2, "another attempt")
    assert world.running == ["a"]
    world.desk.cancel("a", 1, "job stopped")
    await eventually(lambda: world.running == ["b"])
    world.gate.set()
    await world.idle()

    assert world.delivered == [("b", 1)]
    assert not world.failed


async def test_a_newer_attempt_replaces_the_older_one() -> None:
    """What the coordinator hands out again is begun anew."""
    world = World()
    world.gate = asyncio.Event()
    world.desk.accept(assignment())
    await eventually(lambda: bool(world.running))
    world.desk.accept(assignment(attempt=2))
    world.gate.set()
    await world.idle()

    assert world.delivered == [("r1.a0", 2)]


async def test_stopping_gives_everything_back() -> None:
    """The running one and those in line, as the device's own doing."""
    world = World()
    world.gate = asyncio.Event()
    world.desk.accept(assignment("a"))
    world.desk.accept(assignment("b"))
    await eventually(lambda: world.running == ["a"])

    await world.desk.stop(1.0)

    assert [(failed[0], failed[1], failed[3]) for failed in world.failed] == [
        (("a", 1), Reason.DEVICE, False),
        (("b", 1), Reason.DEVICE, False),
    ]
    assert (world.running, world.desk.held, world.delivered) == ([], [], [])


async def test_progress_is_reported_at_changes_and_intervals() -> None:
    """While work runs, a report comes again and again; after its end none does."""
    world = World()
    world.gate = asyncio.Event()
    world.desk.accept(assignment())
    await eventually(lambda: world.reported.count(Stage.TRAINING) >= 3)
    world.gate.set()
    await world.idle()
    seen = len(world.reported)
    await asyncio.sleep(0.15)

    assert len(world.reported) == seen


async def test_an_assignment_whose_deadline_is_long_past_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the connection does, nothing is worked on forever."""
    monkeypatch.setattr("covey_participant.domain.desk.DEADLINE_GRACE", 0.05)
    world = World()
    world.gate = asyncio.Event()
    late = assignment()
    world.desk.accept(Assignment(**{**late.__dict__, "deadline": SystemClock().now() - 5}))
    await world.idle()

    assert (world.running, world.delivered) == ([], [])

"""Works off assignments, one at a time, from the first byte fetched to the acknowledgement of the result."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

from covey_kit.clock import Clock
from covey_kit.errors import CoveyError, Reason, Unavailable
from covey_participant.domain.backend import Choice
from covey_participant.domain.backoff import Backoff
from covey_participant.domain.execution import Execution, Stage
from covey_participant.domain.failure import BackendFailure, WorkFailure
from covey_participant.domain.ports import Chooser, Files, Results, Runner, RunnerReport
from covey_participant.domain.values import Assignment, Result

log = structlog.get_logger(__name__)

DEADLINE_GRACE = 60.0
"""Seconds beyond an assignment's deadline (clocks differ) after which it is dropped whatever happens."""

REPORT_GAP = 0.05
"""Least seconds between two reports of progress: work that is over sooner needs none."""

_RETRIED = frozenset(
    {"UNAVAILABLE", "DEADLINE_EXCEEDED", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED", "INTERNAL"}
)
_LOST = frozenset({Reason.ASSIGNMENT_LOST})


class Desk:
    """Takes assignments and does them in order.

    Args:
        files, runner, results, chooser: see `ports`.
        clock: monotonic for measuring, unix time for deadlines.
        make_backoff: makes the waits between tries of a delivery.
        on_change: called on each change of stage.
    """

    def __init__(
        self,
        *,
        files: Files,
        runner: Runner,
        results: Results,
        chooser: Chooser,
        clock: Clock,
        make_backoff: Callable[[], Backoff],
        on_change: Callable[[], None],
    ) -> None:
        self._files = files
        self._runner = runner
        self._results = results
        self._chooser = chooser
        self._clock = clock
        self._make_backoff = make_backoff
        self._on_change = on_change
        self._turn = asyncio.Lock()
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._stage_changed = asyncio.Event()
        self.progress_interval = 2.0
        self.execution: Execution | None = None
        """What is being worked on now."""
        self.last: Execution | None = None
        """What ran to its end last: what it ran on is there to be seen when nothing runs."""

    # --- commands -----------------------------------------------------------------------------

    @property
    def held(self) -> list[tuple[str, int]]:
        """(assignment, attempt) of everything in hand."""
        return list(self._tasks)

    def accept(self, assignment: Assignment) -> None:
        """Begins an assignment, or puts it in line. The same again changes nothing."""
        if assignment.key in self._tasks:
            return
        for key in self.held:
            if key[0] == assignment.assignment_id:
                self._drop(key, "it was handed out again")
        task = asyncio.create_task(self._do(assignment))
        self._tasks[assignment.key] = task
        task.add_done_callback(lambda _task: self._tasks.pop(assignment.key, None))

    def cancel(self, assignment_id: str, attempt: int, reason: str) -> None:
        """Stops an assignment. One that isn't in hand is no error: its end crossed the command."""
        self._drop((assignment_id, attempt), reason)

    def _drop(self, key: tuple[str, int], reason: str) -> None:
        task = self._tasks.get(key)
        if task is not None:
            log.info("assignment cancelled", assignment=key[0], attempt=key[1], reason=reason)
            task.cancel()

    async def stop(self, give_back_seconds: float) -> None:
        """Cancels everything and gives it back to the coordinator, as far as that works within the time."""
        keys, tasks = self.held, list(self._tasks.values())
        for task in tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(give_back_seconds):
                await asyncio.gather(*(self._give_back(key) for key in keys))
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _give_back(self, key: tuple[str, int]) -> None:
        with contextlib.suppress(CoveyError):
            await self._results.failure(
                key, Reason.DEVICE, "the participant was stopped by its person", package=False
            )

    # --- one assignment -----------------------------------------------------------------------

    async def _do(self, assignment: Assignment) -> None:
        with structlog.contextvars.bound_contextvars(assignment=assignment.assignment_id):
            async with self._turn:
                execution = Execution(assignment, self._clock.monotonic())
                self.execution = execution
                self._changed()
                reporter = asyncio.create_task(self._report(execution, asyncio.current_task()))
                try:
                    async with asyncio.timeout(self._time_left(assignment)):
                        await self._work(execution)
                except TimeoutError:
                    log.warning("assignment dropped: its deadline has passed")
                finally:
                    reporter.cancel()
                    self.execution = None
                    self._changed()

    def _time_left(self, assignment: Assignment) -> float | None:
        if assignment.deadline is None:
            return None
        return max(assignment.deadline - self._clock.now(), 0.0) + DEADLINE_GRACE

    async def _work(self, execution: Execution) -> None:
        assignment = execution.assignment
        try:
            result = await self._run(execution)
            self.last = execution
            try:
                self._enter(execution, Stage.UPLOADING)
                await self._persist(execution, lambda: self._deliver(execution, result))
            finally:
                await self._runner.discard(result)
        except WorkFailure as failure:
            log.warning("assignment failed", reason=failure.reason.value, message=failure.message)
            await self._fail(execution, failure)
        except CoveyError as error:
            if error.reason in _LOST:
                log.info("assignment lost", message=error.message)
                return
            log.warning("assignment failed", reason=error.reason.value, message=error.message)
            await self._fail(execution, WorkFailure(error.reason, error.message, package_fault=False))
        except Exception:
            log.exception("a fault of the participant itself")
            ours = "the participant has a fault of its own; its log has the details"
            await self._fail(execution, WorkFailure(Reason.INTERNAL, ours, package_fault=False))
        else:
            seconds = self._clock.monotonic() - execution.started
            log.info("assignment done", kind=assignment.kind.value, seconds=round(seconds, 3))

    async def _run(self, execution: Execution) -> Result:
        """Runs on the backend chosen, and once more on the CPU where that failed."""
        try:
            return await self._run_on(execution, await self._chooser.choose(execution.assignment))
        except BackendFailure as failure:
            log.warning(
                "the GPU failed: doing it on the CPU", reason=failure.reason.value, message=failure.message
            )
            choice = await self._chooser.choose(execution.assignment, failure)
            execution.units_done = execution.work_rate = None
            return await self._run_on(execution, choice)

    async def _run_on(self, execution: Execution, choice: Choice) -> Result:
        def on_report(report: RunnerReport) -> None:
            if report.units_done is not None:
                execution.units_done = report.units_done
            if report.work_rate is not None:
                execution.work_rate = report.work_rate
            execution.workers = report.workers
            if report.stage in (Stage.TRAINING, Stage.EVALUATING, Stage.PLAYING):
                execution.module_loaded = True
            self._enter(execution, report.stage)

        assignment, execution.choice = execution.assignment, choice
        self._enter(execution, Stage.FETCHING)
        async with self._files.hold(assignment, choice, self._transfer_of(execution)) as inputs:
            execution.workers = 1
            self._enter(execution, Stage.LOADING)
            return await self._runner.run(assignment, inputs, choice, on_report)

    async def _deliver(self, execution: Execution, result: Result) -> None:
        await self._results.deliver(execution.assignment, result, self._transfer_of(execution))

    async def _fail(self, execution: Execution, failure: WorkFailure) -> None:
        key = execution.assignment.key
        try:
            await self._persist(
                execution,
                lambda: self._results.failure(
                    key, failure.reason, failure.message, package=failure.package_fault
                ),
            )
        except CoveyError as error:
            log.info("the failure wasn't taken", reason=error.reason.value, message=error.message)

    async def _persist(self, execution: Execution, call: Callable[[], Awaitable[None]]) -> None:
        """Repeats a call until it is answered: a lost answer, a restart of the coordinator, a full disk."""
        backoff = self._make_backoff()
        while True:
            try:
                await call()
            except CoveyError as error:
                if error.code not in _RETRIED:
                    raise
                level = log.debug if isinstance(error, Unavailable) else log.warning
                level("the coordinator didn't take it; trying again", message=error.message)
                execution.transfer = None
                await asyncio.sleep(backoff.next())
            else:
                return

    # --- showing ------------------------------------------------------------------------------

    def _transfer_of(self, execution: Execution) -> Callable[[int, int], None]:
        def moved(done: int, total: int) -> None:
            execution.transfer = (done, total)

        return moved

    def _enter(self, execution: Execution, stage: Stage) -> None:
        if execution.enter(stage, self._clock.monotonic()):
            self._changed()

    def _changed(self) -> None:
        self._stage_changed.set()
        self._on_change()

    async def _report(self, execution: Execution, work: "asyncio.Task[None] | None") -> None:
        """Reports progress at each change of stage and every interval; drops an assignment that was lost."""
        while True:
            await asyncio.sleep(REPORT_GAP)
            self._stage_changed.clear()
            try:
                await self._results.progress(execution)
            except CoveyError as error:
                if error.reason in _LOST and work is not None:
                    log.info("assignment lost", message=error.message)
                    work.cancel()
                    return
                log.debug("progress wasn't taken", message=error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.progress_interval):
                    await self._stage_changed.wait()

"""Runs assignments on the CPU: the domain's `Runner` over the pool of worker processes."""

import asyncio
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import structlog

from covey_kit.errors import Reason
from covey_participant.domain.backend import Choice
from covey_participant.domain.execution import Stage
from covey_participant.domain.failure import WorkFailure
from covey_participant.domain.ports import Inputs, RunnerReport
from covey_participant.domain.values import Assignment, Backend, Kind, Metric, Package, Result
from covey_participant.runtime import abi
from covey_participant.runtime.pool import WorkerPool
from covey_participant.runtime.protocol import (
    ChunkFile,
    ConfigSpec,
    FileRange,
    Job,
    ModuleSpec,
    Outcome,
    Progress,
    Step,
    Task,
)
from covey_participant.runtime.supervisor import TimeLimits

log = structlog.get_logger("covey.model")

DEFAULT_STEP_SECONDS = 60.0

OnReport = Callable[[RunnerReport], None]


@dataclass(frozen=True)
class DeviceLimits:
    """The device's own bounds, which hold besides the package's.

    Attributes:
        memory_bytes: most linear memory of one worker.
        step_seconds: longest call into a module.
    """

    memory_bytes: int = abi.MOST_PAGES * abi.PAGE
    step_seconds: float = 3600.0


def module_spec(package: Package, path: Path, compiled: Path, limits: DeviceLimits) -> ModuleSpec:
    """Returns the module of a package as a worker gets it."""
    pages = package.memory_pages or abi.MOST_PAGES
    return ModuleSpec(
        path=str(path),
        sha256=package.module.sha256,
        compiled=str(compiled),
        memory_bytes=min(pages * abi.PAGE, limits.memory_bytes),
        weights=package.weights,
        metrics=len(package.metrics),
        dataset=package.dataset_inputs,
        work=package.training or package.evaluation,
        inference=package.inference,
        experience=package.experience,
    )


def time_limits(package: Package, limits: DeviceLimits) -> TimeLimits:
    """Returns how long a package's calls may take here."""
    return TimeLimits(call=min(package.step_seconds or DEFAULT_STEP_SECONDS, limits.step_seconds))


class CpuRunner:
    """Runs packages with wasmtime.

    Args:
        pool: worker processes.
        scratch: folder for results.
        compiled: folder for compiled modules (0700).
        limits: the device's own bounds.
        workers: returns how many workers an assignment may use now.
    """

    def __init__(
        self,
        pool: WorkerPool,
        scratch: Path,
        compiled: Path,
        limits: DeviceLimits,
        workers: Callable[[], int] = lambda: 1,
    ) -> None:
        self._workers = workers
        self._pool = pool
        self._scratch = scratch
        self._compiled = compiled
        self._limits = limits

    async def run(
        self,
        assignment: Assignment,
        inputs: Inputs,
        choice: Choice,
        on_report: OnReport,
    ) -> Result:
        """Does an assignment in a worker process; the play of an experience assignment in several.

        Cancelling it stops it within a second.

        Raises:
            WorkFailure: with the reason.
        """
        if choice.backend is not Backend.CPU_WASM:
            raise WorkFailure(Reason.NOT_IMPLEMENTED, f"this runner has no {choice.backend.value} backend")
        # A name of ours: the assignment's id is the coordinator's word and could be a path.
        output = self._scratch / f"{secrets.token_hex(8)}.delta"
        job = self._job(assignment, inputs, output)
        parts: list[Job] = []
        if job.task is Task.TRAIN and assignment.unit_range is not None:
            parts = split_play(job, min(self._workers(), assignment.package.max_workers))
        try:
            if len(parts) > 1:
                job = await self._play(assignment, job, parts, on_report)
            outcome = await self._run(assignment, job, on_report)
        except BaseException:
            _remove([job.output])
            raise
        finally:
            _remove(part.output for part in parts)
        return _result(assignment, outcome, "" if assignment.kind is Kind.EVALUATE else str(output))

    async def _run(self, assignment: Assignment, job: Job, on_report: OnReport) -> Outcome:
        package = assignment.package
        return await self._pool.run(
            job,
            time_limits(package, self._limits),
            lambda progress: on_report(_report(assignment, progress)),
            lambda level, text: _log_line(package, level, text),
        )

    async def _play(self, assignment: Assignment, job: Job, parts: list[Job], on_report: OnReport) -> Job:
        """Has several workers play, and returns the job that trains on all of it. One failure ends all."""
        reports: dict[int, RunnerReport] = {}

        def add_up(index: int, report: RunnerReport) -> None:
            reports[index] = report
            done = sum(found.units_done or 0 for found in reports.values())
            rate = sum(found.work_rate or 0.0 for found in reports.values())
            on_report(RunnerReport(Stage.PLAYING, done, rate or None, len(parts)))

        tasks = [
            asyncio.ensure_future(self._run(assignment, part, partial(add_up, index)))
            for index, part in enumerate(parts)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return replace(job, records=[part.output for part in parts])

    async def discard(self, result: Result) -> None:
        """Removes a result's file."""
        if result.path:
            await asyncio.to_thread(Path(result.path).unlink, missing_ok=True)

    def _job(self, assignment: Assignment, inputs: Inputs, output: Path) -> Job:
        package, config, weights = assignment.package, assignment.config, assignment.weights
        if assignment.kind is Kind.EVALUATE:
            counts: list[int | None] = [package.validation_examples]
        else:
            counts = [chunk.examples for chunk in assignment.chunks]
        held_out, played = assignment.held_out, assignment.unit_range
        return Job(
            task=Task(assignment.kind.value.lower()),
            module=module_spec(package, inputs.module, self._compiled, self._limits),
            config=ConfigSpec(
                seed=config.seed,
                batch_size=config.batch_size,
                learning_rate=config.learning_rate,
                local_epochs=config.local_epochs,
                hyperparameters=list(config.hyperparameters),
            ),
            weights=FileRange(str(inputs.weights), 0, weights.size) if inputs.weights and weights else None,
            weights_sha256=weights.sha256 if weights else "",
            chunks=[ChunkFile(str(path), count) for path, count in zip(inputs.chunks, counts, strict=False)],
            first_unit=held_out.first if held_out else played.first if played else 0,
            units=held_out.units if held_out else played.units if played else None,
            sequence_seed=played.sequence_seed if played else None,
            output=str(output),
        )


def _remove(paths: Iterable[str]) -> None:
    for path in paths:
        Path(path).unlink(missing_ok=True)


def split_play(job: Job, workers: int) -> list[Job]:
    """Returns the play of a job's units as jobs for so many workers: ranges that adjoin, in unit order."""
    units = job.units or 0
    workers = max(1, min(workers, units))
    bounds = [units * index // workers for index in range(workers + 1)]
    return [
        replace(
            job,
            task=Task.PLAY,
            first_unit=job.first_unit + begin,
            units=end - begin,
            output=f"{job.output}.{index}",
        )
        for index, (begin, end) in enumerate(pairwise(bounds))
    ]


def _report(assignment: Assignment, progress: Progress) -> RunnerReport:
    working = Stage.EVALUATING if assignment.kind is Kind.EVALUATE else Stage.TRAINING
    if progress.playing:
        working = Stage.PLAYING
    stages = {
        Step.COMPILE: Stage.COMPILING,
        Step.LOAD: Stage.LOADING,
        Step.WORK: working,
        Step.HOST: Stage.LOADING if progress.units_done is None else working,
    }
    rate = None
    if progress.work_units and progress.compute_seconds:
        rate = progress.work_units / progress.compute_seconds
    return RunnerReport(stages[progress.step], progress.units_done, rate)


def _result(assignment: Assignment, outcome: Outcome, path: str) -> Result:
    names = assignment.package.metrics
    metrics = [
        Metric(name, total if count else None, count)
        for name, (total, count) in zip(names, outcome.metrics, strict=False)
    ]
    return Result(
        units=outcome.units,
        metrics=tuple(metrics) if assignment.kind is not Kind.INITIALIZE else (),
        backend=Backend.CPU_WASM,
        compute_seconds=outcome.compute_seconds,
        path=path,
        size=outcome.size,
        sha256=outcome.sha256,
    )


def _log_line(package: Package, level: str, text: str) -> None:
    """Shows a line of the model at most as loud as `info`: it is the package's word, not ours."""
    write = log.debug if level == "debug" else log.info
    write("model says", package=package.name, level_given=level, text=text)

"""Drives a job from round to round: open, sum up, finish, next.

One task per job that isn't ended. It holds nothing that can't be made again: killed at any point, its
successor opens the same round from the database, sums up the same deltas in the same order, and makes
the same bytes.
"""

import asyncio
from dataclasses import replace

import structlog

from covey_coordinator.domain.failures import backoff
from covey_coordinator.domain.metrics import merge
from covey_coordinator.domain.model import (
    Assignment,
    AssignmentKind,
    CheckpointRef,
    DeltaFile,
    FailureRecord,
    JobState,
    OpenRound,
    Result,
    RoundRecord,
    assignment_id,
)
from covey_coordinator.domain.moves import bounded, end_job
from covey_coordinator.domain.plan import is_validation_round, round_chunks, round_units
from covey_coordinator.domain.ports import CheckpointFile, Checkpoints, Fold, RoundSummary, StoredValidation
from covey_coordinator.domain.spec import JobSpec
from covey_coordinator.domain.validations import new_validation
from covey_coordinator.domain.world import JobRun, Trouble, World
from covey_kit.errors import CoveyError, DataLoss, Reason

__all__ = ["RoundDriver", "plan_assignments"]

log = structlog.get_logger(__name__)

_PASSING = frozenset(
    {
        "ABORTED",
        "DEADLINE_EXCEEDED",
        "INTERNAL",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "UNAUTHENTICATED",
        "UNAVAILABLE",
    }
)
"""Errors after which trying again makes sense, if need be after somebody has mended something; any other
ends the job."""

_PASSING_UPLOAD = _PASSING | {"DATA_LOSS", "FAILED_PRECONDITION"}
"""The same for uploads: what storage lost in between is written again."""


def plan_assignments(job_id: str, spec: JobSpec, round_number: int, now: float) -> list[Assignment]:
    """Returns the assignments of a round: a pure function of the job. Round 0 makes the initial weights.

    The first call for a pass takes a microsecond a chunk; call it in a thread.
    """
    if round_number == 0:
        return [
            Assignment(assignment_id(job_id, 0, 0), job_id, 0, 0, AssignmentKind.INITIALIZE, (), 0, now),
        ]
    if spec.package.experience:
        return [
            Assignment(
                id=assignment_id(job_id, round_number, index),
                job_id=job_id,
                round=round_number,
                index=index,
                kind=AssignmentKind.TRAIN,
                chunks=(),
                units=units.units,
                pending_since=now,
                unit_range=units,
            )
            for index, units in enumerate(round_units(spec.settings, round_number, spec.origin))
        ]
    places = round_chunks(spec.settings, round_number, len(spec.chunks), spec.origin)
    return [
        Assignment(
            id=assignment_id(job_id, round_number, index),
            job_id=job_id,
            round=round_number,
            index=index,
            kind=AssignmentKind.TRAIN,
            chunks=(spec.chunks[place],),
            units=spec.chunks[place].examples,
            pending_since=now,
        )
        for index, place in enumerate(places)
    ]


class RoundDriver:
    """Drives one job's rounds."""

    def __init__(self, world: World, checkpoints: Checkpoints, job: JobRun) -> None:
        self._world = world
        self._checkpoints = checkpoints
        self._job = job

    async def run(self) -> None:
        """Works until the job has ended. A fault of our own is logged and tried again, with backoff."""
        failures = 0
        while not self._job.record.state.ended:
            try:
                await self._step()
                failures, self._job.trouble = 0, None
            except Exception as error:  # noqa: BLE001 - logged and retried, or it ends the job
                failures += 1
                await self._pass_or_fail(error, failures)

    async def _pass_or_fail(self, error: Exception, failures: int) -> None:
        """Pauses when trying again may help; else ends the job with the error."""
        if isinstance(error, CoveyError) and error.code not in _PASSING:
            job_id = self._job.record.job_id
            failure = FailureRecord(error.reason, bounded(error.message), "", "", self._world.clock.now())
            log.error("the job failed", job=job_id, reason=error.reason.value, error=error.message)
            await self._world.exclusive(lambda: self._fail(failure))
            return
        await self._pause(error, failures)

    async def _pause(self, error: Exception, failures: int) -> None:
        """Waits before the next try, and shows what for."""
        job, now = self._job, self._world.clock.now()
        what = _words(error)
        if not isinstance(error, CoveyError):
            log.error("the round's driver failed; it tries again", job=job.record.job_id, exc_info=error)
        delay = backoff(failures)
        number = job.open_round.round if job.open_round is not None else job.record.rounds_done + 1
        since = job.trouble.since if job.trouble is not None else now
        message = f"round {number} can't go on: {what}; tried {failures} times, again in {delay:g} s"
        job.trouble = Trouble(message, since, now + delay)
        self._world.changed(job)
        log.warning("the round waits", job=job.record.job_id, round=number, error=what, retry_in=delay)
        await asyncio.sleep(delay)

    async def _fail(self, failure: FailureRecord) -> None:
        if not self._job.record.state.ended:
            await end_job(self._world, self._job, JobState.FAILED, failure)

    async def _wait(self) -> None:
        await self._job.wake.wait()

    async def _step(self) -> None:
        """Takes the job one round (or its end) further, or waits until there is something to do."""
        job = self._job
        job.wake.clear()
        if job.record.state is not JobState.RUNNING and job.open_round is None:
            await self._wait()
        elif job.open_round is not None:
            await self._work(job.open_round)
        elif job.record.rounds_done < job.record.rounds_wanted:
            await self._open()
        elif not any(v.scheduled for v in job.validations.values()):
            await self._world.exclusive(self._complete)
        else:
            await self._wait()

    async def _complete(self) -> None:
        if self._job.record.state is JobState.RUNNING:
            await end_job(self._world, self._job, JobState.COMPLETED)
            log.info("job completed", job=self._job.record.job_id, rounds=self._job.record.rounds_done)

    async def _open(self) -> None:
        job = self._job
        number = job.record.rounds_done + 1
        now = self._world.clock.now()
        assignments = await asyncio.to_thread(plan_assignments, job.record.job_id, job.spec, number, now)
        opened = OpenRound(number, now, assignments)

        async def change() -> None:
            if job.record.state is not JobState.RUNNING:
                return
            async with self._world.store.begin() as tx:
                await tx.rounds.open(job.record.job_id, opened)
            job.open_round = opened
            self._world.changed(job)

        await self._world.exclusive(change)

    async def _work(self, opened: OpenRound) -> None:
        """Sums up results as they come, in order; finishes the round when all are there."""
        job = self._job
        opened.aggregating_since = None
        fold = self._checkpoints.begin(job.spec)
        for assignment in opened.assignments:
            result = await self._result(assignment)
            if result is None:  # the job ended
                return
            delta = result.delta
            assert delta is not None
            # Round 0's one delta is the weights themselves: there is nothing to sum.
            units = 0 if opened.round == 0 else result.units
            try:
                await fold.add(assignment.index, delta, units)
            except DataLoss as error:
                await self._redo(assignment, delta, error)
                return
        opened.aggregating_since = self._world.clock.now()
        self._world.changed(job)
        await self._finish(opened, fold)

    async def _result(self, assignment: Assignment) -> Result | None:
        while assignment.result is None and not self._job.record.state.ended:
            self._job.wake.clear()
            await self._wait()
        return assignment.result

    async def _redo(self, assignment: Assignment, delta: DeltaFile, error: Exception) -> None:
        """Gives an assignment out again whose accepted delta can't be read any more."""
        job = self._job
        message = bounded(f"the delta of {assignment.id} can't be read any more; it is done again: {error}")
        log.error("a delta was lost", assignment=assignment.id, file=delta.name, error=str(error))
        failure = FailureRecord(Reason.BLOB_CORRUPT, message, "", assignment.id, self._world.clock.now())

        async def change() -> None:
            record = replace(job.record, last_error=failure)
            async with self._world.store.begin() as tx:
                await tx.assignments.drop_result(assignment.id)
                await tx.jobs.save(record)
            job.record = record
            assignment.result = None
            assignment.pending_since = self._world.clock.now()
            self._world.changed(job)

        await self._world.exclusive(change)

    def _summary(self, opened: OpenRound) -> RoundSummary:
        results = [a.result for a in opened.assignments if a.result is not None]
        if opened.round == 0:
            return RoundSummary(0, (), 0, ())
        names = self._job.spec.package.metrics
        return RoundSummary(
            round=opened.round,
            metrics=merge(names, [result.metrics for result in results]),
            units=sum(result.units for result in results),
            backends=tuple(sorted({result.backend for result in results})),
        )

    async def _finish(self, opened: OpenRound, fold: Fold) -> None:
        job = self._job
        job_id = job.record.job_id
        summary = self._summary(opened)
        base = job.latest.checkpoint if job.latest is not None else None
        async with asyncio.timeout(self._world.options.aggregate_timeout):
            file = await self._checkpoints.finish(fold, job_id, job.spec, summary, base)
        reference = await self._upload(job_id, summary, file)
        record = RoundRecord(
            round=opened.round,
            metrics=summary.metrics,
            units=summary.units,
            assignments=len(opened.assignments),
            participant_ids=tuple(sorted({a.participant_id for a in opened.assignments})),
            checkpoint=reference,
            start_time=opened.start_time,
            end_time=self._world.clock.now(),
            no_units=opened.round > 0 and summary.units == 0,
        )
        await self._world.exclusive(lambda: self._record(opened, record))
        await self._checkpoints.discard(job_id, opened.round)
        log.info("round finished", job=job_id, round=opened.round, checkpoint=reference.sha256)

    async def _upload(self, job_id: str, summary: RoundSummary, file: CheckpointFile) -> CheckpointRef:
        """Stores the checkpoint; goes on trying while storage can't be reached."""
        job, failures = self._job, 0
        while True:
            try:
                reference = await self._checkpoints.upload(job_id, job.spec, summary, file)
            except CoveyError as error:
                if error.code not in _PASSING_UPLOAD:
                    raise
                failures += 1
                await self._pause(error, failures)
            else:
                job.trouble = None
                return reference

    async def _record(self, opened: OpenRound, finished: RoundRecord) -> None:
        """Commits a finished round, with the validation that it calls for."""
        job = self._job
        if job.record.state.ended:
            return
        record = replace(
            job.record, rounds_done=finished.round, units_done=job.record.units_done + finished.units
        )
        due = is_validation_round(record.settings, finished.round, record.rounds_wanted)
        validation = new_validation(job, finished, self._world.clock.now(), scheduled=True) if due else None
        async with self._world.store.begin() as tx:
            await tx.rounds.finish(record.job_id, finished)
            await tx.jobs.save(record)
            if validation is not None:
                await tx.assignments.add(validation.assignment)
                await tx.validations.add(record.job_id, StoredValidation(finished.round, scheduled=True))
        job.record = record
        job.latest = finished
        job.open_round = None
        job.trouble = None
        if validation is not None:
            job.validations[finished.round] = validation
        self._world.changed(job)


def _words(error: Exception) -> str:
    """Says what went wrong, without paths and internals."""
    if isinstance(error, CoveyError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"the coordinator's disk says: {error.strerror}"
    return "a fault of the coordinator; its log has the details"

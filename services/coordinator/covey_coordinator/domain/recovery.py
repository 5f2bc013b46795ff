"""Brings a job back from the database: after a restart, or when an ended one is needed again."""

import asyncio

import structlog

from covey_coordinator.domain.model import (
    Assignment,
    Lease,
    OpenRound,
    RoundRecord,
)
from covey_coordinator.domain.ports import Checkpoints, StoredAssignment, Transaction
from covey_coordinator.domain.rounds import plan_assignments
from covey_coordinator.domain.validations import new_validation
from covey_coordinator.domain.world import JobRun, JobSight, Member, World, job_not_found

__all__ = ["load_run", "load_sight", "recover"]

log = structlog.get_logger(__name__)


def _restore(world: World, assignment: Assignment, stored: StoredAssignment) -> None:
    """Brings back who has an assignment and what became of it.

    A lease's clocks begin anew: its participant has the silence timeout to come back, and the
    assignment timeout to finish.
    """
    assignment.attempt = stored.attempt
    assignment.result = stored.result
    assignment.faults = list(stored.faults)
    if stored.result is None and stored.participant_id is not None:
        now = world.clock.monotonic()
        start = stored.lease_time if stored.lease_time is not None else world.clock.now()
        assignment.lease = Lease(stored.participant_id, start, now, now)
        member = world.members[stored.participant_id]
        member.assignment = assignment


async def load_sight(tx: Transaction, job_id: str) -> JobSight:
    """Returns what there is to see of a job that isn't alive.

    Raises:
        NotFound: JOB_NOT_FOUND.
    """
    record = await tx.jobs.get(job_id)
    if record is None:
        raise job_not_found(job_id)
    invitations = {i.participant_id: i for i in await tx.invitations.of_job(job_id)}
    return JobSight(record, invitations, latest=await tx.rounds.get(job_id, None))


async def _load_round(world: World, tx: Transaction, job: JobRun) -> None:
    opened = await tx.rounds.opened(job.record.job_id)
    if opened is None or job.record.state.ended:
        return
    number, start_time = opened
    assignments = await asyncio.to_thread(
        plan_assignments, job.record.job_id, job.spec, number, world.clock.now()
    )
    stored = {s.id: s for s in await tx.assignments.of_round(job.record.job_id, number)}
    for assignment in assignments:
        _restore(world, assignment, stored[assignment.id])
    job.open_round = OpenRound(number, start_time, assignments)


async def _load_validations(world: World, tx: Transaction, job: JobRun) -> None:
    for pending in await tx.validations.pending(job.record.job_id):
        finished: RoundRecord | None = await tx.rounds.get(job.record.job_id, pending.round)
        if finished is None:
            log.error("a validation's round is missing", job=job.record.job_id, round=pending.round)
            continue
        validation = new_validation(job, finished, world.clock.now(), scheduled=pending.scheduled)
        stored = await tx.assignments.get(validation.assignment.id)
        if stored is not None:
            _restore(world, validation.assignment, stored)
        job.validations[pending.round] = validation


async def load_run(world: World, job_id: str) -> JobRun:
    """Returns a job brought back to life, with its open round and validations.

    Raises:
        NotFound: JOB_NOT_FOUND.
    """

    async def load(tx: Transaction) -> JobRun:
        sight = await load_sight(tx, job_id)
        spec = await tx.jobs.spec(job_id)
        assert spec is not None
        job = JobRun(sight.record, sight.invitations, latest=sight.latest, spec=spec)
        await _load_round(world, tx, job)
        await _load_validations(world, tx, job)
        return job

    return await world.store.read(load)


async def _restore_members(world: World) -> None:
    """Brings back every device that ever joined; none is connected yet, all get a moment to come back."""
    now = world.clock.monotonic()
    for record in await world.store.read(lambda tx: tx.participants.all()):
        back = now + world.options.return_time
        world.members[record.participant_id] = Member(record, disconnected_at=back, idle_since=now)


async def _check_deltas(world: World, checkpoints: Checkpoints, job: JobRun) -> None:
    """Verifies the accepted deltas of the open round; those that are lost are done again."""
    opened = job.open_round
    if opened is None:
        return
    accepted = {a.result.delta.name: a for a in opened.assignments if a.result and a.result.delta}
    deltas = [a.result.delta for a in accepted.values() if a.result and a.result.delta]
    for name in await checkpoints.recover(job.record.job_id, opened.round, deltas):
        log.error("a delta was lost; its assignment is done again", file=name)
        async with world.store.begin() as tx:
            await tx.assignments.drop_result(accepted[name].id)
        accepted[name].result = None


async def recover(world: World, checkpoints: Checkpoints) -> None:
    """Brings back everything that was in hand when the process ended, and tidies up what it left."""
    await _restore_members(world)
    alive = await world.store.read(lambda tx: tx.jobs.alive())
    for job_id in alive:
        job = await load_run(world, job_id)
        await _check_deltas(world, checkpoints, job)
        world.jobs[job_id] = job
    for job_id in await checkpoints.jobs():
        if job_id not in world.jobs or world.jobs[job_id].record.state.ended:
            await checkpoints.forget(job_id)
    if alive:
        log.info("jobs brought back", jobs=len(alive))

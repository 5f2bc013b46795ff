"""Validations: a checkpoint evaluated on held-out data, or on units of the package's own."""

from dataclasses import dataclass

from covey_coordinator.domain.model import (
    Assignment,
    AssignmentKind,
    RoundRecord,
    Validation,
    validation_id,
)
from covey_coordinator.domain.plan import EVALUATION_SEED, UnitRange
from covey_coordinator.domain.ports import StoredValidation
from covey_coordinator.domain.world import JobRun, JobSight, World
from covey_kit.errors import FailedPrecondition, NotFound, Reason

__all__ = ["ValidationAnswer", "new_validation", "request_validation"]


@dataclass(frozen=True)
class ValidationAnswer:
    """Which round is (being) validated, and whether its result is there already."""

    round: int
    done: bool


def new_validation(job: JobRun, finished: RoundRecord, now: float, *, scheduled: bool) -> Validation:
    """Returns the validation of a finished round, to be handed out."""
    package = job.spec.package
    generated = None
    if package.experience:
        generated = UnitRange(0, package.evaluation_units or 0, EVALUATION_SEED)
    assignment = Assignment(
        id=validation_id(job.record.job_id, finished.round),
        job_id=job.record.job_id,
        round=finished.round,
        index=0,
        kind=AssignmentKind.EVALUATE,
        chunks=(),
        units=generated.units if generated is not None else package.validation_examples,
        pending_since=now,
        unit_range=generated,
    )
    return Validation(finished.round, scheduled, finished.checkpoint, assignment)


def _require_validatable(job: JobSight) -> None:
    job_id = job.record.job_id
    if not job.record.can_validate:
        raise FailedPrecondition(
            Reason.JOB_STATE,
            f"job {job_id} can't be validated: its package has no held-out file (or evaluation units) "
            "or no evaluation",
            resource=("job", job_id),
        )
    if not job.accepted():
        raise FailedPrecondition(
            Reason.JOB_STATE,
            f"job {job_id} can't be validated: nobody accepted it; invite participants",
            resource=("job", job_id),
        )


async def request_validation(world: World, job: JobRun, round_number: int | None) -> ValidationAnswer:
    """Asks for the validation of a round or the latest; once is enough. Runs inside `World.exclusive`.

    Raises:
        FailedPrecondition: JOB_STATE: it can't be validated, or nobody accepted it.
        NotFound: ROUND_NOT_FOUND: that round has no checkpoint.
    """
    _require_validatable(job)
    job_id = job.record.job_id
    finished = await world.store.read(lambda tx: tx.rounds.get(job_id, round_number))
    if finished is None:
        what = (
            "has no checkpoint yet" if round_number is None else f"has no checkpoint of round {round_number}"
        )
        raise NotFound(
            Reason.ROUND_NOT_FOUND,
            f"job {job_id} {what}; list its checkpoints",
            resource=("round", f"{job_id}/{round_number if round_number is not None else 'latest'}"),
        )
    if finished.validation_metrics:
        return ValidationAnswer(finished.round, done=True)
    if finished.round in job.validations:
        return ValidationAnswer(finished.round, done=False)
    validation = new_validation(job, finished, world.clock.now(), scheduled=False)
    async with world.store.begin() as tx:
        before = await tx.assignments.get(validation.assignment.id)
        if before is not None:  # attempts are never numbered twice
            validation.assignment.attempt = before.attempt
        await tx.assignments.add(validation.assignment)
        await tx.validations.add(job_id, StoredValidation(finished.round, scheduled=False))
    job.validations[finished.round] = validation
    world.changed(job)
    return ValidationAnswer(finished.round, done=False)

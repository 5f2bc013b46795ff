"""Moves that several parts make: taking work back, counting failures, ending jobs.

Each runs inside `World.exclusive`: it commits, then changes the mirror, then tells.
"""

from collections.abc import Sequence
from dataclasses import replace

from covey_coordinator.domain.commands import CancelCommand, InvitationEndedCommand
from covey_coordinator.domain.failures import backoff, judge
from covey_coordinator.domain.model import (
    Assignment,
    AssignmentKind,
    FailureRecord,
    Fault,
    InvitationState,
    JobState,
)
from covey_coordinator.domain.world import JobRun, World

__all__ = ["bounded", "count_failure", "end_job", "free", "give_up_validation", "take_back"]

_MESSAGE_BYTES = 4096


def bounded(message: str) -> str:
    """Cuts a message to the contract's bound for failures."""
    raw = message.encode()
    return message if len(raw) <= _MESSAGE_BYTES else raw[: _MESSAGE_BYTES - 4].decode(errors="ignore") + "…"


def free(world: World, assignment: Assignment) -> None:
    """Takes an assignment from its participant in the mirror."""
    lease, assignment.lease = assignment.lease, None
    assignment.pending_since = world.clock.now()
    if lease is not None:
        member = world.members[lease.participant_id]
        if member.assignment is assignment:
            member.assignment = None
            member.idle_since = world.clock.monotonic()


async def take_back(
    world: World, job: JobRun, assignments: Sequence[Assignment], reason: str, *, tell: bool = True
) -> None:
    """Takes assignments back to the queue; with `tell`, their participants are told to stop."""
    out = [a for a in assignments if a.lease is not None]
    if not out:
        return
    async with world.store.begin() as tx:
        await tx.assignments.free([a.id for a in out])
    for assignment in out:
        _cancel(world, assignment, reason, tell=tell)
    world.changed(job)


def _cancel(world: World, assignment: Assignment, reason: str, *, tell: bool) -> None:
    if assignment.lease is not None and tell:
        member = world.members[assignment.lease.participant_id]
        member.send(CancelCommand(assignment.id, assignment.attempt, reason))
    free(world, assignment)


async def count_failure(
    world: World, job: JobRun, assignment: Assignment, fault: Fault, *, tell: bool
) -> None:
    """Counts a failed attempt and decides what follows: another try with backoff, or giving up."""
    record = replace(job.record, last_error=fault.failure)
    invitation = job.invitations.get(fault.participant_id)
    async with world.store.begin() as tx:
        await tx.assignments.fault(assignment.id, fault)
        await tx.jobs.save(record)
        if invitation is not None:
            invitation = replace(invitation, failures=invitation.failures + 1)
            await tx.invitations.save(invitation)
    job.record = record
    if invitation is not None:
        job.invitations[fault.participant_id] = invitation
    _cancel(world, assignment, fault.failure.message, tell=tell)
    assignment.faults.append(fault)
    assignment.not_before = world.clock.monotonic() + backoff(len(assignment.faults))
    evaluation = assignment.kind is AssignmentKind.EVALUATE
    siblings = [assignment] if evaluation or job.open_round is None else job.open_round.assignments
    verdict = judge(assignment, siblings, world.present(job))
    if verdict.give_up and evaluation:
        await give_up_validation(world, job, assignment.round, fault.failure, verdict.reason)
    elif verdict.give_up:
        message = bounded(f"{verdict.reason}; the last one: {fault.failure.message}")
        await end_job(world, job, JobState.FAILED, replace(fault.failure, message=message))
    world.changed(job)


async def give_up_validation(
    world: World, job: JobRun, round_number: int, failure: FailureRecord, reason: str
) -> None:
    """Ends a validation that doesn't work; the job goes on and shows the failure as its last error."""
    message = bounded(
        f"the validation of round {round_number} was given up: {reason}; the last one: {failure.message}"
    )
    record = replace(job.record, last_error=replace(failure, message=message))
    async with world.store.begin() as tx:
        await tx.validations.drop(job.record.job_id, [round_number])
        await tx.jobs.save(record)
    job.record = record
    validation = job.validations.pop(round_number, None)
    if validation is not None:
        _cancel(world, validation.assignment, "the validation was given up", tell=True)
    world.changed(job)
    world.let_go(job)


async def end_job(world: World, job: JobRun, state: JobState, failure: FailureRecord | None = None) -> None:
    """Ends a job: nothing of it is handed out any more, open invitations are gone.

    Participants that accepted aren't told: a completed job can still be validated on request.
    """
    words = {
        JobState.COMPLETED: "the job is completed",
        JobState.STOPPED: "the job was stopped by its owner",
        JobState.FAILED: "the job failed",
    }[state]
    record = replace(job.record, state=state, end_time=world.clock.now(), paused_time=None, failure=failure)
    if failure is not None:
        record = replace(record, last_error=failure)
    completed = state is JobState.COMPLETED  # then validations on request go on
    out = [
        a
        for a in job.assignments()
        if a.lease is not None and not (completed and a.kind is AssignmentKind.EVALUATE)
    ]
    dropped = [] if completed else sorted(job.validations)
    async with world.store.begin() as tx:
        await tx.jobs.save(record)
        await tx.assignments.free([a.id for a in out])
        await tx.validations.drop(record.job_id, dropped)
    job.record = record
    for assignment in out:
        _cancel(world, assignment, words, tell=True)
    for number in dropped:
        del job.validations[number]
    for invitation in job.invitations.values():
        if invitation.state is InvitationState.PENDING:
            world.members[invitation.participant_id].send(
                InvitationEndedCommand(invitation.invitation_id, record.job_id, words)
            )
    job.open_round = None
    job.trouble = None
    if job.driver is not None and not completed:
        job.driver.cancel()  # it may be waiting for storage
    world.changed(job)

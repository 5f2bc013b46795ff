"""Owners' commands on jobs."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from covey_coordinator.domain.commands import InvitationEndedCommand
from covey_coordinator.domain.continuing import Continuation, adopted_round, continued_spec
from covey_coordinator.domain.lifecycle import Command, next_state, require_deletable
from covey_coordinator.domain.making import Draft, JobMaker, JobRequest
from covey_coordinator.domain.model import CheckpointRef, InvitationState, JobState, Lineage, RoundRecord
from covey_coordinator.domain.moves import end_job, take_back
from covey_coordinator.domain.ports import BlobStorage, Checkpoints
from covey_coordinator.domain.recovery import load_run, load_sight
from covey_coordinator.domain.spec import Chunk, JobSpec, PackageSpec, SettingsRequest, UploadedFile
from covey_coordinator.domain.validate import validate_job
from covey_coordinator.domain.validations import ValidationAnswer, request_validation
from covey_coordinator.domain.world import JobRun, JobSight, World, job_not_found
from covey_kit.errors import CoveyError, FailedPrecondition, NotFound, Reason

__all__ = ["JobCommands", "NewJob"]

log = structlog.get_logger(__name__)

_TAKE_PART = (InvitationState.PENDING, InvitationState.ACCEPTED)
"""Participants of a job in these states are invited to its continuation."""


@dataclass(frozen=True)
class NewJob(JobRequest):
    """A job to be that begins with initial weights."""

    package: PackageSpec
    chunks: tuple[Chunk, ...]
    settings: SettingsRequest
    files: tuple[UploadedFile, ...]


class JobCommands:
    """Makes jobs and moves them through their lives.

    Args:
        world: everything in hand.
        storage: where the files are.
        checkpoints: the files of rounds.
        drive: starts the driver of a job.
    """

    def __init__(
        self, world: World, storage: BlobStorage, checkpoints: Checkpoints, drive: Callable[[JobRun], None]
    ) -> None:
        self._world = world
        self._storage = storage
        self._checkpoints = checkpoints
        self._maker = JobMaker(world, storage, drive, self.sight)

    @property
    def release_wake(self) -> asyncio.Event:
        """Set when something that was held may have to be released."""
        return self._maker.release_wake

    async def sight(self, job_id: str) -> JobSight:
        """Returns a job, alive or not.

        Raises:
            NotFound: JOB_NOT_FOUND.
        """
        job = self._world.jobs.get(job_id)
        if job is not None:
            return job
        return await self._world.store.read(lambda tx: load_sight(tx, job_id))

    async def create(self, new: NewJob) -> JobSight:
        """Makes a job, or says what is wrong with it.

        Raises:
            InvalidArgument: all violations.
            FailedPrecondition: BLOB_MISSING.
            AlreadyExists: REQUEST_ID_REUSED.
            ResourceExhausted: LIMIT_EXCEEDED, too many jobs live.
            Unavailable: STORAGE_UNAVAILABLE.
        """
        made = await self._maker.made_before(new)
        if made is not None:
            return made
        self._maker.require_room()
        spec = await asyncio.to_thread(validate_job, new.package, new.chunks, new.settings, new.files)
        return await self._maker.make(new, Draft(self._maker.record(spec, new.display_name), spec))

    async def continue_(self, request: Continuation) -> JobSight:
        """Makes a job that goes on from a checkpoint, or says what is wrong with it.

        Raises:
            NotFound: JOB_NOT_FOUND, CHECKPOINT_NOT_FOUND.
            InvalidArgument: all violations; CHECKPOINT_INVALID with every problem of the file.
            FailedPrecondition: BLOB_MISSING.
            AlreadyExists: REQUEST_ID_REUSED.
            ResourceExhausted: LIMIT_EXCEEDED, too many jobs live.
            Unavailable: STORAGE_UNAVAILABLE.
        """
        made = await self._maker.made_before(request)
        if made is not None:
            return made
        self._maker.require_room()
        source, spec = await self._source(request.source_job_id)
        trained = await self._base(request) if request.checkpoint is None else None
        sha256, size = _key(request, trained)
        facts = await self._storage.examine(sha256, request.package or spec.package)
        wanted = await asyncio.to_thread(continued_spec, request, spec, facts)
        record = self._maker.record(wanted, request.display_name or source.record.display_name)
        lineage = Lineage(request.source_job_id, facts.round, sha256, request.new_queue)
        record = replace(record, rounds_done=facts.round, lineage=lineage)
        base = trained or adopted_round(facts, CheckpointRef(sha256, size, 0, 0, ""), record.create_time)
        asked = [i.participant_id for i in source.invitations.values() if i.state in _TAKE_PART]
        return await self._maker.make(request, Draft(record, wanted, base, tuple(sorted(asked))))

    async def _source(self, job_id: str) -> tuple[JobSight, JobSpec]:
        source = await self.sight(job_id)
        spec = await self._world.store.read(lambda tx: tx.jobs.spec(job_id))
        if spec is None:
            raise job_not_found(job_id)
        return source, spec

    async def _base(self, request: Continuation) -> RoundRecord:
        job_id, number = request.source_job_id, request.round
        found = await self._world.store.read(lambda tx: tx.rounds.get(job_id, number))
        if found is None:
            which = f"of round {number}" if number is not None else "yet"
            raise NotFound(
                Reason.CHECKPOINT_NOT_FOUND,
                f"job {job_id} has no checkpoint {which}; list its checkpoints",
                resource=("checkpoint", f"{job_id}/{number if number is not None else 'latest'}"),
            )
        return found

    async def command(self, job_id: str, command: Command) -> JobSight:
        """Starts, pauses, resumes or stops a job; a command that changes nothing succeeds.

        Raises:
            NotFound: JOB_NOT_FOUND.
            FailedPrecondition: JOB_STATE, NOT_ENOUGH_PARTICIPANTS.
        """
        return await self._world.exclusive(lambda: self._command(job_id, command))

    async def _command(self, job_id: str, command: Command) -> JobSight:
        job = await self.sight(job_id)
        state = next_state(job_id, job.record.state, command)
        if state is job.record.state or not isinstance(job, JobRun):
            return job
        now = self._world.clock.now()
        if state is JobState.STOPPED:
            await end_job(self._world, job, state)
            return job
        if command is Command.START:
            _require_participants(job)
        record = replace(
            job.record,
            state=state,
            start_time=now if command is Command.START else job.record.start_time,
            paused_time=now if state is JobState.PAUSED else None,
        )
        async with self._world.store.begin() as tx:
            await tx.jobs.save(record)
        job.record = record
        if state is JobState.PAUSED:
            await take_back(self._world, job, list(job.assignments()), "the job was paused")
        self._world.changed(job)
        log.info("job moved", job=job_id, state=state.value)
        return job

    async def retire(self, job: JobRun) -> None:
        """Removes an ended job's files here, and forgets it when nothing is left to do."""
        job.driver = None
        await self._checkpoints.forget(job.record.job_id)

        async def change() -> None:
            self._world.let_go(job)

        await self._world.exclusive(change)

    async def delete(self, job_id: str) -> None:
        """Forgets a job. Its files in storage are released now, or as soon as storage can be reached.

        Raises:
            NotFound: JOB_NOT_FOUND.
            FailedPrecondition: JOB_STATE.
        """
        await self._world.exclusive(lambda: self._delete(job_id))
        await self.release_pending()

    async def _delete(self, job_id: str) -> None:
        job = await self.sight(job_id)
        require_deletable(job_id, job.record.state)
        if isinstance(job, JobRun):
            await take_back(self._world, job, list(job.assignments()), "the job was deleted")
        async with self._world.store.begin() as tx:
            await tx.jobs.delete(job_id)
            await tx.holders.add(job_id)
        if isinstance(job, JobRun):
            job.record = replace(job.record, state=JobState.STOPPED)
            job.validations.clear()
            del self._world.jobs[job_id]
            self._world.changed(job)
            if job.driver is not None:
                job.driver.cancel()
        for invitation in job.invitations.values():
            if invitation.state in (InvitationState.PENDING, InvitationState.ACCEPTED):
                self._world.members[invitation.participant_id].send(
                    InvitationEndedCommand(invitation.invitation_id, job_id, "the job was deleted")
                )
        log.info("job deleted", job=job_id)

    async def release_pending(self) -> bool:
        """Releases what storage still holds for jobs that are gone; False: storage can't be reached now."""
        noted = await self._world.store.read(lambda tx: tx.holders.all())
        for job_id in [job_id for job_id in noted if not self._maker.in_making(job_id)]:
            try:
                await self._storage.release(job_id)
            except CoveyError as error:
                log.warning("a job's files wait for their release", job=job_id, error=error.message)
                return False

            async def change(released: str = job_id) -> None:
                async with self._world.store.begin() as tx:
                    await tx.holders.remove(released)

            await self._world.exclusive(change)
        return True

    async def validate_round(self, job_id: str, round_number: int | None) -> ValidationAnswer:
        """Asks for a validation.

        Raises:
            NotFound: JOB_NOT_FOUND, ROUND_NOT_FOUND.
            FailedPrecondition: JOB_STATE.
        """

        async def change() -> ValidationAnswer:
            job = self._world.jobs.get(job_id)
            if job is None:
                job = await load_run(self._world, job_id)
            answer = await request_validation(self._world, job, round_number)
            if job.validations:
                self._world.jobs[job_id] = job  # an ended job lives until its validation is done
            return answer

        return await self._world.exclusive(change)


def _key(request: Continuation, trained: RoundRecord | None) -> tuple[str, int]:
    """Returns digest and size of the checkpoint file to go on from."""
    if request.checkpoint is not None:
        return request.checkpoint
    assert trained is not None
    return trained.checkpoint.sha256, trained.checkpoint.size


def _require_participants(job: JobRun) -> None:
    accepted, wanted = len(job.accepted()), job.record.settings.min_participants
    if accepted < wanted:
        raise FailedPrecondition(
            Reason.NOT_ENOUGH_PARTICIPANTS,
            f"job {job.record.job_id} needs {wanted} participants that accepted, it has {accepted}; "
            "invite more, or wait until they answer",
            resource=("job", job.record.job_id),
            metadata={"accepted": str(accepted), "min_participants": str(wanted)},
        )

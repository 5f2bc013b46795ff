"""Owners' commands on jobs."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from covey_coordinator.domain.commands import InvitationEndedCommand
from covey_coordinator.domain.lifecycle import Command, next_state, require_deletable
from covey_coordinator.domain.model import InvitationState, JobRecord, JobState
from covey_coordinator.domain.moves import end_job, take_back
from covey_coordinator.domain.plan import rounds_wanted
from covey_coordinator.domain.ports import BlobStorage, Checkpoints
from covey_coordinator.domain.recovery import load_run, load_sight
from covey_coordinator.domain.spec import Chunk, JobSpec, PackageSpec, SettingsRequest, UploadedFile
from covey_coordinator.domain.validate import validate_job
from covey_coordinator.domain.validations import ValidationAnswer, request_validation
from covey_coordinator.domain.world import JobRun, JobSight, World
from covey_kit.errors import AlreadyExists, CoveyError, FailedPrecondition, Reason, ResourceExhausted
from covey_kit.ids import new_id

__all__ = ["JobCommands", "NewJob"]

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class NewJob:
    """A job to be.

    Attributes:
        request_id: makes the creation idempotent; empty: it isn't.
        fingerprint: digest of the request without its id and `validate_only`.
    """

    request_id: str
    fingerprint: str
    validate_only: bool
    display_name: str
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
        self._drive = drive
        self._making: dict[str, asyncio.Task[JobSight]] = {}
        self.release_wake = asyncio.Event()

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
            Unimplemented: an experience package.
            ResourceExhausted: LIMIT_EXCEEDED, too many jobs live.
            Unavailable: STORAGE_UNAVAILABLE.
        """
        made = await self._made_before(new)
        if made is not None:
            return made
        if len(self._world.jobs) + len(self._making) >= self._world.options.max_jobs:
            raise ResourceExhausted(
                Reason.LIMIT_EXCEEDED,
                f"{len(self._world.jobs)} jobs haven't ended, as many as may be; stop or delete some",
            )
        spec = await asyncio.to_thread(validate_job, new.package, new.chunks, new.settings, new.files)
        blobs = _blobs(spec)
        await self._require_stored(blobs)
        record = self._record(new, spec)
        if new.validate_only:
            return JobSight(replace(record, job_id=""))
        making = asyncio.create_task(self._make(new, record, spec, list(blobs)))
        self._making[record.job_id] = making
        making.add_done_callback(lambda _: self._made(record.job_id))
        return await asyncio.shield(making)  # a caller that hangs up mustn't leave half a job

    async def _made_before(self, new: NewJob) -> JobSight | None:
        if not new.request_id or new.validate_only:
            return None
        found = await self._world.store.read(lambda tx: tx.requests.get(new.request_id))
        if found is None:
            return None
        fingerprint, job_id = found
        if fingerprint != new.fingerprint:
            raise AlreadyExists(
                Reason.REQUEST_ID_REUSED,
                f"request id {new.request_id} made job {job_id} from another request; use a new id",
                resource=("job", job_id),
            )
        return await self.sight(job_id)

    async def _require_stored(self, blobs: dict[str, tuple[int, str]]) -> None:
        missing = await self._storage.missing([(sha256, size) for sha256, (size, _) in blobs.items()])
        if missing:
            names = [f"{blobs[sha256][1]} ({sha256})" for sha256 in missing]
            more = f", and {len(names) - 20} more" if len(names) > 20 else ""
            raise FailedPrecondition(
                Reason.BLOB_MISSING,
                f"{len(names)} files aren't in storage: {', '.join(names[:20])}{more}; "
                "write them, then create the job again",
                metadata={"missing": ",".join(missing[:200])},
            )

    def _record(self, new: NewJob, spec: JobSpec) -> JobRecord:
        return JobRecord(
            job_id=new_id(spec.package.name),
            display_name=new.display_name or spec.package.name,
            state=JobState.CREATED,
            create_time=self._world.clock.now(),
            package_name=spec.package.name,
            package_version=spec.package.version,
            unit=spec.package.unit,
            settings=spec.settings,
            chunk_count=len(spec.chunks),
            can_validate=spec.package.can_validate,
            rounds_wanted=rounds_wanted(spec.settings, len(spec.chunks)),
        )

    async def _make(self, new: NewJob, record: JobRecord, spec: JobSpec, digests: list[str]) -> JobSight:
        """References the files, then commits the job. Dying in between leaves a note to release them."""

        async def note() -> None:
            async with self._world.store.begin() as tx:
                await tx.holders.add(record.job_id)

        async def commit() -> JobSight:
            made = await self._made_before(new)  # by a call that ran beside this one
            if made is not None:
                return made
            async with self._world.store.begin() as tx:
                await tx.jobs.add(record, spec)
                await tx.holders.remove(record.job_id)
                if new.request_id:
                    await tx.requests.add(new.request_id, new.fingerprint, record.job_id)
            job = JobRun(record, spec=spec)
            self._world.jobs[record.job_id] = job
            self._drive(job)
            log.info("job created", job=record.job_id, chunks=len(spec.chunks), rounds=record.rounds_wanted)
            return job

        await self._world.exclusive(note)
        await self._storage.hold(record.job_id, digests)
        return await self._world.exclusive(commit)

    def _made(self, job_id: str) -> None:
        task = self._making.pop(job_id)
        if not task.cancelled():
            task.exception()  # seen: the caller got it, or has gone
        self.release_wake.set()

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
        for job_id in [job_id for job_id in noted if job_id not in self._making]:
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


def _blobs(spec: JobSpec) -> dict[str, tuple[int, str]]:
    """Returns size and file name of everything that a job needs, by digest."""
    blobs = {file.sha256: (file.size, file.file_name) for _, file in spec.package.files()}
    return blobs | {chunk.sha256: (chunk.size, chunk.file_name) for chunk in spec.chunks}


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

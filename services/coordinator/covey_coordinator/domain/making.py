"""How a job comes to be: its files are held, its record is committed, and nothing is left half made."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import structlog

from covey_coordinator.domain.invitations import invitation_command
from covey_coordinator.domain.model import Invitation, InvitationState, JobRecord, JobState, RoundRecord
from covey_coordinator.domain.plan import rounds_wanted
from covey_coordinator.domain.ports import BlobStorage
from covey_coordinator.domain.spec import JobSpec
from covey_coordinator.domain.world import JobRun, JobSight, World
from covey_kit.errors import AlreadyExists, FailedPrecondition, Reason, ResourceExhausted
from covey_kit.ids import new_id

__all__ = ["Draft", "JobMaker", "JobRequest"]

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class JobRequest:
    """A call that makes a job.

    Attributes:
        request_id: makes the creation idempotent; empty: it isn't.
        fingerprint: digest of the request without its id and `validate_only`.
        display_name: what people will call the job; empty: the default.
    """

    request_id: str
    fingerprint: str
    validate_only: bool
    display_name: str


@dataclass(frozen=True)
class Draft:
    """A job that could be made.

    Attributes:
        base: the finished round that it goes on from; None: it begins with initial weights.
        invited: participants that are asked at once.
    """

    record: JobRecord
    spec: JobSpec
    base: RoundRecord | None = None
    invited: tuple[str, ...] = ()

    def blobs(self) -> dict[str, tuple[int, str]]:
        """Returns size and file name of everything that the job needs, by digest."""
        blobs = {file.sha256: (file.size, file.file_name) for _, file in self.spec.package.files()}
        blobs |= {chunk.sha256: (chunk.size, chunk.file_name) for chunk in self.spec.chunks}
        if self.base is not None:
            checkpoint = self.base.checkpoint
            blobs[checkpoint.sha256] = (checkpoint.size, f"the checkpoint of round {self.base.round}")
        return blobs


class JobMaker:
    """Makes jobs.

    Args:
        world: everything in hand.
        storage: where the files are.
        drive: starts the driver of a job.
        sight: returns a job, alive or not.
    """

    def __init__(
        self,
        world: World,
        storage: BlobStorage,
        drive: Callable[[JobRun], None],
        sight: Callable[[str], Awaitable[JobSight]],
    ) -> None:
        self._world = world
        self._storage = storage
        self._drive = drive
        self._sight = sight
        self._making: dict[str, asyncio.Task[JobSight]] = {}
        self.release_wake = asyncio.Event()
        """Set when something that was held may have to be released."""

    def in_making(self, job_id: str) -> bool:
        """Says whether a job is just being made: its holder isn't to be released."""
        return job_id in self._making

    async def made_before(self, request: JobRequest) -> JobSight | None:
        """Returns the job that the same request made before.

        Raises:
            AlreadyExists: REQUEST_ID_REUSED: another request made one.
        """
        if not request.request_id or request.validate_only:
            return None
        found = await self._world.store.read(lambda tx: tx.requests.get(request.request_id))
        if found is None:
            return None
        fingerprint, job_id = found
        if fingerprint != request.fingerprint:
            raise AlreadyExists(
                Reason.REQUEST_ID_REUSED,
                f"request id {request.request_id} made job {job_id} from another request; use a new id",
                resource=("job", job_id),
            )
        return await self._sight(job_id)

    def require_room(self) -> None:
        """Checks that one more job may live.

        Raises:
            ResourceExhausted: LIMIT_EXCEEDED.
        """
        if len(self._world.jobs) + len(self._making) >= self._world.options.max_jobs:
            raise ResourceExhausted(
                Reason.LIMIT_EXCEEDED,
                f"{len(self._world.jobs)} jobs haven't ended, as many as may be; stop or delete some",
            )

    def record(self, spec: JobSpec, display_name: str) -> JobRecord:
        """Returns the record of a new job."""
        return JobRecord(
            job_id=new_id(spec.package.name),
            display_name=display_name or spec.package.name,
            state=JobState.CREATED,
            create_time=self._world.clock.now(),
            package_name=spec.package.name,
            package_version=spec.package.version,
            unit=spec.package.unit,
            settings=spec.settings,
            chunk_count=len(spec.chunks),
            can_validate=spec.package.can_validate,
            rounds_wanted=rounds_wanted(spec.settings, len(spec.chunks)),
            origin=spec.origin,
        )

    async def make(self, request: JobRequest, draft: Draft) -> JobSight:
        """Makes the job, or with `validate_only` says what it would be.

        Raises:
            FailedPrecondition: BLOB_MISSING: all missing files are named.
            InvalidArgument: CHECKPOINT_INVALID, the base can't be the job's.
            Unavailable: STORAGE_UNAVAILABLE.
        """
        blobs = draft.blobs()
        await self._require_stored(blobs)
        if request.validate_only:
            return JobSight(replace(draft.record, job_id=""), latest=draft.base)
        job_id = draft.record.job_id
        making = asyncio.create_task(self._make(request, draft, list(blobs)))
        self._making[job_id] = making
        making.add_done_callback(lambda _: self._made(job_id))
        return await asyncio.shield(making)  # a caller that hangs up mustn't leave half a job

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

    async def _make(self, request: JobRequest, draft: Draft, digests: list[str]) -> JobSight:
        """References the files, then commits the job. Dying in between leaves a note to release them."""
        job_id = draft.record.job_id

        async def note() -> None:
            async with self._world.store.begin() as tx:
                await tx.holders.add(job_id)

        await self._world.exclusive(note)
        await self._storage.hold(job_id, digests)
        base = draft.base
        if base is not None:
            held = await self._storage.adopt(job_id, draft.spec, base.round, base.checkpoint)
            base = replace(base, checkpoint=held)
        return await self._world.exclusive(lambda: self._commit(request, replace(draft, base=base)))

    async def _commit(self, request: JobRequest, draft: Draft) -> JobSight:
        made = await self.made_before(request)  # by a call that ran beside this one
        if made is not None:
            return made
        record, spec = draft.record, draft.spec
        invitations = {who: self._invitation(record.job_id, who) for who in draft.invited}
        async with self._world.store.begin() as tx:
            await tx.jobs.add(record, spec)
            if draft.base is not None:
                await tx.rounds.adopt(record.job_id, draft.base)
            for invitation in invitations.values():
                await tx.invitations.save(invitation)
            await tx.holders.remove(record.job_id)
            if request.request_id:
                await tx.requests.add(request.request_id, request.fingerprint, record.job_id)
        job = JobRun(record, invitations, latest=draft.base, spec=spec)
        self._world.jobs[record.job_id] = job
        for invitation in invitations.values():
            member = self._world.members[invitation.participant_id]
            member.send(invitation_command(record, spec, invitation))
        self._drive(job)
        log.info("job created", job=record.job_id, chunks=len(spec.chunks), rounds=record.rounds_wanted)
        return job

    def _invitation(self, job_id: str, participant_id: str) -> Invitation:
        now = self._world.clock.now()
        return Invitation(new_id("inv", 16), job_id, participant_id, InvitationState.PENDING, now)

    def _made(self, job_id: str) -> None:
        task = self._making.pop(job_id)
        if not task.cancelled():
            task.exception()  # seen: the caller got it, or has gone
        self.release_wake.set()

"""Jobs: made, commanded, watched."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from covey.client._connection import Connection, never_answered
from covey.client._storage import LocalBlob, Storage, UploadProgress
from covey.packages import Dataset, Package
from covey.v1 import common_pb2, job_pb2
from covey.v1 import coordinator_service_pb2 as pb
from covey.v1 import coordinator_service_pb2_grpc as pb_grpc
from covey_kit.bulk import digest_file
from covey_kit.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Reason,
    Unavailable,
)

__all__ = ["ENDED", "Jobs"]

ENDED = frozenset(
    {job_pb2.JOB_STATE_COMPLETED, job_pb2.JOB_STATE_STOPPED, job_pb2.JOB_STATE_FAILED},
)
"""States that a job never leaves."""

# In the class, `list` is the method.
JobList: TypeAlias = list[job_pb2.Job]
RoundList: TypeAlias = list[job_pb2.RoundSummary]

VALIDATION_POLL_SECONDS = 0.1
VALIDATION_SECONDS = 600.0
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 2.0


class Jobs:
    """Training runs."""

    def __init__(self, connection: Connection, storage: Storage) -> None:
        self._connection = connection
        self._storage = storage
        self._stub = pb_grpc.CoordinatorServiceStub(connection.coordinator)

    async def create(
        self,
        package: Package,
        dataset: Dataset | None = None,
        settings: job_pb2.JobSettings | None = None,
        *,
        display_name: str = "",
        request_id: str | None = None,
        validate_only: bool = False,
        on_progress: Callable[[UploadProgress], None] | None = None,
    ) -> job_pb2.Job:
        """Uploads what storage doesn't have yet and makes a job.

        Args:
            package: as `covey.packages.load` checked it.
            dataset: as `covey.packages.load_dataset` checked it; None for packages that read no data.
            settings: None: all defaults.
            display_name: empty: the package's name.
            request_id: the same id again returns the job made before. None: a new one.
            validate_only: check everything, upload and make nothing; the job returned has no id.
            on_progress: called after each piece that was uploaded.

        Raises:
            InvalidArgument: the coordinator's violations, all at once.
            FailedPrecondition: BLOB_MISSING, with `validate_only` alone: everything else is right, but
                files aren't in storage yet.
        """
        files = _files(package, dataset)
        if not validate_only:
            await self._storage.upload(list(files.values()), on_progress=on_progress)
        request = pb.CreateJobRequest(
            request_id=request_id or str(uuid.uuid4()),
            validate_only=validate_only,
            display_name=display_name,
            package=package.manifest,
            settings=settings,
            files=_uploaded(files),
        )
        if dataset is not None:
            request.dataset.CopyFrom(dataset.manifest)
        with self._connection.calls():
            return (await self._stub.CreateJob(request)).job

    async def continue_from(
        self,
        source_job_id: str,
        target_round: int,
        *,
        round_number: int | None = None,
        checkpoint: Path | None = None,
        dataset: Dataset | None = None,
        package: Package | None = None,
        settings: job_pb2.JobSettings | None = None,
        new_queue: bool = False,
        display_name: str = "",
        request_id: str | None = None,
        validate_only: bool = False,
        on_progress: Callable[[UploadProgress], None] | None = None,
    ) -> job_pb2.Job:
        """Uploads what storage doesn't have yet and makes a job that goes on from a checkpoint.

        The source job's participants are invited again; the new job waits to be started.

        Args:
            source_job_id: the job to go on from.
            target_round: the final round of the new job.
            round_number: the source's round to go on from. None: the latest.
            checkpoint: a checkpoint file of the same package to go on from in place of the source's own.
            dataset: None: the source's.
            package: where files that say how it runs are new. None: the source's.
            settings: those that differ from the source's.
            new_queue: begin a new queue of chunks (a new sequence of units); needed with another dataset.
            display_name: empty: the source's.
            request_id: the same id again returns the job made before. None: a new one.
            validate_only: check everything and make nothing; files are uploaded only without it.
            on_progress: called after each piece that was uploaded.

        Raises:
            NotFound: no such job, or no checkpoint of that round.
            InvalidArgument: the coordinator's violations, all at once; every problem of the checkpoint.
            FailedPrecondition: BLOB_MISSING, with `validate_only` alone.
        """
        files = _files(package, dataset)
        blob = await asyncio.to_thread(_local, checkpoint) if checkpoint is not None else None
        if not validate_only:
            wanted = [*files.values(), *([blob] if blob is not None else [])]
            await self._storage.upload(wanted, on_progress=on_progress)
        request = pb.ContinueJobRequest(
            request_id=request_id or str(uuid.uuid4()),
            validate_only=validate_only,
            source_job_id=source_job_id,
            round=round_number,
            target_round=target_round,
            settings=settings,
            dataset=dataset.manifest if dataset is not None else None,
            files=_uploaded(files),
            checkpoint=_ref(blob) if blob is not None else None,
            display_name=display_name,
            new_queue=new_queue,
            package=package.manifest if package is not None else None,
        )
        with self._connection.calls():
            return (await self._stub.ContinueJob(request)).job

    async def get(self, job_id: str) -> job_pb2.Job:
        """Returns the job as it is now.

        Raises:
            NotFound: no such job.
        """
        with self._connection.calls():
            return (await self._stub.GetJob(pb.GetJobRequest(job_id=job_id))).job

    async def list(self, states: Sequence[job_pb2.JobState.ValueType] = ()) -> JobList:
        """Returns all jobs (or those in `states`), the newest first."""
        found: list[job_pb2.Job] = []
        request = pb.ListJobsRequest(states=states, page_size=1000)
        while True:
            with self._connection.calls():
                page = await self._stub.ListJobs(request)
            found += page.jobs
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    async def rounds(self, job_id: str) -> RoundList:
        """Returns the finished rounds in order, from round 0.

        Raises:
            NotFound: no such job.
        """
        found: list[job_pb2.RoundSummary] = []
        request = pb.ListRoundsRequest(job_id=job_id, page_size=1000)
        while True:
            with self._connection.calls():
                page = await self._stub.ListRounds(request)
            found += page.rounds
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    async def watch(self, job_id: str, *, patience: float = 30.0) -> AsyncIterator[job_pb2.Job]:
        """Yields the job's state at once and then whenever it changes, until it has ended.

        A coordinator that goes away is called again with backoff: its restart isn't the watcher's end.

        Args:
            job_id: the job.
            patience: seconds without any answer after which the watch gives up.

        Raises:
            NotFound: no such job.
            Unavailable: nobody answered for `patience` seconds.
        """
        backoff, silent_since, ended = FIRST_BACKOFF, None, False
        clock = asyncio.get_running_loop().time
        while True:
            try:
                async for job in self._watch_once(job_id):
                    backoff, silent_since, ended = FIRST_BACKOFF, None, job.state in ENDED
                    yield job
                    if ended and not job.pending_validation_rounds:
                        return
                if ended:
                    return
            except Unavailable as error:
                if not (never_answered(error) or error.reason is Reason.SHUTTING_DOWN):
                    raise
                silent_since = clock() if silent_since is None else silent_since
                if clock() - silent_since >= patience:
                    raise
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, LONGEST_BACKOFF)

    async def _watch_once(self, job_id: str) -> AsyncIterator[job_pb2.Job]:
        with self._connection.calls():
            call = self._stub.WatchJob(pb.WatchJobRequest(job_id=job_id))
            try:
                async for response in call:
                    yield response.job
            finally:
                call.cancel()

    async def start(self, job_id: str) -> job_pb2.Job:
        """Starts a job that was created.

        Raises:
            NotFound: no such job.
            FailedPrecondition: JOB_STATE, or NOT_ENOUGH_PARTICIPANTS.
        """
        with self._connection.calls():
            return (await self._stub.StartJob(pb.StartJobRequest(job_id=job_id))).job

    async def pause(self, job_id: str) -> job_pb2.Job:
        """Takes back what is being worked on and hands out nothing more.

        Raises:
            NotFound: no such job.
            FailedPrecondition: JOB_STATE.
        """
        with self._connection.calls():
            return (await self._stub.PauseJob(pb.PauseJobRequest(job_id=job_id))).job

    async def resume(self, job_id: str) -> job_pb2.Job:
        """Goes on with a paused job.

        Raises:
            NotFound: no such job.
            FailedPrecondition: JOB_STATE.
        """
        with self._connection.calls():
            return (await self._stub.ResumeJob(pb.ResumeJobRequest(job_id=job_id))).job

    async def stop(self, job_id: str) -> job_pb2.Job:
        """Ends a job; its checkpoints stay.

        Raises:
            NotFound: no such job.
            FailedPrecondition: JOB_STATE.
        """
        with self._connection.calls():
            return (await self._stub.StopJob(pb.StopJobRequest(job_id=job_id))).job

    async def delete(self, job_id: str) -> pb.DeleteJobResponse:
        """Forgets an ended (or never started) job and its checkpoints, and returns what that freed.

        Raises:
            NotFound: no such job.
            FailedPrecondition: JOB_STATE.
        """
        with self._connection.calls():
            return await self._stub.DeleteJob(pb.DeleteJobRequest(job_id=job_id))

    async def validate(self, job_id: str, round_number: int | None = None) -> pb.RunValidationResponse:
        """Asks for a validation of a round's checkpoint (None: the latest) and returns at once.

        The result appears in `rounds`.

        Raises:
            NotFound: no such job, or that round has no checkpoint.
            FailedPrecondition: JOB_STATE: the package can't be validated, or nobody accepted the job.
        """
        request = pb.RunValidationRequest(job_id=job_id, round=round_number)
        with self._connection.calls():
            return await self._stub.RunValidation(request)

    async def validation_of(
        self, job_id: str, round_number: int, *, timeout: float = VALIDATION_SECONDS
    ) -> job_pb2.RoundSummary:
        """Waits until the validation that was asked for is done, and returns the round with its metrics.

        Raises:
            NotFound: no such job, or that round has no checkpoint.
            FailedPrecondition: JOB_STATE: the validation isn't waited for any more and has no result.
            DeadlineExceeded: it took longer than `timeout` seconds; the job's state says what it waits for.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            job = await self.get(job_id)
            if round_number not in job.pending_validation_rounds:
                break
            if asyncio.get_running_loop().time() >= deadline:
                waits = (
                    "; ".join(wait.message for wait in job.waits) or "its state doesn't say what it waits for"
                )
                raise DeadlineExceeded(
                    Reason.DEADLINE, f"round {round_number} wasn't validated in {timeout:.0f} s: {waits}"
                )
            await asyncio.sleep(VALIDATION_POLL_SECONDS)
        for summary in await self.rounds(job_id):
            if summary.round == round_number:
                if not summary.validation_metrics:
                    why = job.last_error.message if job.HasField("last_error") else "no error is recorded"
                    raise FailedPrecondition(
                        Reason.JOB_STATE, f"round {round_number} of {job_id} has no validation result: {why}"
                    )
                return summary
        raise NotFound(Reason.ROUND_NOT_FOUND, f"{job_id} has no round {round_number}")


def _local(path: Path) -> LocalBlob:
    """Returns a file on this machine by its content. Blocks."""
    try:
        size, sha256 = digest_file(path)
    except OSError as error:
        raise InvalidArgument(Reason.DEVICE, f"{path} can't be read: {error.strerror or error}") from error
    return LocalBlob(path, sha256, size)


def _ref(blob: LocalBlob) -> common_pb2.BlobRef:
    return common_pb2.BlobRef(sha256=blob.sha256, size_bytes=blob.size)


def _uploaded(files: dict[str, LocalBlob]) -> Sequence[common_pb2.UploadedFile]:
    return [common_pb2.UploadedFile(file_name=name, blob=_ref(blob)) for name, blob in files.items()]


def _files(package: Package | None, dataset: Dataset | None) -> dict[str, LocalBlob]:
    """Returns every file of the job by name: the package's first, then the dataset's."""
    files = {}
    if package is not None:
        files = {
            item.file_name: LocalBlob(package.path_of(item.file_name), item.sha256, item.size)
            for item in package.files()
        }
    if dataset is not None:
        for item in dataset.files():
            files.setdefault(item.file_name, LocalBlob(dataset.paths[item.file_name], item.sha256, item.size))
    return files

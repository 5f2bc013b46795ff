"""Blobs: what is stored, and getting files there."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from covey.client._connection import Connection
from covey.v1 import common_pb2
from covey.v1 import storage_service_pb2 as pb
from covey.v1 import storage_service_pb2_grpc as pb_grpc
from covey_kit import blobs

__all__ = ["LocalBlob", "Storage", "UploadProgress"]

UPLOADS_AT_ONCE = 4
BLOBS_A_QUESTION = 10_000


@dataclass(frozen=True)
class LocalBlob:
    """A file on this machine, by its content."""

    path: Path
    sha256: str
    size: int


@dataclass(frozen=True)
class UploadProgress:
    """How far an upload is.

    Attributes:
        bytes_done: bytes that storage has.
        bytes_total: bytes in all; those that were there before are counted as done.
        files_done: files that storage has whole.
        files_total: files in all.
    """

    bytes_done: int
    bytes_total: int
    files_done: int
    files_total: int


class Storage:
    """The mesh's storage."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def _stub(self) -> pb_grpc.StorageServiceStub:
        return pb_grpc.StorageServiceStub(await self._connection.storage())

    async def missing(self, files: Sequence[LocalBlob]) -> list[LocalBlob]:
        """Returns those of `files` that storage doesn't have, each content once."""
        stub = await self._stub()
        by_digest = {file.sha256: file for file in files}
        absent: set[str] = set()
        wanted = list(by_digest.values())
        for first in range(0, len(wanted), BLOBS_A_QUESTION):
            some = wanted[first : first + BLOBS_A_QUESTION]
            request = pb.FindMissingBlobsRequest(
                blobs=[common_pb2.BlobRef(sha256=file.sha256, size_bytes=file.size) for file in some]
            )
            with self._connection.calls(storage=True):
                absent.update(blob.sha256 for blob in (await stub.FindMissingBlobs(request)).missing)
        return [file for digest, file in by_digest.items() if digest in absent]

    async def upload(
        self,
        files: Sequence[LocalBlob],
        *,
        on_progress: Callable[[UploadProgress], None] | None = None,
    ) -> int:
        """Writes the files that storage doesn't have, some at a time; a cut transfer goes on where it was.

        Returns:
            The number of files that were sent.

        Raises:
            InvalidArgument: DIGEST_MISMATCH: a file changed after it was hashed.
            ResourceExhausted: it is too large, or there is no room.
        """
        absent = await self.missing(files)
        channel = await self._connection.storage()
        total = sum(file.size for file in {file.sha256: file for file in files}.values())
        sent = {file.sha256: 0 for file in absent}
        known = total - sum(file.size for file in absent)
        whole = len({file.sha256 for file in files}) - len(absent)
        gate = asyncio.Semaphore(UPLOADS_AT_ONCE)
        finished = 0

        def report() -> None:
            if on_progress is not None:
                on_progress(
                    UploadProgress(known + sum(sent.values()), total, whole + finished, whole + len(absent))
                )

        async def one(file: LocalBlob) -> None:
            nonlocal finished

            def advance(done: int, _total: int) -> None:
                sent[file.sha256] = done
                report()

            async with gate:
                with self._connection.calls(storage=True):
                    await blobs.write_blob(channel, file.path, file.sha256, file.size, on_progress=advance)
            sent[file.sha256] = file.size
            finished += 1
            report()

        report()
        try:
            async with asyncio.TaskGroup() as group:
                for file in absent:
                    group.create_task(one(file))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first one ended the others
        return len(absent)

    async def inventory(self) -> pb.GetInventoryResponse:
        """Returns the totals, and every blob in one list."""
        stub = await self._stub()
        request = pb.GetInventoryRequest(page_size=10_000)
        whole: pb.GetInventoryResponse | None = None
        while True:
            with self._connection.calls(storage=True):
                page = await stub.GetInventory(request)
            if whole is None:
                whole = page
            else:
                whole.blobs.extend(page.blobs)
            if not page.next_page_token:
                whole.next_page_token = ""
                return whole
            request.page_token = page.next_page_token

    async def scrub(self) -> AsyncIterator[pb.ScrubResponse]:
        """Hashes every blob again and yields progress; the last message has `done`."""
        stub = await self._stub()
        with self._connection.calls(storage=True):
            call = stub.Scrub(pb.ScrubRequest())
            try:
                async for response in call:
                    yield response
            finally:
                call.cancel()

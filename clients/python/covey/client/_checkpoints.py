"""Checkpoints: listed, exported, verified."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import grpc.aio

from covey.client._connection import Connection
from covey.v1 import checkpoint_pb2, storage_service_pb2, storage_service_pb2_grpc
from covey.v1 import coordinator_service_pb2 as pb
from covey.v1 import coordinator_service_pb2_grpc as pb_grpc
from covey_kit.bulk import FileSink
from covey_kit.errors import DataLoss, InvalidArgument, Reason
from covey_kit.files import sync_folder

__all__ = ["Checkpoints"]

CheckpointList: TypeAlias = list[checkpoint_pb2.Checkpoint]
"""In the class, `list` is the method."""


class Checkpoints:
    """The results of rounds."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub = pb_grpc.CoordinatorServiceStub(connection.coordinator)

    async def list(self, job_id: str) -> CheckpointList:
        """Returns the job's checkpoints by round.

        Raises:
            NotFound: no such job.
        """
        found: list[checkpoint_pb2.Checkpoint] = []
        request = pb.CoordinatorServiceListCheckpointsRequest(job_id=job_id, page_size=1000)
        while True:
            with self._connection.calls():
                page = await self._stub.ListCheckpoints(request)
            found += page.checkpoints
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    async def export(
        self,
        job_id: str,
        path: Path | str,
        round_number: int | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> checkpoint_pb2.Checkpoint:
        """Writes a round's checkpoint (None: the latest) to `path`: whole and verified, or not at all.

        Args:
            job_id: the job.
            path: the file; replaced if it exists.
            round_number: None: the latest.
            on_progress: called with (bytes done, bytes in all).

        Raises:
            NotFound: no such job or checkpoint.
            DataLoss: what came isn't what was announced.
            InvalidArgument: the folder can't be written to.
        """
        path = Path(path)
        request = pb.ExportCheckpointRequest(job_id=job_id, round=round_number)
        with self._connection.calls():
            call = self._stub.ExportCheckpoint(request)
            try:
                first = await call.read()
                if not isinstance(first, pb.ExportCheckpointResponse) or not first.HasField("checkpoint"):
                    raise DataLoss(Reason.SIZE_MISMATCH, "the export began without the checkpoint's record")
                await self._receive(call, first.checkpoint, path, on_progress)
            finally:
                call.cancel()
        return first.checkpoint

    async def _receive(
        self,
        call: "grpc.aio.UnaryStreamCall[pb.ExportCheckpointRequest, pb.ExportCheckpointResponse]",
        record: checkpoint_pb2.Checkpoint,
        path: Path,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")  # beside it, so that the rename is atomic
        try:
            sink = await FileSink.open(temporary)
        except OSError as error:
            raise InvalidArgument(
                Reason.DEVICE, f"{path} can't be written: {error.strerror or error}"
            ) from error
        try:
            while isinstance(message := await call.read(), pb.ExportCheckpointResponse):
                if sink.size + len(message.data) > record.blob.size_bytes:
                    break
                await sink.write(message.data)
                if on_progress is not None:
                    on_progress(sink.size, record.blob.size_bytes)
            size, sha256 = await sink.finish()
            if size != record.blob.size_bytes or sha256 != record.blob.sha256:
                raise DataLoss(
                    Reason.DIGEST_MISMATCH,
                    f"round {record.round}: announced {record.blob.size_bytes:,} bytes with SHA-256 "
                    f"{record.blob.sha256}, received {size:,} with {sha256}; export it again",
                )
            await asyncio.to_thread(_publish, temporary, path)
        finally:
            await sink.abort()

    async def verify(
        self, job_id: str, round_number: int | None = None
    ) -> tuple[checkpoint_pb2.Checkpoint, storage_service_pb2.VerifyCheckpointResponse]:
        """Has storage read a round's checkpoint (None: the latest) whole, and returns it with what is wrong.

        Raises:
            NotFound: no such job or checkpoint.
        """
        stub = storage_service_pb2_grpc.StorageServiceStub(await self._connection.storage())
        request = storage_service_pb2.GetCheckpointRequest(job_id=job_id, round=round_number)
        with self._connection.calls(storage=True):
            record = (await stub.GetCheckpoint(request)).checkpoint
            verdict = await stub.VerifyCheckpoint(
                storage_service_pb2.VerifyCheckpointRequest(sha256=record.blob.sha256)
            )
        return record, verdict


def _publish(temporary: Path, path: Path) -> None:
    """Gives a whole file its name, and the mode that files have that aren't secret."""
    temporary.chmod(0o644)
    temporary.replace(path)
    sync_folder(path.parent)

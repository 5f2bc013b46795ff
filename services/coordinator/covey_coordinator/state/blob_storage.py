"""The way to the storage service."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TypeAlias, cast

import grpc.aio

from covey.v1 import checkpoint_pb2, common_pb2, storage_service_pb2, storage_service_pb2_grpc
from covey_coordinator.convert.checkpoint import (
    expectation_to_proto,
    facts_from_proto,
    package_expectation_to_proto,
    problems_from_proto,
)
from covey_coordinator.convert.values import checkpoint_from_proto
from covey_coordinator.domain.model import CheckpointRef
from covey_coordinator.domain.ports import CheckpointFacts
from covey_coordinator.domain.spec import JobSpec, PackageSpec
from covey_kit.caller import Role
from covey_kit.channel import connect
from covey_kit.errors import (
    CoveyError,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Reason,
    Unavailable,
)
from covey_kit.status import rpc_errors
from covey_kit.tokens import SigningKey

__all__ = ["StorageLink"]

_ReadCall: TypeAlias = (
    "grpc.aio.UnaryStreamCall[storage_service_pb2.ReadBlobRequest, storage_service_pb2.ReadBlobResponse]"
)

_TOKEN_SECONDS = 3600.0


class StorageLink:
    """Calls storage as a service, with tokens that the coordinator signs itself.

    Args:
        key: signs the tokens.
        root_cert: PEM of the root certificates; None: plain text.
    """

    def __init__(self, key: SigningKey, root_cert: Path | None = None) -> None:
        self._key = key
        self._root_cert = root_cert
        self._channel: grpc.aio.Channel | None = None
        self.address = ""

    def use(self, address: str) -> None:
        """Says where storage is. Nothing is called yet."""
        self.address = address

    def _token(self) -> str:
        return self._key.issue("coordinator", Role.SERVICE, _TOKEN_SECONDS)

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel; connects at the first call."""
        if self._channel is None:
            if not self.address:
                raise Unavailable(
                    Reason.STORAGE_UNAVAILABLE, "no storage address is set; start with --storage HOST:PORT"
                )
            self._channel = connect(self.address, self._token, root_cert=self._root_cert)
        return self._channel

    @property
    def _stub(self) -> storage_service_pb2_grpc.StorageServiceStub:
        return storage_service_pb2_grpc.StorageServiceStub(self.channel)

    def _told(self, error: CoveyError) -> CoveyError:
        """Says that it was storage that can't be reached."""
        if isinstance(error, (Unavailable, DeadlineExceeded)):
            return Unavailable(
                Reason.STORAGE_UNAVAILABLE,
                f"storage at {self.address} can't be reached: {error.message}",
                retry_after=error.retry_after or 1.0,
            )
        return error

    async def missing(self, files: Sequence[tuple[str, int]]) -> list[str]:
        """Returns the digests, of (digest, size) pairs, that aren't stored with that size."""
        request = storage_service_pb2.FindMissingBlobsRequest(
            blobs=[common_pb2.BlobRef(sha256=sha256, size_bytes=size) for sha256, size in files]
        )
        try:
            with rpc_errors():
                response = await self._stub.FindMissingBlobs(request)
        except CoveyError as error:
            raise self._told(error) from error
        return [blob.sha256 for blob in response.missing]

    async def hold(self, job_id: str, digests: Sequence[str]) -> None:
        """References blobs for a job. Raises FailedPrecondition (BLOB_MISSING)."""
        request = storage_service_pb2.AddReferencesRequest(holder=f"jobs/{job_id}", sha256=digests)
        try:
            with rpc_errors():
                await self._stub.AddReferences(request)
        except CoveyError as error:
            raise self._told(error) from error

    async def release(self, job_id: str) -> None:
        """Drops a job's references and checkpoints, and the blobs that nobody else needs."""
        request = storage_service_pb2.ReleaseHolderRequest(holder=f"jobs/{job_id}", delete_unreferenced=True)
        try:
            with rpc_errors():
                await self._stub.ReleaseHolder(request)
        except CoveyError as error:
            raise self._told(error) from error

    async def examine(self, sha256: str, package: PackageSpec) -> CheckpointFacts:
        """Has a stored checkpoint read whole and compared with the package; returns what it says of itself.

        Raises:
            InvalidArgument: CHECKPOINT_INVALID with every problem.
            FailedPrecondition: BLOB_MISSING.
        """
        request = storage_service_pb2.VerifyCheckpointRequest(
            sha256=sha256, expectation=package_expectation_to_proto(package)
        )
        try:
            with rpc_errors():
                found = await self._stub.VerifyCheckpoint(request)
        except NotFound as error:
            raise FailedPrecondition(
                Reason.BLOB_MISSING,
                f"the checkpoint {sha256} isn't in storage; write it, then try again",
                metadata={"missing": sha256},
            ) from error
        except CoveyError as error:
            raise self._told(error) from error
        problems = problems_from_proto(found)
        if not found.valid:
            listed = "; ".join(f"{v.field}: {v.description}" for v in problems[:10])
            raise InvalidArgument(
                Reason.CHECKPOINT_INVALID,
                f"nothing can go on from the checkpoint {sha256}: {listed}",
                violations=problems,
            )
        return facts_from_proto(found.header)

    async def adopt(
        self, job_id: str, spec: JobSpec, round_number: int, checkpoint: CheckpointRef
    ) -> CheckpointRef:
        """Records a stored checkpoint as one of the job's own, and references it."""
        request = storage_service_pb2.PutCheckpointRequest(
            job_id=job_id,
            blob=common_pb2.BlobRef(sha256=checkpoint.sha256, size_bytes=checkpoint.size),
            expectation=expectation_to_proto(spec, round_number),
        )
        try:
            return checkpoint_from_proto(await self.put_checkpoint(request))
        except CoveyError as error:
            raise self._told(error) from error

    async def put_checkpoint(
        self, request: storage_service_pb2.PutCheckpointRequest
    ) -> checkpoint_pb2.Checkpoint:
        """Records a checkpoint."""
        with rpc_errors():
            return (await self._stub.PutCheckpoint(request)).checkpoint

    async def get_checkpoint(self, job_id: str, round_number: int) -> checkpoint_pb2.Checkpoint:
        """Returns a recorded checkpoint. Raises NotFound (CHECKPOINT_NOT_FOUND)."""
        request = storage_service_pb2.GetCheckpointRequest(job_id=job_id, round=round_number)
        try:
            with rpc_errors():
                return (await self._stub.GetCheckpoint(request)).checkpoint
        except CoveyError as error:
            raise self._told(error) from error

    async def list_checkpoints(
        self, job_id: str, page_size: int, page_token: str
    ) -> tuple[Sequence[checkpoint_pb2.Checkpoint], str]:
        """Returns a page of a job's recorded checkpoints and the next page's token."""
        request = storage_service_pb2.ListCheckpointsRequest(
            job_id=job_id, page_size=page_size, page_token=page_token
        )
        try:
            with rpc_errors():
                response = await self._stub.ListCheckpoints(request)
        except CoveyError as error:
            raise self._told(error) from error
        return list(response.checkpoints), response.next_page_token

    async def read(self, sha256: str) -> AsyncIterator[bytes]:
        """Yields a blob's bytes as storage sends them; who receives them in the end verifies them."""
        request = storage_service_pb2.ReadBlobRequest(sha256=sha256)
        try:
            with rpc_errors():
                call: _ReadCall = self._stub.ReadBlob(request)
                done = 0
                size = -1
                while (read := await call.read()) is not grpc.aio.EOF:
                    message = cast("storage_service_pb2.ReadBlobResponse", read)
                    if message.HasField("header"):
                        size = message.header.size_bytes
                    elif message.HasField("data"):
                        done += len(message.data)
                        yield message.data
        except CoveyError as error:
            raise self._told(error) from error
        if done != size:
            raise DataLoss(
                Reason.SIZE_MISMATCH, f"storage sent {done} of {size} bytes of {sha256}; ask again"
            )

    async def close(self) -> None:
        """Closes the channel. May be called twice."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

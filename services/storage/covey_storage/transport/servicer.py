"""`StorageService` over gRPC: parse, call the domain, build the reply."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio

from covey.v1 import storage_service_pb2 as pb
from covey.v1 import storage_service_pb2_grpc as pb_grpc
from covey_kit.caller import current_caller
from covey_kit.errors import InvalidArgument, Reason, Violation
from covey_storage.convert import (
    checkpoint_to_proto,
    examined_to_proto,
    expectation_from_proto,
    inventory_to_proto,
    progress_to_proto,
    record_to_proto,
    ref_from_proto,
    ref_to_proto,
)
from covey_storage.domain.catalog import Catalog
from covey_storage.domain.gate import Gate
from covey_storage.domain.reads import Reads
from covey_storage.domain.scrub import Scrubber
from covey_storage.domain.shelf import Shelf
from covey_storage.domain.writes import Write, Writes

__all__ = ["Rooms", "StorageServicer"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_SLICE = 1000
"""Blobs converted before the event loop gets its turn."""


@dataclass(frozen=True)
class Rooms:
    """The domain objects behind the edge."""

    writes: Writes
    reads: Reads
    catalog: Catalog
    shelf: Shelf
    scrubber: Scrubber
    gate: Gate


class StorageServicer(pb_grpc.StorageServiceServicer):
    """Each method as the contract describes it. Errors are raised; the kit's interceptor maps them."""

    def __init__(self, rooms: Rooms) -> None:
        self._writes = rooms.writes
        self._reads = rooms.reads
        self._catalog = rooms.catalog
        self._shelf = rooms.shelf
        self._scrubber = rooms.scrubber
        self._gate = rooms.gate

    async def WriteBlob(
        self, request_iterator: AsyncIterator[pb.WriteBlobRequest], context: Context
    ) -> pb.WriteBlobResponse:
        with self._gate.transfer():
            return await self._write_blob(context)

    async def _write_blob(self, context: Context) -> pb.WriteBlobResponse:
        first = await context.read()
        if not isinstance(first, pb.WriteBlobRequest) or not first.HasField("header"):
            raise _out_of_order("header", "the first message must carry the header")
        ref = ref_from_proto(first.header.blob)
        async with self._writes.open(ref, first.header.offset) as write:
            if write is not None:
                await self._take_all(write, context)
        return pb.WriteBlobResponse(blob=ref_to_proto(ref), already_existed=write is None)

    async def _take_all(self, write: Write, context: Context) -> None:
        # read() rather than the iterator: faster for bulk.
        while isinstance(message := await context.read(), pb.WriteBlobRequest):
            self._gate.check()
            if not message.HasField("data"):
                raise _out_of_order("data", "messages behind the first must carry data")
            await write.take(message.data)
        await write.finish()

    async def QueryWrite(self, request: pb.QueryWriteRequest, context: Context) -> pb.QueryWriteResponse:
        committed, complete = await self._writes.committed(request.sha256)
        return pb.QueryWriteResponse(committed_bytes=committed, complete=complete)

    async def ReadBlob(self, request: pb.ReadBlobRequest, context: Context) -> None:
        with self._gate.transfer():
            await self._read_blob(request, context)

    async def _read_blob(self, request: pb.ReadBlobRequest, context: Context) -> None:
        reading = await self._reads.open(current_caller(), request.sha256, request.offset, request.limit)
        header = pb.ReadBlobHeader(
            blob_size_bytes=reading.blob_size, offset=reading.offset, size_bytes=reading.size
        )
        await context.write(pb.ReadBlobResponse(header=header))
        async with aclosing(reading.blocks()) as blocks:
            async for block in blocks:
                self._gate.check()
                await context.write(pb.ReadBlobResponse(data=block))
        await context.write(pb.ReadBlobResponse(range_sha256=reading.range_sha256))

    async def FindMissingBlobs(
        self, request: pb.FindMissingBlobsRequest, context: Context
    ) -> pb.FindMissingBlobsResponse:
        response = pb.FindMissingBlobsResponse()
        # Slice by slice, so that other calls get their turn between them.
        for start in range(0, len(request.blobs), _SLICE):
            asked = [ref_from_proto(ref) for ref in request.blobs[start : start + _SLICE]]
            response.missing.extend(map(ref_to_proto, await self._catalog.find_missing(asked)))
        return response

    async def StatBlob(self, request: pb.StatBlobRequest, context: Context) -> pb.StatBlobResponse:
        record = await self._reads.stat(current_caller(), request.sha256)
        return pb.StatBlobResponse(blob=record_to_proto(record))

    async def DeleteBlob(self, request: pb.DeleteBlobRequest, context: Context) -> pb.DeleteBlobResponse:
        return pb.DeleteBlobResponse(deleted=await self._catalog.delete(request.sha256))

    async def AddReferences(
        self, request: pb.AddReferencesRequest, context: Context
    ) -> pb.AddReferencesResponse:
        await self._catalog.add_references(request.holder, list(request.sha256))
        return pb.AddReferencesResponse()

    async def ReleaseHolder(
        self, request: pb.ReleaseHolderRequest, context: Context
    ) -> pb.ReleaseHolderResponse:
        released = await self._catalog.release(request.holder, delete=request.delete_unreferenced)
        return pb.ReleaseHolderResponse(
            references_dropped=released.references,
            blobs_deleted=len(released.freed),
            bytes_freed=sum(ref.size for ref in released.freed),
        )

    async def GetInventory(
        self, request: pb.GetInventoryRequest, context: Context
    ) -> pb.GetInventoryResponse:
        inventory = await self._catalog.inventory(request.page_size, request.page_token)
        response = inventory_to_proto(inventory)
        for start in range(0, len(inventory.blobs), _SLICE):
            response.blobs.extend(map(record_to_proto, inventory.blobs[start : start + _SLICE]))
            await asyncio.sleep(0)
        return response

    async def PutCheckpoint(
        self, request: pb.PutCheckpointRequest, context: Context
    ) -> pb.PutCheckpointResponse:
        record = await self._shelf.put(
            request.job_id, ref_from_proto(request.blob), expectation_from_proto(request.expectation)
        )
        return pb.PutCheckpointResponse(checkpoint=checkpoint_to_proto(record))

    async def GetCheckpoint(
        self, request: pb.GetCheckpointRequest, context: Context
    ) -> pb.GetCheckpointResponse:
        round_ = request.round if request.HasField("round") else None
        return pb.GetCheckpointResponse(
            checkpoint=checkpoint_to_proto(await self._shelf.get(request.job_id, round_))
        )

    async def ListCheckpoints(
        self, request: pb.ListCheckpointsRequest, context: Context
    ) -> pb.ListCheckpointsResponse:
        page, token = await self._shelf.list(request.job_id, request.page_size, request.page_token)
        return pb.ListCheckpointsResponse(checkpoints=map(checkpoint_to_proto, page), next_page_token=token)

    async def VerifyCheckpoint(
        self, request: pb.VerifyCheckpointRequest, context: Context
    ) -> pb.VerifyCheckpointResponse:
        expectation = expectation_from_proto(request.expectation) if request.HasField("expectation") else None
        return examined_to_proto(await self._shelf.verify(request.sha256, expectation))

    async def Scrub(self, request: pb.ScrubRequest, context: Context) -> None:
        async with aclosing(self._scrubber.scrub()) as steps:
            async for progress in steps:
                await context.write(progress_to_proto(progress))


def _out_of_order(field: str, what: str) -> InvalidArgument:
    return InvalidArgument(Reason.INVALID_FIELD, f"WriteBlob: {what}", violations=[Violation(field, what)])

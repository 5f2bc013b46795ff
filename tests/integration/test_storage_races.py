"""Everything at once on a few blobs, with callers that go away: files and records stay together."""

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from covey.v1 import storage_service_pb2 as pb
from support.eventually import eventually
from support.storage import Storage, get, listing, put, ref, sha256, storage

BLOBS = [bytes([65 + index]) * (300_000 * index + 1) for index in range(4)]
EXPECTED = {
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAVAILABLE,
}
"""What calls that cross each other may be told."""


async def one_call(stub: Any, chance: random.Random) -> None:
    """Some call on some blob."""
    data = chance.choice(BLOBS)
    digest = sha256(data)
    match chance.randrange(7):
        case 0 | 1 | 2:
            await put(stub, data, step=50_000)
        case 3:
            _, found, _ = await get(stub, digest)
            assert found == data
        case 4:
            await stub.DeleteBlob(pb.DeleteBlobRequest(sha256=digest))
        case 5:
            await stub.AddReferences(pb.AddReferencesRequest(holder="jobs/j", sha256=[digest]))
        case 6:
            await stub.ReleaseHolder(pb.ReleaseHolderRequest(holder="jobs/j", delete_unreferenced=True))


async def worker(served: Storage, seed: int, calls: int) -> None:
    """Calls one after the other, some of which it gives up in the middle."""
    chance = random.Random(seed)
    stub = served.stub()
    for _ in range(calls):
        call = asyncio.create_task(one_call(stub, chance))
        if chance.random() < 0.4:
            await asyncio.wait([call], timeout=chance.random() * 0.03)
            call.cancel()
        try:
            await call
        except asyncio.CancelledError:
            continue
        except grpc.aio.AioRpcError as error:
            if error.code() not in EXPECTED:
                raise


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_crossing_calls_keep_files_and_records_together(tmp_path: Path) -> None:
    """After hundreds of crossing and cancelled calls: no damage, no orphan, no lost file."""
    async with storage(tmp_path / "storage") as served:
        await asyncio.gather(*(worker(served, seed, 60) for seed in range(6)))
        # Callers that went away may be noticed a moment later.
        await eventually(lambda: not served.app._rooms.writes._active)

        stub = served.stub()
        reports = [report async for report in stub.Scrub(pb.ScrubRequest())]
        assert [digest for report in reports for digest in report.damaged] == []
        assert reports[-1].orphans_removed == 0
        inventory = await stub.GetInventory(pb.GetInventoryRequest())
        assert inventory.quarantined_count == 0
        assert listing(served.folder / "quarantine") == set()
        visible = {blob.blob.sha256 for blob in inventory.blobs}
        files = {path.name for path in (served.folder / "blobs").glob("*/*")}
        assert files == visible
        for data in BLOBS:
            assert (await put(stub, data)).already_existed == (sha256(data) in visible)
            assert (await get(stub, sha256(data)))[1] == data
        missing = await stub.FindMissingBlobs(pb.FindMissingBlobsRequest(blobs=map(ref, BLOBS)))
        assert list(missing.missing) == []
        await served.restart()
        assert (await served.stub().GetInventory(pb.GetInventoryRequest())).blob_count == len(BLOBS)

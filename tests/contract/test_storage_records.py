"""References, deletion, inventory, scrub and recovery over a real connection."""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covey.v1 import checkpoint_pb2, common_pb2
from covey.v1 import storage_service_pb2 as pb
from covey.v1 import storage_service_pb2_grpc as pb_grpc
from covey_kit.caller import Role
from covey_kit.errors import DataLoss, FailedPrecondition, InvalidArgument, PermissionDenied, Reason
from covey_kit.status import rpc_errors
from covey_storage.app import StorageApp, StorageSettings
from covey_storage.transport.servicer import StorageServicer
from support.storage import (
    Storage,
    expectation,
    get,
    listing,
    put,
    ref,
    sha256,
    storage,
    write_checkpoint,
)

BLOBS = [b"blob %d" % index for index in range(25)]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Storage]:
    """A running storage in a fresh folder."""
    async with storage(tmp_path / "storage") as found:
        yield found


async def hold(served: Storage, holder: str, *blobs: bytes) -> None:
    """Lets a holder reference these blobs."""
    digests = [sha256(data) for data in blobs]
    await served.stub().AddReferences(pb.AddReferencesRequest(holder=holder, sha256=digests))


async def inventory(served: Storage, **request: Any) -> pb.GetInventoryResponse:
    found: pb.GetInventoryResponse = await served.stub().GetInventory(pb.GetInventoryRequest(**request))
    return found


async def scrub(served: Storage) -> list[pb.ScrubResponse]:
    """All reports of one scrub."""
    return [report async for report in served.stub().Scrub(pb.ScrubRequest())]


def test_every_method_is_there() -> None:
    """No method of the contract is left to the generated base, which answers UNIMPLEMENTED."""
    for method in pb.DESCRIPTOR.services_by_name["StorageService"].methods:
        theirs = getattr(pb_grpc.StorageServiceServicer, method.name)
        assert getattr(StorageServicer, method.name) is not theirs, method.name


async def test_missing_blobs_are_named_in_order(served: Storage) -> None:
    """FindMissingBlobs returns what isn't there, and what is there with another size, in the order asked."""
    for data in BLOBS[::2]:
        await put(served.stub(), data)
    wrong = common_pb2.BlobRef(sha256=sha256(BLOBS[0]), size_bytes=99)
    asked = [wrong, *map(ref, reversed(BLOBS))]

    response = await served.stub().FindMissingBlobs(pb.FindMissingBlobsRequest(blobs=asked))

    assert list(response.missing) == [wrong, *(ref(data) for data in reversed(BLOBS[1::2]))]


async def test_thousands_of_blobs_can_be_asked_for(served: Storage) -> None:
    """Far more digests than one SQL statement takes are answered in one call."""
    asked = [common_pb2.BlobRef(sha256=f"{number:064x}", size_bytes=1) for number in range(5000)]
    await put(served.stub(), b"x")
    asked.append(ref(b"x"))

    response = await served.stub().FindMissingBlobs(pb.FindMissingBlobsRequest(blobs=asked))

    assert list(response.missing) == asked[:-1]


async def test_a_referenced_blob_cannot_be_deleted(served: Storage) -> None:
    """DeleteBlob refuses while holders reference a blob, and names them."""
    await put(served.stub(), b"held")
    await hold(served, "jobs/a", b"held")
    await hold(served, "jobs/b", b"held")
    request = pb.DeleteBlobRequest(sha256=sha256(b"held"))

    with pytest.raises(FailedPrecondition) as caught, rpc_errors():
        await served.stub().DeleteBlob(request)

    assert caught.value.reason is Reason.BLOB_REFERENCED
    assert caught.value.metadata["holders"] == "jobs/a,jobs/b"
    for holder in ("jobs/a", "jobs/b"):
        await served.stub().ReleaseHolder(pb.ReleaseHolderRequest(holder=holder))
    assert (await served.stub().DeleteBlob(request)).deleted
    assert not (await served.stub().DeleteBlob(request)).deleted
    assert not served.blob_path(sha256(b"held")).exists()


async def test_references_are_added_all_or_none(served: Storage) -> None:
    """With one blob missing nothing is referenced, and every missing blob is named."""
    await put(served.stub(), b"there")
    absent = [sha256(b"not there"), sha256(b"nor there")]

    with pytest.raises(FailedPrecondition) as caught, rpc_errors():
        await served.stub().AddReferences(
            pb.AddReferencesRequest(holder="jobs/j", sha256=[sha256(b"there"), *absent])
        )

    assert caught.value.reason is Reason.BLOB_MISSING
    assert all(digest in caught.value.message for digest in absent)
    stat = await served.stub().StatBlob(pb.StatBlobRequest(sha256=sha256(b"there")))
    assert list(stat.blob.holders) == []


async def test_adding_a_reference_twice_changes_nothing(served: Storage) -> None:
    """A holder counts once for a blob, however often (in one call, too) it's added."""
    await put(served.stub(), b"x")
    for _ in range(2):
        await hold(served, "jobs/j", b"x", b"x")

    stat = await served.stub().StatBlob(pb.StatBlobRequest(sha256=sha256(b"x")))
    released = await served.stub().ReleaseHolder(pb.ReleaseHolderRequest(holder="jobs/j"))

    assert list(stat.blob.holders) == ["jobs/j"]
    assert released.references_dropped == 1


async def test_release_deletes_what_nobody_needs(served: Storage) -> None:
    """`delete_unreferenced` deletes what the holder alone had: not what others hold or nobody ever held."""
    for data in (b"mine", b"shared", b"uploaded, not yet referenced"):
        await put(served.stub(), data)
    await hold(served, "jobs/j", b"mine", b"shared")
    await hold(served, "jobs/k", b"shared")

    request = pb.ReleaseHolderRequest(holder="jobs/j", delete_unreferenced=True)
    released = await served.stub().ReleaseHolder(request)
    again = await served.stub().ReleaseHolder(request)

    assert (released.references_dropped, released.blobs_deleted, released.bytes_freed) == (2, 1, 4)
    assert again == pb.ReleaseHolderResponse()
    assert not served.blob_path(sha256(b"mine")).exists()
    left = {blob.blob.sha256 for blob in (await inventory(served)).blobs}
    assert left == {sha256(b"shared"), sha256(b"uploaded, not yet referenced")}


async def test_the_inventory_counts(served: Storage) -> None:
    """Sums are those of what is there: visible, unreferenced, quarantined, partial."""
    for data in BLOBS:
        await put(served.stub(), data)
    await hold(served, "jobs/j", *BLOBS[:10])
    with pytest.raises(InvalidArgument), rpc_errors():
        await put(served.stub(), b"part", blob=ref(b"part of something"))
    served.blob_path(sha256(BLOBS[20])).write_bytes(b"rotten!")
    with pytest.raises(DataLoss), rpc_errors():
        await get(served.stub(), sha256(BLOBS[20]))

    found = await inventory(served)

    assert found.blob_count == 24
    assert found.blob_bytes == sum(map(len, BLOBS)) - len(BLOBS[20])
    assert found.unreferenced_count == 14
    assert found.unreferenced_bytes == sum(map(len, BLOBS[10:])) - len(BLOBS[20])
    assert found.quarantined_count == 1
    assert found.partial_count == 1
    assert found.checkpoint_count == 0
    assert [blob.blob.sha256 for blob in found.blobs if blob.quarantined] == [sha256(BLOBS[20])]


async def test_the_inventory_comes_in_pages(served: Storage) -> None:
    """Pages together show each blob once, by digest; the last has no token."""
    for data in BLOBS:
        await put(served.stub(), data)
    seen: list[str] = []
    token, pages = "", 0
    while pages == 0 or token:
        page = await inventory(served, page_size=10, page_token=token)
        seen += [blob.blob.sha256 for blob in page.blobs]
        token, pages = page.next_page_token, pages + 1

    assert pages == 3
    assert seen == sorted(map(sha256, BLOBS))


async def test_page_tokens_are_ours_alone(served: Storage) -> None:
    """Tokens that are made up, altered or of another listing are refused; ours outlive a restart."""
    for data in BLOBS[:3]:
        await put(served.stub(), data)
    token = (await inventory(served, page_size=1)).next_page_token
    altered = ("A" if token[0] != "A" else "B") + token[1:]

    for wrong in ("x", "ä", "!" * 10, sha256(b"x"), altered, token[:-4]):
        with pytest.raises(InvalidArgument) as caught, rpc_errors():
            await inventory(served, page_token=wrong)
        assert caught.value.reason is Reason.PAGE_TOKEN
    with pytest.raises(InvalidArgument) as caught, rpc_errors():
        await served.stub().ListCheckpoints(pb.ListCheckpointsRequest(job_id="j", page_token=token))
    assert caught.value.reason is Reason.PAGE_TOKEN
    await served.restart()
    assert len((await inventory(served, page_token=token)).blobs) == 2


async def test_scrub_of_sound_blobs_finds_nothing(served: Storage) -> None:
    """A scrub hashes every blob once and says when it's done."""
    for data in BLOBS:
        await put(served.stub(), data)

    reports = await scrub(served)

    assert [report.done for report in reports] == [False] * (len(reports) - 1) + [True]
    assert reports[-1] == pb.ScrubResponse(
        blobs_checked=25, bytes_checked=sum(map(len, BLOBS)), blobs_total=25, done=True
    )


async def test_scrub_finds_damage_and_loss(served: Storage) -> None:
    """Flipped bytes, cut files and lost files are reported and quarantined; the rest stays readable."""
    for data in BLOBS:
        await put(served.stub(), data)
    flipped, cut, lost = (served.blob_path(sha256(data)) for data in BLOBS[:3])
    flipped.write_bytes(b"blub 0")
    cut.write_bytes(b"blob")
    lost.unlink()

    reports = await scrub(served)

    damaged = sorted(digest for report in reports for digest in report.damaged)
    assert damaged == sorted(map(sha256, BLOBS[:3]))
    assert reports[-1].blobs_checked == 25
    assert (await inventory(served)).quarantined_count == 3
    assert listing(served.folder / "quarantine") == {flipped.name, cut.name}
    assert (await get(served.stub(), sha256(BLOBS[5])))[1] == BLOBS[5]
    missing = await served.stub().FindMissingBlobs(pb.FindMissingBlobsRequest(blobs=map(ref, BLOBS)))
    assert sorted(blob.sha256 for blob in missing.missing) == damaged
    assert (await scrub(served))[-1].damaged == []


async def test_scrub_clears_away_what_nobody_owns(tmp_path: Path) -> None:
    """Objects without a record, stray files and stale parts go; parts that are being written stay."""
    async with storage(tmp_path / "storage", stale_part_seconds=0) as served:
        await put(served.stub(), b"owned")
        orphan = served.blob_path(sha256(b"orphan"))
        orphan.parent.mkdir(exist_ok=True)
        orphan.write_bytes(b"orphan")
        stray = served.folder / "blobs" / "notes.txt"
        stray.write_text("hello")
        with pytest.raises(InvalidArgument), rpc_errors():
            await put(served.stub(), b"part", blob=ref(b"part of something"))
        call = served.stub().WriteBlob()
        await call.write(pb.WriteBlobRequest(header=pb.WriteBlobHeader(blob=ref(b"in progress"))))
        await call.write(pb.WriteBlobRequest(data=b"in "))

        reports = await scrub(served)

        assert reports[-1].orphans_removed == 3
        assert not orphan.exists()
        assert not stray.exists()
        assert not served.part_path(sha256(b"part of something")).exists()
        await call.write(pb.WriteBlobRequest(data=b"progress"))
        await call.done_writing()
        assert not (await call).already_existed
        assert (await get(served.stub(), sha256(b"owned")))[1] == b"owned"


async def test_a_start_adopts_a_whole_file_without_a_record(served: Storage) -> None:
    """A crash between rename and record heals: the file is hashed and recorded; a wrong one is dropped."""
    await served.stop()
    whole, wrong = served.blob_path(sha256(b"whole")), served.blob_path(sha256(b"right"))
    for path, data in ((whole, b"whole"), (wrong, b"wrong")):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    await served.start()

    assert (await get(served.stub(), sha256(b"whole")))[1] == b"whole"
    assert not wrong.exists()
    assert (await inventory(served)).blob_count == 1


async def test_a_start_flags_records_without_a_file(served: Storage) -> None:
    """A record whose file is gone is quarantined at the start, and its blob counts as missing."""
    await put(served.stub(), b"lost")
    await served.stop()
    served.blob_path(sha256(b"lost")).unlink()
    await served.start()

    assert (await inventory(served)).quarantined_count == 1
    with pytest.raises(DataLoss), rpc_errors():
        await get(served.stub(), sha256(b"lost"))
    assert not (await put(served.stub(), b"lost")).already_existed
    assert (await get(served.stub(), sha256(b"lost")))[1] == b"lost"


async def test_a_lost_database_is_rebuilt_from_files(served: Storage) -> None:
    """Without its database storage records every file again; only references are gone."""
    for data in BLOBS[:5]:
        await put(served.stub(), data)
    await served.stop()
    for path in served.folder.glob("storage.sqlite*"):
        path.unlink()
    await served.start()

    found = await inventory(served)

    assert [blob.blob.sha256 for blob in found.blobs] == sorted(map(sha256, BLOBS[:5]))


async def test_one_process_has_the_folder(served: Storage) -> None:
    """A second storage on the same folder is refused with the folder and the process that has it."""
    with pytest.raises(FailedPrecondition) as caught:
        await StorageApp.open(StorageSettings(served.folder))

    assert str(served.folder) in caught.value.message
    assert str(os.getpid()) in caught.value.message


async def test_a_copied_folder_serves_elsewhere(served: Storage, tmp_path: Path) -> None:
    """A stopped storage's folder is all there is to it: a copy serves the same blobs."""
    await put(served.stub(), b"moved")
    await hold(served, "jobs/j", b"moved")
    await served.stop()
    shutil.copytree(served.folder, tmp_path / "copy")
    async with storage(tmp_path / "copy") as copy:
        stat = await copy.stub().StatBlob(pb.StatBlobRequest(sha256=sha256(b"moved")))
        assert list(stat.blob.holders) == ["jobs/j"]
        assert (await get(copy.stub(), sha256(b"moved")))[1] == b"moved"
    await served.start()


async def put_checkpoint_from(served: Storage, path: Path) -> checkpoint_pb2.Checkpoint:
    """Makes a checkpoint, writes it and records it for job `j`."""
    data = write_checkpoint(path)
    await put(served.stub(), data)
    request = pb.PutCheckpointRequest(job_id="j", blob=ref(data), expectation=expectation())
    found: checkpoint_pb2.Checkpoint = (await served.stub().PutCheckpoint(request)).checkpoint
    return found


@pytest.mark.parametrize("url", ["memory:///", "file"])
async def test_blobs_may_lie_in_a_bucket(tmp_path: Path, url: str) -> None:
    """With a blob URL the same calls work on an object store: write, read, checkpoint, damage, delete."""
    if url == "file":
        (tmp_path / "bucket").mkdir()
        url = (tmp_path / "bucket").as_uri()
    data = os.urandom(3_000_000)
    async with storage(tmp_path / "storage", blob_url=url) as served:
        await put(served.stub(), data)
        assert (await get(served.stub(), sha256(data)))[1] == data
        assert (await get(served.stub(), sha256(data), 1_000_000, 7))[1] == data[1_000_000:1_000_007]
        assert not served.part_path(sha256(data)).exists()
        assert (await scrub(served))[-1].blobs_checked == 1
        checkpoint = await put_checkpoint_from(served, tmp_path / "checkpoint")
        assert checkpoint.header.round == 3
        found = await inventory(served)
        assert (found.checkpoint_count, found.partial_count) == (1, 0)
        await served.stub().ReleaseHolder(pb.ReleaseHolderRequest(holder="jobs/j", delete_unreferenced=True))
        if "bucket" in url:
            path = tmp_path / "bucket" / "blobs" / sha256(data)[:2] / sha256(data)
            path.write_bytes(data[:-1] + b"?")
            with pytest.raises(DataLoss), rpc_errors():
                await get(served.stub(), sha256(data))
            await put(served.stub(), data)
        assert (await served.stub().DeleteBlob(pb.DeleteBlobRequest(sha256=sha256(data)))).deleted
        assert (await inventory(served)).blob_count == 0


@pytest.mark.parametrize("role", [Role.VIEWER, Role.GRANT, Role.PARTICIPANT])
async def test_only_owners_and_services_change_things(served: Storage, role: Role) -> None:
    """Viewers, grants and participants can neither delete nor reference, release or scrub."""
    stub = served.stub(role, "j" if role is Role.GRANT else None)
    for call in (
        stub.DeleteBlob(pb.DeleteBlobRequest(sha256="0" * 64)),
        stub.AddReferences(pb.AddReferencesRequest(holder="jobs/j", sha256=["0" * 64])),
        stub.ReleaseHolder(pb.ReleaseHolderRequest(holder="jobs/j")),
        stub.Scrub(pb.ScrubRequest()).read(),
    ):
        with pytest.raises(PermissionDenied), rpc_errors():
            await call

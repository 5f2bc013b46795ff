"""Writing and reading blobs over a real connection."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from covey.v1 import common_pb2
from covey.v1 import storage_service_pb2 as pb
from covey_kit.caller import Role
from covey_kit.errors import (
    Aborted,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfRange,
    PermissionDenied,
    Reason,
    ResourceExhausted,
    Unavailable,
)
from covey_kit.status import rpc_errors
from support.eventually import eventually
from support.storage import Storage, get, put, ref, sha256, storage

DATA = bytes(range(256)) * 20_000  # 5,120,000 bytes: several messages, the last one short


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Storage]:
    """A running storage in a fresh folder."""
    async with storage(tmp_path / "storage") as found:
        yield found


async def cut_write(served: Storage, data: bytes, sent: int) -> None:
    """Sends the first `sent` bytes of a blob, waits until they're on disk, and cancels the call."""
    call = served.stub().WriteBlob()
    await call.write(pb.WriteBlobRequest(header=pb.WriteBlobHeader(blob=ref(data))))
    await call.write(pb.WriteBlobRequest(data=data[:sent]))
    path = served.part_path(sha256(data))
    await eventually(lambda: path.exists() and path.stat().st_size == sent)
    call.cancel()


async def query(served: Storage, digest: str) -> tuple[int, bool]:
    state = await served.stub().QueryWrite(pb.QueryWriteRequest(sha256=digest))
    return state.committed_bytes, state.complete


async def test_a_written_blob_reads_back(served: Storage) -> None:
    """What was written is read back byte for byte, with its size and its digest."""
    written = await put(served.stub(), DATA)
    header, data, digest = await get(served.stub(), sha256(DATA))

    assert not written.already_existed
    assert written.blob == ref(DATA)
    assert (header.blob_size_bytes, header.offset, header.size_bytes) == (len(DATA), 0, len(DATA))
    assert data == DATA
    assert digest == sha256(DATA)


async def test_an_empty_blob_is_a_blob(served: Storage) -> None:
    """A blob of no bytes can be written, described and read."""
    await put(served.stub(), b"")
    header, data, digest = await get(served.stub(), sha256(b""))

    assert header.blob_size_bytes == 0
    assert data == b""
    assert digest == sha256(b"")


async def test_writing_twice_succeeds_at_once(served: Storage) -> None:
    """A blob that's there is answered with `already_existed`, whatever is sent behind the header."""
    await put(served.stub(), DATA)

    again = await put(served.stub(), b"something else entirely", blob=ref(DATA))

    assert again.already_existed
    assert (await get(served.stub(), sha256(DATA)))[1] == DATA


async def test_other_bytes_than_announced_are_refused(served: Storage) -> None:
    """Bytes with another hash are refused and dropped: nothing becomes visible."""
    announced = common_pb2.BlobRef(sha256=sha256(b"other"), size_bytes=len(DATA))

    with pytest.raises(InvalidArgument) as caught, rpc_errors():
        await put(served.stub(), DATA, blob=announced)

    assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert await query(served, announced.sha256) == (0, False)


async def test_more_bytes_than_announced_are_refused(served: Storage) -> None:
    """A stream that outgrows its announced size is refused at once and dropped."""
    announced = common_pb2.BlobRef(sha256=sha256(DATA), size_bytes=len(DATA) - 1)

    with pytest.raises(InvalidArgument) as caught, rpc_errors():
        await put(served.stub(), DATA, blob=announced)

    assert caught.value.reason is Reason.SIZE_MISMATCH
    assert await query(served, announced.sha256) == (0, False)


async def test_fewer_bytes_than_announced_can_go_on(served: Storage) -> None:
    """A stream that ends early is refused, and what came can be continued."""
    with pytest.raises(InvalidArgument) as caught, rpc_errors():
        await put(served.stub(), DATA[:100_000], blob=ref(DATA))

    assert caught.value.reason is Reason.SIZE_MISMATCH
    assert await query(served, sha256(DATA)) == (100_000, False)
    assert not (await put(served.stub(), DATA, offset=100_000)).already_existed


@pytest.mark.parametrize("sent", [1, 12_345, 1 << 20, len(DATA) - 1])
async def test_a_cut_write_goes_on_where_it_stopped(served: Storage, sent: int) -> None:
    """After a cancelled call the part is kept; a write from QueryWrite's offset completes the blob."""
    await cut_write(served, DATA, sent)
    committed, complete = await query(served, sha256(DATA))

    assert (committed, complete) == (sent, False)
    await eventually(lambda: not served.app._rooms.writes.is_active(sha256(DATA)))
    await put(served.stub(), DATA, offset=committed)
    assert (await get(served.stub(), sha256(DATA)))[1] == DATA
    assert await query(served, sha256(DATA)) == (len(DATA), True)


async def test_a_cut_write_survives_a_restart(served: Storage) -> None:
    """The part of a write is there after the process was restarted, and its hash is rebuilt from disk."""
    await cut_write(served, DATA, 700_001)
    await served.restart()

    assert await query(served, sha256(DATA)) == (700_001, False)
    await put(served.stub(), DATA, offset=700_001)
    assert (await get(served.stub(), sha256(DATA)))[2] == sha256(DATA)


async def test_a_write_may_begin_anew(served: Storage) -> None:
    """Offset 0 throws the part away, also one with wrong bytes."""
    with pytest.raises(InvalidArgument), rpc_errors():
        await put(served.stub(), b"wrong bytes", blob=ref(DATA))

    assert not (await put(served.stub(), DATA)).already_existed


@pytest.mark.parametrize("offset", [1, 99_999, 100_001, 1 << 40])
async def test_a_write_goes_on_nowhere_else(served: Storage, offset: int) -> None:
    """An offset that isn't where the part ends is refused, and the error says where that is."""
    with pytest.raises(InvalidArgument), rpc_errors():
        await put(served.stub(), DATA[:100_000], blob=ref(DATA))

    with pytest.raises(FailedPrecondition) as caught, rpc_errors():
        await put(served.stub(), DATA, offset=offset)

    assert caught.value.reason is Reason.OFFSET_MISMATCH
    assert caught.value.metadata["committed_bytes"] == "100000"


async def test_one_stream_at_a_time_writes_a_blob(served: Storage) -> None:
    """A second writer of the same blob is sent away while the first goes on undisturbed."""
    first = served.stub().WriteBlob()
    await first.write(pb.WriteBlobRequest(header=pb.WriteBlobHeader(blob=ref(DATA))))
    await eventually(lambda: served.app._rooms.writes.is_active(sha256(DATA)))

    with pytest.raises(Aborted) as caught, rpc_errors():
        await put(served.stub(), DATA)

    assert caught.value.reason is Reason.OFFSET_MISMATCH
    await first.write(pb.WriteBlobRequest(data=DATA))
    await first.done_writing()
    assert not (await first).already_existed


async def test_a_blob_may_be_too_large(tmp_path: Path) -> None:
    """What is larger than the bound is refused before a byte of it is taken."""
    async with storage(tmp_path / "storage", max_blob_bytes=1000) as served:
        with pytest.raises(ResourceExhausted) as caught, rpc_errors():
            await put(served.stub(), DATA)

        assert caught.value.reason is Reason.LIMIT_EXCEEDED
        await put(served.stub(), bytes(1000))


async def test_writes_leave_room_on_the_disk(tmp_path: Path) -> None:
    """A write that would leave less room than was set is refused as STORAGE_FULL."""
    async with storage(tmp_path / "storage", min_free_bytes=1 << 60) as served:
        with pytest.raises(ResourceExhausted) as caught, rpc_errors():
            await put(served.stub(), DATA)

        assert caught.value.reason is Reason.STORAGE_FULL


async def test_the_first_message_is_the_header(served: Storage) -> None:
    """Data before the header, a header behind data and an empty stream are refused."""
    stub = served.stub()
    orders: list[list[pb.WriteBlobRequest]] = [
        [],
        [pb.WriteBlobRequest(data=b"x")],
        [pb.WriteBlobRequest(header=pb.WriteBlobHeader(blob=ref(DATA)))] * 2,
    ]
    for order in orders:
        with pytest.raises(InvalidArgument) as caught, rpc_errors():
            await stub.WriteBlob(iter(order))
        assert caught.value.reason is Reason.INVALID_FIELD


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "a" * 63])
async def test_a_digest_is_a_digest(served: Storage, digest: str) -> None:
    """What isn't 64 lower-case hex digits is refused at the edge, on writes too."""
    with pytest.raises(InvalidArgument) as caught, rpc_errors():
        await put(served.stub(), b"", blob=common_pb2.BlobRef(sha256=digest))
    assert caught.value.reason is Reason.INVALID_FIELD
    with pytest.raises(InvalidArgument), rpc_errors():
        await get(served.stub(), digest)


@pytest.mark.parametrize(
    ("offset", "limit"),
    [(0, 10), (1, 0), (1 << 20, 1 << 20), (4_999_999, 0), (7, 3_000_000), (5_000_000, 99)],
)
async def test_a_range_reads_alone(served: Storage, offset: int, limit: int) -> None:
    """Offset and limit give exactly that range, with its own digest."""
    data = DATA[:5_000_000]
    await put(served.stub(), data)
    expected = data[offset:][: limit or None]

    header, found, digest = await get(served.stub(), sha256(data), offset, limit)

    assert found == expected
    assert digest == sha256(expected)
    assert (header.blob_size_bytes, header.offset, header.size_bytes) == (len(data), offset, len(expected))


async def test_a_range_behind_the_end_is_refused(served: Storage) -> None:
    """An offset behind the end is OUT_OF_RANGE; at the end nothing follows."""
    await put(served.stub(), b"12345")

    with pytest.raises(OutOfRange) as caught, rpc_errors():
        await get(served.stub(), sha256(b"12345"), 6)

    assert caught.value.reason is Reason.RANGE
    assert (await get(served.stub(), sha256(b"12345"), 5))[1] == b""


async def test_an_unknown_blob_is_not_found(served: Storage) -> None:
    """Reading and describing what isn't there is NOT_FOUND for those who may read everything."""
    for role in (Role.OWNER, Role.SERVICE):
        for call in (
            get(served.stub(role), "0" * 64),
            served.stub(role).StatBlob(pb.StatBlobRequest(sha256="0" * 64)),
        ):
            with pytest.raises(NotFound) as caught, rpc_errors():
                await call
            assert caught.value.reason is Reason.BLOB_NOT_FOUND
            assert caught.value.resource == ("blob", "0" * 64)


async def test_damage_is_found_on_reading(served: Storage) -> None:
    """A flipped byte ends a read with DATA_LOSS; the blob is quarantined, and writing it again mends it."""
    await put(served.stub(), DATA)
    path = served.blob_path(sha256(DATA))
    path.write_bytes(DATA[:1_000_000] + b"\xff" + DATA[1_000_001:])

    with pytest.raises(DataLoss) as caught, rpc_errors():
        await get(served.stub(), sha256(DATA))

    assert caught.value.reason is Reason.BLOB_CORRUPT
    assert not path.exists()
    stat = await served.stub().StatBlob(pb.StatBlobRequest(sha256=sha256(DATA)))
    assert stat.blob.quarantined
    with pytest.raises(DataLoss), rpc_errors():
        await get(served.stub(), sha256(DATA))
    assert not (await put(served.stub(), DATA)).already_existed
    assert (await get(served.stub(), sha256(DATA)))[1] == DATA


@pytest.mark.parametrize("size", [0, 1000, len(DATA) + 1, None])
async def test_a_file_of_another_size_is_damage(served: Storage, size: int | None) -> None:
    """A blob whose file is shorter, longer or lost is quarantined at the next read, of a range too."""
    await put(served.stub(), DATA)
    path = served.blob_path(sha256(DATA))
    if size is None:
        path.unlink()
    else:
        path.write_bytes((DATA + b"!")[:size])

    with pytest.raises(DataLoss) as caught, rpc_errors():
        await get(served.stub(), sha256(DATA), 5, 10)

    assert caught.value.reason is Reason.BLOB_CORRUPT


async def test_a_grant_reads_what_its_job_holds(served: Storage) -> None:
    """A grant reads the blobs that its job references and no others, existing or not."""
    mine, other = b"my chunk", b"a chunk of another job"
    for data, job in ((mine, "jobs/mine"), (other, "jobs/other")):
        await put(served.stub(), data)
        request = pb.AddReferencesRequest(holder=job, sha256=[sha256(data)])
        await served.stub().AddReferences(request)
    stub = served.stub(Role.GRANT, "mine")

    assert (await get(stub, sha256(mine)))[1] == mine
    assert list((await stub.StatBlob(pb.StatBlobRequest(sha256=sha256(mine)))).blob.holders) == ["jobs/mine"]
    refused = set()
    for digest in (sha256(other), "0" * 64):
        for call in (get(stub, digest), stub.StatBlob(pb.StatBlobRequest(sha256=digest))):
            with pytest.raises(PermissionDenied) as caught, rpc_errors():
                await call
            assert caught.value.reason is Reason.NO_GRANT
            refused.add(caught.value.message.replace(digest, "…"))
    assert len(refused) == 1, "the answer must not say whether the blob exists"


async def test_a_released_job_is_no_longer_read(served: Storage) -> None:
    """Once its holder is released, a grant opens nothing."""
    await put(served.stub(), b"chunk")
    await served.stub().AddReferences(pb.AddReferencesRequest(holder="jobs/j", sha256=[sha256(b"chunk")]))
    stub = served.stub(Role.GRANT, "j")
    await get(stub, sha256(b"chunk"))
    await served.stub().ReleaseHolder(pb.ReleaseHolderRequest(holder="jobs/j"))

    with pytest.raises(PermissionDenied), rpc_errors():
        await get(stub, sha256(b"chunk"))


@pytest.mark.parametrize("role", [Role.VIEWER, Role.PARTICIPANT])
async def test_others_read_no_bytes(served: Storage, role: Role) -> None:
    """A viewer and a participant without a grant can't read a blob or write one."""
    await put(served.stub(), b"x")
    for call in (get(served.stub(role), sha256(b"x")), put(served.stub(role), b"y")):
        with pytest.raises(PermissionDenied), rpc_errors():
            await call


async def test_a_reader_who_goes_away_leaves_nothing_open(served: Storage) -> None:
    """A cancelled read doesn't disturb the next one, and its file can be deleted."""
    data = bytes(32 << 20)
    await put(served.stub(), data)
    call = served.stub().ReadBlob(pb.ReadBlobRequest(sha256=sha256(data)))
    await call.read()
    call.cancel()

    assert (await get(served.stub(), sha256(data)))[2] == sha256(data)
    await served.stub().DeleteBlob(pb.DeleteBlobRequest(sha256=sha256(data)))
    assert not served.blob_path(sha256(data)).exists()


async def test_draining_stops_transfers_that_can_go_on(served: Storage) -> None:
    """A server that drains ends a write with UNAVAILABLE; what came is kept for after the restart."""
    call = served.stub().WriteBlob()
    await call.write(pb.WriteBlobRequest(header=pb.WriteBlobHeader(blob=ref(DATA))))
    await call.write(pb.WriteBlobRequest(data=DATA[:1_000_000]))
    path = served.part_path(sha256(DATA))
    await eventually(lambda: path.exists() and path.stat().st_size == 1_000_000)
    await served.app.drain()
    await call.write(pb.WriteBlobRequest(data=DATA[1_000_000:2_000_000]))

    with pytest.raises(Unavailable) as caught, rpc_errors():
        await call

    assert caught.value.reason is Reason.SHUTTING_DOWN
    await served.restart()
    assert await query(served, sha256(DATA)) == (1_000_000, False)


async def test_many_writers_at_once(served: Storage) -> None:
    """Forty blobs written at the same time over one connection are all there, each whole."""
    blobs = [bytes([index]) * (100_000 + index) for index in range(40)]
    stub = served.stub()
    await asyncio.gather(*(put(stub, data) for data in blobs))

    found = await asyncio.gather(*(get(stub, sha256(data)) for data in blobs))

    assert [data for _, data, _ in found] == blobs


async def test_calls_without_a_token_are_refused(served: Storage) -> None:
    """Nobody reads without saying who they are."""
    async with grpc.aio.insecure_channel(served.host.address) as channel:
        call = channel.unary_stream(
            "/covey.v1.StorageService/ReadBlob",
            request_serializer=pb.ReadBlobRequest.SerializeToString,
            response_deserializer=pb.ReadBlobResponse.FromString,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(pb.ReadBlobRequest(sha256="0" * 64)).read()

    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

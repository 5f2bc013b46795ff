"""The kit's transfers against a real storage: cut, resumed, damaged, refused."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from covey.v1 import storage_service_pb2 as pb
from covey.v1 import storage_service_pb2_grpc as pb_grpc
from covey_kit import blobs
from covey_kit.blobs import digest_file, read_blob, read_bytes, write_blob, write_bytes
from covey_kit.caller import Role
from covey_kit.errors import (
    CoveyError,
    DataLoss,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Reason,
    ResourceExhausted,
    Unavailable,
)
from covey_kit.status import rpc_errors
from support.eventually import eventually
from support.storage import Storage, listing, put, ref, sha256, storage

DATA = os.urandom(6_000_001)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Storage]:
    """A running storage in a fresh folder."""
    async with storage(tmp_path / "storage") as found:
        yield found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with `DATA`."""
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


async def test_a_file_goes_there_and_back(served: Storage, file: Path, tmp_path: Path) -> None:
    """A file is written, written again at once, and read back whole, with progress to the end each time."""
    size, digest = digest_file(file)
    written: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []

    first = await write_blob(served.channel(), file, digest, size, lambda *at: written.append(at))
    again = await write_blob(served.channel(), file, digest, size)
    await read_blob(served.channel(), digest, tmp_path / "copy", on_progress=lambda *at: read.append(at))

    assert (first, again) == (False, True)
    assert (tmp_path / "copy").read_bytes() == DATA
    assert written == sorted(written)
    assert written[-1] == read[-1] == (size, size)
    assert listing(tmp_path) == {"copy", "file", "storage"}


async def test_bytes_go_there_and_back(served: Storage) -> None:
    """Small blobs need no files; a bound on their size is kept."""
    for data in (b"", b"hello", DATA):
        blob = await write_bytes(served.channel(), data)
        assert blob == ref(data)
        assert await read_bytes(served.channel(), blob.sha256, max_bytes=len(data)) == data
    with pytest.raises(ResourceExhausted) as caught:
        await read_bytes(served.channel(), sha256(DATA), max_bytes=len(DATA) - 1)
    assert caught.value.reason is Reason.LIMIT_EXCEEDED


async def test_a_write_goes_on_where_another_stopped(served: Storage, file: Path) -> None:
    """Only what storage lacks is sent."""
    with pytest.raises(InvalidArgument), rpc_errors():
        await put(served.stub(), DATA[:2_000_000], blob=ref(DATA))
    seen: list[int] = []

    await write_blob(served.channel(), file, sha256(DATA), len(DATA), lambda done, _: seen.append(done))

    assert min(seen) > 2_000_000


async def test_a_wrong_part_is_replaced(served: Storage, file: Path) -> None:
    """If what storage kept of an earlier write is wrong, the write begins anew by itself, once."""
    with pytest.raises(InvalidArgument), rpc_errors():
        await put(served.stub(), bytes(1000), blob=ref(DATA))

    await write_blob(served.channel(), file, sha256(DATA), len(DATA))

    assert await read_bytes(served.channel(), sha256(DATA), max_bytes=len(DATA)) == DATA


async def test_a_file_that_is_not_what_was_said_is_refused(served: Storage, file: Path) -> None:
    """Another size is noticed before anything is sent; another digest by storage."""
    with pytest.raises(InvalidArgument) as caught:
        await write_blob(served.channel(), file, sha256(DATA), len(DATA) + 1)
    assert caught.value.reason is Reason.SIZE_MISMATCH
    with pytest.raises(InvalidArgument) as caught:
        await write_blob(served.channel(), file, sha256(b"other"), len(DATA))
    assert caught.value.reason is Reason.DIGEST_MISMATCH


async def test_a_write_outlives_a_restart_of_storage(served: Storage, file: Path) -> None:
    """Storage goes away in the middle of a write and comes back: the write ends as if nothing had been."""
    channel = served.channel()
    restarts = 0

    async def restart() -> None:
        await served.host.stop(grace=0)
        await served.start()

    def on_progress(done: int, _: int) -> None:
        nonlocal restarts
        if done > 2_000_000 and restarts == 0:
            restarts += 1
            task.append(asyncio.create_task(restart()))

    task: list[asyncio.Task[None]] = []
    written = await write_blob(channel, file, sha256(DATA), len(DATA), on_progress)
    await task[0]

    assert restarts == 1
    assert isinstance(written, bool)
    assert await read_bytes(served.channel(), sha256(DATA), max_bytes=len(DATA)) == DATA


async def test_two_writers_of_one_blob_both_succeed(served: Storage, file: Path) -> None:
    """The second waits until the first is done, and finds that the blob is there."""
    results = await asyncio.gather(
        *(write_blob(served.channel(), file, sha256(DATA), len(DATA)) for _ in range(2))
    )

    assert sorted(results) == [False, True]


async def test_nobody_there_is_told_after_a_while(
    file: Path, served: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that doesn't come back is Unavailable, once the tries are used up."""
    monkeypatch.setattr(blobs, "_ATTEMPTS", 2)
    channel = served.channel()
    await served.host.stop(grace=0)

    with pytest.raises(Unavailable):
        await write_blob(channel, file, sha256(DATA), len(DATA))
    await served.start()


async def test_a_range_is_read_into_a_file(served: Storage, tmp_path: Path) -> None:
    """A range is verified against the digest given, or against storage's own."""
    await put(served.stub(), DATA)
    expected = DATA[1_000_003:4_000_000]
    channel = served.channel()
    for known in (None, sha256(expected)):
        await read_blob(
            channel, sha256(DATA), tmp_path / "r", offset=1_000_003, size=len(expected), expected_sha256=known
        )
        assert (tmp_path / "r").read_bytes() == expected
    with pytest.raises(DataLoss) as caught:
        await read_blob(
            channel,
            sha256(DATA),
            tmp_path / "x",
            offset=0,
            size=10,
            expected_sha256=sha256(b"something else"),
        )
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    with pytest.raises(ValueError, match="0 bytes"):
        await read_blob(channel, sha256(DATA), tmp_path / "x", size=0)
    assert listing(tmp_path) == {"r", "storage"}


def part_of(path: Path, digest: str) -> Path:
    """Where a read keeps what it has."""
    return path.with_name(f".{path.name}.{digest[:8]}-0.part")


@pytest.mark.parametrize("kept", [0, 1, 3_000_000, len(DATA)])
async def test_a_read_goes_on_where_it_stopped(served: Storage, tmp_path: Path, kept: int) -> None:
    """The part that an earlier process left is used: only the rest is read."""
    await put(served.stub(), DATA)
    part_of(tmp_path / "copy", sha256(DATA)).write_bytes(DATA[:kept])
    seen: list[int] = []

    await read_blob(
        served.channel(), sha256(DATA), tmp_path / "copy", on_progress=lambda done, _: seen.append(done)
    )

    assert (tmp_path / "copy").read_bytes() == DATA
    assert all(done > kept for done in seen)


async def test_a_damaged_part_is_read_anew(served: Storage, tmp_path: Path) -> None:
    """If the part kept is wrong, the blob is read once more from its beginning."""
    await put(served.stub(), DATA)
    part_of(tmp_path / "copy", sha256(DATA)).write_bytes(bytes(2_000_000))

    await read_blob(served.channel(), sha256(DATA), tmp_path / "copy")

    assert (tmp_path / "copy").read_bytes() == DATA


async def test_a_read_outlives_a_restart_of_storage(served: Storage, tmp_path: Path) -> None:
    """Storage goes away in the middle of a read and comes back: the read ends as if nothing had been."""
    data = os.urandom(1 << 20) * 64
    await put(served.stub(), data)
    stopped: list[asyncio.Task[None]] = []

    async def restart() -> None:
        await served.host.stop(grace=0)
        await served.start()

    def on_progress(done: int, _: int) -> None:
        if done > 20_000_000 and not stopped:
            stopped.append(asyncio.create_task(restart()))

    await read_blob(served.channel(), sha256(data), tmp_path / "copy", on_progress=on_progress)
    await stopped[0]

    assert await asyncio.to_thread(digest_file, tmp_path / "copy") == (len(data), sha256(data))


async def test_a_cancelled_read_keeps_its_part(served: Storage, tmp_path: Path) -> None:
    """Cancelling leaves the part, closed, for the next try."""
    data = os.urandom(1 << 20) * 64
    await put(served.stub(), data)
    started = asyncio.Event()
    path = tmp_path / "copy"
    task = asyncio.create_task(
        read_blob(served.channel(), sha256(data), path, on_progress=lambda *_: started.set())
    )
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    kept = part_of(path, sha256(data)).stat().st_size

    assert 0 < kept <= len(data)
    await read_blob(served.channel(), sha256(data), path)
    assert await asyncio.to_thread(digest_file, path) == (len(data), sha256(data))


async def test_a_grant_is_used_for_one_call(served: Storage, tmp_path: Path) -> None:
    """A token given with the call counts instead of the channel's."""
    await put(served.stub(), DATA)
    await served.stub().AddReferences(pb.AddReferencesRequest(holder="jobs/j", sha256=[sha256(DATA)]))
    channel = served.channel(Role.PARTICIPANT)
    grant = served.key.issue("p", Role.GRANT, 60, "j")

    with pytest.raises(PermissionDenied):
        await read_blob(channel, sha256(DATA), tmp_path / "copy")
    await read_blob(channel, sha256(DATA), tmp_path / "copy", token=grant)

    assert (tmp_path / "copy").read_bytes() == DATA


async def test_what_is_not_there_leaves_nothing(served: Storage, tmp_path: Path) -> None:
    """A read of an unknown blob raises NotFound."""
    with pytest.raises(NotFound):
        await read_blob(served.channel(), "0" * 64, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


class Liar(pb_grpc.StorageServiceServicer):
    """A storage that sends other bytes than those asked for."""

    async def ReadBlob(
        self, request: pb.ReadBlobRequest, context: object
    ) -> AsyncIterator[pb.ReadBlobResponse]:
        yield pb.ReadBlobResponse(header=pb.ReadBlobHeader(blob_size_bytes=4, size_bytes=4))
        yield pb.ReadBlobResponse(data=b"lies")
        yield pb.ReadBlobResponse(range_sha256=sha256(b"lies"))


async def test_nothing_is_believed_because_it_arrived(tmp_path: Path) -> None:
    """Bytes that don't hash to the blob's key are refused, whatever digest comes with them."""
    server = grpc.aio.server()
    pb_grpc.add_StorageServiceServicer_to_server(Liar(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(DataLoss) as caught:
            await read_blob(channel, sha256(b"true"), tmp_path / "copy")
        with pytest.raises(DataLoss):
            await read_bytes(channel, sha256(b"true"), max_bytes=100)
    await server.stop(None)

    assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert listing(tmp_path) == set()


async def test_an_early_refusal_keeps_its_reason(served: Storage) -> None:
    """However a refusal and a client's writes cross, the client learns the server's reason."""
    reasons = set()
    channel = served.channel()
    for _ in range(100):
        try:
            with rpc_errors():
                await put(
                    pb_grpc.StorageServiceStub(channel), bytes(300_000), blob=ref(b"short"), step=10_000
                )
        except CoveyError as error:
            reasons.add((error.code, error.reason))
    await eventually(lambda: not served.app._rooms.writes.is_active(sha256(b"short")))

    assert reasons == {("INVALID_ARGUMENT", Reason.SIZE_MISMATCH)}

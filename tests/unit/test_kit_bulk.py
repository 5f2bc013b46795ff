"""Files and bytes in motion, without a server."""

import asyncio
import errno
import hashlib
import os
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey_kit.bulk import FileSink, digest_file, file_blocks, read_ahead
from covey_kit.limits import BULK_BYTES


async def filled(path: Path, blocks: Sequence[bytes], *, resume: bool = False) -> tuple[int, str]:
    """Writes blocks through a sink."""
    sink = await FileSink.open(path, resume=resume)
    for block in blocks:
        await sink.write(block)
    return await sink.finish()


async def test_a_sink_writes_and_hashes(tmp_path: Path) -> None:
    """Many blocks, more than its queue holds, come out in order with the right size and digest."""
    blocks = [os.urandom(BULK_BYTES // 3 + index) for index in range(60)]
    data = b"".join(blocks)

    size, digest = await filled(tmp_path / "f", blocks)

    assert (size, digest) == (len(data), hashlib.sha256(data).hexdigest())
    assert await asyncio.to_thread((tmp_path / "f").read_bytes) == data
    assert await asyncio.to_thread(digest_file, tmp_path / "f") == (size, digest)


async def test_a_sink_goes_on_behind_what_is_there(tmp_path: Path) -> None:
    """With `resume` the bytes on disk count into size and digest; without it they're gone."""
    await filled(tmp_path / "f", [b"one "])

    both = await filled(tmp_path / "f", [b"two"], resume=True)
    anew = await filled(tmp_path / "f", [b"three"])

    assert both == (7, hashlib.sha256(b"one two").hexdigest())
    assert anew == (5, hashlib.sha256(b"three").hexdigest())


async def test_a_closed_sink_keeps_what_came(tmp_path: Path) -> None:
    """`close` writes what is queued and keeps the file; `abort` removes it; both may come twice."""
    kept = await FileSink.open(tmp_path / "kept")
    dropped = await FileSink.open(tmp_path / "dropped")
    for sink in (kept, dropped):
        await sink.write(bytes(5_000_000))
    for _ in range(2):
        await kept.close()
        await dropped.abort()

    assert (tmp_path / "kept").stat().st_size == 5_000_000
    assert not (tmp_path / "dropped").exists()


async def test_a_failing_disk_is_told_and_what_was_good_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room, a later write and `finish` raise the OSError; the file is a prefix of what came."""
    real = os.pwrite

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        room = 3_000_000 - offset
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:room], offset)

    monkeypatch.setattr(os, "pwrite", full)
    data = os.urandom(BULK_BYTES)
    sink = await FileSink.open(tmp_path / "f")

    async def write_on() -> None:
        for _ in range(100):
            await sink.write(data)

    with pytest.raises(OSError, match="No space"):
        await write_on()
    with pytest.raises(OSError, match="No space"):
        await sink.finish()
    await sink.close()

    kept = (tmp_path / "f").read_bytes()

    assert kept == (data * 100)[: len(kept)]
    assert len(kept) == 3_000_000


async def collect(path: Path, offset: int, size: int | None) -> bytes:
    """Reads through `file_blocks`."""
    async with aclosing(file_blocks(path, offset, size)) as blocks:
        return b"".join([block async for block in blocks])


async def test_blocks_are_the_file(tmp_path: Path) -> None:
    """Any range, at and across the bounds of blocks and batches, is read exactly, up to the file's end."""
    data = os.urandom(9 * BULK_BYTES + 77)
    path = tmp_path / "f"
    await asyncio.to_thread(path.write_bytes, data)
    for offset, size in (
        (0, None),
        (5, None),
        (BULK_BYTES, BULK_BYTES),
        (4 * BULK_BYTES - 1, 2),
        (len(data), None),
        (len(data) + 5, None),
        (len(data) - 3, 100),
        (7, 0),
    ):
        end = len(data) if size is None else offset + size
        assert await collect(path, offset, size) == data[offset:end]


async def test_reading_ahead_keeps_order_and_one_at_a_time() -> None:
    """Batches are fetched one after the other, the next while the last is used, and come out in order."""
    fetching = 0
    asked: list[tuple[int, int]] = []

    async def fetch(start: int, length: int) -> list[bytes]:
        nonlocal fetching
        fetching += 1
        assert fetching == 1
        asked.append((start, length))
        await asyncio.sleep(0)
        fetching -= 1
        return [start.to_bytes(4, "big")]

    async with aclosing(read_ahead(fetch, 10, 10 << 20)) as blocks:
        starts = [int.from_bytes(block, "big") async for block in blocks]

    assert starts == [start for start, _ in asked]
    assert len(starts) > 2
    ends = [start + length for start, length in asked]
    assert [*starts, 10 + (10 << 20)] == [10, *ends]


async def test_a_reader_that_stops_waits_for_its_thread() -> None:
    """Closing early waits for the fetch in flight, so that what it reads from can be closed."""
    ended: list[int] = []

    async def fetch(start: int, _: int) -> list[bytes]:
        await asyncio.sleep(0.01)
        ended.append(start)
        return [b"x"]

    async with aclosing(read_ahead(fetch, 0, 100 << 20)) as blocks:
        await anext(blocks)

    assert len(ended) == 2


@given(st.lists(st.binary(max_size=50), max_size=10), st.integers(0, 5))
def test_any_blocks_make_one_file(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[bytes], cut: int
) -> None:
    """However bytes are cut into writes and resumes, file, size and digest are the same."""
    path = tmp_path_factory.mktemp("sink") / "f"

    async def write() -> tuple[int, str]:
        sink = await FileSink.open(path)
        for block in blocks[:cut]:
            await sink.write(block)
        await sink.close()
        return await filled(path, blocks[cut:], resume=True)

    data = b"".join(blocks)

    assert asyncio.run(write()) == (len(data), hashlib.sha256(data).hexdigest())
    assert path.read_bytes() == data

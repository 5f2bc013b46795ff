"""Deltas as they arrive: verified, whole or not there, and found again after a restart."""

import asyncio
import errno
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from covey_coordinator.state import deltas as module
from covey_coordinator.state.deltas import (
    DeltaSink,
    StoredDelta,
    delta_path,
    list_round,
    recover_round,
    remove_round,
    verify_delta,
)
from covey_kit.errors import Aborted, DataLoss, InvalidArgument, Reason, ResourceExhausted

COUNT = 1000


def values(count: int = COUNT) -> bytes:
    """Returns the bytes of a delta."""
    return np.random.default_rng(count).standard_normal(count).astype("<f4").tobytes()


def digest(data: bytes) -> str:
    """Returns the SHA-256 as hex."""
    return hashlib.sha256(data).hexdigest()


async def store(folder: Path, key: str, data: bytes, *, cut: int = 1 << 20, sha256: str = "") -> StoredDelta:
    """Sends a delta in messages of `cut` bytes, announced truly unless told otherwise."""
    sha256 = sha256 or digest(data)
    async with await DeltaSink.open(folder, key, len(data) // 4, len(data), sha256) as sink:
        for start in range(0, len(data), cut):
            await sink.write(data[start : start + cut])
        return await sink.finish()


def names(folder: Path) -> list[str]:
    """Returns everything in a folder, hidden files too."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("cut", [1, 3, 4, 7, 1024, 1 << 20])
async def test_what_comes_is_what_lies_there(tmp_path: Path, cut: int) -> None:
    """However the bytes are cut into messages, the file holds them all and nothing else is left."""
    data = values()

    stored = await store(tmp_path / "jobs" / "1", "a-1", data, cut=cut)

    assert stored == StoredDelta(
        delta_path(tmp_path / "jobs" / "1", "a-1", digest(data)), digest(data), len(data)
    )
    assert stored.path.read_bytes() == data
    assert names(stored.path.parent) == [stored.path.name]


async def test_a_size_that_cannot_be_right_is_refused_before_any_byte(tmp_path: Path) -> None:
    """4 bytes for each weight: anything else is refused at `open`, which leaves no trace."""
    with pytest.raises(
        InvalidArgument, match=r"expected a delta of 4000 bytes .4 for each of 1000"
    ) as caught:
        await DeltaSink.open(tmp_path, "a", COUNT, 4 * COUNT + 4, "0" * 64)

    assert caught.value.reason is Reason.SIZE_MISMATCH
    assert names(tmp_path) == []


async def test_too_many_bytes_are_refused_at_once(tmp_path: Path) -> None:
    """The message that goes over the announced size is the one that fails, not the end of the stream."""
    data = values()
    async with await DeltaSink.open(tmp_path, "a", COUNT, len(data), digest(data)) as sink:
        await sink.write(data)
        with pytest.raises(InvalidArgument, match="4001 or more came") as caught:
            await sink.write(b"x")

    assert caught.value.reason is Reason.SIZE_MISMATCH
    assert names(tmp_path) == []


async def test_too_few_bytes_are_refused_at_the_end(tmp_path: Path) -> None:
    """A stream that ends early is a size mismatch with both sizes."""
    data = values()
    async with await DeltaSink.open(tmp_path, "a", COUNT, len(data), digest(data)) as sink:
        await sink.write(data[:-1])
        with pytest.raises(
            InvalidArgument, match="expected 4000 bytes as announced, but 3999 came"
        ) as caught:
            await sink.finish()

    assert caught.value.reason is Reason.SIZE_MISMATCH
    assert names(tmp_path) == []


async def test_other_bytes_than_announced_are_refused(tmp_path: Path) -> None:
    """The digest decides, and both digests are named."""
    data = values()
    with pytest.raises(InvalidArgument, match=digest(data)) as caught:
        await store(tmp_path, "a", data, sha256="0" * 64)

    assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert names(tmp_path) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("cut", [1, 6, 4000])
async def test_values_that_are_not_finite_are_counted(tmp_path: Path, bad: float, cut: int) -> None:
    """The first such element and their number are said, wherever messages are cut."""
    array = np.frombuffer(values(), dtype="<f4").copy()
    array[[17, 18, 999]] = bad

    with pytest.raises(
        InvalidArgument, match=r"3 of the delta's 1000 values .* the first is element 17"
    ) as caught:
        await store(tmp_path, "a", array.tobytes(), cut=cut)

    assert caught.value.reason is Reason.DELTA_NOT_FINITE
    assert caught.value.metadata == {"first": "17", "count": "3"}
    assert names(tmp_path) == []


async def test_large_finite_values_are_welcome(tmp_path: Path) -> None:
    """Values whose squares overflow f32 are finite all the same."""
    data = np.full(COUNT, np.finfo(np.float32).max, dtype="<f4").tobytes()

    assert (await store(tmp_path, "a", data)).size == len(data)


async def test_a_full_disk_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC becomes STORAGE_FULL with advice when to come back."""

    def full(descriptor: int, data: bytes, offset: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "write_all", full)
    with pytest.raises(ResourceExhausted) as caught:
        await store(tmp_path, "a", values())

    assert caught.value.reason is Reason.STORAGE_FULL
    assert caught.value.retry_after is not None
    assert names(tmp_path) == []


async def test_an_aborted_delta_is_gone(tmp_path: Path) -> None:
    """`abort` removes the beginning, also while a message is being written, and may be called again."""
    data = values()
    sink = await DeltaSink.open(tmp_path, "a", COUNT, len(data), digest(data))
    await sink.write(data)

    await asyncio.gather(sink.abort(), sink.abort())

    assert names(tmp_path) == []


async def test_a_finished_delta_survives_abort(tmp_path: Path) -> None:
    """Once acknowledged it stays."""
    data = values()
    sink = await DeltaSink.open(tmp_path, "a", COUNT, len(data), digest(data))
    await sink.write(data)
    stored = await sink.finish()

    await sink.abort()

    assert stored.path.read_bytes() == data


async def test_the_same_result_may_come_twice_at_once(tmp_path: Path) -> None:
    """Two streams with the same key don't disturb each other; one file remains."""
    data = values()

    first, second = await asyncio.gather(
        store(tmp_path, "a", data, cut=100), store(tmp_path, "a", data, cut=64)
    )

    assert first == second
    assert names(tmp_path) == [first.path.name]


async def test_a_round_that_ended_meanwhile_aborts_the_delta(tmp_path: Path) -> None:
    """Removing the round's folder under an arriving delta makes it ASSIGNMENT_LOST; the folder stays away."""
    data = values()
    folder = tmp_path / "7"
    async with await DeltaSink.open(folder, "a", COUNT, len(data), digest(data)) as sink:
        await sink.write(data)
        await remove_round(folder)
        with pytest.raises(Aborted) as caught:
            await sink.finish()

    assert caught.value.reason is Reason.ASSIGNMENT_LOST
    assert names(tmp_path) == []


@pytest.mark.parametrize("key", ["", "../x", "a/b", "A", "a.b", ".a", "a" * 152])
async def test_keys_cannot_leave_the_folder(tmp_path: Path, key: str) -> None:
    """A key is a plain name."""
    with pytest.raises(ValueError, match="expected a key"):
        await DeltaSink.open(tmp_path, key, 1, 4, "0" * 64)


async def test_the_file_is_synced_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, name, folder: in this order, so that a loss of power leaves either nothing or the whole delta."""
    seen: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def watch_fsync(descriptor: int) -> None:
        seen.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")  # noqa: PTH112
        fsync(descriptor)

    def watch_replace(self: Path, target: Path) -> Path:
        seen.append("name")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(Path, "replace", watch_replace)
    await store(tmp_path, "a", values())

    assert seen == ["file", "name", "folder"]


async def test_a_damaged_file_is_found(tmp_path: Path) -> None:
    """A stored delta whose bytes changed, or that is gone, is DATA_LOSS."""
    stored = await store(tmp_path, "a", values())
    await verify_delta(stored)

    with stored.path.open("r+b") as file:
        file.write(b"\xff")
    with pytest.raises(DataLoss, match="hashes to") as caught:
        await verify_delta(stored)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    stored.path.unlink()
    with pytest.raises(DataLoss, match="is gone"):
        await verify_delta(stored)


async def test_a_restart_keeps_what_was_accepted_and_nothing_else(tmp_path: Path) -> None:
    """Beginnings and unrecorded deltas are removed, damaged ones are named for another try."""
    kept, damaged, gone, unrecorded = [await store(tmp_path, f"a-{i}", values(COUNT + i)) for i in range(4)]
    killed = await DeltaSink.open(tmp_path, "a-4", COUNT, 4 * COUNT, "0" * 64)
    await killed.write(values())
    damaged.path.write_bytes(values(3))
    gone.path.unlink()

    assert await list_round(tmp_path) == [kept, StoredDelta(damaged.path, damaged.sha256, 12), unrecorded]
    assert await recover_round(tmp_path, [kept, damaged, gone]) == [damaged, gone]
    assert await list_round(tmp_path) == [kept]
    assert names(tmp_path) == [kept.path.name]
    await killed.abort()


async def test_recovery_of_a_round_without_a_folder(tmp_path: Path) -> None:
    """No delta ever came: nothing is there, and that's no error."""
    assert await list_round(tmp_path / "9") == []
    assert await recover_round(tmp_path / "9", []) == []
    await remove_round(tmp_path / "9")


async def test_a_removal_that_was_cut_short_is_made_up_for(tmp_path: Path) -> None:
    """A process killed while it removed a round leaves a hidden folder; the next removal takes it along."""
    await store(tmp_path / "1", "a", values())
    (tmp_path / "1").rename(tmp_path / ".1.abcd.removed")
    await store(tmp_path / "2", "a", values())

    await remove_round(tmp_path / "2")

    assert names(tmp_path) == []

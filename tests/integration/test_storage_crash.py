"""A real storage process, killed at any moment: nothing acknowledged is lost, and what was cut goes on."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from covey.v1 import storage_service_pb2 as pb
from covey.v1 import storage_service_pb2_grpc as pb_grpc
from covey_kit.blobs import digest_file, read_blob, read_bytes, write_blob, write_bytes
from covey_kit.caller import Role
from covey_kit.channel import connect
from covey_kit.errors import Reason, ResourceExhausted
from covey_kit.tokens import SigningKey
from support.storage import listing, sha256

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
sys.argv[0] = "covey-storage"
from covey_storage.__main__ import main
main()
"""
"""A storage whose files can't grow beyond 3 MB: the disk is full there."""


class Process:
    """A storage process that can be killed and started again on the same port and folder."""

    def __init__(self, folder: Path, *, program: tuple[str, ...] = ("-m", "covey_storage")) -> None:
        self.folder = folder
        self.key: SigningKey
        self._program = program
        self._port = 0
        self.address = ""
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        """Starts it and waits until it answers."""
        self.key = await asyncio.to_thread(SigningKey.load_or_create, self.folder.parent / "signing-key.pem")
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._program,
            "serve",
            "--listen",
            f"127.0.0.1:{self._port}",
            "--folder",
            str(self.folder),
            "--trusted-key",
            str(self.folder.parent / "signing-key.pub"),
            "--min-free-bytes",
            "0",
            "--log-level",
            "warning",
            stdout=asyncio.subprocess.PIPE,
        )
        assert self.process.stdout is not None
        line = (await asyncio.wait_for(self.process.stdout.readline(), 30)).decode()
        assert line.startswith("covey-storage is ready on "), line
        self.address = line.split()[-1]
        self._port = int(self.address.rpartition(":")[2])

    async def kill(self) -> None:
        """Kills it, as a loss of power would as far as the process goes."""
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def stop(self) -> int:
        """Asks it to end; returns its exit status."""
        if self.process.returncode is None:
            self.process.terminate()
        return await asyncio.wait_for(self.process.wait(), 30)

    def channel(self) -> grpc.aio.Channel:
        """A channel with a service's token."""
        return connect(self.address, self.key.issue("tester", Role.SERVICE, 600))


@asynccontextmanager
async def running(process: Process) -> AsyncIterator[Process]:
    """The process, started and ended."""
    await process.start()
    try:
        yield process
    finally:
        await process.stop()


async def scrub(channel: grpc.aio.Channel) -> pb.ScrubResponse:
    """Scrubs and returns the last report, with everything damaged in it."""
    damaged: list[str] = []
    last = pb.ScrubResponse()
    async for last in pb_grpc.StorageServiceStub(channel).Scrub(pb.ScrubRequest()):
        damaged += last.damaged
    del last.damaged[:]
    last.damaged.extend(damaged)
    return last


async def test_kills_in_the_middle_of_writes(tmp_path: Path) -> None:
    """Killed at random points of a large write: each time the write goes on, and a scrub is clean."""
    chance = random.Random(7)
    size = 160 << 20
    file = tmp_path / "file"
    await asyncio.to_thread(file.write_bytes, os.urandom(size))
    _, digest = await asyncio.to_thread(digest_file, file)
    async with running(Process(tmp_path / "storage")) as process:
        channel = process.channel()
        small = [os.urandom(chance.randrange(1, 100_000)) for _ in range(10)]
        for data in small:
            await write_bytes(channel, data)
        kills = sorted(chance.sample(range(1 << 20, size), 4))
        restarts: list[asyncio.Task[None]] = []
        furthest: list[int] = []

        async def restart() -> None:
            await process.kill()
            await process.start()

        def on_progress(done: int, _: int) -> None:
            furthest.append(done)
            if kills and done >= kills[0] and all(task.done() for task in restarts):
                del kills[0]
                restarts.append(asyncio.create_task(restart()))

        await write_blob(channel, file, digest, size, on_progress)
        await asyncio.gather(*restarts)

        assert len(restarts) == 4
        sent = len(furthest) << 20
        assert sent < 2.5 * size, f"{sent} bytes were sent for {size}: parts weren't kept"
        for data in small:
            assert await read_bytes(channel, sha256(data), max_bytes=100_000) == data
        await read_blob(channel, digest, tmp_path / "copy")
        assert await asyncio.to_thread(digest_file, tmp_path / "copy") == (size, digest)
        last = await scrub(channel)
        assert (last.blobs_checked, list(last.damaged), last.orphans_removed) == (11, [], 0)
        assert await process.stop() == 0
        await channel.close()
    assert listing(process.folder / "partial") == set()
    assert listing(process.folder / "quarantine") == set()


async def test_kills_among_many_small_writes(tmp_path: Path) -> None:
    """Whatever was acknowledged before a kill is there after it; nothing else is left behind."""
    chance = random.Random(11)
    async with running(Process(tmp_path / "storage")) as process:
        acknowledged: dict[str, bytes] = {}
        grew: asyncio.Queue[None] = asyncio.Queue()
        channel = process.channel()
        for _ in range(4):
            before = len(acknowledged)
            goal = before + chance.randrange(5, 40)

            async def write_on(seed: int) -> None:
                random_ = random.Random(seed)
                while True:
                    data = random_.randbytes(random_.randrange(1, 30_000))
                    await write_bytes(channel, data)
                    acknowledged[sha256(data)] = data
                    grew.put_nowait(None)

            writers = [asyncio.create_task(write_on(chance.getrandbits(64))) for _ in range(3)]
            async with asyncio.timeout(60):
                while len(acknowledged) < goal:
                    await grew.get()
            await process.kill()
            for writer in writers:
                writer.cancel()
            await asyncio.gather(*writers, return_exceptions=True)
            known = dict(acknowledged)
            await process.start()
            for digest, data in known.items():
                assert await read_bytes(channel, digest, max_bytes=30_000) == data
        last = await scrub(channel)
        assert list(last.damaged) == []
        assert last.blobs_checked >= len(acknowledged)
        await channel.close()


async def test_a_full_disk_keeps_what_was_good(tmp_path: Path) -> None:
    """Without room a write ends as STORAGE_FULL; the part stays, and with room again the write goes on."""
    data = os.urandom(5_000_000)
    file = tmp_path / "file"
    await asyncio.to_thread(file.write_bytes, data)
    folder = tmp_path / "storage"
    async with running(Process(folder, program=("-c", LIMITED))) as process:
        channel = process.channel()
        fits = await write_bytes(channel, data[:2_000_000])
        with pytest.raises(ResourceExhausted) as caught:
            await write_blob(channel, file, sha256(data), len(data))
        assert caught.value.reason is Reason.STORAGE_FULL
        assert await read_bytes(channel, fits.sha256, max_bytes=2_000_000) == data[:2_000_000]
        await channel.close()
    async with running(Process(folder)) as process:
        channel = process.channel()
        state = await pb_grpc.StorageServiceStub(channel).QueryWrite(
            pb.QueryWriteRequest(sha256=sha256(data))
        )
        assert 2_000_000 < state.committed_bytes <= 3_000_000
        await write_blob(channel, file, sha256(data), len(data))
        assert await read_bytes(channel, sha256(data), max_bytes=len(data)) == data
        await channel.close()


async def test_a_second_process_is_told_who_has_the_folder(tmp_path: Path) -> None:
    """A second process on the folder ends at once, with one line that names folder and process."""
    async with running(Process(tmp_path / "storage")) as process:
        second = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "covey_storage",
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--folder",
            str(process.folder),
            "--trusted-key",
            str(tmp_path / "signing-key.pub"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await asyncio.wait_for(second.communicate(), 30)

        assert second.returncode == 1
        assert str(process.folder).encode() in errors
        assert str(process.process.pid).encode() in errors
        assert b"Traceback" not in errors

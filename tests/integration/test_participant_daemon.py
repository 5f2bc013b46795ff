"""The participant as a process: signals, its folder, a coordinator that isn't there, and no orphans."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from covey.v1 import common_pb2, job_pb2
from support.coordinator import Mesh, mesh
from support.device import create_job
from support.eventually import eventually
from support.mesh import alive, processes_with
from support.wat_packages import write_package

pytestmark = pytest.mark.slow

NOBODY = "127.0.0.1:9"


class Daemon:
    """`python -m covey_participant join …` with its output."""

    def __init__(self, process: asyncio.subprocess.Process, output: Path) -> None:
        self.process = process
        self._output = output

    def said(self) -> str:
        """Everything that it printed and logged so far."""
        return self._output.read_text("utf-8")

    def workers(self) -> list[psutil.Process]:
        """Its worker processes."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    async def ended(self, seconds: float) -> int:
        """Waits for its end, at most so long, and returns its exit status."""
        async with asyncio.timeout(seconds):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def daemon(address: str, folder: Path, *arguments: str) -> AsyncIterator[Daemon]:
    """A participant; killed at the end if it still runs."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    output = folder.parent / f"{folder.name}.log"
    with output.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "covey_participant", "join", address),
            *("--folder", str(folder), "--accept-all", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield Daemon(process, output)
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()


async def training(running: Mesh, job_id: str, found: Daemon) -> None:
    """Waits until the coordinator knows that a device trains, and a worker has computed for a while."""

    async def told() -> bool:
        job = await running.job(job_id)
        return any(a.stage == common_pb2.STAGE_TRAINING for a in job.current_round.assignments)

    def busy() -> bool:
        return any(worker.cpu_times().user > 0.6 for worker in found.workers())

    await eventually(told, 20.0, "a device trains")
    await eventually(busy, 20.0, "a worker computes")


@pytest.mark.may_block
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_gives_the_work_back_and_ends_within_two_seconds(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Exit status 0, no process left, and the coordinator has the work back before it is missed."""
    package = write_package(tmp_path / "package", "never-done")
    async with mesh(tmp_path / "mesh") as running:
        job_id = await create_job(running, package, silence_timeout={"seconds": 60})
        async with daemon(running.address, tmp_path / "device") as found:
            await eventually(lambda: "joined" in found.said(), 20.0)
            await running.begin(job_id, 1)
            await training(running, job_id, found)
            workers = found.workers()
            before = time.monotonic()
            found.process.send_signal(number)

            assert await found.ended(5.0) == 0, found.said()
            assert time.monotonic() - before < 2.0
            await eventually(lambda: not [w for w in workers if alive(w)], 1.0)

            async def given_back() -> bool:
                job = await running.job(job_id)
                states = [a.status for a in job.current_round.assignments]
                # The next one may have been handed out just before the stream ended: it comes back with it.
                running_still = job_pb2.ASSIGNMENT_STATUS_RUNNING in states
                return not running_still and "stopped by its person" in job.last_error.message

            await eventually(given_back, 5.0)


@pytest.mark.may_block
@pytest.mark.parametrize("variant", ["never-done", "endless-step"])
async def test_a_daemon_that_is_killed_leaves_no_orphan(tmp_path: Path, variant: str) -> None:
    """SIGKILL of the daemon ends its workers too, also in the middle of a call that never ends."""
    package = write_package(tmp_path / "package", variant, limits={"stepSeconds": 60, "memoryPages": 100})
    async with mesh(tmp_path / "mesh") as running:
        job_id = await create_job(running, package)
        async with daemon(running.address, tmp_path / "device") as found:
            await eventually(lambda: "joined" in found.said(), 20.0)
            await running.begin(job_id, 1)
            await training(running, job_id, found)
            workers = found.workers()
            assert workers
            os.kill(found.process.pid, signal.SIGKILL)
            await found.process.wait()

            await eventually(lambda: not [w for w in workers if alive(w)], 2.0, "no orphan")
            assert processes_with(str(tmp_path)) == []


@pytest.mark.may_block
async def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    """The second one says which process has the folder, and exits with 1."""
    async with daemon(NOBODY, tmp_path / "device") as first:
        await eventually(lambda: "participant device-" in first.said(), 20.0)
        async with daemon(NOBODY, tmp_path / "device") as second:
            assert await second.ended(20.0) == 1
            said = second.said()
    assert f"in use by process {first.process.pid}" in said
    assert "Traceback" not in said


@pytest.mark.may_block
async def test_a_missing_coordinator_is_logged_once_and_joined_when_it_comes(tmp_path: Path) -> None:
    """One warning, not one a try; the identity stays the same over restarts."""
    async with mesh(tmp_path / "mesh") as running:
        await running.stop()
        async with daemon(running.address, tmp_path / "device", "--name", "late") as found:
            await eventually(lambda: "not connected to the coordinator" in found.said(), 20.0)
            await asyncio.to_thread(_tries, found)
            await running.start()
            await eventually(lambda: "joined" in found.said(), 20.0)
            said = found.said()
            found.process.terminate()
            assert await found.ended(5.0) == 0
        async with daemon(running.address, tmp_path / "device") as again:
            await eventually(lambda: again.said().count("joined") == 2, 20.0)
            names = set(re.findall(r"participant (device-\w+) in", again.said()))
            again.process.terminate()
            await again.ended(5.0)

    assert said.count("not connected to the coordinator") == 1
    assert len(names) == 1


def _tries(found: Daemon) -> None:
    """Lets a few tries go by: they are at most 0.2, 0.4 and 0.8 s apart."""
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline and found.process.returncode is None:
        with contextlib.suppress(psutil.TimeoutExpired):
            psutil.Process(found.process.pid).wait(0.1)


@pytest.mark.may_block
async def test_another_devices_id_is_refused_for_good(tmp_path: Path) -> None:
    """CREDENTIAL_MISMATCH isn't retried: exit 1 with the coordinator's words."""
    async with (
        mesh(tmp_path / "mesh") as running,
        daemon(running.address, tmp_path / "one", "--id", "mine") as one,
    ):
        await eventually(lambda: "joined" in one.said(), 20.0)
        async with daemon(running.address, tmp_path / "two", "--id", "mine") as two:
            assert await two.ended(20.0) == 1
            said = two.said()
    assert "error:" in said
    assert "mine" in said
    assert "Traceback" not in said


@pytest.mark.may_block
async def test_wrong_usage_says_what_is_wrong(tmp_path: Path) -> None:
    """An address without a port is wrong usage."""
    async with daemon("nowhere", tmp_path / "device") as found:
        assert await found.ended(20.0) == 2
        assert "ADDRESS" in found.said()


@pytest.mark.may_block
async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """Whatever the first one still waits for; no worker stays."""
    async with mesh(tmp_path / "mesh") as running, daemon(running.address, tmp_path / "device") as found:
        await eventually(lambda: "joined" in found.said() and bool(found.workers()), 20.0)
        workers = found.workers()
        os.kill(found.process.pid, signal.SIGSTOP)
        found.process.send_signal(signal.SIGTERM)
        found.process.send_signal(signal.SIGINT)
        os.kill(found.process.pid, signal.SIGCONT)

        assert await found.ended(1.0) == 130
        await eventually(lambda: not [w for w in workers if alive(w)], 1.0)

"""SIGKILL at any moment: training goes on from what was acknowledged, and makes the same bytes."""

import asyncio
import contextlib
import random
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from covey.v1 import job_pb2
from covey_kit.errors import CoveyError
from support.coordinator import Mesh, mesh
from support.eventually import eventually
from support.scripted_participant import Outcome, ScriptedParticipant, Weights, compute, participants

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

COUNTS = (5, 6, 7, 0, 9, 4, 3)
JOB = {"assignments_per_round": 3, "epochs": 4, "validation_interval": 3}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class KilledMesh(Mesh):
    """A mesh whose coordinator is a process of its own, so that it can be killed."""

    async def start_coordinator(self) -> None:
        """Starts the process (again) and waits until it is ready."""
        self.port = self.port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "covey_coordinator", "serve", "--listen", self.address),
            *("--folder", str(self.folder / "coordinator"), "--storage", self.storage_address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        assert b"is ready on" in line
        self.connect()

    async def stop_coordinator(self) -> None:
        """Kills the process."""
        await self.disconnect()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def staying(running: Mesh, count: int) -> AsyncIterator[list[ScriptedParticipant]]:
    """Participants that come back whenever the coordinator does."""
    chance = random.Random(1)

    async def dawdle(_: ScriptedParticipant, assignment: object, base: Weights | None) -> Outcome:
        await asyncio.sleep(chance.random() * 0.05)
        return compute(assignment, base)  # type: ignore[arg-type]  # an assignment

    devices = [ScriptedParticipant(running.address, f"p{n}", dawdle) for n in range(count)]
    tasks = [asyncio.create_task(device.stay()) for device in devices]
    try:
        await eventually(lambda: all(device.welcomed.is_set() for device in devices))
        yield devices
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for device in devices:
            await device.die()


async def test_a_killed_coordinator_goes_on(tmp_path: Path) -> None:
    """Killed again and again, in the middle of whatever it does, it makes the checkpoints of a quiet run."""
    async with mesh(tmp_path / "quiet") as running, participants(running.address, 1):
        job_id = await running.create(COUNTS, **JOB)
        await running.begin(job_id, 1)
        await running.ended(job_id)
        expected = [r.checkpoint.sha256 for r in await running.rounds(job_id)]

    chance = random.Random(7)
    running = KilledMesh(tmp_path / "killed", together=False)
    await running.start()
    try:
        async with staying(running, 3):
            job_id = await running.create(COUNTS, **JOB)
            await running.begin(job_id, 3)
            for _ in range(4):
                await asyncio.sleep(0.1 + chance.random() * 0.6)
                await running.stop_coordinator()
                await running.start_coordinator()

            async def done() -> job_pb2.Job | None:
                with contextlib.suppress(CoveyError):
                    job = await running.job(job_id)
                    return job if job.HasField("end_time") else None
                return None

            job = await eventually(done, 90)
            assert job is not None
            assert job.state == job_pb2.JOB_STATE_COMPLETED, job.failure
            rounds = await running.rounds(job_id)
            assert [r.checkpoint.sha256 for r in rounds] == expected
            assert all(r.validation_metrics for r in rounds if r.round in {3, 6, 9, 12})
            assert sum(r.units for r in rounds) == 4 * sum(COUNTS)
    finally:
        await running.stop()

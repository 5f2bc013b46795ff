"""Rounds in which a GPU takes part: beside a CPU, and dying in the middle of the work."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from covey.client import Client, connect
from covey.packages import load, load_dataset
from covey.v1 import common_pb2, job_pb2
from covey_kit.caller import Role
from covey_participant.app import ParticipantApp
from covey_participant.domain.values import Adapter, Preference
from support.coordinator import Mesh, mesh
from support.device import device
from support.eventually import eventually
from support.gpu_device import require_adapter
from support.packages import DIGITS

pytestmark = [pytest.mark.slow, pytest.mark.may_block, pytest.mark.timeout(240)]

SECONDS = 120.0


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    """The adapter of this machine."""
    return require_adapter()


@asynccontextmanager
async def owner(running: Mesh, folder: Path) -> AsyncIterator[Client]:
    """The SDK's client with an owner's token."""
    token = folder / "owner.token"
    token.write_text(running.key.issue("tester", Role.OWNER, 600))
    async with connect(running.address, token_file=token) as client:
        yield client


async def create(client: Client, **settings: Any) -> str:
    """Makes a job of `digits` and returns its id."""
    package = await asyncio.to_thread(load, DIGITS)
    dataset = await asyncio.to_thread(load_dataset, DIGITS / "data" / "dataset.json", package)
    job = await client.jobs.create(package, dataset, job_pb2.JobSettings(seed=5, **settings))
    return job.job_id


def on_gpu(adapter: Adapter) -> dict[str, Any]:
    """Settings of a device that uses this GPU."""

    async def find() -> list[Adapter]:
        return [adapter]

    return {"preference": Preference.GPU, "find_adapters": find}


async def test_cpu_and_gpu_share_a_round(tmp_path: Path, adapter: Adapter) -> None:
    """Their deltas are summed as any others; the checkpoint names both backends, each device its own."""
    async with mesh(tmp_path / "mesh") as running, owner(running, tmp_path) as client:
        job_id = await create(client, target_round=1, assignments_per_round=4, min_participants=2)
        async with (
            device(running.address, tmp_path / "gpu", display_name="gpu", **on_gpu(adapter)) as gpu,
            device(running.address, tmp_path / "cpu", display_name="cpu", preference=Preference.CPU) as cpu,
        ):
            await eventually(lambda: gpu.control.connected and cpu.control.connected)
            await running.begin(job_id, 2)
            job = await running.ended(job_id, SECONDS)
            record = await client.checkpoints.export(job_id, tmp_path / "checkpoint.safetensors")
            ran = gpu.state().last_run

    assert job.state == job_pb2.JOB_STATE_COMPLETED, job.failure.message
    assert list(record.header.backends) == [common_pb2.CPU_WASM, common_pb2.GPU_WGPU]
    backends = {one.display_name: one.backend for one in job.participants}
    assert backends == {"gpu": common_pb2.GPU_WGPU, "cpu": common_pb2.CPU_WASM}
    assert (ran.backend, ran.adapter.name) == (common_pb2.GPU_WGPU, adapter.name)
    assert ran.fallback_reason == common_pb2.FALLBACK_REASON_UNSPECIFIED
    assert ran.shader_archive_sha256 == load(DIGITS).manifest.shader_archive.sha256


async def on_the_gpu(app: ParticipantApp) -> int:
    """The process id of the GPU's worker, once it trains there and the snapshot says so."""

    def found() -> int:
        snapshot = app.snapshot()
        assert snapshot.stage == common_pb2.STAGE_TRAINING
        assert snapshot.backend == common_pb2.GPU_WGPU
        assert snapshot.HasField("shader_archive_sha256")
        assert snapshot.adapter.name
        return app.gpu_pool.pids[0]

    return await eventually(found, SECONDS, interval=0.002)


async def test_a_gpu_that_dies_is_replaced_by_the_cpu(tmp_path: Path, adapter: Adapter) -> None:
    """The assignment at hand is redone on the CPU with DEVICE_ERROR; the next one runs on the GPU again."""
    async with mesh(tmp_path / "mesh") as running, owner(running, tmp_path) as client:
        job_id = await create(client, target_round=1, assignments_per_round=2, local_epochs=20)
        async with device(running.address, tmp_path / "gpu", **on_gpu(adapter)) as app:
            await eventually(lambda: app.control.connected)
            await running.begin(job_id, 1)
            victim = await on_the_gpu(app)
            os.kill(victim, signal.SIGKILL)

            def redone() -> bool:
                snapshot = app.snapshot()
                return snapshot.fallback_reason == common_pb2.FALLBACK_REASON_DEVICE_ERROR

            await eventually(redone, SECONDS, interval=0.002)
            job = await running.ended(job_id, SECONDS)
            record = await client.checkpoints.export(job_id, tmp_path / "checkpoint.safetensors")
            ran = app.state().last_run

    assert job.state == job_pb2.JOB_STATE_COMPLETED, job.failure.message
    assert job.participants[0].failures == 0
    assert list(record.header.backends) == [common_pb2.CPU_WASM, common_pb2.GPU_WGPU]
    assert ran.backend == common_pb2.GPU_WGPU

"""Which backend a device uses, through coordinator, storage and the real worker processes."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.v1 import common_pb2, job_pb2, snapshot_pb2
from covey.v1 import coordinator_service_pb2 as pb
from covey_kit.errors import InvalidArgument, Reason
from covey_participant.app import ParticipantApp
from covey_participant.domain.values import Adapter, Preference
from support.coordinator import Mesh, mesh
from support.device import create_job, device
from support.eventually import eventually
from support.gpu_plans import adapter_facts, archive_bytes, linear_plan
from support.wat_packages import write_package

pytestmark = [pytest.mark.slow, pytest.mark.may_block]

ADAPTER = replace(adapter_facts(), name="A GPU of another machine", adapter_type="DiscreteGPU")
"""Good enough for every check; whoever tries to open it finds that it isn't there."""

SOFTWARE = replace(ADAPTER, name="A software GPU", adapter_type="CPU")

BOTH = [{"kind": "CPU_WASM"}, {"kind": "GPU_WGPU"}]


def requires(**what: Any) -> list[dict[str, Any]]:
    """Backends of a package that asks something of a GPU."""
    return [{"kind": "CPU_WASM"}, {"kind": "GPU_WGPU", "requires": what}]


def archive(folder: Path) -> dict[str, Any]:
    """Writes a shader archive whose plan takes 4 MiB, and returns its entry in a manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = linear_plan()
    plan["buffers"] = [
        {"name": "weight", "element": "F32", "count": 'size("w")', "parameter": "w"},
        {"name": "scratch", "element": "F32", "count": "1048576"},
    ]
    content = archive_bytes(plan)
    (folder / "shaders.zip").write_bytes(content)
    return {
        "fileName": "shaders.zip",
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def finder(*adapters: Adapter) -> Callable[[], Any]:
    """What finds these adapters."""

    async def find() -> list[Adapter]:
        return list(adapters)

    return find


@asynccontextmanager
async def at_work(
    folder: Path, backends: list[dict[str, Any]], *, with_archive: bool = True, **settings: Any
) -> AsyncIterator[tuple[Mesh, ParticipantApp]]:
    """A device that trains a package whose work on the CPU never ends."""
    changes: dict[str, Any] = {"backends": backends}
    if with_archive:
        changes["shaderArchive"] = archive(folder / "package")
    package = await asyncio.to_thread(write_package, folder / "package", "never-done", **changes)
    async with mesh(folder / "mesh") as running:
        job_id = await create_job(running, package)
        async with device(running.address, folder / "device", **settings) as app:
            await eventually(lambda: app.control.connected)
            await running.begin(job_id, 1)
            yield running, app


async def training(app: ParticipantApp) -> snapshot_pb2.Snapshot:
    """The snapshot of the device once it trains on the CPU."""

    def found() -> snapshot_pb2.Snapshot:
        snapshot = app.snapshot()
        assert snapshot.stage == common_pb2.STAGE_TRAINING
        assert snapshot.backend == common_pb2.CPU_WASM
        return snapshot

    return await eventually(found, 30.0)


CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "PREFERENCE": (BOTH, {"preference": Preference.CPU}),
    "NOT_DECLARED": (BOTH[:1], {}),
    "NO_ARCHIVE": (BOTH, {}),
    "NO_ADAPTER": (BOTH, {"find_adapters": finder()}),
    "LIMITS": (requires(limits={"max-buffer-size": 1 << 40}), {}),
    "FEATURES": (requires(features=["shader-f16"]), {}),
    "BUDGET": (BOTH, {"gpu_memory_budget_mib": 1}),
    "DEVICE_ERROR": (BOTH, {}),
}


@pytest.mark.parametrize("reason", CASES)
async def test_without_one_precondition_the_cpu_trains_and_says_why(tmp_path: Path, reason: str) -> None:
    """Everything is there but one thing: the work goes on, and state and snapshot name that very thing."""
    backends, settings = CASES[reason]
    given = {"preference": Preference.GPU, "find_adapters": finder(ADAPTER), **settings}
    expected = common_pb2.FallbackReason.Value(f"FALLBACK_REASON_{reason}")

    async with at_work(
        tmp_path, backends, with_archive=reason not in ("NO_ARCHIVE", "NOT_DECLARED"), **given
    ) as (_, app):
        snapshot = await training(app)

        assert snapshot.fallback_reason == expected
        assert app.state().snapshot.fallback_reason == expected
        assert not snapshot.HasField("shader_archive_sha256")
        if reason == "BUDGET":
            assert snapshot.gpu_memory_budget_mib == 1


async def test_auto_leaves_a_software_gpu_alone(tmp_path: Path) -> None:
    """The module is faster there; the words say what to set for the GPU all the same."""
    async with at_work(tmp_path, BOTH, find_adapters=finder(SOFTWARE)) as (_, app):
        snapshot = await training(app)
        execution = app.desk.execution

    assert snapshot.fallback_reason == common_pb2.FALLBACK_REASON_PREFERENCE
    assert snapshot.adapter.name == SOFTWARE.name
    assert execution is not None
    assert execution.choice is not None
    assert "the preference GPU does" in execution.choice.message


async def test_looking_for_gpus_delays_no_join(tmp_path: Path) -> None:
    """A device joins while its drivers don't answer; only work that a GPU could do waits for them."""
    answer = asyncio.Event()

    async def slow() -> list[Adapter]:
        await answer.wait()
        return []

    async with at_work(tmp_path, BOTH, find_adapters=slow) as (_, app):
        assert app.control.connected
        await eventually(lambda: app.desk.execution is not None)
        execution = app.desk.execution
        assert execution is not None
        assert execution.choice is None
        answer.set()
        snapshot = await training(app)

    assert snapshot.fallback_reason == common_pb2.FALLBACK_REASON_NO_ADAPTER


async def test_what_ran_is_known_when_nothing_runs(tmp_path: Path) -> None:
    """The state tells the backend of the last assignment and why, and the job's state tells the backend."""
    package = await asyncio.to_thread(write_package, tmp_path / "package", backends=BOTH)
    async with mesh(tmp_path / "mesh") as running:
        job_id = await create_job(running, package, target_round=1)
        async with device(running.address, tmp_path / "device") as app:
            await eventually(lambda: app.control.connected)
            await running.begin(job_id, 1)
            job = await running.ended(job_id)
            last = app.state().last_run

    assert job.state == job_pb2.JOB_STATE_COMPLETED
    assert job.participants[0].backend == common_pb2.CPU_WASM
    assert (last.job_id, last.backend) == (job_id, common_pb2.CPU_WASM)
    assert last.fallback_reason == common_pb2.FALLBACK_REASON_NO_ARCHIVE
    assert last.message
    assert not last.HasField("adapter")


async def test_a_device_names_the_gpus_of_its_last_run_when_it_joins(tmp_path: Path) -> None:
    """Owners see them at once; the device itself looks anew before it chooses."""
    answer = asyncio.Event()

    async def slow() -> list[Adapter]:
        await answer.wait()
        return []

    async with mesh(tmp_path / "mesh") as running:
        async with device(running.address, tmp_path / "device", find_adapters=finder(ADAPTER)) as app:
            await eventually((tmp_path / "device" / "adapters.json").exists)
            await eventually(lambda: app.control.connected)
        async with device(running.address, tmp_path / "device", find_adapters=slow) as app:
            await eventually(lambda: app.control.connected)
            known = (await running.call("ListParticipants", pb.ListParticipantsRequest())).participants
            answer.set()
            await eventually(lambda: not app.state().device.adapters)

    assert [adapter.name for adapter in known[0].device.adapters] == [ADAPTER.name]


async def test_an_archive_that_isnt_the_manifests_is_refused(tmp_path: Path) -> None:
    """At the job's creation, with what was declared and what was found: never a fallback later."""
    changes: dict[str, Any] = {"backends": BOTH, "shaderArchive": archive(tmp_path / "package")}
    package = await asyncio.to_thread(write_package, tmp_path / "package", **changes)
    declared = changes["shaderArchive"]["sha256"]
    (tmp_path / "package" / "shaders.zip").write_bytes(b"something else")
    async with mesh(tmp_path / "mesh") as running:
        with pytest.raises(InvalidArgument) as caught:
            await create_job(running, package)

    wrong = {violation.field: violation.description for violation in caught.value.violations}
    assert caught.value.reason is Reason.PACKAGE_MISMATCH
    assert set(wrong) == {"package.shader_archive.bytes", "package.shader_archive.sha256"}
    assert declared in wrong["package.shader_archive.sha256"]
    assert hashlib.sha256(b"something else").hexdigest() in wrong["package.shader_archive.sha256"]

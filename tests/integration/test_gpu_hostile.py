"""Whatever a package's archive holds, the GPU worker answers in time, and the next job runs."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from covey_kit.errors import Reason
from covey_participant.domain.backend import Fallback
from covey_participant.domain.failure import WorkFailure
from covey_participant.domain.values import Adapter
from covey_participant.runtime.gpu.failure import GpuFailure
from covey_participant.runtime.gpu.protocol import GpuJob
from covey_participant.runtime.gpu.supervisor import GpuPool
from covey_participant.runtime.protocol import Outcome, Progress, Step
from covey_participant.runtime.supervisor import TimeLimits
from support.eventually import eventually
from support.gpu_device import require_adapter
from support.gpu_module import chunk, gpu_job
from support.gpu_plans import INPUTS, LINEAR, linear_plan, minibatches

LIMITS = TimeLimits(call=20.0, compile=60.0)
BASE = np.linspace(-1, 1, INPUTS + 1).astype(np.float32)
CHUNK = chunk(minibatches(4, seed=1))

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    """The adapter of this machine."""
    return require_adapter()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[GpuPool]:
    """One pool for all tests: each leaves it able to work."""
    made = GpuPool()
    yield made
    await made.close()


def job(folder: Path, adapter: Adapter, **changes: Any) -> GpuJob:
    """The linear model's job, changed."""
    return gpu_job(folder, (adapter.name, adapter.api), CHUNK, BASE, **changes)


async def failure(pool: GpuPool, bad: GpuJob, limits: TimeLimits = LIMITS) -> WorkFailure:
    """How a job fails."""
    with pytest.raises(WorkFailure) as caught:
        await pool.run(bad, limits)
    return caught.value


async def works(pool: GpuPool, folder: Path, adapter: Adapter) -> Outcome:
    """Runs a job that nothing is wrong with."""
    outcome = await pool.run(job(folder, adapter), LIMITS)
    assert np.fromfile(folder / "delta.bin", "<f4").any()
    return outcome


def descend(body: str) -> dict[str, str]:
    """The linear model's shaders with another body of `descend`."""
    head, _, _ = LINEAR.partition("@compute @workgroup_size(16)\nfn descend")
    return {
        "linear.wgsl": f"{head}@compute @workgroup_size(16)\n"
        f"fn descend(@builtin(global_invocation_id) id: vec3<u32>) {{ {body} }}"
    }


def many_groups() -> dict[str, Any]:
    """The plan with as many workgroups as there can be in `descend`."""
    plan = linear_plan()
    plan["pipelines"][1]["workgroups"] = ["65535", "65535", "65535"]
    return plan


async def test_an_endless_shader_is_killed(tmp_path: Path, adapter: Adapter, pool: GpuPool) -> None:
    """A kernel that doesn't come back costs the step's time limit and the worker, not the next job."""
    endless = descend("loop { weight[id.x % INPUTS] += 1.0; if (bias[0] > 1e30) { break; } }")
    bad = job(tmp_path, adapter, plan=many_groups(), modules=endless)
    await works(pool, tmp_path, adapter)  # compiles nothing new below but the endless pipeline
    bad = job(tmp_path, adapter, plan=many_groups(), modules=endless)
    started = time.monotonic()

    found = await failure(pool, bad, TimeLimits(call=2.0, compile=60.0))

    assert isinstance(found, GpuFailure)
    assert found.reason is Reason.STEP_TIMEOUT
    assert "2 s" in found.message
    assert time.monotonic() - started < 30
    await works(pool, tmp_path, adapter)


async def test_an_endless_shader_can_be_cancelled(tmp_path: Path, adapter: Adapter, pool: GpuPool) -> None:
    """Cancelling doesn't wait for the GPU: the worker is killed, and the next job gets another."""
    endless = descend("loop { weight[id.x % INPUTS] += 1.0; if (bias[0] > 1e30) { break; } }")
    working = asyncio.Event()

    def watch(progress: Progress) -> None:
        if progress.step is Step.WORK:
            working.set()

    bad = job(tmp_path, adapter, plan=many_groups(), modules=endless)
    task = asyncio.create_task(pool.run(bad, LIMITS, watch))
    await asyncio.wait_for(working.wait(), 30)
    started = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert time.monotonic() - started < 5
    await works(pool, tmp_path, adapter)


async def test_an_index_out_of_bounds_reaches_nothing(
    tmp_path: Path, adapter: Adapter, pool: GpuPool
) -> None:
    """Reads and writes far outside of a buffer neither crash nor touch other buffers' weights."""
    wild = descend("let far = 1000000000u + id.x; difference[far] = difference[far + 7u] + 3.0;")

    outcome = await pool.run(job(tmp_path, adapter, modules=wild), LIMITS)

    assert outcome.units == 64
    assert not np.fromfile(tmp_path / "delta.bin", "<f4").any()
    await works(pool, tmp_path, adapter)


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        pytest.param({"linear.wgsl": LINEAR + "fn broken( {"}, "isn't closed", id="unbalanced"),
        pytest.param(descend("weight[0] = 1u;"), "descend", id="wrong-type"),
        pytest.param(descend("nowhere[0] = 1.0;"), "nowhere", id="unknown-name"),
        pytest.param(descend("let d = " + "(" * 20000 + "1.0" + ")" * 20000 + ";"), "", id="deep"),
    ],
)
async def test_invalid_shaders_are_named(
    tmp_path: Path, adapter: Adapter, pool: GpuPool, modules: dict[str, str], words: str
) -> None:
    """A shader that can't be compiled is refused with the compiler's words."""
    found = await failure(pool, job(tmp_path, adapter, modules=modules))

    assert isinstance(found, GpuFailure)
    assert found.reason in (Reason.SHADER_INVALID, Reason.WORKER_DIED)
    assert words in found.message
    await works(pool, tmp_path, adapter)


async def test_shader_and_plan_must_agree(tmp_path: Path, adapter: Adapter, pool: GpuPool) -> None:
    """A binding that the shader uses otherwise than the plan says is refused before anything runs."""
    plan = linear_plan()
    plan["pipelines"][1]["bindings"][2]["access"] = "READ"

    found = await failure(pool, job(tmp_path, adapter, plan=plan))

    assert found.reason is Reason.SHADER_INVALID
    assert "'forward'" in found.message


async def test_a_buffer_too_small_for_its_shader_is_refused(
    tmp_path: Path, adapter: Adapter, pool: GpuPool
) -> None:
    """A uniform buffer that is shorter than the struct in the shader is the package's mistake."""
    plan = linear_plan()
    plan["buffers"][5]["count"] = "3"

    found = await failure(pool, job(tmp_path, adapter, plan=plan))

    assert found.reason is Reason.SHADER_INVALID
    assert "16" in found.message
    await works(pool, tmp_path, adapter)


async def test_forty_gibibytes_are_refused(tmp_path: Path, adapter: Adapter, pool: GpuPool) -> None:
    """Twenty buffers of 2 GiB are named one by one, without one of them being made."""
    plan = linear_plan()
    for index in range(20):
        plan["buffers"].append({"name": f"huge{index}", "element": "F32", "count": "536870912"})
        plan["pipelines"][1]["bindings"].append(
            {"binding": 10 + index, "buffer": f"huge{index}", "access": "READ_WRITE"}
        )

    found = await failure(pool, job(tmp_path, adapter, plan=plan))

    assert isinstance(found, GpuFailure)
    assert (found.reason, found.fallback) == (Reason.LIMIT_EXCEEDED, Fallback.LIMITS)
    assert "huge0" in found.message
    assert "max-buffer-size" in found.message
    await works(pool, tmp_path, adapter)


async def test_more_memory_than_the_machine_has_is_refused(
    tmp_path: Path, adapter: Adapter, pool: GpuPool
) -> None:
    """Buffers that each fit but not together are refused by their sum where memory is shared."""
    if adapter.adapter_type not in ("CPU", "IntegratedGPU"):
        pytest.skip(f"{adapter.name} has memory of its own")
    plan = linear_plan()
    source = LINEAR.partition("@compute")[0] + "@compute @workgroup_size(1) fn touch() { }"
    for index in range(240):
        name, size = f"b{index}", adapter.limits["max-storage-buffer-binding-size"] // 4
        plan["buffers"].append({"name": name, "element": "F32", "count": str(size)})
        bindings = [{"binding": 0, "buffer": name, "access": "READ_WRITE"}]
        touch = {"name": name, "module": "touch.wgsl", "entryPoint": "touch", "workgroups": ["1"]}
        plan["pipelines"].append({**touch, "bindings": bindings})
    modules = {"linear.wgsl": LINEAR, "touch.wgsl": source}

    found = await failure(pool, job(tmp_path, adapter, plan=plan, modules=modules, budget_bytes=1 << 34))

    assert isinstance(found, GpuFailure)
    assert (found.reason, found.fallback) == (Reason.LIMIT_EXCEEDED, Fallback.BUDGET)
    assert "the budget is" in found.message


async def test_the_budget_holds(tmp_path: Path, adapter: Adapter, pool: GpuPool) -> None:
    """A plan over the budget is refused with both numbers."""
    found = await failure(pool, job(tmp_path, adapter, budget_bytes=1000))

    assert isinstance(found, GpuFailure)
    assert (found.fallback, found.package_fault) == (Fallback.BUDGET, False)
    assert "the budget is 1000" in found.message


@pytest.mark.parametrize(
    ("variant", "reason", "words"),
    [
        ("no-tensor", Reason.MODULE_EXPORT_MISSING, "covey_tensor"),
        ("null-tensor", Reason.MODULE_INVALID, "null"),
        ("outside-tensor", Reason.MODULE_INVALID, "outside of memory"),
        ("unaligned-tensor", Reason.MODULE_INVALID, "multiple of 4"),
        ("large-tensor", Reason.SHADER_INVALID, "4000 elements"),
        ("no-stream", Reason.MODULE_STATUS, "covey_begin"),
        ("stuck", Reason.MODULE_INVALID, "minibatch"),
        ("trapping", Reason.MODULE_TRAP, "UNREACHABLE"),
    ],
)
async def test_a_module_that_feeds_wrongly_fails_as_gpu(
    tmp_path: Path, adapter: Adapter, pool: GpuPool, variant: str, reason: Reason, words: str
) -> None:
    """What the module does wrong while it feeds the GPU is the GPU's failure: the CPU may do better."""
    found = await failure(pool, job(tmp_path, adapter, variant=variant))

    assert isinstance(found, GpuFailure)
    assert found.reason is reason
    assert words in found.message


async def test_a_chunk_that_does_not_load_is_no_gpu_failure(
    tmp_path: Path, adapter: Adapter, pool: GpuPool
) -> None:
    """A broken chunk would fail on the CPU too, and says so."""
    bad = gpu_job(tmp_path, (adapter.name, adapter.api), CHUNK[:-1], BASE)

    found = await failure(pool, bad)

    assert not isinstance(found, GpuFailure)
    assert found.reason is Reason.MODULE_STATUS


async def test_an_endless_module_is_killed(tmp_path: Path, adapter: Adapter, pool: GpuPool) -> None:
    """A module that doesn't come back while it feeds the GPU is killed like any other."""
    found = await failure(pool, job(tmp_path, adapter, variant="endless"), TimeLimits(call=1.0, compile=60.0))

    assert isinstance(found, GpuFailure)
    assert found.reason is Reason.STEP_TIMEOUT
    await works(pool, tmp_path, adapter)


async def test_results_that_are_not_finite_are_refused(
    tmp_path: Path, adapter: Adapter, pool: GpuPool
) -> None:
    """Infinite weights never leave the device."""
    modules = descend("bias[0] = 1.0 / settings.unused;")

    found = await failure(pool, job(tmp_path, adapter, modules=modules))

    assert isinstance(found, GpuFailure)
    assert found.reason is Reason.RESULT_NOT_FINITE


async def test_a_worker_that_is_killed_takes_only_its_job(
    tmp_path: Path, adapter: Adapter, pool: GpuPool
) -> None:
    """When the driver takes the process with it, the job fails as a GPU's, and the next one runs."""
    slow = descend("for (var i = 0u; i < 60000u; i++) { weight[id.x % INPUTS] += 1e-9; }")
    bad = job(tmp_path, adapter, plan=many_groups(), modules=slow)
    task = asyncio.create_task(pool.run(bad, LIMITS))
    await eventually(lambda: pool.busy == 1, timeout=30)
    for pid in pool.pids:
        os.kill(pid, signal.SIGABRT)

    with pytest.raises(GpuFailure) as caught:
        await task

    assert caught.value.reason is Reason.WORKER_DIED
    await works(pool, tmp_path, adapter)


async def test_an_adapter_that_is_gone_is_named(tmp_path: Path, adapter: Adapter, pool: GpuPool) -> None:
    """A GPU that was there when the assignment was planned, and isn't now, is a failure of the device."""
    found = await failure(pool, gpu_job(tmp_path, ("Ghost 9000", "Vulkan"), CHUNK, BASE))

    assert isinstance(found, GpuFailure)
    assert found.reason is Reason.DEVICE
    assert not found.package_fault
    assert "Ghost 9000" in found.message
    await works(pool, tmp_path, adapter)

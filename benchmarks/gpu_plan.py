"""What a shader plan costs beyond its kernels: the host's time a dispatch, a matmul with and without a plan.

    make bench ARGS=gpu_plan

Runs on the best adapter of this machine (lavapipe, where there is no GPU). The kernels are register-tiled:
four or eight rows of one vec4 of columns an invocation, no workgroup memory. Kernel and plan take turns, and
the best of each counts, so that what else runs on the machine weighs on both alike.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import wgpu
from wgpu import BufferUsage

from covey.v1 import shader_plan_pb2
from covey_participant.domain.values import Adapter
from covey_participant.runtime.gpu.adapters import environment, list_adapters
from covey_participant.runtime.gpu.archive import ShaderArchive
from covey_participant.runtime.gpu.assess import assess
from covey_participant.runtime.gpu.device import Device
from covey_participant.runtime.gpu.executor import Executor
from covey_participant.runtime.gpu.facts import PackageFacts
from covey_participant.runtime.gpu.inputs import Minibatch
from covey_participant.runtime.gpu.plan import Phase
from covey_participant.runtime.gpu.run import Run

TURNS = 6
TURN_SECONDS = 0.15
Work = Callable[[int], None]
VALUES = {"batchSize": 1.0, "learningRate": 0.1, "localEpochs": 1.0}


def matmul(size: int, rows: int) -> str:
    """WGSL for c = a·b of square matrices: `rows` rows and four columns an invocation, 8 × 8 invocations."""
    acc = "\n".join(f"var s{i} = vec4<f32>();" for i in range(rows))
    fma = "\n".join(f"s{i} += a[(r + {i}u) * {size}u + k] * v;" for i in range(rows))
    out = "\n".join(f"c[(r + {i}u) * {size // 4}u + q] = s{i};" for i in range(rows))
    return f"""
@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> c: array<vec4<f32>>;
@compute @workgroup_size(8, 8)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
    let q = id.x; let r = id.y * {rows}u;
    {acc}
    for (var k = 0u; k < {size}u; k++) {{ let v = b[k * {size // 4}u + q]; {fma} }}
    {out}
}}"""


def direct(device: Device, size: int, rows: int) -> Work:
    """The kernel by itself."""
    gpu = device.gpu
    usage = BufferUsage.STORAGE | BufferUsage.COPY_SRC | BufferUsage.COPY_DST
    buffers = [gpu.create_buffer(size=4 * size * size, usage=usage) for _ in range(3)]
    for buffer in buffers[:2]:
        gpu.queue.write_buffer(buffer, 0, np.random.default_rng(1).random(size * size, np.float32))
    module = gpu.create_shader_module(code=matmul(size, rows))
    made = gpu.create_compute_pipeline(layout="auto", compute={"module": module, "entry_point": "main"})
    entries = [
        {"binding": i, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
        for i, buffer in enumerate(buffers)
    ]
    group = gpu.create_bind_group(layout=made.get_bind_group_layout(0), entries=entries)

    def once(times: int) -> None:
        encoder = gpu.create_command_encoder()
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(made)
        compute.set_bind_group(0, group)
        for _ in range(times):
            compute.dispatch_workgroups(size // 32, size // (8 * rows), 1)
        compute.end()
        gpu.queue.submit([encoder.finish()])
        gpu.queue.read_buffer(buffers[2], 0, 4)

    return once


def in_turns(works: list[Work]) -> list[float]:
    """How often each can be done a second: the best of several turns, once warm."""
    times = []
    for work in works:
        work(1)
        started = time.perf_counter()
        work(2)
        times.append(max(1, int(2 * TURN_SECONDS / (time.perf_counter() - started))))
    best = [0.0] * len(works)
    for _ in range(TURNS):
        for index, work in enumerate(works):
            started = time.perf_counter()
            work(times[index])
            best[index] = max(best[index], times[index] / (time.perf_counter() - started))
    return best


def planned(device: Device, size: int, rows: int) -> Work:
    """The kernel as the only step of a plan, a minibatch each."""
    plan = shader_plan_pb2.ShaderPlan(format_version=1)
    for name in "abc":
        plan.buffers.add(
            name=name, element=shader_plan_pb2.ShaderBuffer.F32, count=f'size("{name}")', parameter=name
        )
    pipeline = plan.pipelines.add(
        name="matmul",
        module="m.wgsl",
        entry_point="main",
        workgroups=[str(size // 32), str(size // (8 * rows))],
    )
    for number, name in enumerate("abc"):
        access = (
            shader_plan_pb2.ShaderBinding.READ_WRITE if name == "c" else shader_plan_pb2.ShaderBinding.READ
        )
        pipeline.bindings.add(binding=number, buffer=name, access=access)
    plan.train.add(pipeline="matmul")
    facts = PackageFacts(dict.fromkeys("abc", size * size), VALUES, metrics=0, evaluation=False)
    executor = executor_of(device, ShaderArchive(plan, {"m.wgsl": matmul(size, rows)}), facts)
    executor.weights.write(np.random.default_rng(1).random(3 * size * size, np.float32))

    def once(times: int) -> None:
        run = Run(executor, Phase.TRAIN, (Minibatch(1, {}) for _ in range(times)), VALUES)
        while run.advance():
            pass

    return once


def executor_of(device: Device, archive: ShaderArchive, facts: PackageFacts) -> Executor:
    """The executor of a plan without violations."""
    assessment = assess(archive, facts, device.facts)
    if assessment.plan is None:
        raise assessment.error()
    return Executor(device, assessment.plan)


def overhead(device: Device, dispatches: int, minibatches: int = 640) -> tuple[float, float]:
    """(host's µs, µs in all) of a minibatch with so many small dispatches, an input and a uniform."""
    plan = shader_plan_pb2.ShaderPlan(format_version=1)
    kind = shader_plan_pb2.ShaderBuffer
    plan.buffers.add(name="w", element=kind.F32, count='size("w")', parameter="w")
    plan.buffers.add(name="x", element=kind.F32, count="64 * batchSize", tensor=0)
    plan.buffers.add(name="u", element=kind.F32, count="4").uniform.fields.extend(
        ["learningRate", "batchUnits"]
    )
    plan.buffers.add(name="m", element=kind.F32, count="1", metrics=True)
    binding = shader_plan_pb2.ShaderBinding
    for name in ("even", "odd"):
        made = plan.pipelines.add(name=name, module="m.wgsl", entry_point=name, workgroups=["1"])
        made.bindings.add(binding=0, buffer="w", access=binding.READ_WRITE)
        made.bindings.add(binding=1, buffer="x", access=binding.READ)
        made.bindings.add(binding=2, buffer="u", access=binding.UNIFORM)
        made.bindings.add(binding=3, buffer="m", access=binding.READ_WRITE)
    for index in range(dispatches):
        plan.train.add(pipeline=("even", "odd")[index % 2])
    kernel = "@compute @workgroup_size(64) fn {}(@builtin(local_invocation_id) i: vec3<u32>)"
    source = f"""
@group(0) @binding(0) var<storage, read_write> w: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<uniform> u: vec4<f32>;
@group(0) @binding(3) var<storage, read_write> m: array<f32>;
{kernel.format("even")} {{ w[i.x] += u.x * x[i.x]; if (i.x == 0u) {{ m[0] += w[0]; }} }}
{kernel.format("odd")} {{ w[i.x] -= u.x * x[i.x]; if (i.x == 0u) {{ m[0] += u.y; }} }}
"""
    facts = PackageFacts({"w": 64}, VALUES, metrics=1, evaluation=False)
    executor = executor_of(device, ShaderArchive(plan, {"m.wgsl": source}), facts)
    words = np.zeros(64, np.uint32)
    best = (float("inf"), float("inf"))
    for _ in range(5):
        run = Waiting(executor, Phase.TRAIN, (Minibatch(1, {0: words}) for _ in range(minibatches)), VALUES)
        started = time.perf_counter()
        while run.advance():
            pass
        total = time.perf_counter() - started
        best = min(best, (1e6 * (total - run.waited) / minibatches, 1e6 * total / minibatches))
    executor.close()
    return best


class Waiting(Run):
    """A run that measures how long it waits for the GPU."""

    def __init__(
        self, executor: Executor, phase: Phase, stream: Iterator[Minibatch], values: dict[str, float]
    ) -> None:
        super().__init__(executor, phase, stream, values)
        self.waited = 0.0

    def _land(self) -> None:
        started = time.perf_counter()
        super()._land()
        self.waited += time.perf_counter() - started


def main() -> None:
    """Prints the figures."""
    found: list[Adapter] = asyncio.run(list_adapters())
    if not found:
        print("no GPU adapter")
        return
    device = Device.open(found[0].name, found[0].api, [])
    print(f"{found[0].name} ({found[0].adapter_type}, {found[0].api}), wgpu {wgpu.__version__}")
    for dispatches in (4, 8, 20, 40):
        host, total = overhead(device, dispatches)
        print(
            f"{dispatches:3} dispatches a step: host {host:6.1f} µs ({host / dispatches:.2f} a dispatch; "
            f"bound {5 * dispatches}), in all {total:6.1f} µs"
        )
    for size in (256, 512, 1024):
        works = [make(device, size, rows) for rows in (4, 8) for make in (direct, planned)]
        speeds = [2e-9 * size**3 * rate for rate in in_turns(works)]
        kernel, plan = max(speeds[::2]), max(speeds[1::2])
        print(
            f"matmul {size}³: kernel {kernel:.2f} GFLOP/s, through the plan {plan:.2f} ({plan / kernel:.0%})"
        )


if __name__ == "__main__":
    os.environ.update(environment())
    main()
    os._exit(0)  # drivers' own clean-up may hang

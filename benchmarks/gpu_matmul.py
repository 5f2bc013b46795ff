"""How fast the shader plan of models/digits multiplies matrices, against the best of many kernels.

    python benchmarks/gpu_matmul.py [--batch 64 256 512] [--repeat 15] [--json FILE]

The plan's two large products, as its executor dispatches them:

    forward           [batch][784] times [784][128], bias and ReLU with it
    descend_hidden    [784][batch] times [batch][128], the step of momentum and weights with it

Against each stand kernels of the same size that only multiply: every tile of 2 to 8 rows by 4 to 16 columns
in registers, in workgroups of 32 to 256, and tiles in shared memory. The best of them is what the plan could
be. All take turns, and the best run of each counts. A software adapter is timed by the processor time that it
takes, which other work on the machine hardly moves: its speeds are those of one core. Then whole training
steps, end to end through the executor: all their arithmetic over the time that passed. Without an adapter it
says so and ends.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

# The executor is the participant's, its driver the tests'.
from covey_participant.runtime.gpu.device import Device, Dispatch
from covey_participant.runtime.gpu.plan import Phase
from support.gpu import GpuModel, adapter, device
from support.packages import DIGITS, defaults, training_chunks, weight_count
from support.wasm_harness import TRAIN

PIXELS, HIDDEN, CLASSES = 784, 128, 10
RUN_SECONDS = 0.01
"""A run repeats its dispatch until it takes about so long."""


@dataclass(frozen=True)
class Kernel:
    """One way to multiply; `shared`: tiles of 32 x 32 in shared memory, each invocation 4 x 4."""

    rows: int
    vectors: int
    group: tuple[int, int]
    shared: bool = False

    def __str__(self) -> str:
        where = "shared memory" if self.shared else "registers"
        return f"{self.rows} x {4 * self.vectors} in {where}, workgroups of {self.group[0]} x {self.group[1]}"


@dataclass(frozen=True)
class Row:
    """One comparison; speeds in GFLOP/s."""

    product: str
    batch: int
    plan: float
    best: float
    kernel: str
    share: float


def registers(kernel: Kernel, m: int, k: int, n: int, *, turned: bool) -> str:
    """C = A B (with `turned`: A is [k][m]) with a tile in registers; A is read four values at a time."""
    tile = list(itertools.product(range(kernel.rows), range(kernel.vectors)))
    lines = [f"var c{i}_{j} = vec4<f32>();" for i, j in tile]
    if turned:
        lines.append(f"for (var k = 0u; k < {k}u; k++) {{")
        lines += [f"let a{q} = a[(k * {m}u + row) / 4u + {q}u];" for q in range(kernel.rows // 4)]
        lines += [f"let b{j} = b[k * {n // 4}u + column + {j}u];" for j in range(kernel.vectors)]
        lines += [f"c{i}_{j} += a{i // 4}.{'xyzw'[i % 4]} * b{j};" for i, j in tile]
    else:
        lines.append(f"for (var k = 0u; k < {k // 4}u; k++) {{")
        lines += [f"let a{i} = a[(row + {i}u) * {k // 4}u + k];" for i in range(kernel.rows)]
        for part, name in enumerate("xyzw"):
            base = f"(k * 4u + {part}u) * {n // 4}u + column"
            lines += [f"let b{part}_{j} = b[{base} + {j}u];" for j in range(kernel.vectors)]
            lines += [f"c{i}_{j} += a{i}.{name} * b{part}_{j};" for i, j in tile]
    lines.append("}")
    lines += [f"c[(row + {i}u) * {n // 4}u + column + {j}u] = c{i}_{j};" for i, j in tile]
    body = "\n  ".join(lines)
    return f"""
@group(0) @binding(0) var<storage, read> a: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> b: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> c: array<vec4<f32>>;
@compute @workgroup_size({kernel.group[0]}, {kernel.group[1]})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
  let column = id.x * {kernel.vectors}u;
  let row = id.y * {kernel.rows}u;
  if (row >= {m}u || column >= {n // 4}u) {{ return; }}
  {body}
}}"""


def in_shared_memory(m: int, k: int, n: int, *, turned: bool) -> str:
    """The same with tiles of 32 x 32 of A and B in shared memory: 64 invocations of 4 x 4."""
    element = f"a[(at + i) * {m}u + row + t]" if turned else f"a[(row + t) * {k}u + at + i]"
    return f"""
@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> c: array<vec4<f32>>;
var<workgroup> left: array<f32, 1024>; // [k][row]
var<workgroup> right: array<vec4<f32>, 256>; // [k][column / 4]
@compute @workgroup_size(8, 8)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {{
  let row = group.y * 32u;
  let column = group.x * 8u;
  let mine = local.y * 8u + local.x;
  var c0 = vec4<f32>(); var c1 = vec4<f32>(); var c2 = vec4<f32>(); var c3 = vec4<f32>();
  for (var at = 0u; at < {k}u; at += 32u) {{
    for (var j = mine; j < 1024u; j += 64u) {{
      let t = j % 32u; let i = j / 32u;
      left[j] = select(0.0, {element}, at + i < {k}u && row + t < {m}u);
    }}
    for (var j = mine; j < 256u; j += 64u) {{
      let inside = at + j / 8u < {k}u;
      right[j] = select(vec4<f32>(), b[(at + j / 8u) * {n // 4}u + column + j % 8u], inside);
    }}
    workgroupBarrier();
    for (var i = 0u; i < 32u; i++) {{
      let r = right[i * 8u + local.x];
      let l = i * 32u + local.y * 4u;
      c0 += left[l] * r; c1 += left[l + 1u] * r; c2 += left[l + 2u] * r; c3 += left[l + 3u] * r;
    }}
    workgroupBarrier();
  }}
  let first = row + local.y * 4u;
  if (first + 3u < {m}u) {{
    c[first * {n // 4}u + column + local.x] = c0;
    c[(first + 1u) * {n // 4}u + column + local.x] = c1;
    c[(first + 2u) * {n // 4}u + column + local.x] = c2;
    c[(first + 3u) * {n // 4}u + column + local.x] = c3;
  }}
}}"""


class Bench:
    """Times dispatches on one device."""

    def __init__(self, on: Device) -> None:
        import wgpu

        self._on = on
        self._clock = time.process_time if on.facts.adapter_type == "CPU" else time.perf_counter
        self._usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.COPY_SRC
        self._back = on.buffer("back", 4, wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.MAP_READ)
        self._kept: list[Any] = []

    def seconds(self, dispatch: Dispatch, fence: Any, times: int) -> float:
        """How long one of so many dispatches took, with the wait for the last."""
        start = self._clock()
        encoder = self._on.gpu.create_command_encoder()
        self._on.encode(encoder, [dispatch] * times)
        encoder.copy_buffer_to_buffer(fence, 0, self._back, 0, 4)
        self._on.gpu.queue.submit([encoder.finish()])
        self._back.map_sync("READ_NOSYNC")
        self._back.unmap()
        return (self._clock() - start) / times

    def best(self, works: list[tuple[Dispatch, Any]], repeat: int) -> list[float]:
        """The least seconds of each, taken in turns after one to warm up."""
        times = [
            max(1, int(RUN_SECONDS / self.seconds(*work, 1))) if self.seconds(*work, 1) else 1
            for work in works
        ]
        turns = [
            [self.seconds(*work, count) for work, count in zip(works, times, strict=True)]
            for _ in range(repeat)
        ]
        return [min(column) for column in zip(*turns, strict=True)]

    def buffer(self, values: np.ndarray[Any, Any]) -> Any:
        """A storage buffer with these values."""
        return self._on.gpu.create_buffer_with_data(data=values, usage=self._usage)

    def dispatch(self, source: str, buffers: list[Any], groups: tuple[int, int]) -> Dispatch:
        """A dispatch of `main` of a module with these buffers."""
        gpu = self._on.gpu
        made = gpu.create_compute_pipeline(
            layout="auto", compute={"module": gpu.create_shader_module(code=source), "entry_point": "main"}
        )
        entries = [
            {"binding": i, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
            for i, buffer in enumerate(buffers)
        ]
        group = gpu.create_bind_group(layout=made.get_bind_group_layout(0), entries=entries)
        self._kept += [made, group, *buffers]
        return Device.handle(made), Device.handle(group), *groups, 1


def kernels(m: int, n: int, *, turned: bool) -> list[Kernel]:
    """The kernels that fit these sizes."""
    found = [Kernel(4, 1, (8, 8), shared=True)]
    for rows, vectors, group in itertools.product(
        (2, 4, 8), (1, 2, 4), ((8, 4), (16, 2), (8, 8), (16, 4), (16, 16))
    ):
        if not (m % rows or n % (4 * vectors * group[0]) or (turned and rows % 4)):
            found.append(Kernel(rows, vectors, group))
    return found


def alternatives(bench: Bench, m: int, k: int, n: int, *, turned: bool) -> list[tuple[Kernel, Dispatch, Any]]:
    """Every kernel, checked against NumPy once."""
    random = np.random.default_rng(1)
    a, b = random.random((m, k), np.float32), random.random((k, n), np.float32)
    left, right = bench.buffer(np.ascontiguousarray(a.T) if turned else a), bench.buffer(b)
    made = []
    for kernel in kernels(m, n, turned=turned):
        c = bench.buffer(np.zeros((m, n), np.float32))
        if kernel.shared:
            source, tile = in_shared_memory(m, k, n, turned=turned), (32, 32)
        else:
            source = registers(kernel, m, k, n, turned=turned)
            tile = (kernel.rows * kernel.group[1], 4 * kernel.vectors * kernel.group[0])
        dispatch = bench.dispatch(source, [left, right, c], (-(-n // tile[1]), -(-m // tile[0])))
        bench.seconds(dispatch, c, 1)
        found = np.frombuffer(device().gpu.queue.read_buffer(c), np.float32).reshape(m, n)
        np.testing.assert_allclose(found, a @ b, rtol=1e-4, err_msg=str(kernel))
        made.append((kernel, dispatch, c))
    return made


def compare(batch: int, repeat: int) -> list[Row]:
    """Both products of the plan at one batch size."""
    own, _ = defaults(DIGITS)
    model = GpuModel(DIGITS, own, batch=batch, rate=1e-6)
    model.module.load(b"".join(training_chunks(DIGITS)[:1]))
    model.module.check("initialize", 1)
    model.set_weights(model.module.weights(weight_count(DIGITS)))
    model.run(TRAIN, 0, min(batch, 375))  # fills the buffers; their content doesn't matter for time
    steps = dict(
        zip(
            (pipeline.name for pipeline in model.plan.phases[Phase.TRAIN]),
            model.executor.steps(Phase.TRAIN, 0),
            strict=True,
        )
    )
    bench, rows = Bench(device()), []
    for name, (m, k), turned in (
        ("forward", (batch, PIXELS), False),
        ("descend_hidden", (PIXELS, batch), True),
    ):
        others = alternatives(bench, m, k, HIDDEN, turned=turned)
        works = [(steps[name], model.executor.fence)]
        works += [(dispatch, fence) for _, dispatch, fence in others]
        mine, *theirs = bench.best(works, repeat)
        least = min(range(len(theirs)), key=theirs.__getitem__)
        flops = 2.0 * m * k * HIDDEN
        plan, best = flops / mine / 1e9, flops / theirs[least] / 1e9
        rows.append(Row(name, batch, plan, best, str(others[least][0]), plan / best))
    model.close()
    return rows


def end_to_end(batch: int, repeat: int) -> tuple[float, float]:
    """Whole training through the executor: (GFLOP/s, examples a second)."""
    own, _ = defaults(DIGITS)
    model = GpuModel(DIGITS, own, batch=batch, rate=0.01)
    units = model.module.load(training_chunks(DIGITS)[0])
    model.module.check("initialize", 1)
    model.set_weights(model.module.weights(weight_count(DIGITS)))
    model.run(TRAIN, 0, units)
    work: Callable[[], object] = lambda: model.run(TRAIN, 0, units)  # noqa: E731
    least = min(timed(work) for _ in range(repeat))
    model.close()
    flops = 2 * (2 * PIXELS * HIDDEN + 3 * HIDDEN * CLASSES)
    return units * flops / least / 1e9, units / least


def timed(work: Callable[[], object]) -> float:
    """How long one call took, in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256, 512], help="multiples of 8, to 512")
    parser.add_argument("--repeat", type=int, default=15, help="runs of each kernel (default 15)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    found = adapter()
    if isinstance(found, str):
        print(found)
        return
    setting = f"{found.name} ({found.adapter_type}, {found.api}), best of {arguments.repeat}"
    print(f"{setting}\n")
    print("| product | batch | plan, GFLOP/s | best kernel, GFLOP/s | plan / best | the best kernel |")
    print("|---|---|---|---|---|---|")
    rows: list[Row] = []
    for batch in arguments.batch:
        for row in compare(batch, arguments.repeat):
            rows.append(row)
            print(
                f"| {row.product} | {row.batch} | {row.plan:.2f} | {row.best:.2f} | {row.share:.2f} "
                f"| {row.kernel} |",
                flush=True,
            )
    print("\n| training, end to end: batch | GFLOP/s | examples/s |\n|---|---|---|")
    whole = []
    for batch in (16, *arguments.batch):
        speed, examples = end_to_end(batch, max(3, arguments.repeat // 3))
        whole.append({"batch": batch, "gflops": speed, "examples": examples})
        print(f"| {batch} | {speed:.2f} | {examples:,.0f} |", flush=True)
    if arguments.json:
        figures = {"setting": setting, "rows": [asdict(row) for row in rows], "training": whole}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

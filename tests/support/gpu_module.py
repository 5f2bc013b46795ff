"""The linear model's module in WebAssembly text: it decodes chunks into a batch stream and trains nothing.

A unit is nine little-endian f32: x (eight) and t. The stream goes through the units as they lie. Variants
misbehave each in one way.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import wasmtime

from covey_participant.runtime.gpu.protocol import GpuJob, GpuSpec
from covey_participant.runtime.protocol import ChunkFile, ConfigSpec, FileRange, ModuleSpec, Task
from support.gpu_plans import BATCH, F32, INPUTS, RATE, archive_bytes, linear_facts, linear_plan
from support.wat_packages import BODIES

ROW = 4 * (INPUTS + 1)

_STEP = f"""
  (local.set $n (global.get $batch))
  (if (i32.gt_u (local.get $n) (i32.sub (global.get $units) (global.get $position)))
    (then (local.set $n (i32.sub (global.get $units) (global.get $position)))))
  (if (i32.eqz (global.get $left)) (then (return (i32.const 0))))
  (local.set $from (i32.add (global.get $data) (i32.mul (i32.const {ROW})
    (i32.add (global.get $first) (global.get $position)))))
  (loop $each
    (memory.copy (i32.add (i32.const 8192) (i32.mul (local.get $i) (i32.const {ROW - 4})))
      (local.get $from) (i32.const {ROW - 4}))
    (memory.copy (i32.add (i32.const 32768) (i32.shl (local.get $i) (i32.const 2)))
      (i32.add (local.get $from) (i32.const {ROW - 4})) (i32.const 4))
    (local.set $from (i32.add (local.get $from) (i32.const {ROW})))
    (local.set $i (i32.add (local.get $i) (i32.const 1)))
    (br_if $each (i32.lt_u (local.get $i) (local.get $n))))
  (i32.store (i32.const 1024) (i32.const 8192))
  (i32.store (i32.const 1028) (i32.mul (local.get $n) (i32.const {INPUTS})))
  (i32.store (i32.const 1032) (i32.const 32768))
  (i32.store (i32.const 1036) (local.get $n))
  (global.set $position (i32.add (global.get $position) (local.get $n)))
  (if (i32.eq (global.get $position) (global.get $units)) (then (global.set $position (i32.const 0))))
  (global.set $left (i32.sub (global.get $left) (local.get $n)))
  (global.get $left)"""

_FUNCTIONS = {
    "covey_abi": ("(result i32)", "(i32.const 1)"),
    "covey_alloc": (
        "(param $bytes i32) (result i32) (local $at i32) (local $end i32)",
        BODIES["covey_alloc"],
    ),
    "covey_free": ("(param $at i32) (param $bytes i32)", BODIES["covey_free"]),
    "covey_configure": (
        "(param $at i32) (param $bytes i32) (result i32)",
        """(global.set $batch (i32.load offset=4 (local.get $at)))
        (global.set $epochs (i32.load offset=24 (local.get $at))) (i32.const 0)""",
    ),
    "covey_weights": ("(result i32)", "(i32.const 4096)"),
    "covey_initialize": ("(param $seed i64) (result i32)", "(i32.const 0)"),
    "covey_load": (
        "(param $at i32) (param $bytes i32) (result i32)",
        f"""(if (i32.rem_u (local.get $bytes) (i32.const {ROW})) (then (return (i32.const -2))))
        (global.set $data (call $covey_alloc (local.get $bytes)))
        (memory.copy (global.get $data) (local.get $at) (local.get $bytes))
        (i32.div_u (local.get $bytes) (i32.const {ROW}))""",
    ),
    "covey_begin": (
        """(param $phase i32) (param $first i64) (param $units i32) (result i32)
        (local $to i32) (local $j i32)""",
        """(if (i32.lt_u (local.get $phase) (i32.const 5)) (then (return (i32.const -5))))
        (global.set $first (i32.wrap_i64 (local.get $first)))
        (global.set $units (local.get $units))
        (global.set $position (i32.const 0))
        (global.set $left (i32.mul (local.get $units)
          (select (i32.const 1) (global.get $epochs) (i32.eq (local.get $phase) (i32.const 6)))))
        (i32.const 0)""",
    ),
    "covey_step": ("(result i32) (local $i i32) (local $n i32) (local $from i32)", _STEP),
    "covey_metrics": ("(result i32)", "(i32.const 2048)"),
    "covey_error": ("(result i32)", "(i32.const 1100)"),
    "covey_experience": (
        "(param $span i32) (result i32)",
        f"""(i32.store (local.get $span) (global.get $data))
        (i32.store offset=4 (local.get $span) (i32.mul (global.get $units) (i32.const {ROW})))
        (i32.const 0)""",
    ),
    "covey_load_experience": (
        "(param $at i32) (param $bytes i32) (result i32)",
        "(call $covey_load (local.get $at) (local.get $bytes))",
    ),
    "covey_tensor": (
        "(param $index i32) (result i32)",
        """(if (i32.gt_u (local.get $index) (i32.const 1)) (then (return (i32.const 0))))
        (i32.add (i32.const 1024) (i32.shl (local.get $index) (i32.const 3)))""",
    ),
}

# An UPDATE names the absolute first unit of its record, which begins at `data`.
# PLAY of unit n records x = (n, n + 1, …) / 64 and t = w₀ · n: a function of the weights and the unit alone.
_PLAY = f"""
  (if (i32.eq (local.get $phase) (i32.const 3)) (then
    (global.set $data (call $covey_alloc (i32.mul (local.get $units) (i32.const {ROW}))))
    (local.set $to (global.get $data))
    (loop $unit
      (local.set $j (i32.const 0))
      (loop $column
        (f32.store (i32.add (local.get $to) (i32.shl (local.get $j) (i32.const 2)))
          (f32.div (f32.convert_i64_s (i64.add (local.get $first) (i64.extend_i32_u (local.get $j))))
            (f32.const 64)))
        (local.set $j (i32.add (local.get $j) (i32.const 1)))
        (br_if $column (i32.lt_u (local.get $j) (i32.const {INPUTS}))))
      (f32.store (i32.add (local.get $to) (i32.const {ROW - 4}))
        (f32.mul (f32.load (i32.const 4096)) (f32.convert_i64_s (local.get $first))))
      (local.set $to (i32.add (local.get $to) (i32.const {ROW})))
      (local.set $first (i64.add (local.get $first) (i64.const 1)))
      (br_if $unit (i32.lt_u (i32.sub (local.get $to) (global.get $data))
        (i32.mul (local.get $units) (i32.const {ROW})))))
    (global.set $units (local.get $units))
    (global.set $left (i32.const 0))
    (return (i32.const 0))))
  (if (i32.eq (local.get $phase) (i32.const 7)) (then (local.set $first (i64.const 0))))
  {_FUNCTIONS["covey_begin"][1]}"""

VARIANTS: dict[str, dict[str, str]] = {
    "linear": {},
    "experience": {"covey_begin": _PLAY},
    "no-tensor": {"covey_tensor": ""},
    "null-tensor": {"covey_tensor": "(i32.const 0)"},
    "outside-tensor": {"covey_tensor": "(i32.store (i32.const 1024) (i32.const -64)) (i32.const 1024)"},
    "unaligned-tensor": {"covey_tensor": "(i32.store (i32.const 1024) (i32.const 8193)) (i32.const 1024)"},
    "large-tensor": {"covey_tensor": "(i32.store (i32.const 1028) (i32.const 4000)) (i32.const 1024)"},
    "no-stream": {"covey_begin": "(i32.const -5)"},
    "stuck": {"covey_step": "(global.get $left)"},
    "trapping": {"covey_step": "(unreachable)"},
    "endless": {"covey_step": "(loop $forever (br $forever)) (unreachable)"},
}


def linear_module(variant: str = "linear") -> bytes:
    """The module as a binary."""
    bodies = VARIANTS[variant]
    parts = ['(memory (export "memory") 2)', "(global $top (mut i32) (i32.const 131072))"]
    names = ("batch", "epochs", "data", "first", "units", "position", "left")
    parts += [f"(global ${name} (mut i32) (i32.const 0))" for name in names]
    parts += ["(global $error (mut i32) (i32.const 1100))"]
    for name, (signature, body) in _FUNCTIONS.items():
        own = bodies.get(name, body)
        if own:
            parts.append(f'(func ${name} (export "{name}") {signature} {own})')
    return bytes(wasmtime.wat2wasm("\n".join(["(module", *parts, ")"])))


def chunk(batches: list[tuple[F32, F32]]) -> bytes:
    """The units of minibatches as a chunk."""
    return b"".join(np.hstack([x, t[:, None]]).astype("<f4").tobytes() for x, t in batches)


def gpu_job(
    folder: Path,
    adapter: tuple[str, str],
    content: bytes,
    base: F32,
    *,
    task: Task = Task.TRAIN,
    variant: str = "linear",
    plan: dict[str, Any] | None = None,
    modules: dict[str, str] | None = None,
    archive: bytes | None = None,
    epochs: int = 1,
    experience: tuple[int, int] | None = None,
    budget_bytes: int | None = None,
    batch: int = BATCH,
) -> GpuJob:
    """A job of the linear model with its files in `folder`; `experience`: (first unit, units) to play."""
    module = linear_module(variant)
    packed = archive if archive is not None else archive_bytes(plan or linear_plan(), modules)
    (folder / "module.wasm").write_bytes(module)
    (folder / "chunk.bin").write_bytes(content)
    (folder / "base.bin").write_bytes(base.astype("<f4").tobytes())
    (folder / "shaders.zip").write_bytes(packed)
    config = ConfigSpec(seed=1, batch_size=batch, learning_rate=RATE, local_epochs=epochs)
    spec = ModuleSpec(
        path=str(folder / "module.wasm"),
        sha256=hashlib.sha256(module).hexdigest(),
        compiled=str(folder / "compiled"),
        memory_bytes=64 << 20,
        weights=INPUTS + 1,
        metrics=1,
        dataset=experience is None,
        experience=experience is not None,
    )
    return GpuJob(
        task=task,
        module=spec,
        config=config,
        weights=FileRange(str(folder / "base.bin"), 0, 4 * base.size),
        weights_sha256=hashlib.sha256(base.astype("<f4").tobytes()).hexdigest(),
        chunks=[] if experience else [ChunkFile(str(folder / "chunk.bin"), len(content) // ROW)],
        first_unit=experience[0] if experience else 0,
        units=experience[1] if experience else None,
        sequence_seed=1 if experience else None,
        output=str(folder / "delta.bin"),
        gpu=GpuSpec(
            archive=str(folder / "shaders.zip"),
            archive_sha256=hashlib.sha256(packed).hexdigest(),
            facts=replace(linear_facts(batch, epochs=epochs), experience=experience is not None),
            adapter=adapter[0],
            api=adapter[1],
            budget_bytes=budget_bytes,
        ),
    )

"""Model packages written in WebAssembly text: one that behaves, and one for each way not to.

The well-behaved model is the *adder*: `weights` f32 numbers, and units that are f32 numbers too. Training
on a unit x adds `learningRate · x` (rounded to f32) to every weight; so NumPy knows every bit of every result
(`adder_train`). `initialize(seed)` sets weight i to `f32((seed & 255) + i)`. Metrics: `total` (sum of x + w₀
over the units of work) and `absent`, whose count is always 0. A prediction adds w₀ to each input.

Everything else is the adder with some function bodies replaced: see `VARIANTS`.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import wasmtime

PAGE = 65536
WEIGHTS_AT = 4096
FORMAT = "adder-f32"

# (name, parameters, results): the body is `BODIES[name]` unless a variant has its own.
FUNCTIONS: dict[str, str] = {
    "covey_abi": "(result i32)",
    "covey_alloc": "(param $bytes i32) (result i32) (local $at i32) (local $end i32)",
    "covey_free": "(param $at i32) (param $bytes i32)",
    "covey_configure": "(param $at i32) (param $bytes i32) (result i32)",
    "covey_weights": "(result i32)",
    "covey_initialize": "(param $seed i64) (result i32) (local $i i32)",
    "covey_load": "(param $at i32) (param $bytes i32) (result i32)",
    "covey_begin": "(param $phase i32) (param $first i64) (param $units i32) (result i32)",
    "covey_step": "(result i32) (local $i i32) (local $w i32) (local $x f32) (local $n i32)"
    " (local $scaled f32)",
    "covey_metrics": "(result i32)",
    "covey_predict": "(param $in i32) (param $in_bytes i32) (param $out i32) (param $room i32) (result i32)"
    " (local $i i32)",
    "covey_error": "(result i32)",
}

BODIES: dict[str, str] = {
    "covey_abi": "(i32.const 1)",
    # A bump allocator: 16-aligned, grows the memory, frees only what was taken last.
    "covey_alloc": """
      (local.set $at (i32.and (i32.add (global.get $top) (i32.const 15)) (i32.const -16)))
      (local.set $end (i32.add (local.get $at) (local.get $bytes)))
      (if (i32.lt_u (local.get $end) (local.get $at)) (then (return (i32.const 0))))
      (if (i32.gt_u (local.get $end) (i32.mul (memory.size) (i32.const 65536))) (then
        (if (i32.eq (i32.const -1) (memory.grow (i32.add (i32.const 1) (i32.div_u
              (i32.sub (local.get $end) (i32.mul (memory.size) (i32.const 65536))) (i32.const 65536)))))
          (then (return (i32.const 0))))))
      (global.set $top (local.get $end))
      (local.get $at)""",
    "covey_free": """
      (if (i32.eq (i32.add (local.get $at) (local.get $bytes)) (global.get $top))
        (then (global.set $top (local.get $at))))""",
    "covey_configure": """
      (if (i32.ne (i32.load (local.get $at)) (i32.const 1))
        (then (global.set $error (i32.const 1024)) (return (i32.const -1))))
      (global.set $batch (i32.load offset=4 (local.get $at)))
      (global.set $rate (f32.demote_f64 (f64.load offset=16 (local.get $at))))
      (global.set $epochs (i32.load offset=24 (local.get $at)))
      (i32.const 0)""",
    "covey_weights": "(i32.const {weights_at})",
    "covey_initialize": """
      (loop $each
        (f32.store offset={weights_at} (i32.shl (local.get $i) (i32.const 2))
          (f32.convert_i64_s (i64.add (i64.and (local.get $seed) (i64.const 255))
                                      (i64.extend_i32_u (local.get $i)))))
        (local.set $i (i32.add (local.get $i) (i32.const 1)))
        (br_if $each (i32.lt_u (local.get $i) (i32.const {weights}))))
      (i32.const 0)""",
    "covey_load": """
      (if (i32.rem_u (local.get $bytes) (i32.const 4))
        (then (global.set $error (i32.const 1088)) (return (i32.const -2))))
      (global.set $data (call $covey_alloc (local.get $bytes)))
      (if (i32.eqz (global.get $data)) (then (global.set $error (i32.const 1152)) (return (i32.const -4))))
      (memory.copy (global.get $data) (local.get $at) (local.get $bytes))
      (global.set $loaded (i32.shr_u (local.get $bytes) (i32.const 2)))
      (global.get $loaded)""",
    "covey_begin": """
      (memory.fill (i32.const 2048) (i32.const 0) (i32.const 32))
      (if (i64.gt_u (i64.add (local.get $first) (i64.extend_i32_u (local.get $units)))
                    (i64.extend_i32_u (global.get $loaded)))
        (then (global.set $error (i32.const 1216)) (return (i32.const -1))))
      (global.set $phase (local.get $phase))
      (global.set $first (i32.wrap_i64 (local.get $first)))
      (global.set $units (local.get $units))
      (global.set $left (select (i32.mul (local.get $units) (global.get $epochs)) (local.get $units)
                                (i32.eq (local.get $phase) (i32.const 1))))
      (i32.const 0)""",
    # One batch a step. In training, each unit adds rate·x to each weight.
    "covey_step": """
      (local.set $n (global.get $batch))
      (block $done (loop $unit
        (br_if $done (i32.or (i32.eqz (global.get $left)) (i32.eqz (local.get $n))))
        (local.set $x (f32.load (i32.add (global.get $data) (i32.shl (i32.add (global.get $first)
          (i32.rem_u (i32.sub (i32.mul (global.get $units) (global.get $epochs)) (global.get $left))
                     (global.get $units))) (i32.const 2)))))
        (if (i32.eq (global.get $phase) (i32.const 1)) (then
          (local.set $scaled (f32.mul (global.get $rate) (local.get $x)))
          (local.set $i (i32.const 0))
          (loop $each
            (local.set $w (i32.add (i32.const {weights_at}) (i32.shl (local.get $i) (i32.const 2))))
            (f32.store (local.get $w) (f32.add (f32.load (local.get $w)) (local.get $scaled)))
            (local.set $i (i32.add (local.get $i) (i32.const 1)))
            (br_if $each (i32.lt_u (local.get $i) (i32.const {weights}))))))
        (f64.store (i32.const 2048) (f64.add (f64.load (i32.const 2048))
          (f64.promote_f32 (f32.add (local.get $x) (f32.load (i32.const {weights_at}))))))
        (f64.store (i32.const 2056) (f64.add (f64.load (i32.const 2056)) (f64.const 1)))
        (global.set $left (i32.sub (global.get $left) (i32.const 1)))
        (local.set $n (i32.sub (local.get $n) (i32.const 1)))
        (br $unit)))
      (global.get $left)""",
    "covey_metrics": "(i32.const 2048)",
    "covey_predict": """
      (if (i32.lt_u (local.get $room) (local.get $in_bytes))
        (then (global.set $error (i32.const 1280)) (return (i32.const -1))))
      (block $done (loop $each
        (br_if $done (i32.ge_u (local.get $i) (local.get $in_bytes)))
        (f32.store (i32.add (local.get $out) (local.get $i))
          (f32.add (f32.load (i32.add (local.get $in) (local.get $i))) (f32.load (i32.const {weights_at}))))
        (local.set $i (i32.add (local.get $i) (i32.const 4)))
        (br $each)))
      (local.get $in_bytes)""",
    "covey_error": "(global.get $error)",
}

TEXTS = {
    1024: "configuration version isn't 1",
    1088: "a chunk's length must be a multiple of 4",
    1152: "no memory for the chunk",
    1216: "units outside of what is loaded",
    1280: "the output buffer is too small",
    1344: "the model says: \\c3\\a4ther is down",
}


@dataclass(frozen=True)
class Variant:
    """How a module differs from the adder."""

    bodies: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    imports: str = '(import "covey" "log" (func $log (param i32 i32 i32)))'
    extra: str = ""


ENDLESS = "(loop $forever (br $forever)) (unreachable)"
GROW = "(loop $more (br_if $more (i32.ne (memory.grow (i32.const 1)) (i32.const -1))))"

VARIANTS: dict[str, Variant] = {
    "adder": Variant(),
    "trap-initialize": Variant({"covey_initialize": "(unreachable)"}),
    "trap-configure": Variant({"covey_configure": "(i32.load (i32.const -8))"}),
    "trap-load": Variant({"covey_load": "(i32.load (i32.const -8))"}),
    "trap-step": Variant({"covey_step": "(i32.div_u (i32.const 1) (local.get $i))"}),
    "deep-recursion": Variant({"covey_step": "(call $covey_step)"}),
    "endless-step": Variant({"covey_step": ENDLESS}),
    "endless-load": Variant({"covey_load": ENDLESS}),
    "endless-start": Variant(extra=f"(func $start {ENDLESS}) (start $start)"),
    "trap-start": Variant(extra="(func $start (unreachable)) (start $start)"),
    # It never ends, but each step does: only a cancellation or the assignment's deadline stops it.
    "never-done": Variant({"covey_step": "(i32.const 1)"}),
    "grow-trap": Variant({"covey_step": f"{GROW} (unreachable)"}),
    "grow-status": Variant({"covey_load": f"{GROW} (global.set $error (i32.const 1152)) (i32.const -4)"}),
    "huge-alloc": Variant({"covey_alloc": "(i32.const 0)"}),
    "missing-export": Variant(without=("covey_step", "covey_metrics")),
    "wrong-signature": Variant(
        without=("covey_metrics",),
        extra='(func (export "covey_metrics") (result i64) (i64.const 0))',
    ),
    "forbidden-import": Variant(
        imports='(import "covey" "log" (func $log (param i32 i32 i32)))'
        ' (import "wasi_snapshot_preview1" "clock_time_get" (func (param i32 i64 i32) (result i32)))'
        ' (import "env" "secret" (global i32))',
    ),
    "wrong-log-type": Variant(imports='(import "covey" "log" (func $log (param i64)))'),
    "wrong-abi": Variant({"covey_abi": "(i32.const 7)"}),
    "nan-weights": Variant(
        {"covey_step": "(f32.store (i32.const {weights_at}) (f32.const nan)) (i32.const 0)"},
    ),
    "infinite-weights": Variant(
        {"covey_initialize": "(f32.store (i32.const {weights_at}) (f32.const inf)) (i32.const 0)"},
    ),
    "nan-metric": Variant(
        {
            "covey_step": "(f64.store (i32.const 2056) (f64.const 1))"
            " (f64.store (i32.const 2048) (f64.const nan)) (i32.const 0)"
        }
    ),
    "negative-count": Variant({"covey_step": "(f64.store (i32.const 2056) (f64.const -1)) (i32.const 0)"}),
    "weights-outside": Variant({"covey_weights": "(i32.const -16)"}),
    "weights-unaligned": Variant({"covey_weights": "(i32.const 4097)"}),
    "alloc-outside": Variant({"covey_alloc": "(i32.const -65536)"}),
    "alloc-unaligned": Variant({"covey_alloc": "(i32.const 524292)"}),
    "metrics-outside": Variant({"covey_metrics": "(i32.const -8)"}),
    "error-outside": Variant({"covey_step": "(i32.const -3)", "covey_error": "(i32.const -1)"}),
    "error-endless": Variant({"covey_step": "(i32.const -3)", "covey_error": ENDLESS}),
    "wrong-count": Variant({"covey_load": "(i32.const 3)"}),
    "status-step": Variant({"covey_step": "(global.set $error (i32.const 1344)) (i32.const -3)"}),
    "status-configure": Variant({"covey_configure": "(global.set $error (i32.const 1344)) (i32.const -1)"}),
    "predict-too-much": Variant({"covey_predict": "(i32.add (local.get $room) (i32.const 1))"}),
    "steps-backwards": Variant({"covey_step": "(i32.const 2147483647)"}),
    "chatty": Variant(
        {
            "covey_step": """
              (loop $again
                (call $log (i32.const 1) (i32.const 1344) (i32.const 32))
                (local.set $i (i32.add (local.get $i) (i32.const 1)))
                (br_if $again (i32.lt_u (local.get $i) (i32.const 20000))))
              (call $log (i32.const 99) (i32.const -64) (i32.const 4096))
              (i32.const 0)"""
        },
    ),
    "log-outside": Variant(
        {"covey_step": "(call $log (i32.const 1) (i32.const -4) (i32.const -1)) (i32.const 0)"}
    ),
    # Experience: unit n of the sequence with seed s is the number (s & 255) + n; UPDATE trains on them.
    "player": Variant(
        {
            "covey_begin": """
              (memory.fill (i32.const 2048) (i32.const 0) (i32.const 32))
              (global.set $phase (local.get $phase))
              (global.set $first (i32.wrap_i64 (local.get $first)))
              (global.set $units (local.get $units))
              (global.set $left (local.get $units))
              (if (i32.eq (local.get $phase) (i32.const 4)) (then
                (global.set $phase (i32.const 1))
                (global.set $first (i32.const 0))
                (global.set $left (i32.mul (local.get $units) (global.get $epochs)))))
              (if (i32.eq (local.get $phase) (i32.const 3)) (then
                (global.set $data (call $covey_alloc (i32.shl (local.get $units) (i32.const 2))))))
              (i32.const 0)""",
            "covey_step": """
              (if (i32.eq (global.get $phase) (i32.const 3)) (then
                (if (i32.eqz (global.get $left)) (then (return (i32.const 0))))
                (local.set $i (i32.sub (global.get $units) (global.get $left)))
                (f32.store (i32.add (global.get $data) (i32.shl (local.get $i) (i32.const 2)))
                  (f32.convert_i32_s (i32.add (global.get $seed)
                    (i32.add (global.get $first) (local.get $i)))))
                (global.set $left (i32.sub (global.get $left) (i32.const 1)))
                (return (global.get $left))))"""
            + BODIES["covey_step"],
            "covey_configure": """
              (global.set $seed
                (i32.and (i32.wrap_i64 (i64.load offset=8 (local.get $at))) (i32.const 255)))"""
            + BODIES["covey_configure"],
        },
        extra="""
          (func (export "covey_experience") (param $span i32) (result i32)
            (i32.store (local.get $span) (global.get $data))
            (i32.store offset=4 (local.get $span) (i32.shl (global.get $units) (i32.const 2)))
            (i32.const 0))
          (func (export "covey_load_experience") (param $at i32) (param $bytes i32) (result i32)
            (call $covey_load (local.get $at) (local.get $bytes)))""",
    ),
    # Remembers that it ran: its second run in one instance would give other weights.
    "stateful": Variant(
        {
            "covey_initialize": """
              (i32.store (i32.const 3000) (i32.add (i32.const 1) (i32.load (i32.const 3000))))
              (f32.store (i32.const {weights_at}) (f32.convert_i32_s (i32.load (i32.const 3000))))
              (i32.const 0)"""
        },
    ),
}


def wat(variant: str = "adder", *, weights: int = 8) -> str:
    """Returns the text of a module with so many weights."""
    how = VARIANTS[variant]
    pages = (WEIGHTS_AT + 4 * weights + PAGE - 1) // PAGE
    parts = [
        f'(memory (export "memory") {pages})',
        f"(global $top (mut i32) (i32.const {pages * PAGE}))",
        "(global $rate (mut f32) (f32.const 0))",
    ]
    names = ("seed", "batch", "epochs", "data", "loaded", "phase", "first", "units", "left")
    parts += [f"(global ${name} (mut i32) (i32.const 0))" for name in names]
    parts += ["(global $error (mut i32) (i32.const 960))"]
    parts += [f'(data (i32.const {at}) "{text}\\00")' for at, text in {960: "", **TEXTS}.items()]
    for name, signature in FUNCTIONS.items():
        export = "" if name in how.without else f' (export "{name}")'
        body = how.bodies.get(name, BODIES[name])
        body = body.replace("{weights_at}", str(WEIGHTS_AT)).replace("{weights}", str(weights))
        parts.append(f"(func ${name}{export} {signature} {body})")
    return "\n".join(["(module", how.imports, *parts, how.extra, ")"])


def wasm(variant: str = "adder", *, weights: int = 8) -> bytes:
    """Returns the module as a binary."""
    return bytes(wasmtime.wat2wasm(wat(variant, weights=weights)))


def large_wasm(weights: int) -> bytes:
    """Returns an adder that changes only its first and last weight: for tests of memory and transfer."""
    last = WEIGHTS_AT + 4 * (weights - 1)
    text = wat(weights=weights)
    head, found, tail = text.partition("(func $covey_step")
    assert found
    body_end = tail.index("(func $covey_metrics")
    step = f"""(func $covey_step (export "covey_step") (result i32)
      (f32.store (i32.const {WEIGHTS_AT}) (f32.add (f32.load (i32.const {WEIGHTS_AT})) (global.get $rate)))
      (f32.store (i32.const {last}) (f32.add (f32.load (i32.const {last})) (global.get $rate)))
      (i32.const 0))
    """
    return bytes(wasmtime.wat2wasm(head + step + tail[body_end:]))


def manifest(module: bytes, *, weights: int = 8, name: str = "adder", **changes: Any) -> dict[str, Any]:
    """Returns `manifest.json` for an adder, as the JSON object; `changes` replace whole keys."""
    return {
        "format": "weei-model-package",
        "formatVersion": 1,
        "name": name,
        "version": "1.0.0",
        "description": "Adds what it sees to its weights.",
        "license": "Apache-2.0",
        "module": {
            "fileName": "model.wasm",
            "bytes": len(module),
            "sha256": hashlib.sha256(module).hexdigest(),
        },
        "parameters": [{"name": "w", "shape": [weights]}],
        "dataFormats": [FORMAT],
        "workSource": {"kind": "DATASET", "inputs": "dataset", "unit": "example"},
        "capabilities": {"training": True, "evaluation": True, "inference": True},
        "metrics": [
            {"name": "total", "label": "Total", "direction": "MINIMIZE"},
            {"name": "absent", "label": "Absent", "direction": "NONE"},
        ],
        "hyperparameters": [
            {"name": "batchSize", "label": "Batch size", "default": 4, "min": 1, "max": 1024},
            {"name": "learningRate", "label": "Learning rate", "default": 0.5, "min": 0, "max": 10},
            {"name": "localEpochs", "label": "Local epochs", "default": 1, "min": 1, "max": 100},
        ],
        "backends": [{"kind": "CPU_WASM"}],
        "limits": {"memoryPages": 2048, "stepSeconds": 5},
        "inference": {
            "inputs": [{"name": "x", "dtype": "F32", "shape": [4]}],
            "outputs": [{"name": "y", "dtype": "F32", "shape": [4]}],
        },
        **changes,
    }


def chunk_bytes(values: "list[float] | np.ndarray[Any, Any]") -> bytes:
    """Returns a chunk of these units."""
    return np.asarray(values, "<f4").tobytes()


@dataclass(frozen=True)
class WatPackage:
    """A package folder with its dataset folder."""

    folder: Path
    module: bytes
    manifest: dict[str, Any]
    chunks: list[dict[str, Any]]

    @property
    def data(self) -> Path:
        """The dataset's folder: `dataset.json` and the chunks."""
        return self.folder / "data"


def write_package(
    folder: Path,
    variant: str = "adder",
    *,
    weights: int = 8,
    chunks: int = 2,
    units: int = 6,
    validation_units: int | None = None,
    **changes: Any,
) -> WatPackage:
    """Writes the package, perhaps with `validation.bin`, and `data/` with dataset manifest and chunks.

    Chunk k holds the units k + 1, k + 1.25, k + 1.5, …: exact in f32, and no two chunks are alike.
    """
    module = wasm(variant, weights=weights)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "model.wasm").write_bytes(module)
    if validation_units is not None:
        held_out = chunk_bytes([0.5 * i for i in range(validation_units)])
        (folder / "validation.bin").write_bytes(held_out)
        changes.setdefault(
            "validation",
            {
                "fileName": "validation.bin",
                "bytes": len(held_out),
                "sha256": hashlib.sha256(held_out).hexdigest(),
            },
        )
    made = []
    for index in range(chunks):
        content = chunk_bytes([index + 1 + 0.25 * i for i in range(units)])
        name = f"chunk-{index:03}.bin"
        (folder / "data" / name).write_bytes(content)
        made.append(
            {
                "id": f"chunk-{index:03}",
                "fileName": name,
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
                "format": FORMAT,
                "exampleCount": units,
            },
        )
    described = manifest(module, weights=weights, **changes)
    (folder / "manifest.json").write_text(json.dumps(described, indent=2))
    (folder / "data" / "dataset.json").write_text(json.dumps(made, indent=2))
    return WatPackage(folder, module, described, made)


def adder_initialize(weights: int, seed: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Returns what `covey_initialize` makes."""
    return (np.arange(weights, dtype=np.int64) + (seed & 255)).astype(np.float32)


def adder_train(
    base: "np.ndarray[Any, np.dtype[np.float32]]",
    units: "list[float] | np.ndarray[Any, Any]",
    *,
    learning_rate: float = 0.5,
    local_epochs: int = 1,
) -> "tuple[np.ndarray[Any, np.dtype[np.float32]], float]":
    """Returns (delta, sum of `total`) of one training assignment, to the bit."""
    weights, total, rate = base.astype(np.float32).copy(), 0.0, np.float32(learning_rate)
    for _ in range(local_epochs):
        for unit in np.asarray(units, np.float32):
            weights += rate * unit
            total += float(unit + weights[0])
    return weights - base, total

"""How fast the module of models/digits trains, against the same network in NumPy.

    python benchmarks/digits_kernel.py [--repeat 7] [--json FILE]

One thread each: the module in wasmtime (128-bit SIMD, called a minibatch at a time as a participant does),
NumPy with its OpenBLAS held to one thread. Both train 784-128-10 with momentum on the 375 digits of a chunk,
or on images of that size without a blank pixel: the module passes over blank pixels, matrix products don't.
Runs alternate, and the best of each counts; compare the ratios, since machines and their neighbours differ.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

# The host and the reference are the tests' own.
from support import digits_reference as reference
from support.packages import DIGITS, load_script, training_chunks
from support.wasm_harness import EVALUATE, TRAIN, WasmModule

ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
RATE, MOMENTUM = 0.04, 0.9
BATCHES = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Row:
    """One comparison; rates are examples per second."""

    images: str
    work: str
    batch: int
    module: float
    numpy: float


def seconds(work: Callable[[], object]) -> float:
    """How long one call took."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def best(repeat: int, *works: Callable[[], object]) -> list[float]:
    """The least seconds of each, taken in turns after one turn to warm up."""
    times = [[seconds(work) for work in works] for _ in range(repeat + 1)][1:]
    return [min(column) for column in zip(*times, strict=True)]


def compare(name: str, chunk: bytes, batch: int, repeat: int) -> list[Row]:
    """Trains and evaluates one chunk on both sides."""
    images, labels = reference.decode_chunk(chunk)
    x, y = reference.scaled(images), labels
    module = WasmModule(DIGITS / "model.wasm")
    epochs = 8
    module.configure([MOMENTUM, 0.0], batch=batch, rate=RATE, epochs=epochs)
    module.check("initialize", 1)
    units = module.load(chunk)
    network = reference.Reference(module.weights(reference.WEIGHTS), RATE, MOMENTUM)
    orders = [np.array(reference.epoch_order(1, epoch, 0, units)) for epoch in range(epochs)]

    def train_numpy() -> None:
        for order in orders:
            for start in range(0, units, batch):
                which = order[start : start + batch]
                network.step(x[which], y[which])

    def evaluate_numpy() -> None:
        for start in range(0, units, 128):
            network.losses(x[start : start + 128], y[start : start + 128])

    trained = best(repeat, lambda: module.run(TRAIN, 0, units), train_numpy)
    rows = [Row(name, "train", batch, *(units * epochs / time_ for time_ in trained))]
    if batch == BATCHES[-1]:
        evaluated = best(repeat * 4, lambda: module.run(EVALUATE, 0, units), evaluate_numpy)
        rows.append(Row(name, "evaluate", 128, *(units / time_ for time_ in evaluated)))
    return rows


def inked_chunk() -> bytes:
    """375 images of random pixels from 1 to 255."""
    encode = load_script(DIGITS / "tools" / "make_chunks.py").encode_chunk
    pixels = np.random.default_rng(1).integers(1, 256, (375, reference.PIXELS), np.uint8)
    made: bytes = encode(28, 28, [(i % 10, image.tobytes()) for i, image in enumerate(pixels)])
    return made


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--repeat", type=int, default=7, help="runs of each side (default 7)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    if not ONE_THREAD.items() <= os.environ.items():
        # NumPy's BLAS read these when it was imported: begin again with them set.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ONE_THREAD)
    versions = f"wasmtime {importlib.metadata.version('wasmtime')}, NumPy {np.__version__}"
    setting = f"{versions}, {platform.machine()}, {os.cpu_count()} cores"
    print(f"{setting}; one thread each, best of {arguments.repeat}\n")
    print("| images | work | batch | module, examples/s | NumPy, examples/s | module / NumPy |")
    print("|---|---|---|---|---|---|")
    rows: list[Row] = []
    for name, chunk, batches in (
        ("digits", training_chunks(DIGITS)[0], BATCHES),
        ("all ink", inked_chunk(), (64,)),
    ):
        for batch in batches:
            for row in compare(name, chunk, batch, arguments.repeat):
                rows.append(row)
                print(
                    f"| {row.images} | {row.work} | {row.batch} | {row.module:,.0f} | {row.numpy:,.0f} "
                    f"| {row.module / row.numpy:.2f} |",
                    flush=True,
                )
    if arguments.json:
        figures = {"setting": setting, "repeat": arguments.repeat, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

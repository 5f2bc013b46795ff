"""What a participant's worker process costs on top of the module itself.

    python benchmarks/participant_overhead.py [--repeat 5] [--epochs 40] [--json FILE]

- digits: examples per second of whole assignments (weights in, chunk decoded, trained, delta out and hashed)
  in a worker process, against the same module called in a bare loop in this process. Runs alternate; the best
  of each counts. Noise of a shared machine is ±15 %: read the ratio.
- overhead: milliseconds of a whole assignment of a model with 8 weights and 6 units, where nothing is
  computed; of a model with --megabytes of weights, which all come in and all go out; of a worker's start.
"""

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from google.protobuf import json_format

from covey.v1 import package_pb2
from covey_kit.bulk import digest_file
from covey_participant import convert
from covey_participant.runtime.abi import Phase
from covey_participant.runtime.cpu import DeviceLimits, module_spec
from covey_participant.runtime.instance import Instance
from covey_participant.runtime.module import RUNTIME, compile_module, engine
from covey_participant.runtime.pool import WorkerPool
from covey_participant.runtime.program import _config
from covey_participant.runtime.protocol import ChunkFile, ConfigSpec, FileRange, Job, ModuleSpec, Task
from covey_participant.runtime.supervisor import TimeLimits
from support.wat_packages import large_wasm
from support.worker_jobs import Bench

DIGITS = Path(__file__).resolve().parent.parent / "models" / "digits"
CHUNK = DIGITS / "data" / "train" / "train-0000.bin"
EXAMPLES = 375


def digits_job(folder: Path, epochs: int) -> Job:
    """One assignment of the digits package: a chunk, several local epochs."""
    manifest = json_format.Parse((DIGITS / "manifest.json").read_text(), package_pb2.ModelPackage())
    package = convert.package_from_proto(manifest)
    base = np.random.default_rng(0).normal(0, 0.05, package.weights).astype(np.float32)
    base.tofile(folder / "digits.base")
    shared = {"batchSize", "learningRate", "localEpochs"}
    values = [h.default for h in manifest.hyperparameters if h.name not in shared]
    return Job(
        Task.TRAIN,
        module_spec(package, DIGITS / "model.wasm", folder / "compiled", DeviceLimits()),
        ConfigSpec(7, 64, 0.04, epochs, values),
        weights=FileRange(str(folder / "digits.base"), 0, base.nbytes),
        weights_sha256=digest_file(folder / "digits.base")[1],
        chunks=[ChunkFile(str(CHUNK), EXAMPLES)],
        output=str(folder / "digits.delta"),
    )


def bare_loop(job: Job, folder: Path) -> float:
    """Returns the seconds of the module alone: begin and steps, nothing around them."""
    engine_ = engine()
    module = compile_module(engine_, Path(job.module.path).read_bytes(), job.module.sha256, None)
    instance = Instance(engine_, module, memory_bytes=job.module.memory_bytes, log=lambda _level, _text: None)
    instance.configure(_config(job.config))
    base = np.fromfile(folder / "digits.base", np.float32)
    instance.weights(base.size)[:] = base
    units = instance.load(CHUNK.read_bytes())
    started = time.perf_counter()
    instance.begin(Phase.TRAIN, 0, units)
    while instance.step():
        pass
    return time.perf_counter() - started


async def timed(pool: WorkerPool, job: Job) -> float:
    """Returns the seconds of a whole assignment."""
    started = time.perf_counter()
    await pool.run(job, TimeLimits())
    return time.perf_counter() - started


def large_job(folder: Path, megabytes: int) -> Job:
    """An assignment whose weights are large and whose work is nothing."""
    count = megabytes * 1_000_000 // 4
    content = large_wasm(count)
    (folder / "large.wasm").write_bytes(content)
    np.ones(count, np.float32).tofile(folder / "large.base")
    return Job(
        Task.TRAIN,
        ModuleSpec(
            str(folder / "large.wasm"), "large", str(folder / "compiled"), 4 << 30, weights=count, metrics=2
        ),
        ConfigSpec(),
        weights=FileRange(str(folder / "large.base"), 0, 4 * count),
        weights_sha256="large",
        output=str(folder / "large.delta"),
        chunks=[ChunkFile(str(folder / "chunk"), 6)],
    )


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Runs everything."""
    bench = Bench(folder)
    bench.prepare()
    job, tiny, large = (
        digits_job(folder, arguments.epochs),
        bench.train(),
        large_job(folder, arguments.megabytes),
    )
    pool = WorkerPool()
    started = time.perf_counter()
    await pool.warm_up()
    start = time.perf_counter() - started
    try:
        for warm in (job, tiny, large):
            await pool.run(warm, TimeLimits())
        bare, worker = [], []
        for _ in range(arguments.repeat):
            bare.append(await asyncio.to_thread(bare_loop, job, folder))
            worker.append(await timed(pool, job))
        tinies = sorted([await timed(pool, tiny) for _ in range(100)])
        larges = [await timed(pool, large) for _ in range(arguments.repeat)]
    finally:
        await pool.close()
    work = EXAMPLES * arguments.epochs
    return {
        "digits, bare module, examples/s": work / min(bare),
        "digits, whole assignment in a worker, examples/s": work / min(worker),
        "digits, worker / bare": min(bare) / min(worker),
        "overhead of an assignment, 8 weights, median ms": tinies[len(tinies) // 2] * 1e3,
        f"overhead of an assignment, {arguments.megabytes} MB of weights, ms": min(larges) * 1e3,
        "start of a worker, ms": start * 1e3,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(arguments, Path(folder)))
    print(f"{platform.machine()}, Python {platform.python_version()}, {RUNTIME}")
    for name, value in rows.items():
        print(f"{name:58} {value:12,.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()

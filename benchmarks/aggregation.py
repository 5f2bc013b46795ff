"""How fast deltas become weights, and in how much memory.

    python benchmarks/aggregation.py [--megabytes 100] [--folder FOLDER] [--json FILE]

- fold: adding one delta in memory to the f64 sum, against the naive NumPy expression and against the
  memory bandwidth that a plain copy reaches. Each element moves 20 bytes (4 + 8 read, 8 written).
- receive, add, finish: the coordinator's own code with real files, on the file system of --folder.
- event loop: the longest that a task waited for its turn meanwhile. The design allows 50 ms.
- memory: peak resident memory above idle, in multiples of the weights, in a process of its own.

Rates are GB of delta (f32) per second, the best of --repeat runs.
"""

import argparse
import asyncio
import gc
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from covey.v1 import job_pb2
from covey.v1.checkpoint_pb2 import CheckpointHeader
from covey.v1.package_pb2 import Parameter
from covey_coordinator.domain.aggregation import Aggregation, Strategy, accumulate
from covey_coordinator.state.deltas import DeltaSink, StoredDelta
from covey_coordinator.state.round_sum import RoundSum
from covey_kit.checkpoints import CheckpointReader
from covey_kit.memory import tune_malloc

MESSAGE = 1 << 20
PARTICIPANTS = 4


def best(repeat: int, work: Callable[[], object]) -> float:
    """Returns the shortest of several runs in seconds."""
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def fold_rates(count: int, repeat: int) -> dict[str, float]:
    """Measures the sum alone, in GB of delta per second."""
    delta = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    acc = np.ones(count)
    copy = np.ones(count)

    def naive() -> None:
        nonlocal acc
        acc += delta.astype(np.float64) * 7.0

    moved = 16 * count / best(repeat, lambda: np.copyto(copy, acc)) / 1e9
    size = 4 * count / 1e9
    return {
        "memory bandwidth (copy, bytes moved)": moved,
        "fold, limit by that bandwidth": moved * 4 / 20,
        "fold, naive acc += x.astype(f64) * w": size / best(repeat, naive),
        "fold, accumulate": size / best(repeat, lambda: accumulate(acc, delta, 7.0)),
    }


@asynccontextmanager
async def watched(worst: dict[str, float], name: str) -> AsyncIterator[None]:
    """Notes the longest time for which the event loop didn't come round."""
    running = True
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while running:
            begin = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - begin - 0.001)

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        running = False
        await task
        worst[name] = max(worst.get(name, 0.0), longest)


def blocks(data: bytes) -> Iterator[bytes]:
    """Cuts a delta into messages."""
    for start in range(0, len(data), MESSAGE):
        yield data[start : start + MESSAGE]


async def receive(folder: Path, key: str, data: bytes, sha256: str) -> StoredDelta:
    """Takes a delta as a stream brings it."""
    async with await DeltaSink.open(folder, key, len(data) // 4, len(data), sha256) as sink:
        for block in blocks(data):
            await sink.write(block)
        return await sink.finish()


def header(number: int, units: int, aggregation: Aggregation) -> CheckpointHeader:
    """Returns a checkpoint's header."""
    strategy = job_pb2.AggregationStrategy.Value(f"AGGREGATION_STRATEGY_{aggregation.strategy}")
    return CheckpointHeader(
        package_name="benchmark",
        package_version="1.0.0",
        module_sha256="00" * 32,
        round=number,
        units=units,
        aggregation=job_pb2.AggregationSettings(strategy=strategy),
    )


async def one_round(
    base: Path | None, deltas: list[StoredDelta], aggregation: Aggregation, out: Path, count: int
) -> tuple[float, float]:
    """Makes a checkpoint; returns the seconds of all additions and of the finish."""
    rounds = RoundSum(count)
    begin = time.perf_counter()
    for index, delta in enumerate(deltas):
        await rounds.add(index, delta, 7 if base else 0)
    added = time.perf_counter()
    reader = CheckpointReader(base) if base else None
    try:
        await rounds.finish(
            base=reader,
            aggregation=aggregation,
            header=header(1 if base else 0, rounds.units, aggregation),
            parameters=[Parameter(name="weights", shape=[count])],
            out=out,
        )
    finally:
        if reader:
            reader.close()
    return added - begin, time.perf_counter() - added


async def files(folder: Path, count: int, repeat: int) -> tuple[dict[str, float], dict[str, float]]:
    """Measures the coordinator's path through files; returns numbers, and the loop's longest waits."""
    data = (np.random.default_rng(1).standard_normal(count) * 1e-3).astype("<f4").tobytes()
    sha256 = hashlib.sha256(data).hexdigest()
    result: dict[str, float] = {}
    lag: dict[str, float] = {}
    seconds = []
    delta = None
    for _ in range(repeat):
        begin = time.perf_counter()
        async with watched(lag, "receive"):
            delta = await receive(folder, "a", data, sha256)
        seconds.append(time.perf_counter() - begin)
    assert delta is not None
    result["receive (hash, check, write, sync), GB/s"] = len(data) / min(seconds) / 1e9
    for strategy in Strategy:
        aggregation = Aggregation.resolve(strategy)
        base = folder / f"{strategy}-0"
        await one_round(None, [delta], aggregation, base, count)
        runs = []
        for _ in range(repeat):
            async with watched(lag, f"add, finish {strategy}"):
                runs.append(await one_round(base, [delta] * 2, aggregation, folder / f"{strategy}-1", count))
        if strategy is Strategy.FED_AVG:
            result["add (file to sum), GB/s"] = 2 * len(data) / min(add for add, _ in runs) / 1e9
        result[f"finish {strategy}, s"] = min(finish for _, finish in runs)
    return result, lag


def resident(field: str) -> int:
    """Returns VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def restart_peak() -> int:
    """Starts the kernel's peak anew from what is resident now, and returns that."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def memory_child(folder: Path, count: int, strategy: Strategy, participants: int) -> None:
    """Runs one round in this process and prints its memory as JSON."""
    tune_malloc()
    aggregation = Aggregation.resolve(strategy)

    async def make(seed: int) -> StoredDelta:
        # Made block by block, so that the benchmark's own memory isn't measured.
        digest = hashlib.sha256()
        for chunk in random_blocks(seed, count):
            digest.update(chunk)
        async with await DeltaSink.open(folder, f"d-{seed}", count, 4 * count, digest.hexdigest()) as sink:
            for chunk in random_blocks(seed, count):
                await sink.write(chunk)
            return await sink.finish()

    async def run() -> int:
        await one_round(None, [await make(0)], aggregation, folder / "m-0", count)
        idle = restart_peak()
        deltas = [await make(1 + number) for number in range(participants)]
        await one_round(folder / "m-0", deltas, aggregation, folder / "m-1", count)
        return idle

    idle = asyncio.run(run())
    print(json.dumps({"idle": idle, "peak": resident("VmHWM")}))


def random_blocks(seed: int, count: int) -> Iterator[bytes]:
    """Yields a delta of random values in messages."""
    random = np.random.default_rng(seed)
    for start in range(0, count, MESSAGE // 4):
        size = min(MESSAGE // 4, count - start)
        yield (random.standard_normal(size, dtype=np.float32) * np.float32(1e-3)).tobytes()


def memory_ratio(folder: Path, count: int, strategy: Strategy, participants: int) -> float:
    """Returns the peak above idle of a fresh process, in multiples of the weights."""
    command = [
        sys.executable,
        __file__,
        "--memory-child",
        strategy,
        str(participants),
        str(count),
        str(folder),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    return float(found["peak"] - found["idle"]) / (4 * count)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the model, MiB of f32")
    parser.add_argument("--repeat", type=int, default=5, help="runs of which the best counts")
    parser.add_argument("--folder", type=Path, help="where files go (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    parser.add_argument("--memory-child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_child:
        strategy, participants, count, folder = options.memory_child
        memory_child(Path(folder), int(count), Strategy(strategy), int(participants))
        return
    tune_malloc()
    count = int(options.megabytes * (1 << 20) / 4)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        rates = fold_rates(count, options.repeat)
        through_files, lag = asyncio.run(files(folder, count, options.repeat))
        memory = {
            f"{strategy}, {participants} participants": memory_ratio(folder, count, strategy, participants)
            for strategy, participants in [
                (Strategy.FED_AVG, 2),
                (Strategy.FED_ADAM, 2),
                (Strategy.FED_ADAM, 8),
            ]
        }
    print(f"model: {count:,} weights, {4 * count / 1e6:.0f} MB")
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}"
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, {versions}")
    sections = {
        "in memory, GB/s": rates,
        "through files": through_files,
        "event loop, longest wait, ms": {key: 1000 * value for key, value in lag.items()},
        "peak memory above idle, x weights": memory,
    }
    for title, rows in sections.items():
        print(f"\n{title}")
        for key, value in rows.items():
            print(f"  {key:<44}{value:10.2f}")
    if options.json:
        options.json.write_text(json.dumps({"weights": count, **sections}, indent=2) + "\n")


if __name__ == "__main__":
    main()

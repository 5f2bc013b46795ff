"""Worker processes: what a package may do to them, and what they never do to anybody else."""

import asyncio
import errno
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from covey_kit.errors import Reason
from covey_participant.domain.failure import WorkFailure
from covey_participant.runtime.pool import WorkerPool
from covey_participant.runtime.protocol import FileRange, Job, Outcome, Progress, Task
from covey_participant.runtime.supervisor import TimeLimits
from support.eventually import eventually
from support.wat_packages import adder_initialize, adder_train, large_wasm
from support.worker_jobs import BASE, UNITS, Bench

LIMITS = TimeLimits(call=0.5)


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    """A pool; at the end none of its processes is left."""
    made = WorkerPool()
    yield made
    pids = made.pids
    await made.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    """Files for jobs."""
    made = Bench(tmp_path)
    await asyncio.to_thread(made.prepare)
    return made


async def failure(pool: WorkerPool, job: Job, limits: TimeLimits = LIMITS) -> WorkFailure:
    """Runs a job that must fail."""
    with pytest.raises(WorkFailure) as caught:
        await pool.run(job, limits)
    return caught.value


FAILING_TRAINING = {
    "trap-configure": (Reason.MODULE_TRAP, "covey_configure() trapped: MEMORY_OUT_OF_BOUNDS"),
    "trap-load": (Reason.MODULE_TRAP, "covey_load() trapped: MEMORY_OUT_OF_BOUNDS"),
    "trap-step": (Reason.MODULE_TRAP, "covey_step() trapped: INTEGER_DIVISION_BY_ZERO"),
    "trap-start": (Reason.MODULE_TRAP, "the start function trapped: UNREACHABLE"),
    "deep-recursion": (Reason.MODULE_TRAP, "covey_step() trapped: STACK_OVERFLOW"),
    "grow-trap": (Reason.MEMORY_LIMIT, "covey_step() trapped: UNREACHABLE"),
    "grow-status": (Reason.MEMORY_LIMIT, "no memory for the chunk"),
    "huge-alloc": (Reason.MEMORY_LIMIT, "covey_alloc(32) returned 0"),
    "missing-export": (Reason.MODULE_EXPORT_MISSING, "covey_step, covey_metrics"),
    "wrong-signature": (Reason.MODULE_INVALID, "covey_metrics must be () -> (i32), found () -> (i64)"),
    "forbidden-import": (Reason.MODULE_INVALID, "wasi_snapshot_preview1.clock_time_get isn't offered"),
    "wrong-log-type": (Reason.MODULE_INVALID, "covey.log must be (i32, i32, i32) -> (), found (i64) -> ()"),
    "wrong-abi": (Reason.MODULE_INVALID, "covey_abi() is 7"),
    "nan-weights": (Reason.RESULT_NOT_FINITE, "weight 0 changed by nan"),
    "nan-metric": (Reason.RESULT_NOT_FINITE, "metric 0 is nan over 1.0"),
    "negative-count": (Reason.RESULT_NOT_FINITE, "metric 0 is 0.0 over -1.0"),
    "weights-outside": (Reason.MODULE_INVALID, "covey_weights() points outside of memory"),
    "weights-unaligned": (Reason.MODULE_INVALID, "isn't a multiple of 4"),
    "alloc-outside": (Reason.MODULE_INVALID, "covey_alloc() points outside of memory"),
    "alloc-unaligned": (Reason.MODULE_INVALID, "isn't a multiple of 16"),
    "metrics-outside": (Reason.MODULE_INVALID, "covey_metrics() points outside of memory"),
    "error-outside": (Reason.MODULE_STATUS, "covey_step() returned -3 without a word"),
    "wrong-count": (Reason.EXAMPLE_COUNT, "loaded with 3 examples, its manifest says 6"),
    "status-step": (Reason.MODULE_STATUS, "covey_step() returned -3: the model says: äther is down"),
    "status-configure": (
        Reason.MODULE_STATUS,
        "covey_configure() returned -1: the model says: äther is down",
    ),
}


async def test_each_misbehaviour_has_its_reason_and_the_worker_goes_on(
    pool: WorkerPool, bench: Bench
) -> None:
    """One worker outlives every module that fails without hanging, and then still trains to the bit."""
    for variant, (reason, words) in FAILING_TRAINING.items():
        found = await failure(pool, bench.train(variant))
        assert (variant, found.reason) == (variant, reason), found.message
        assert words in found.message
        assert found.package_fault

    await pool.run(bench.train(), LIMITS)

    delta, _ = adder_train(BASE, list(UNITS))
    assert bench.output().tobytes() == delta.tobytes()
    assert pool.started == 1


async def test_initial_weights_that_fail_have_their_reason(pool: WorkerPool, bench: Bench) -> None:
    """A trap and infinite weights are told apart."""
    trapped = await failure(pool, bench.initialize("trap-initialize"))
    infinite = await failure(pool, bench.initialize("infinite-weights"))

    assert (trapped.reason, infinite.reason) == (Reason.MODULE_TRAP, Reason.RESULT_NOT_FINITE)


@pytest.mark.parametrize("variant", ["endless-step", "endless-load", "endless-start", "error-endless"])
async def test_a_call_that_never_ends_is_killed_in_time(pool: WorkerPool, bench: Bench, variant: str) -> None:
    """STEP_TIMEOUT within the limit and a second, whichever call it is; the next job gets a new worker."""
    await pool.warm_up()
    before = time.monotonic()

    found = await failure(pool, bench.train(variant))

    assert found.reason is Reason.STEP_TIMEOUT
    assert "0.5 s" in found.message
    assert time.monotonic() - before < LIMITS.call + 1.0
    assert pool.pids == []
    assert (await pool.run(bench.train(), LIMITS)).units == len(UNITS)


async def test_what_isnt_wasm_is_named_so(pool: WorkerPool, bench: Bench) -> None:
    """Text, nothing, a truncated module, and features that are switched off are MODULE_INVALID."""
    for name, content in {
        "text": b"(module)",
        "empty": b"",
        "cut": b"\0asm\1\0\0\0\1\xff",
        # (memory 1 1 shared): threads are off.
        "threads": b"\0asm\1\0\0\0\5\4\1\3\1\1",
    }.items():
        module = bench.module(name, content=content)
        found = await failure(pool, replace(bench.train(), module=module))
        assert found.reason is Reason.MODULE_INVALID, name
    assert pool.started == 1


async def test_a_module_that_needs_more_than_it_may_have_isnt_started(pool: WorkerPool, bench: Bench) -> None:
    """A memory that is too large from the beginning is MEMORY_LIMIT."""
    module = replace(bench.module("adder"), memory_bytes=65536)

    found = await failure(pool, replace(bench.train(), module=module))

    assert found.reason is Reason.MEMORY_LIMIT
    assert "65536" in found.message


async def test_results_dont_depend_on_what_ran_before(pool: WorkerPool, bench: Bench) -> None:
    """The same assignment gives the same bytes on a fresh worker, a used one, and after another's failure."""
    first = await pool.run(bench.train(local_epochs=3), LIMITS)
    await pool.run(bench.train(learning_rate=2.0), LIMITS)
    await failure(pool, bench.train("nan-weights"))
    again = await pool.run(bench.train(local_epochs=3), LIMITS)

    delta, total = adder_train(BASE, list(UNITS), local_epochs=3)
    assert first.sha256 == again.sha256
    assert first.metrics == again.metrics == [(total, 18.0), (0.0, 0.0)]
    assert bench.output().tobytes() == delta.tobytes()
    assert (first.units, first.work_units) == (6, 18)


async def test_a_module_that_remembers_meets_a_fresh_instance(pool: WorkerPool, bench: Bench) -> None:
    """State that a module keeps in its memory is gone at the next job."""
    sums = {(await pool.run(bench.initialize("stateful"), LIMITS)).sha256 for _ in range(3)}

    assert len(sums) == 1
    assert bench.output()[0] == 1.0


async def test_initial_weights_come_from_the_seed(pool: WorkerPool, bench: Bench) -> None:
    """Negative seeds too; the result is the weights themselves."""
    await pool.run(bench.initialize(seed=-3), LIMITS)

    assert bench.output().tobytes() == adder_initialize(8, -3).tobytes()


async def test_zero_units_are_no_error(pool: WorkerPool, bench: Bench) -> None:
    """An empty chunk trains nothing: delta 0, no metric."""
    (bench.folder / "chunk").write_bytes(b"")
    job = bench.train()
    job = replace(job, chunks=[replace(job.chunks[0], examples=0)])

    outcome = await pool.run(job, LIMITS)

    assert (outcome.units, outcome.metrics) == (0, [(0.0, 0.0), (0.0, 0.0)])
    assert not bench.output().any()


async def test_evaluation_leaves_weights_alone_and_keeps_to_its_units(pool: WorkerPool, bench: Bench) -> None:
    """Only the units asked for count; units that aren't there are refused."""
    job = replace(bench.train(), task=Task.EVALUATE, first_unit=2, units=3)

    outcome = await pool.run(job, LIMITS)
    found = await failure(pool, replace(job, first_unit=4, units=3))

    assert outcome.metrics[0] == (sum(UNITS[2:5]) + 3 * float(BASE[0]), 3.0)
    assert outcome.units == 3
    assert found.reason is Reason.EXAMPLE_COUNT


async def test_cancelling_stops_between_steps_and_keeps_the_worker(pool: WorkerPool, bench: Bench) -> None:
    """Work that is cancelled ends within half a second, and its worker takes the next job."""
    await pool.warm_up()
    pids = pool.pids
    begun = asyncio.Event()
    task = asyncio.create_task(
        pool.run(bench.train("never-done"), LIMITS, lambda progress: _when_working(progress, begun))
    )
    await begun.wait()
    before = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert time.monotonic() - before < 0.6
    assert pool.pids == pids
    assert (await pool.run(bench.train(), LIMITS)).units == len(UNITS)


async def test_cancelling_kills_a_worker_that_doesnt_listen(pool: WorkerPool, bench: Bench) -> None:
    """A step that doesn't end is killed within a second of the cancellation."""
    begun = asyncio.Event()
    limits = TimeLimits(call=60)
    task = asyncio.create_task(
        pool.run(bench.train("endless-step"), limits, lambda progress: _when_working(progress, begun))
    )
    await begun.wait()
    process = psutil.Process(pool.pids[0])
    spent = process.cpu_times().user
    await eventually(lambda: process.cpu_times().user > spent + 0.05, message="the step runs")
    before = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert time.monotonic() - before < 1.0
    assert pool.pids == []


def _when_working(progress: Progress, begun: asyncio.Event) -> None:
    if progress.step.value == "work":
        begun.set()


@pytest.mark.parametrize(("number", "package_fault"), [(signal.SIGKILL, False), (signal.SIGABRT, True)])
async def test_a_worker_that_dies_is_named_with_its_end(
    pool: WorkerPool, bench: Bench, number: signal.Signals, package_fault: bool
) -> None:
    """WORKER_DIED tells the signal, and blames the package only for crashes of its own making."""
    begun = asyncio.Event()
    task = asyncio.create_task(
        pool.run(bench.train("never-done"), LIMITS, lambda progress: _when_working(progress, begun))
    )
    await begun.wait()
    os.kill(pool.pids[0], number)

    with pytest.raises(WorkFailure, match=number.name) as caught:
        await task
    assert caught.value.reason is Reason.WORKER_DIED
    assert caught.value.package_fault is package_fault
    assert (await pool.run(bench.train(), LIMITS)).units == len(UNITS)


async def test_a_chatty_module_is_bounded(pool: WorkerPool, bench: Bench) -> None:
    """20,000 lines become 100; a line outside of memory is dropped and harms nothing."""
    lines: list[str] = []
    outcome = await pool.run(
        bench.train("chatty"), TimeLimits(call=10), on_log=lambda _level, text: lines.append(text)
    )
    await pool.run(bench.train("log-outside"), LIMITS, on_log=lambda _level, text: lines.append(text))

    assert isinstance(outcome, Outcome)
    assert len(lines) == 100
    assert lines[0].startswith("the model says: äther is down")


async def test_workers_are_hardened(pool: WorkerPool, bench: Bench) -> None:
    """No environment, no privileges to gain, no cores, few files, first to go when memory runs out."""
    await pool.warm_up()
    proc = Path(f"/proc/{pool.pids[0]}")
    status, limits, environment, adjust, opened = await asyncio.to_thread(_inspect, proc)

    assert "NoNewPrivs:\t1" in status
    assert environment == ["OPENBLAS_NUM_THREADS=1"]
    assert adjust == 800
    assert _limit(limits, "Max core file size") == 0
    assert _limit(limits, "Max open files") <= 64
    assert _limit(limits, "Max processes") == 0
    assert _limit(limits, "Max file size") < 5 << 30
    assert all(name.startswith(("socket:", "pipe:", "/dev/null")) for name in opened), opened


def _inspect(proc: Path) -> tuple[str, str, list[str], int, list[str]]:
    environment = [text for text in (proc / "environ").read_text().split("\0") if text]
    opened = [str(entry.readlink()) for entry in (proc / "fd").iterdir()]
    return (
        (proc / "status").read_text(),
        (proc / "limits").read_text(),
        environment,
        int((proc / "oom_score_adj").read_text()),
        opened,
    )


def _limit(limits: str, name: str) -> int:
    line = next(line for line in limits.splitlines() if line.startswith(name))
    return int(line.removeprefix(name).split()[0])


async def test_base_weights_are_read_from_any_offset(pool: WorkerPool, bench: Bench) -> None:
    """The range begins wherever the checkpoint's header ends, aligned or not."""
    for head in (0, 1, 4, 4099):
        (bench.folder / "base").write_bytes(b"x" * head + BASE.tobytes())
        job = bench.train()
        assert job.weights is not None
        job = replace(job, weights=replace(job.weights, offset=head), weights_sha256=str(head))
        await pool.run(job, LIMITS)
        assert np.array_equal(bench.output(), adder_train(BASE, list(UNITS))[0])


async def test_a_result_that_cant_be_written_is_the_devices_trouble(pool: WorkerPool, bench: Bench) -> None:
    """DEVICE, not the package's fault."""
    found = await failure(pool, replace(bench.train(), output=str(bench.folder / "missing" / "out")))

    assert (found.reason, found.package_fault) == (Reason.DEVICE, False)


async def test_closing_the_pool_ends_even_a_busy_worker_at_once(bench: Bench) -> None:
    """`close` doesn't wait for a step."""
    pool = WorkerPool()
    task = asyncio.create_task(pool.run(bench.train("endless-step"), TimeLimits(call=60)))
    await eventually(lambda: pool.busy == 1 and bool(pool.pids))
    pids = pool.pids
    before = time.monotonic()

    await pool.close()

    assert time.monotonic() - before < 0.5
    with pytest.raises(WorkFailure, match="SIGKILL"):
        await task
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


PROBE = """
import ctypes, json, os, signal, socket, subprocess, threading
from covey_participant.runtime import sandbox, seccomp

sandbox.harden()
filtered = seccomp.deny_system_calls()
libc = ctypes.CDLL(None, use_errno=True)

def outcome(work):
    try:
        work()
    except (OSError, RuntimeError) as error:
        return getattr(error, "errno", None) or "refused"
    return "done"

def traced():
    if libc.ptrace(16, os.getppid(), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")

print(json.dumps({
    "filtered": filtered,
    "socket": outcome(lambda: socket.socket()),
    "fork": outcome(lambda: os.fork() or os._exit(0)),
    "exec": outcome(lambda: os.execv("/bin/true", ["true"])),
    "thread": outcome(threading.Thread(target=print).start),
    "signal": outcome(lambda: os.kill(os.getppid(), 0)),
    "ptrace": outcome(traced),
    "file": outcome(lambda: open("/dev/null").close()),
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
async def test_a_worker_reaches_nobody(tmp_path: Path) -> None:
    """No network, no program, no process, no thread, no signal to others; files it needs still open."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", PROBE), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    found = json.loads(out)

    assert found.pop("filtered")
    assert found.pop("file") == "done"
    assert found.pop("thread") in (errno.EPERM, "refused")
    assert set(found.values()) == {errno.EPERM}, found


async def test_memory_stays_at_a_few_copies_of_the_weights(pool: WorkerPool, bench: Bench) -> None:
    """25 million weights: linear memory and the mapped file, no more, and all of it is given back."""
    count = 25_000_000
    content = await asyncio.to_thread(large_wasm, count)
    await asyncio.to_thread(lambda: np.zeros(count, np.float32).tofile(bench.folder / "large"))
    module = replace(bench.module("large", content=content), weights=count, memory_bytes=2048 * 65536)
    job = replace(
        bench.train(),
        module=module,
        weights=FileRange(str(bench.folder / "large"), 0, 4 * count),
        weights_sha256="large",
    )
    await pool.run(bench.train(), LIMITS)
    worker, parent = psutil.Process(pool.pids[0]), psutil.Process()
    idle, parent_idle = worker.memory_info().rss, parent.memory_info().rss

    outcome = await pool.run(job, TimeLimits())
    status = await asyncio.to_thread(Path(f"/proc/{worker.pid}/status").read_text)
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024

    assert outcome.size == 4 * count
    assert peak - idle < 2.2 * 4 * count  # one in linear memory, one mapped
    await pool.run(bench.train(), LIMITS)
    assert worker.memory_info().rss - idle < 0.2 * 4 * count
    assert parent.memory_info().rss - parent_idle < 0.2 * 4 * count

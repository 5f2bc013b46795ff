"""What a worker process does with a job: from the module's file to the result's file.

Each job gets a fresh instance, so that nothing depends on what ran before (law 3). What is kept from one job
to the next is bytes alone: compiled modules, and the mapping of the base weights' file.
"""

import contextlib
import hashlib
import math
import mmap
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import wasmtime

from covey_kit.errors import Reason
from covey_participant.domain.failure import WorkFailure

from . import abi
from .delta import DeltaWriter
from .instance import F32Array, Instance
from .module import CompiledFolder, check_interface, compile_module, engine, interface_problems
from .protocol import ConfigSpec, FileRange, Job, ModuleSpec, Outcome, Progress, Step, Task

KEPT_MODULES = 4
PROGRESS_SECONDS = 0.25

Report = Callable[[Progress], None]
Log = Callable[[str, str], None]


class Program:
    """Runs jobs one after the other.

    Args:
        report: takes signs of life; called before anything that may take long, and at most every 0.25 s
            between steps. May raise `Cancelled`.
        log: takes (level, text) of `covey.log`.
    """

    def __init__(self, report: Report, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._log = log
        self._clock = clock
        self._engine = engine()
        self._modules: OrderedDict[tuple[str, ModuleSpec], wasmtime.Module] = OrderedDict()
        self._base: tuple[str, F32Array] | None = None
        self._writer = DeltaWriter()

    def run(self, job: Job) -> Outcome:
        """Does a job.

        Raises:
            WorkFailure: with the reason.
            Cancelled: when `report` raised it.
        """
        if job.task is Task.CHECK:
            return Outcome(problems=self._check(job.module))
        module = self._module(job.module)
        with self._instance(job, module) as instance:
            if job.task is Task.INITIALIZE:
                return self._initialize(job, instance)
            if job.task is Task.COUNT:
                return Outcome(units=self._load_all(job, instance))
            base = self._set_weights(job, instance)
            if job.task is Task.TRAIN:
                return self._train(job, instance, base)
            others = {Task.EVALUATE: self._evaluate, Task.PLAY: self._record, Task.PREDICT: self._predict}
            return others[job.task](job, instance)

    # --- tasks --------------------------------------------------------------------------------

    def _check(self, spec: ModuleSpec) -> list[str]:
        """Returns everything that is wrong with a module, as far as it can be told without data."""
        self._report(Progress(Step.COMPILE))
        try:
            module = compile_module(self._engine, _read(spec.path), spec.sha256, None)
            problems = interface_problems(module, _required(spec)).sentences()
            if problems:
                return problems
            self._report(Progress(Step.LOAD))
            instance = Instance(self._engine, module, memory_bytes=spec.memory_bytes, log=self._log)
            try:
                instance.check_abi()
                instance.weights(spec.weights)
            finally:
                instance.close()
        except WorkFailure as failure:
            if not failure.package_fault:
                raise
            return [failure.message]
        return []

    def _initialize(self, job: Job, instance: Instance) -> Outcome:
        instance.initialize(job.config.seed)
        weights = instance.weights(job.module.weights)
        return self._write(job, weights, None, Outcome(memory_bytes=instance.memory_bytes))

    def _train(self, job: Job, instance: Instance, base: F32Array) -> Outcome:
        tally = _Tally(job.module.metrics)
        if job.module.experience:
            self._play_and_update(job, instance, tally)
        for chunk in job.chunks:
            units = self._load(instance, chunk.path, chunk.examples)
            self._work(instance, _Work(abi.Phase.TRAIN, 0, units, job.config.local_epochs), tally)
            tally.add(instance.metrics(job.module.metrics))
        weights = instance.weights(job.module.weights)
        return self._write(job, weights, base, tally.outcome(instance.memory_bytes))

    def _play_and_update(self, job: Job, instance: Instance, tally: "_Tally") -> None:
        """Updates from what other workers played, or from the job's own units, played here."""
        wanted = job.units or 0
        record = b"".join(map(_read, job.records)) if job.records else self._play(job, instance, tally)
        instance.configure(_config(job.config))
        self._report(Progress(Step.LOAD))
        found = instance.load(record, experience=True)
        if found != wanted:
            raise WorkFailure(Reason.EXAMPLE_COUNT, f"PLAY of {wanted} units recorded {found}")
        tally.units = 0  # the same units come a second time
        self._work(instance, _Work(abi.Phase.UPDATE, job.first_unit, wanted, job.config.local_epochs), tally)
        tally.add(instance.metrics(job.module.metrics))

    def _play(self, job: Job, instance: Instance, tally: "_Tally") -> bytes:
        """Plays the job's units and returns the record of them."""
        if job.sequence_seed is not None:
            # A unit's play is seeded from (sequence seed, number), whoever plays it.
            instance.configure(_config(replace(job.config, seed=job.sequence_seed)))
        self._work(instance, _Work(abi.Phase.PLAY, job.first_unit, job.units or 0), tally)
        return instance.experience()

    def _record(self, job: Job, instance: Instance) -> Outcome:
        tally = _Tally(job.module.metrics)
        record = self._play(job, instance, tally)
        _write_file(job.output, record)
        found = tally.outcome(instance.memory_bytes)
        return replace(found, sha256=hashlib.sha256(record).hexdigest(), size=len(record))

    def _evaluate(self, job: Job, instance: Instance) -> Outcome:
        tally = _Tally(job.module.metrics)
        loaded = self._load_all(job, instance)
        if job.chunks:
            units = loaded - job.first_unit if job.units is None else job.units
            if job.first_unit > loaded or units > loaded - job.first_unit:
                raise WorkFailure(
                    Reason.EXAMPLE_COUNT,
                    f"units {job.first_unit} to {job.first_unit + units} were asked for, {loaded} are there",
                )
        else:
            units = job.units or 0
            if job.sequence_seed is not None:
                instance.configure(_config(replace(job.config, seed=job.sequence_seed)))
        self._work(instance, _Work(abi.Phase.EVALUATE, job.first_unit, units), tally)
        tally.add(instance.metrics(job.module.metrics))
        return tally.outcome(instance.memory_bytes)

    def _predict(self, job: Job, instance: Instance) -> Outcome:
        content = _read(job.input)
        written = instance.predict(content, job.output_bytes)
        _write_file(job.output, written)
        return Outcome(sha256=hashlib.sha256(written).hexdigest(), size=len(written))

    # --- parts --------------------------------------------------------------------------------

    def _module(self, spec: ModuleSpec) -> wasmtime.Module:
        key = (spec.sha256, spec)
        module = self._modules.get(key)
        if module is None:
            self._report(Progress(Step.COMPILE))
            module = compile_module(
                self._engine, _read(spec.path), spec.sha256, CompiledFolder(Path(spec.compiled))
            )
            check_interface(module, _required(spec))
            self._modules[key] = module
            while len(self._modules) > KEPT_MODULES:
                self._modules.popitem(last=False)
        self._modules.move_to_end(key)
        return module

    @contextlib.contextmanager
    def _instance(self, job: Job, module: wasmtime.Module) -> Iterator[Instance]:
        self._report(Progress(Step.LOAD))
        instance = Instance(self._engine, module, memory_bytes=job.module.memory_bytes, log=self._log)
        try:
            instance.check_abi()
            instance.configure(_config(job.config))
            self._report(Progress(Step.LOAD))
            yield instance
        finally:
            instance.close()

    def _set_weights(self, job: Job, instance: Instance) -> F32Array:
        assert job.weights is not None
        base = self._map(job.weights, job.weights_sha256)
        if base.size != job.module.weights:
            raise WorkFailure(
                Reason.DEVICE, f"the base weights have {base.size} numbers, the manifest {job.module.weights}"
            )
        self._report(Progress(Step.HOST))
        instance.weights(base.size)[:] = base
        self._report(Progress(Step.LOAD))
        return base

    def _map(self, part: FileRange, sha256: str) -> F32Array:
        """Returns the base weights, mapped from the file; the last ones stay mapped."""
        if self._base is not None and self._base[0] == sha256:
            return self._base[1]
        self._base = None
        try:
            with Path(part.path).open("rb") as file:
                before = part.offset % mmap.ALLOCATIONGRANULARITY
                mapped = mmap.mmap(
                    file.fileno(), part.size + before, access=mmap.ACCESS_READ, offset=part.offset - before
                )
        except (OSError, ValueError) as error:
            raise WorkFailure(Reason.DEVICE, f"the base weights can't be read: {error}") from error
        base = np.frombuffer(mapped, np.float32, count=part.size // 4, offset=before)
        self._base = (sha256, base)
        return base

    def _load_all(self, job: Job, instance: Instance) -> int:
        """Loads chunk by chunk, each in the last one's place, and returns the units of all."""
        return sum(self._load(instance, chunk.path, chunk.examples) for chunk in job.chunks)

    def _load(self, instance: Instance, path: str, expected: int | None) -> int:
        content = _read(path)
        self._report(Progress(Step.LOAD))
        units = instance.load(content)
        if expected is not None and units != expected:
            raise WorkFailure(
                Reason.EXAMPLE_COUNT, f"the chunk loaded with {units} examples, its manifest says {expected}"
            )
        return units

    def _work(self, instance: Instance, work: "_Work", tally: "_Tally") -> None:
        """Begins a phase and steps until it is done, measuring the module's own time."""
        clock, wanted, playing = self._clock, work.units * work.epochs, work.phase is abi.Phase.PLAY
        units, work_units, seconds = tally.units, tally.work_units, tally.seconds

        def report(left: int, now: float) -> None:
            done = wanted - left
            tally.units = units + done // work.epochs
            tally.work_units = work_units + done
            tally.seconds = seconds + now - started
            progress = Progress(Step.WORK, tally.units, tally.work_units, tally.seconds, playing=playing)
            self._report(progress)

        started = last = clock()
        report(wanted, started)
        instance.begin(work.phase, work.first, work.units)
        left = wanted
        while found := instance.step():
            left = min(left, found)
            now = clock()
            if now - last >= PROGRESS_SECONDS:
                last = now
                report(left, now)
        report(0, clock())

    def _write(self, job: Job, weights: F32Array, base: F32Array | None, outcome: Outcome) -> Outcome:
        """Writes new − base (or the weights themselves) block by block, checked and hashed on the way."""
        self._report(Progress(Step.HOST, outcome.units or None))
        sha256 = self._writer.write(Path(job.output), weights, base)
        return replace(outcome, sha256=sha256, size=4 * weights.size)


@dataclass(frozen=True)
class _Work:
    """One phase over the units [first, first + units), each `epochs` times."""

    phase: abi.Phase
    first: int
    units: int
    epochs: int = 1


class _Tally:
    """Sums over the chunks of an assignment, in order."""

    def __init__(self, metrics: int) -> None:
        self.units = 0
        self.work_units = 0
        self.seconds = 0.0
        self._metrics = [(0.0, 0.0)] * metrics

    def add(self, found: list[tuple[float, float]]) -> None:
        for index, (total, count) in enumerate(found):
            if not math.isfinite(count) or count < 0 or (count and not math.isfinite(total)):
                raise WorkFailure(
                    Reason.RESULT_NOT_FINITE,
                    f"metric {index} is {total} over {count}: both must be finite, the count not negative",
                )
            if count:
                old = self._metrics[index]
                self._metrics[index] = (old[0] + total, old[1] + count)

    def outcome(self, memory_bytes: int) -> Outcome:
        return Outcome(
            units=self.units,
            work_units=self.work_units,
            metrics=self._metrics,
            compute_seconds=self.seconds,
            memory_bytes=memory_bytes,
        )


def _required(spec: ModuleSpec) -> dict[str, abi.Signature]:
    return abi.required_exports(
        dataset=spec.dataset, work=spec.work, inference=spec.inference, experience=spec.experience
    )


def _config(spec: ConfigSpec) -> bytes:
    return abi.encode_config(
        seed=spec.seed,
        batch_size=spec.batch_size,
        learning_rate=spec.learning_rate,
        local_epochs=spec.local_epochs,
        hyperparameters=spec.hyperparameters,
    )


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise WorkFailure(
            Reason.DEVICE, f"a file of the assignment can't be read: {error.strerror}"
        ) from error


def _write_file(path: str, content: bytes) -> None:
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise WorkFailure(Reason.DEVICE, f"the result can't be written: {error.strerror}") from error

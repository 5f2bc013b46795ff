"""One phase over a stream of minibatches.

Several minibatches go into one submission, each with its own copy of what the host fills and reads (inputs,
uniforms, metrics). Their number adapts to the time that a submission takes. While one submission runs, the
next one's inputs are decoded and its dispatches are encoded.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .device import gpu_errors
from .executor import Executor
from .inputs import Inputs, Minibatch
from .plan import Phase, Role

SHORT_SECONDS = 0.025
LONG_SECONDS = 0.1
"""A submission should take so long: more minibatches when it is shorter, fewer when it is longer."""

F64Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Totals:
    """What was added up so far.

    Attributes:
        metrics: (sum, count) in manifest order, f64.
        units: units of work.
        minibatches, submissions: how many.
    """

    metrics: F64Array
    units: int = 0
    minibatches: int = 0
    submissions: int = 0


@dataclass(frozen=True)
class _Flight:
    """A submission that may still run."""

    units: list[int]
    since: float


class Run:
    """A phase in progress, from zeroed scratch buffers.

    Args:
        stream: minibatches; their tensors need to live until the next one is asked for.
        hyperparameters: values of the uniforms' fields.

    Every method raises GpuFailure: `DEVICE`, or `SHADER_INVALID` for inputs that don't fit the plan.
    """

    def __init__(
        self,
        executor: Executor,
        phase: Phase,
        stream: Iterator[Minibatch],
        hyperparameters: Mapping[str, float],
    ) -> None:
        self.totals = Totals(np.zeros((executor.plan.metrics, 2)))
        self._executor = executor
        self._gpu = executor.device.gpu
        self._phase = phase
        self._stream = stream
        self._metrics = executor.plan.metrics_buffer
        self._inputs = Inputs(executor.plan, phase, hyperparameters)
        self._flight: _Flight | None = None
        self._zero_scratch()

    def advance(self) -> bool:
        """Sends one submission, waits for the one before, and returns whether there is more to do."""
        executor = self._executor
        units = self._inputs.fill(self._stream, min(executor.batches, executor.plan.slots))
        commands = self._encode(len(units)) if units else None
        self._land()
        if commands is None:
            return False
        started = time.monotonic()
        with gpu_errors("submitting work to the GPU"):
            self._gpu.queue.submit([commands])
        self._flight = _Flight(units, started)
        self.totals.submissions += 1
        return True

    def _zero_scratch(self) -> None:
        with gpu_errors("clearing the scratch buffers"):
            encoder = self._gpu.create_command_encoder()
            for buffer in self._executor.plan.buffers:
                if buffer.role is Role.SCRATCH:
                    encoder.clear_buffer(self._executor.buffers[buffer.name])
            self._gpu.queue.submit([encoder.finish()])

    def _encode(self, count: int) -> Any:
        """Sends the inputs on their way and returns the commands for `count` minibatches."""
        executor, metrics = self._executor, self._metrics
        with gpu_errors("encoding a minibatch", shader=True):
            for name, content in self._inputs.contents(count):
                self._gpu.queue.write_buffer(executor.buffers[name], 0, content)
            encoder = self._gpu.create_command_encoder()
            if metrics is not None:
                encoder.clear_buffer(executor.buffers[metrics.name])
            dispatches = [step for slot in range(count) for step in executor.steps(self._phase, slot)]
            executor.device.encode(encoder, dispatches)
            if metrics is not None:
                source, size = executor.buffers[metrics.name], count * metrics.stride
            else:
                source, size = executor.fence, 4
            encoder.copy_buffer_to_buffer(source, 0, executor.readback, 0, size)
            return encoder.finish()

    def _land(self) -> None:
        """Waits for the submission that may still run, and adds up its metrics."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        readback = self._executor.readback
        with gpu_errors("waiting for the GPU"):
            # The copy is part of the submission itself; READ would submit an empty one besides.
            readback.map_sync("READ_NOSYNC")
            view = np.frombuffer(readback.read_mapped(copy=False), np.float32)
            if self._metrics is not None:
                rows = view[: len(flight.units) * self._metrics.stride // 4].reshape(len(flight.units), -1)
                self._add(rows[:, : self._metrics.count].astype(np.float64), flight.units)
            del view
            readback.unmap()
        self.totals.units += sum(flight.units)
        self.totals.minibatches += len(flight.units)
        self._adapt(len(flight.units), time.monotonic() - flight.since)

    def _add(self, rows: F64Array, units: list[int]) -> None:
        metrics = self.totals.metrics
        if rows.shape[1] == len(metrics):
            metrics[:, 0] += rows.sum(axis=0)
            metrics[:, 1] += sum(units)
        else:
            metrics += rows.sum(axis=0).reshape(-1, 2)

    def _adapt(self, count: int, seconds: float) -> None:
        executor = self._executor
        if seconds < SHORT_SECONDS and count == executor.batches < executor.plan.slots:
            executor.batches = min(2 * executor.batches, executor.plan.slots)
        elif seconds > LONG_SECONDS and executor.batches > 1:
            executor.batches //= 2

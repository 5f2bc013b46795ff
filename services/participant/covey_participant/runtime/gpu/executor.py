"""Runs a checked plan: buffers, bind groups and pipelines are made once and used for every minibatch.

Several minibatches go into one submission, each with its own copy of what the host fills and reads (inputs,
uniforms, metrics). Their number adapts to the time that a submission takes. While one submission runs, the
next one's inputs are decoded and its dispatches are encoded.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import wgpu

from covey_kit.errors import Reason

from .device import Device, Dispatch, gpu_errors
from .failure import GpuFailure
from .inputs import Inputs, Minibatch
from .plan import Binding, Buffer, Phase, Pipeline, Plan, Role
from .weights import Weights

SHORT_SECONDS = 0.025
LONG_SECONDS = 0.1
"""A submission should take so long: more minibatches when it is shorter, fewer when it is longer."""

_USAGE = wgpu.BufferUsage


@dataclass
class Totals:
    """What a run added up, in f64.

    Attributes:
        metrics: (sum, count) in manifest order.
        units: units of work.
        minibatches, submissions: how many.
    """

    metrics: "np.ndarray[Any, np.dtype[np.float64]]"
    units: int = 0
    minibatches: int = 0
    submissions: int = 0


@dataclass(frozen=True)
class _Flight:
    """A submission that may still run."""

    units: list[int]
    since: float


class Executor:
    """A plan on a device.

    Args:
        on_compile: called with a pipeline's name before it is compiled, which may take long.

    Raises:
        GpuFailure: `SHADER_INVALID` quotes the compiler; `DEVICE`: no memory, or the driver's words.
    """

    def __init__(
        self, device: Device, plan: Plan, on_compile: Callable[[str], None] = lambda _name: None
    ) -> None:
        self.plan = plan
        self._device = device
        self._buffers: dict[str, Any] = {}
        self._groups: dict[tuple[str, int], Any] = {}
        self._dispatches: dict[tuple[Phase, int], list[Dispatch]] = {}
        self._owned: list[Any] = []
        self._batches = 1
        try:
            modules = {name: self._module(name, source) for name, source in plan.modules.items()}
            self._pipelines: dict[str, tuple[Any, Any]] = {}
            for pipeline in plan.pipelines:
                on_compile(pipeline.name)
                self._pipelines[pipeline.name] = self._pipeline(pipeline, modules[pipeline.module])
            for buffer in plan.buffers:
                self._buffers[buffer.name] = self._own(
                    buffer.name, buffer.total(plan.slots), _usage(plan, buffer)
                )
            self._fence = self._own("fence", 4, _USAGE.COPY_SRC)
            metrics = plan.metrics_buffer
            self._metrics = metrics
            self._readback = self._own(
                "readback", metrics.total(plan.slots) if metrics else 4, _USAGE.COPY_DST | _USAGE.MAP_READ
            )
            self.weights = Weights(device, self._parameters(), self._own)
        except BaseException:
            self.close()
            raise

    # --- making -------------------------------------------------------------------------------

    def _own(self, label: str, size: int, usage: int) -> Any:
        buffer = self._device.buffer(label, size, usage)
        self._owned.append(buffer)
        return buffer

    def _module(self, name: str, source: str) -> Any:
        if source.lstrip().startswith("#version"):
            raise GpuFailure(Reason.SHADER_INVALID, f"{name} isn't WGSL")
        with gpu_errors(f"compiling {name}", shader=True):
            return self._device.gpu.create_shader_module(label=name, code=source)

    def _pipeline(self, pipeline: Pipeline, module: Any) -> tuple[Any, Any]:
        gpu = self._device.gpu
        with gpu_errors(f"making the pipeline {pipeline.name!r} of {pipeline.module}", shader=True):
            layout = gpu.create_bind_group_layout(
                entries=[
                    {
                        "binding": binding.number,
                        "visibility": wgpu.ShaderStage.COMPUTE,
                        "buffer": {"type": binding.access.value},
                    }
                    for binding in pipeline.bindings
                ]
            )
            made = gpu.create_compute_pipeline(
                label=pipeline.name,
                layout=gpu.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": module, "entry_point": pipeline.entry_point},
            )
        return made, layout

    def _parameters(self) -> list[tuple[Any, int]]:
        """Returns (buffer, bytes) of the weights in manifest order."""
        by_name = {buffer.parameter: buffer for buffer in self.plan.buffers if buffer.role is Role.PARAMETER}
        return [(self._buffers[by_name[name].name], by_name[name].size) for name in self.plan.parameters]

    def _group(self, pipeline: Pipeline, slot: int) -> Any:
        """Returns the bind group of a pipeline for a slot; one for all when nothing in it differs."""
        if not any(binding.buffer.role.per_minibatch for binding in pipeline.bindings):
            slot = 0
        key = (pipeline.name, slot)
        if key not in self._groups:
            with gpu_errors(f"binding the buffers of pipeline {pipeline.name!r}", shader=True):
                self._groups[key] = self._device.gpu.create_bind_group(
                    layout=self._pipelines[pipeline.name][1],
                    entries=[self._entry(binding, slot) for binding in pipeline.bindings],
                )
        return self._groups[key]

    def _entry(self, binding: Binding, slot: int) -> dict[str, Any]:
        buffer = binding.buffer
        offset = slot * buffer.stride if buffer.role.per_minibatch else 0
        resource = {"buffer": self._buffers[buffer.name], "offset": offset, "size": buffer.size}
        return {"binding": binding.number, "resource": resource}

    def _steps(self, phase: Phase, slot: int) -> list[Dispatch]:
        key = (phase, slot)
        if key not in self._dispatches:
            handle = Device.handle
            self._dispatches[key] = [
                (handle(self._pipelines[p.name][0]), handle(self._group(p, slot)), *p.workgroups)
                for p in self.plan.phases[phase]
            ]
        return self._dispatches[key]

    # --- running ------------------------------------------------------------------------------

    def run(
        self,
        phase: Phase,
        stream: Iterator[Minibatch],
        hyperparameters: dict[str, float],
        on_wait: Callable[[int], None] = lambda _units: None,
    ) -> Totals:
        """Runs the steps of a phase for each minibatch of a stream, from zeroed scratch buffers.

        Args:
            stream: minibatches; their tensors need to live until the next one is asked for.
            hyperparameters: values of the uniforms' fields.
            on_wait: called before waiting for the GPU, with the units that are known to be done. May raise.

        Raises:
            GpuFailure: `DEVICE`, or `SHADER_INVALID` for inputs that don't fit the plan.
        """
        totals = Totals(np.zeros((self.plan.metrics, 2)))
        inputs = Inputs(self.plan, phase, hyperparameters)
        self._zero_scratch()
        flight: _Flight | None = None
        while True:
            units = inputs.fill(stream, min(self._batches, self.plan.slots))
            if not units:
                break
            commands = self._encode(phase, inputs, len(units))
            if flight is not None:
                on_wait(totals.units)
                self._land(flight, totals)
            started = time.monotonic()
            with gpu_errors("submitting work to the GPU"):
                self._device.gpu.queue.submit([commands])
            flight = _Flight(units, started)
            totals.submissions += 1
        if flight is not None:
            on_wait(totals.units)
            self._land(flight, totals)
        return totals

    def _zero_scratch(self) -> None:
        scratch = [self._buffers[b.name] for b in self.plan.buffers if b.role is Role.SCRATCH]
        with gpu_errors("clearing the scratch buffers"):
            encoder = self._device.gpu.create_command_encoder()
            for buffer in scratch:
                encoder.clear_buffer(buffer)
            self._device.gpu.queue.submit([encoder.finish()])

    def _encode(self, phase: Phase, inputs: Inputs, count: int) -> Any:
        """Sends the inputs on their way and returns the commands for `count` minibatches."""
        gpu = self._device.gpu
        with gpu_errors("encoding a minibatch"):
            for name, content in inputs.contents(count):
                gpu.queue.write_buffer(self._buffers[name], 0, content)
            encoder = gpu.create_command_encoder()
            metrics = self._metrics
            if metrics is not None:
                encoder.clear_buffer(self._buffers[metrics.name])
            dispatches = [step for slot in range(count) for step in self._steps(phase, slot)]
            self._device.encode(encoder, dispatches)
            if metrics is not None:
                size = count * metrics.stride
                encoder.copy_buffer_to_buffer(self._buffers[metrics.name], 0, self._readback, 0, size)
            else:
                encoder.copy_buffer_to_buffer(self._fence, 0, self._readback, 0, 4)
            return encoder.finish()

    def _land(self, flight: _Flight, totals: Totals) -> None:
        """Waits for a submission and adds up its metrics."""
        with gpu_errors("waiting for the GPU"):
            # The copy is part of the submission itself; READ would submit an empty one besides.
            self._readback.map_sync("READ_NOSYNC")
            view = np.frombuffer(self._readback.read_mapped(copy=False), np.float32)
            if self._metrics is not None:
                rows = view[: len(flight.units) * self._metrics.stride // 4].reshape(len(flight.units), -1)
                self._add(rows[:, : self._metrics.count].astype(np.float64), flight.units, totals)
            self._readback.unmap()
        totals.units += sum(flight.units)
        totals.minibatches += len(flight.units)
        self._adapt(len(flight.units), time.monotonic() - flight.since)

    def _add(self, rows: "np.ndarray[Any, np.dtype[np.float64]]", units: list[int], totals: Totals) -> None:
        if rows.shape[1] == self.plan.metrics:
            totals.metrics[:, 0] += rows.sum(axis=0)
            totals.metrics[:, 1] += sum(units)
        else:
            totals.metrics += rows.sum(axis=0).reshape(-1, 2)

    def _adapt(self, count: int, seconds: float) -> None:
        if seconds < SHORT_SECONDS and count == self._batches < self.plan.slots:
            self._batches = min(2 * self._batches, self.plan.slots)
        elif seconds > LONG_SECONDS and self._batches > 1:
            self._batches //= 2

    def close(self) -> None:
        """Gives the GPU memory back. Idempotent."""
        for buffer in self._owned:
            buffer.destroy()
        self._owned.clear()


def _usage(plan: Plan, buffer: Buffer) -> int:
    uniform = any(
        bound.buffer == buffer and bound.access.value == "uniform"
        for pipeline in plan.pipelines
        for bound in pipeline.bindings
    )
    usage = _USAGE.STORAGE | _USAGE.COPY_DST | _USAGE.COPY_SRC
    return int(usage | _USAGE.UNIFORM) if uniform else int(usage)

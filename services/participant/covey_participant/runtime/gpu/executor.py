"""A checked plan on a device: buffers, bind groups and pipelines, made once and used for every minibatch."""

from collections.abc import Callable
from typing import Any

import wgpu

from covey_kit.errors import Reason

from .device import Device, Dispatch, gpu_errors
from .failure import GpuFailure
from .plan import Binding, Buffer, Phase, Pipeline, Plan, Role
from .weights import Weights

_USAGE = wgpu.BufferUsage


class Executor:
    """A plan on a device.

    Args:
        on_compile: called with a pipeline's name before it is compiled, which may take long.

    Attributes:
        batches: minibatches of the next submission, which adapts to the time that one takes.
        readback: takes the metrics of a submission, or the fence where there are none.

    Raises:
        GpuFailure: `SHADER_INVALID` quotes the compiler; `DEVICE`: no memory, or the driver's words.
    """

    def __init__(
        self, device: Device, plan: Plan, on_compile: Callable[[str], None] = lambda _name: None
    ) -> None:
        self.plan = plan
        self.device = device
        self.buffers: dict[str, Any] = {}
        self._layouts: dict[tuple[Binding, ...], Any] = {}
        self._groups: dict[tuple[tuple[Binding, ...], int], Any] = {}
        self._dispatches: dict[tuple[Phase, int], list[Dispatch]] = {}
        self._owned: list[Any] = []
        self.batches = 1
        try:
            modules = {name: self._module(name, source) for name, source in plan.modules.items()}
            self._pipelines: dict[str, Any] = {}
            for pipeline in plan.pipelines:
                on_compile(pipeline.name)
                self._pipelines[pipeline.name] = self._pipeline(pipeline, modules[pipeline.module])
            for buffer in plan.buffers:
                self.buffers[buffer.name] = self._own(
                    buffer.name, buffer.total(plan.slots), _usage(plan, buffer)
                )
            self.fence = self._own("fence", 4, _USAGE.COPY_SRC)
            metrics = plan.metrics_buffer
            self.readback = self._own(
                "readback", metrics.total(plan.slots) if metrics else 4, _USAGE.COPY_DST | _USAGE.MAP_READ
            )
            self.weights = Weights(device, self._parameters(), self._own)
        except BaseException:
            self.close()
            raise

    # --- making -------------------------------------------------------------------------------

    def _own(self, label: str, size: int, usage: int) -> Any:
        buffer = self.device.buffer(label, size, usage)
        self._owned.append(buffer)
        return buffer

    def _module(self, name: str, source: str) -> Any:
        if source.lstrip().startswith("#version"):
            raise GpuFailure(Reason.SHADER_INVALID, f"{name} isn't WGSL")
        with gpu_errors(f"compiling {name}", shader=True):
            return self.device.gpu.create_shader_module(label=name, code=source)

    def _pipeline(self, pipeline: Pipeline, module: Any) -> Any:
        gpu = self.device.gpu
        with gpu_errors(f"making the pipeline {pipeline.name!r} of {pipeline.module}", shader=True):
            return gpu.create_compute_pipeline(
                label=pipeline.name,
                layout=gpu.create_pipeline_layout(bind_group_layouts=[self._layout(pipeline.bindings)]),
                compute={"module": module, "entry_point": pipeline.entry_point},
            )

    def _layout(self, bindings: tuple[Binding, ...]) -> Any:
        """Returns the layout of these bindings; equal ones share it, and with it their bind groups."""
        if bindings not in self._layouts:
            self._layouts[bindings] = self.device.gpu.create_bind_group_layout(
                entries=[
                    {
                        "binding": binding.number,
                        "visibility": wgpu.ShaderStage.COMPUTE,
                        "buffer": {"type": binding.access.value},
                    }
                    for binding in bindings
                ]
            )
        return self._layouts[bindings]

    def _parameters(self) -> list[tuple[Any, int]]:
        """Returns (buffer, bytes) of the weights in manifest order."""
        by_name = {buffer.parameter: buffer for buffer in self.plan.buffers if buffer.role is Role.PARAMETER}
        return [(self.buffers[by_name[name].name], by_name[name].size) for name in self.plan.parameters]

    def _group(self, pipeline: Pipeline, slot: int) -> Any:
        """Returns the bind group of a pipeline for a slot; one for all when nothing in it differs."""
        bindings = pipeline.bindings
        if not any(binding.buffer.role.per_minibatch for binding in bindings):
            slot = 0
        key = (bindings, slot)
        if key not in self._groups:
            with gpu_errors(f"binding the buffers of pipeline {pipeline.name!r}", shader=True):
                self._groups[key] = self.device.gpu.create_bind_group(
                    layout=self._layouts[bindings],
                    entries=[self._entry(binding, slot) for binding in bindings],
                )
        return self._groups[key]

    def _entry(self, binding: Binding, slot: int) -> dict[str, Any]:
        buffer = binding.buffer
        offset = slot * buffer.stride if buffer.role.per_minibatch else 0
        resource = {"buffer": self.buffers[buffer.name], "offset": offset, "size": buffer.size}
        return {"binding": binding.number, "resource": resource}

    def steps(self, phase: Phase, slot: int) -> list[Dispatch]:
        """Returns the dispatches of a phase for the minibatch in a slot."""
        key = (phase, slot)
        if key not in self._dispatches:
            handle = Device.handle
            self._dispatches[key] = [
                (handle(self._pipelines[p.name]), handle(self._group(p, slot)), *p.workgroups)
                for p in self.plan.phases[phase]
            ]
        return self._dispatches[key]

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

"""One open device, and the few calls on it that aren't wgpu's plain ones."""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import wgpu
from wgpu.backends.wgpu_native import _ffi

from covey_kit.errors import Reason
from covey_participant.domain.values import Adapter

from .adapters import describe, ranked
from .failure import GpuFailure

# Encoding through cffi itself takes 0.4 µs a call, through wgpu's Python objects 1.3 µs. What is wrong with a
# dispatch is reported when the encoder finishes, which is a plain call again.
_lib: Any = _ffi.lib
_NULL: Any = _ffi.ffi.NULL

DEVICE_LIMITS = (
    "max-bind-groups",
    "max-bindings-per-bind-group",
    "max-buffer-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroup-size-y",
    "max-compute-workgroup-size-z",
    "max-compute-workgroup-storage-size",
    "max-compute-workgroups-per-dimension",
    "max-storage-buffer-binding-size",
    "max-storage-buffers-per-shader-stage",
    "max-uniform-buffer-binding-size",
    "max-uniform-buffers-per-shader-stage",
)
"""Asked for as high as the adapter goes; WebGPU's defaults are far below."""

Dispatch = tuple[Any, Any, int, int, int]
"""(pipeline, bind group, workgroups in x, y, z)."""


@contextlib.contextmanager
def gpu_errors(what: str, *, shader: bool = False) -> Iterator[None]:
    """Turns what wgpu raises into `GpuFailure`.

    Args:
        what: what was being done, for the message.
        shader: a validation error is the shader's fault.
    """
    try:
        yield
    except wgpu.GPUOutOfMemoryError as error:
        raise GpuFailure(Reason.DEVICE, f"{what}: out of GPU memory: {error}") from error
    except wgpu.GPUValidationError as error:
        reason = Reason.SHADER_INVALID if shader else Reason.DEVICE
        raise GpuFailure(reason, f"{what}: {error}") from error
    except (wgpu.GPUError, RuntimeError, ValueError, KeyError, OSError) as error:
        raise GpuFailure(Reason.DEVICE, f"{what}: {error}") from error


class Device:
    """An open device."""

    def __init__(self, gpu: Any, facts: Adapter, features: frozenset[str]) -> None:
        self.gpu = gpu
        self.facts = facts
        self.features = features

    @classmethod
    def open(cls, name: str, api: str, features: Collection[str]) -> "Device":
        """Opens the adapter of this name and API.

        Raises:
            GpuFailure: `DEVICE`: it isn't there (any more), lacks a feature, or can't be opened.
        """
        with gpu_errors("listing the GPUs"):
            adapters = ranked(wgpu.gpu.enumerate_adapters_sync())
        for adapter in adapters:
            facts = describe(adapter)
            if (facts.name, facts.api) == (name, api):
                limits = {limit: facts.limits[limit] for limit in DEVICE_LIMITS if limit in facts.limits}
                with gpu_errors(f"opening the GPU {name!r}"):
                    gpu = adapter.request_device_sync(
                        required_features=sorted(features), required_limits=limits
                    )
                return cls(gpu, facts, frozenset(features))
        found = ", ".join(repr(describe(adapter).name) for adapter in adapters) or "none"
        raise GpuFailure(Reason.DEVICE, f"the GPU {name!r} ({api}) isn't there; found: {found}")

    def buffer(self, label: str, size: int, usage: int) -> Any:
        """Makes a buffer of zeros."""
        with gpu_errors(f"making the buffer {label!r} of {size} bytes"):
            return self.gpu.create_buffer(label=label, size=size, usage=usage)

    def encode(self, encoder: Any, dispatches: list[Dispatch]) -> None:
        """Encodes dispatches, in order, each seeing what those before it wrote."""
        compute = encoder.begin_compute_pass()
        inner = compute._internal  # noqa: SLF001 - see above
        set_pipeline = _lib.wgpuComputePassEncoderSetPipeline
        set_bind_group = _lib.wgpuComputePassEncoderSetBindGroup
        dispatch = _lib.wgpuComputePassEncoderDispatchWorkgroups
        last_pipeline = last_group = None
        for pipeline, group, x, y, z in dispatches:
            if pipeline is not last_pipeline:
                set_pipeline(inner, pipeline)
                last_pipeline = pipeline
            if group is not last_group:
                set_bind_group(inner, 0, group, 0, _NULL)
                last_group = group
            dispatch(inner, x, y, z)
        compute.end()

    @staticmethod
    def handle(thing: Any) -> Any:
        """Returns what `encode` takes for a pipeline or a bind group; the thing itself must be kept alive."""
        return thing._internal  # noqa: SLF001 - see above

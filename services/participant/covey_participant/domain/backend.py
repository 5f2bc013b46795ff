"""Which backend an assignment runs on, and why not the GPU: a pure function of what is known."""

from dataclasses import dataclass
from enum import StrEnum

from covey_participant.domain.values import Adapter, Backend, DeviceSettings, Package, Preference

MIB = 1 << 20


class Fallback(StrEnum):
    """The first check that failed."""

    PREFERENCE = "PREFERENCE"
    NOT_DECLARED = "NOT_DECLARED"
    NO_ARCHIVE = "NO_ARCHIVE"
    NO_ADAPTER = "NO_ADAPTER"
    LIMITS = "LIMITS"
    FEATURES = "FEATURES"
    BUDGET = "BUDGET"
    EXPERIENCE_OVER_DATASET = "EXPERIENCE_OVER_DATASET"
    DEVICE_ERROR = "DEVICE_ERROR"


@dataclass(frozen=True)
class Choice:
    """A backend; `fallback` is None when it is the GPU. `message` says the same in words."""

    backend: Backend
    fallback: Fallback | None
    message: str
    adapter: Adapter | None = None


def choose_backend(
    package: Package,
    settings: DeviceSettings,
    adapters: tuple[Adapter, ...],
    *,
    plan_bytes: int | None = None,
    device_error: str = "",
) -> Choice:
    """Returns the GPU if and only if every check passes, else the CPU with the first one that failed.

    Args:
        package: what is to run.
        settings: preference and GPU memory budget.
        adapters: GPUs that the device can use, best first.
        plan_bytes: GPU memory that the package's plan takes for this assignment; None: not known.
        device_error: what the GPU failed with while it ran this assignment; empty: it didn't.
    """
    found = _first_obstacle(package, settings, adapters, plan_bytes)
    if found is None and device_error:
        found = Fallback.DEVICE_ERROR, f"the GPU failed: {device_error}"
    if found is not None:
        return Choice(Backend.CPU_WASM, *found)
    backend = Backend.HYBRID if package.experience else Backend.GPU_WGPU
    return Choice(backend, None, f"runs on {adapters[0].name}", adapters[0])


def _first_obstacle(
    package: Package, settings: DeviceSettings, adapters: tuple[Adapter, ...], plan_bytes: int | None
) -> tuple[Fallback, str] | None:
    if settings.preference is Preference.CPU:
        return Fallback.PREFERENCE, "the device's preference is CPU"
    if package.gpu is None:
        return Fallback.NOT_DECLARED, f"{package.name} doesn't declare GPU_WGPU"
    if package.shader_archive is None:
        return Fallback.NO_ARCHIVE, "the job has no shader archive"
    if not adapters:
        return Fallback.NO_ADAPTER, "the device has no GPU adapter that this program can use"
    return _adapter_obstacle(package, adapters[0]) or _job_obstacle(package, settings, plan_bytes)


def _adapter_obstacle(package: Package, adapter: Adapter) -> tuple[Fallback, str] | None:
    assert package.gpu is not None
    low = [
        f"{name} is {adapter.limits.get(name, 'unknown')}, required {least}"
        for name, least in sorted(package.gpu.limits.items())
        if adapter.limits.get(name, -1) < least
    ]
    if low:
        return Fallback.LIMITS, f"{adapter.name}: {'; '.join(low)}"
    lacking = sorted(set(package.gpu.features) - adapter.features)
    if lacking:
        return Fallback.FEATURES, f"{adapter.name} lacks {', '.join(lacking)}"
    return None


def _job_obstacle(
    package: Package, settings: DeviceSettings, plan_bytes: int | None
) -> tuple[Fallback, str] | None:
    budget = settings.gpu_memory_budget_mib
    if budget is not None and plan_bytes is not None and plan_bytes > budget * MIB:
        return Fallback.BUDGET, f"the plan takes {plan_bytes} bytes of GPU memory, the budget is {budget} MiB"
    if package.experience and package.dataset_inputs:
        return Fallback.EXPERIENCE_OVER_DATASET, "experience work over dataset inputs runs on the CPU only"
    return None

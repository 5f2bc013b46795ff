"""Which backend an assignment runs on, and why not the GPU: a pure function of what is known."""

from dataclasses import dataclass
from enum import StrEnum

from covey_participant.domain.values import Adapter, Backend, DeviceSettings, Package, Preference

MIB = 1 << 20

SOFTWARE = "CPU"
"""`Adapter.adapter_type` of a driver that computes on the CPU; the module itself is faster there."""


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
    failed_as: Fallback = Fallback.DEVICE_ERROR,
) -> Choice:
    """Returns the GPU if and only if every check passes, else the CPU with the first one that failed.

    Args:
        package: what is to run.
        settings: preference and GPU memory budget.
        adapters: GPUs that the device can use, best first.
        plan_bytes: GPU memory that the package's plan takes for this assignment; None: not known.
        device_error: what the GPU failed with while it ran this assignment; empty: it didn't.
        failed_as: the reason that goes with `device_error`.
    """
    adapter = _adapter(package, settings, adapters)
    found = _first_obstacle(package, settings, adapter, plan_bytes)
    if found is None and device_error:
        found = failed_as, device_error
    if found is not None:
        return Choice(Backend.CPU_WASM, *found)
    assert adapter is not None, "without one there is an obstacle"
    backend = Backend.HYBRID if package.experience else Backend.GPU_WGPU
    return Choice(backend, None, f"runs on {adapter.name}", adapter)


def _adapter(package: Package, settings: DeviceSettings, adapters: tuple[Adapter, ...]) -> Adapter | None:
    """Returns the best adapter that has what the package requires, or the best one if none has."""
    able = [adapter for adapter in adapters if package.gpu and _adapter_obstacle(package, adapter) is None]
    wanted = [adapter for adapter in able if _taken(adapter, settings)]
    return next(iter([*wanted, *adapters]), None)


def _taken(adapter: Adapter, settings: DeviceSettings) -> bool:
    """Whether the preference takes this kind of adapter: software only where a person asked for the GPU."""
    return settings.preference is Preference.GPU or adapter.adapter_type != SOFTWARE


def _first_obstacle(
    package: Package, settings: DeviceSettings, adapter: Adapter | None, plan_bytes: int | None
) -> tuple[Fallback, str] | None:
    if settings.preference is Preference.CPU:
        return Fallback.PREFERENCE, "the device's preference is CPU"
    if package.gpu is None:
        return Fallback.NOT_DECLARED, f"{package.name} doesn't declare GPU_WGPU"
    if package.shader_archive is None:
        return Fallback.NO_ARCHIVE, "the job has no shader archive"
    if adapter is None:
        return Fallback.NO_ADAPTER, "the device has no GPU adapter that this program can use"
    found = _adapter_obstacle(package, adapter) or _job_obstacle(package, settings, plan_bytes)
    if found is None and not _taken(adapter, settings):
        why = "computes on the CPU, where the module is faster: AUTO doesn't take it, the preference GPU does"
        return Fallback.PREFERENCE, f"{adapter.name} {why}"
    return found


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

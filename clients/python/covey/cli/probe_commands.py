"""`covey probe`: what this machine could run, and why not on its GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covey.cli._command import JsonOption, example, run_async
from covey.cli._options import BackendOption, GpuMemoryOption, preference_of
from covey.cli._output import Out
from covey.words import size

if TYPE_CHECKING:
    from covey_participant.domain.values import Adapter
    from covey_participant.runtime.gpu.probe import Probed

__all__ = ["add_to"]

SHOWN_LIMITS = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
)


def add_to(root: typer.Typer) -> None:
    """Adds the command."""
    root.command("probe", epilog=example("covey probe", "covey probe models/digits --backend gpu"))(probe)


def probe(
    package: Annotated[
        Path | None, typer.Argument(metavar="[PACKAGE]", help="A package's folder.", show_default=False)
    ] = None,
    backend: BackendOption = None,
    gpu_memory: GpuMemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what this machine could run, and why not on its GPU.

    Needs neither a coordinator nor a running device. With a package: what it would run on here, and the first
    reason against the GPU. --backend and --gpu-memory ask what would be if they were set.
    """
    from covey.packages import load
    from covey_kit.errors import Reason, Unimplemented

    try:
        from covey_participant.domain.values import DeviceSettings, Preference
        from covey_participant.runtime.gpu.probe import probe as ask
    except ModuleNotFoundError as error:
        needs = "probing needs the participant's runtime; install covey[participant]"
        raise Unimplemented(Reason.NOT_IMPLEMENTED, f"{needs} ({error.name} is missing)") from error

    preference = preference_of(backend) or Preference.AUTO
    settings = DeviceSettings(preference, gpu_memory_budget_mib=gpu_memory)
    loaded = load(package) if package is not None else None
    archive = None
    if loaded is not None and loaded.manifest.HasField("shader_archive"):
        archive = loaded.path_of(loaded.manifest.shader_archive.file_name).read_bytes()
    found = run_async(ask(settings, loaded.manifest if loaded else None, archive))
    out = Out(as_json=as_json)
    out.value(_facts(found, settings.preference.value))
    _show(out, found, settings.preference.value)


def _facts(found: "Probed", preference: str) -> dict[str, Any]:
    device, choice = found.device, found.choice
    facts: dict[str, Any] = {
        "platform": device.platform,
        "runtime": device.runtime,
        "cpu_cores": device.cpus,
        "memory_bytes": device.memory_bytes,
        "adapters": [_adapter(adapter) for adapter in device.adapters],
        "preference": preference,
    }
    if choice is not None:
        facts |= {
            "backend": choice.backend.value,
            "adapter": choice.adapter.name if choice.adapter else None,
            "fallback_reason": choice.fallback.value if choice.fallback else None,
            "message": choice.message,
            "plan_bytes": found.plan_bytes,
        }
    return facts


def _adapter(adapter: "Adapter") -> dict[str, Any]:
    return {
        "name": adapter.name,
        "adapter_type": adapter.adapter_type,
        "api": adapter.api,
        "limits": adapter.limits,
        "features": sorted(adapter.features),
    }


def _show(out: Out, found: "Probed", preference: str) -> None:
    device, choice = found.device, found.choice
    pairs: list[tuple[str, Any]] = [
        ("runs on", f"{device.platform}, {device.runtime}"),
        ("cores", device.cpus),
        ("memory", size(device.memory_bytes)),
    ]
    for adapter in device.adapters:
        limits = ", ".join(
            f"{name} {adapter.limits[name]:,}" for name in SHOWN_LIMITS if name in adapter.limits
        )
        pairs.append(("GPU", f"{adapter.name} ({adapter.adapter_type}, {adapter.api}): {limits}"))
    if not device.adapters:
        pairs.append(("GPU", "none that this program can use"))
    pairs.append(("preference", preference.lower()))
    if choice is not None:
        pairs += [
            ("backend", choice.backend.value),
            ("why not the GPU" if choice.fallback else "GPU", _why(found)),
        ]
        if found.plan_bytes is not None:
            pairs.append(("GPU memory", f"at least {size(found.plan_bytes)}"))
    out.facts(pairs)


def _why(found: "Probed") -> str:
    choice = found.choice
    assert choice is not None
    return f"{choice.fallback.value}: {choice.message}" if choice.fallback else choice.message

"""What would this machine run a package on? Asked without a coordinator and without a running participant."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from covey.v1 import package_pb2
from covey_kit.errors import InvalidArgument
from covey_participant import convert
from covey_participant.domain.backend import MIB, Choice, Fallback, choose_backend
from covey_participant.domain.values import Adapter, Backend, Config, Device, DeviceSettings, Package
from covey_participant.runtime.machine import describe_machine

from .adapters import list_adapters, memory_bound
from .archive import read_archive
from .assess import assess
from .facts import package_facts
from .sizes import plan_bytes

__all__ = ["Probed", "probe"]


@dataclass(frozen=True)
class Probed:
    """What was found.

    Attributes:
        device: this machine with its GPUs, best first.
        choice: the backend, and why not the GPU; None: no package was given.
        plan_bytes: least GPU memory that the plan takes; None: no plan, or a wrong one.
    """

    device: Device
    choice: Choice | None = None
    plan_bytes: int | None = None


async def probe(
    settings: DeviceSettings,
    manifest: package_pb2.ModelPackage | None = None,
    archive: bytes | None = None,
    adapters: Sequence[Adapter] | None = None,
) -> Probed:
    """Chooses as a participant would, with the manifest's default hyperparameters.

    Args:
        settings: preference and GPU memory budget.
        manifest: the package's; None: the machine alone.
        archive: its shader archive; None: it has none.
        adapters: the machine's; None: they are looked for.
    """
    found = tuple(await list_adapters() if adapters is None else adapters)
    device = describe_machine(found)
    if manifest is None:
        return Probed(device)
    package, config = convert.package_from_proto(manifest), convert.default_config(manifest)
    takes = await asyncio.to_thread(plan_bytes, archive, package, config) if archive and package.gpu else None
    choice = choose_backend(package, settings, found, plan_bytes=takes)
    if archive is not None and choice.adapter is not None:
        budget = settings.gpu_memory_budget_mib
        bound = memory_bound(choice.adapter, None if budget is None else budget * MIB)
        choice = await asyncio.to_thread(_checked, choice, archive, package, config, bound)
    return Probed(device, choice, takes)


def _checked(choice: Choice, archive: bytes, package: Package, config: Config, bound: int | None) -> Choice:
    """Returns the choice once the plan was checked as the GPU's worker will."""
    assert choice.adapter is not None
    try:
        assessment = assess(read_archive(archive), package_facts(package, config), choice.adapter, bound)
    except InvalidArgument as error:
        return _refused(choice, Fallback.DEVICE_ERROR, error)
    return choice if assessment.plan else _refused(choice, assessment.fallback, assessment.error())


def _refused(choice: Choice, fallback: Fallback, error: InvalidArgument) -> Choice:
    wrong = "; ".join(
        f"{one.field}: {one.description}" if one.field else one.description for one in error.violations
    )
    message = f"{error.message}: {wrong}" if wrong else error.message
    return replace(choice, backend=Backend.CPU_WASM, fallback=fallback, message=message, adapter=None)

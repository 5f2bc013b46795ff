"""What this machine is, as far as it can be found out."""

import os
import platform

import psutil

from covey_kit.version import program_version
from covey_participant.domain.values import Adapter, Device
from covey_participant.runtime.module import RUNTIME

__all__ = ["cores", "describe_machine"]


def describe_machine(adapters: tuple[Adapter, ...] = ()) -> Device:
    """Returns the device with these GPUs."""
    return Device(
        platform=f"{platform.system()} {platform.machine()}",
        cpus=cores(),
        memory_bytes=psutil.virtual_memory().total,
        runtime=RUNTIME,
        program_version=program_version(),
        adapters=adapters,
    )


def cores() -> int:
    """Returns how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

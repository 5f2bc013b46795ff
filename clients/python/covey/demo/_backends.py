"""What the devices of a demo really ran on."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from covey.client import open_device
from covey.v1 import common_pb2
from covey.v1.participant_service_pb2 import LastRun
from covey_kit.errors import CoveyError

__all__ = ["Used", "last_runs", "used"]


@dataclass(frozen=True)
class Used:
    """What trained the last round.

    Attributes:
        backend: its name; several are joined with `+`.
        adapter: the GPU's name; None: none was used.
        fallback_reason: why not every device used its GPU, the first reason found; None: nothing to explain.
        message: the same in words.
    """

    backend: str
    adapter: str | None = None
    fallback_reason: str | None = None
    message: str | None = None


async def last_runs(folders: Iterable[Path]) -> list[LastRun]:
    """Returns what each device ran on last, as it says itself; one that doesn't answer is left out."""
    found = []
    for folder in folders:
        try:
            async with open_device(folder) as device:
                state = await device.state()
        except CoveyError:
            continue
        if state.HasField("last_run"):
            found.append(state.last_run)
    return found


def used(backends: "Iterable[common_pb2.Backend.ValueType]", runs: Iterable[LastRun]) -> Used:
    """Sums up.

    Args:
        backends: of the last round, as its checkpoint names them.
        runs: what the devices say.
    """
    runs = list(runs)
    name = "+".join(common_pb2.Backend.Name(backend) for backend in sorted(backends))
    adapter = next((run.adapter.name for run in runs if run.HasField("adapter")), None)
    unset = common_pb2.FALLBACK_REASON_UNSPECIFIED
    reason = next((run for run in runs if run.fallback_reason != unset), None)
    if reason is None:
        return Used(name, adapter)
    word = common_pb2.FallbackReason.Name(reason.fallback_reason).removeprefix("FALLBACK_REASON_")
    return Used(name, adapter, word, reason.message)

"""The GPUs that were found last time, in `adapters.json` of the device's folder.

They are what a device says of itself when it joins, while it looks for them anew: that takes longer than to
join. No work is chosen by them.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from covey_kit.tokens import write_secret
from covey_participant.domain.values import Adapter

__all__ = ["AdaptersFile"]


class AdaptersFile:
    """Reads and writes the names of GPUs. Its methods block."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "adapters.json"

    def load(self) -> tuple[Adapter, ...]:
        """Returns what was found last time, without limits and features; nothing where that isn't known."""
        try:
            found = json.loads(self._path.read_bytes())
            return tuple(Adapter(str(one["name"]), str(one["type"]), str(one["api"])) for one in found)
        except (OSError, ValueError, KeyError, TypeError):
            return ()

    def save(self, adapters: Sequence[Adapter]) -> None:
        """Keeps what was found; where it can't be written, the next start says less."""
        document = [{"name": one.name, "type": one.adapter_type, "api": one.api} for one in adapters]
        write_secret(self._path, json.dumps(document, indent=2).encode())

"""What is set on the device, in `settings.json` of its folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from covey_kit.tokens import write_secret
from covey_participant.domain.values import DeviceSettings, Preference

log = structlog.get_logger(__name__)


class SettingsFile:
    """Reads and writes the settings; each change is on disk before it is in force. Its methods block."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "settings.json"

    def load(self) -> DeviceSettings:
        """Returns what was set, defaults where nothing was; a damaged file is logged and not used."""
        try:
            found = json.loads(self._path.read_bytes())
            return DeviceSettings(
                preference=Preference(found.get("backendPreference", Preference.AUTO)),
                max_local_workers=_bound(found.get("maxLocalWorkers")),
                gpu_memory_budget_mib=_bound(found.get("gpuMemoryBudgetMib")),
                accept_all=found.get("acceptAll", False) is True,
            )
        except FileNotFoundError:
            return DeviceSettings()
        except (ValueError, AttributeError) as error:
            log.warning("settings can't be read; defaults hold", file=str(self._path), error=str(error))
            return DeviceSettings()

    def save(self, settings: DeviceSettings) -> None:
        """Writes the settings, whole or not at all."""
        document = {
            "backendPreference": settings.preference.value,
            "maxLocalWorkers": settings.max_local_workers,
            "gpuMemoryBudgetMib": settings.gpu_memory_budget_mib,
            "acceptAll": settings.accept_all,
        }
        write_secret(self._path, json.dumps(document, indent=2).encode())

    def start_with(self, **given: Any) -> DeviceSettings:
        """Puts settings of the command line in place (None: not given), keeps and returns them all."""
        settings = replace(self.load(), **{name: value for name, value in given.items() if value is not None})
        self.save(settings)
        return settings


def _bound(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"expected a number from 1, found {value!r}")
    return value

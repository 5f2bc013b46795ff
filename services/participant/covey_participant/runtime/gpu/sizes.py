"""How much GPU memory do plans take? Worked out once for each plan and configuration, without a GPU."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from covey_kit.errors import InvalidArgument
from covey_participant.domain.values import Adapter, Config, Package

from .archive import read_archive
from .assess import assess
from .facts import package_facts

MOST_KNOWN = 256

NOWHERE = Adapter("", "", "")
"""The least memory of a plan doesn't depend on the adapter."""


class PlanSizes:
    """Knows the least GPU memory of each plan whose archive is on the device.

    Args:
        path: returns where a blob lies if it is there.
    """

    def __init__(self, path: Callable[[str], Path]) -> None:
        self._path = path
        self._known: dict[object, int | None] = {}

    async def find(self, package: Package, config: Config) -> int | None:
        """Returns the bytes that a plan takes with one minibatch a submission.

        None: the archive isn't on the device, or the plan is wrong; the GPU's worker says how.
        """
        if package.gpu is None or package.shader_archive is None:
            return None
        key = (
            package.shader_archive.sha256,
            package.gpu.parameters,
            package.gpu.hyperparameters,
            replace(config, seed=0),
        )
        if key not in self._known:
            path = self._path(package.shader_archive.sha256)
            try:
                content = await asyncio.to_thread(path.read_bytes)
            except OSError:
                return None
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = await asyncio.to_thread(plan_bytes, content, package, config)
        return self._known[key]


def plan_bytes(content: bytes, package: Package, config: Config) -> int | None:
    """Returns the least GPU memory of an archive's plan in bytes; None: that can't be said."""
    try:
        return assess(read_archive(content), package_facts(package, config), NOWHERE).memory_bytes
    except (InvalidArgument, ValueError):
        return None

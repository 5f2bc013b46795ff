"""The GPU that tests run on: a real one, or lavapipe (`make gpu` installs it on Debian and Ubuntu)."""

import asyncio
import functools

import pytest

from covey_participant.domain.values import Adapter
from covey_participant.runtime.gpu.adapters import list_adapters


@functools.cache
def _found() -> Adapter | None:
    adapters = asyncio.run(list_adapters())
    return adapters[0] if adapters else None


def require_adapter() -> Adapter:
    """The best adapter of this machine; skips the test, saying why, where there is none."""
    adapter = _found()
    if adapter is None:
        pytest.skip("no GPU adapter: no Vulkan driver is installed (`make gpu` installs a software one)")
    return adapter

"""Which GPUs are there? Asked in a process of its own, because a broken driver may take its process with it.

python -m covey_participant.runtime.gpu.adapters        prints them as JSON
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from covey_participant.domain.values import Adapter
from covey_participant.runtime import sandbox

LIST_SECONDS = 20.0
MOST_BYTES = 1 << 20
MOST_ADAPTERS = 16

APIS = ("Vulkan", "Metal", "D3D12")
"""OpenGL is left out: the same devices show up there again, with less."""

_SHARING = ("CPU", "IntegratedGPU")
_RANKS = {"DiscreteGPU": 0, "IntegratedGPU": 1, "CPU": 3}
_PASSED_ON = (
    "VK_",
    "LD_LIBRARY_PATH",
    "DYLD_",
    "NVIDIA_",
    "CUDA_VISIBLE_DEVICES",
    "XDG_RUNTIME_DIR",
    "SYSTEMROOT",
)


def environment(cache: Path | None = None) -> dict[str, str]:
    """Returns the environment of a GPU process: what chooses drivers, and nothing else of ours.

    Args:
        cache: folder in which drivers may keep compiled shaders; None: nowhere.
    """
    kept = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    kept.setdefault("XDG_RUNTIME_DIR", _runtime_folder())
    kept["OPENBLAS_NUM_THREADS"] = "1"
    if cache is None:
        kept["MESA_SHADER_CACHE_DISABLE"] = "true"
        kept["__GL_SHADER_DISK_CACHE"] = "0"
    else:
        kept["MESA_SHADER_CACHE_DIR"] = str(cache)
        kept["__GL_SHADER_DISK_CACHE_PATH"] = str(cache)
    return kept


def _runtime_folder() -> str:
    """Returns a folder of this user alone; without one, drivers complain on stderr about each start."""
    folder = Path(tempfile.gettempdir()) / f"covey-gpu-{os.getuid() if hasattr(os, 'getuid') else 0}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    return str(folder)


async def list_adapters(seconds: float = LIST_SECONDS) -> list[Adapter]:
    """Returns the adapters of this machine, best first; empty when there are none or no driver answers."""
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-m",
            __name__,
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment(),
            start_new_session=True,
            limit=MOST_BYTES,
        )
    except OSError:
        return []
    try:
        async with asyncio.timeout(seconds):
            assert process.stdout is not None
            output = await process.stdout.read()
            await process.wait()
    except TimeoutError:
        return []
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    try:
        return parse(output)
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # it died before it could say anything


def parse(output: bytes) -> list[Adapter]:
    """Returns what the child printed."""
    return [
        Adapter(
            name=str(item["name"])[:256],
            adapter_type=str(item["adapter_type"])[:64],
            api=str(item["api"])[:64],
            limits={str(name): int(value) for name, value in item["limits"].items()},
            features=frozenset(str(name) for name in item["features"]),
        )
        for item in json.loads(output)[:MOST_ADAPTERS]
    ]


def describe(adapter: Any) -> Adapter:
    """Returns the facts of a wgpu adapter."""
    info = adapter.info
    return Adapter(
        name=str(info["device"] or info["vendor"] or "GPU"),
        adapter_type=str(info["adapter_type"]),
        api=str(info["backend_type"]),
        limits={name: int(value) for name, value in adapter.limits.items()},
        features=frozenset(adapter.features),
    )


def memory_bound(adapter: Adapter, budget_bytes: int | None) -> int | None:
    """Returns the most GPU memory that a plan may take, in bytes: the budget, or less where there is less.

    A driver says how large one buffer may be, not how many there may be. Where buffers lie in the machine's
    own memory, half of it is the bound, and never more than is free: the rest is for everything else that
    runs.
    """
    if adapter.adapter_type not in _SHARING:
        return budget_bytes
    memory = psutil.virtual_memory()
    free = int(min(memory.total // 2, memory.available))
    return free if budget_bytes is None else min(free, budget_bytes)


def ranked(adapters: list[Any]) -> list[Any]:
    """Returns the wgpu adapters that can be used, best first; the driver's own order decides among equals."""
    usable = [adapter for adapter in adapters if adapter.info["backend_type"] in APIS]
    return sorted(usable, key=lambda adapter: _RANKS.get(adapter.info["adapter_type"], 2))


def main() -> None:
    """Prints this machine's adapters, then leaves without the drivers' own clean-up, which may hang."""
    sandbox.die_with_parent(int(sys.argv[1]))
    import wgpu

    found = [describe(adapter) for adapter in ranked(wgpu.gpu.enumerate_adapters_sync())]
    text = json.dumps([{**vars(facts), "features": sorted(facts.features)} for facts in found])
    sys.stdout.write(text)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""Looking for GPUs: never an error, whatever a driver does."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from covey_participant.domain.values import Adapter
from covey_participant.runtime.gpu import adapters
from covey_participant.runtime.gpu.adapters import environment, list_adapters, parse, ranked


def described(**changes: Any) -> dict[str, Any]:
    """An adapter as the child prints it."""
    return {"name": "card", "adapter_type": "CPU", "api": "Vulkan", "limits": {}, "features": [], **changes}


def test_what_the_child_prints_is_read() -> None:
    """Names, limits and features come out as they went in; no more than 16 adapters do."""
    printed = [described(limits={"max-buffer-size": 5}, features=["b", "a"])] * 20

    found = parse(json.dumps(printed).encode())

    assert len(found) == 16
    assert found[0] == Adapter("card", "CPU", "Vulkan", {"max-buffer-size": 5}, frozenset({"a", "b"}))


async def test_a_driver_that_does_not_answer_counts_as_none() -> None:
    """When the time is up, the child is gone and the list is empty."""
    assert await list_adapters(seconds=0.0) == []


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.abort()",
        "print('[{}]')",
        "print('no JSON')",
        "print('[{\"name\": 1}]')",
        "print('{}')",
        "import sys; sys.exit(3)",
    ],
)
async def test_a_driver_that_breaks_counts_as_none(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort or nonsense in the child is no error here."""
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -c "$COVEY_TEST_PROGRAM"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(adapters, "environment", lambda: {"COVEY_TEST_PROGRAM": program})

    assert await list_adapters() == []


async def test_a_missing_program_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does a child that can't be started."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    assert await list_adapters() == []


class Found:
    """A wgpu adapter, as far as ranking looks."""

    def __init__(self, kind: str, api: str) -> None:
        self.info = {"adapter_type": kind, "backend_type": api}


def test_the_best_adapter_is_first() -> None:
    """Real cards before shared ones before software; OpenGL's second view of them is left out."""
    found = [
        Found("CPU", "Vulkan"),
        Found("IntegratedGPU", "Vulkan"),
        Found("DiscreteGPU", "OpenGL"),
        Found("VirtualGPU", "Vulkan"),
        Found("DiscreteGPU", "Vulkan"),
    ]

    kinds = [adapter.info["adapter_type"] for adapter in ranked(found)]

    assert kinds == ["DiscreteGPU", "IntegratedGPU", "VirtualGPU", "CPU"]


def test_a_gpu_process_sees_what_chooses_drivers_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of ours is passed on: no home, no path, no token."""
    for name in ("VK_DRIVER_FILES", "HOME", "PATH", "COVEY_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")

    seen = environment(tmp_path)

    assert seen["VK_DRIVER_FILES"] == "x"
    assert seen["MESA_SHADER_CACHE_DIR"] == str(tmp_path)
    assert Path(seen["XDG_RUNTIME_DIR"]).is_dir()
    assert not {"HOME", "PATH", "COVEY_TOKEN", "AWS_SECRET_ACCESS_KEY"} & seen.keys()
    assert environment()["MESA_SHADER_CACHE_DISABLE"] == "true"

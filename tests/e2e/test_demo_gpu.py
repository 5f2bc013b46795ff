"""`covey demo --backend gpu`: on the GPU where there is one, else on the CPU with the reason."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from covey_participant.domain.values import Adapter
from support.gpu_device import require_adapter
from support.mesh import covey
from support.packages import DIGITS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NO_DRIVER = {"VK_DRIVER_FILES": "/nowhere/driver.json", "VK_ICD_FILENAMES": "/nowhere/driver.json"}
"""What a machine without a driver looks like to the Vulkan loader."""


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    """The adapter of this machine."""
    return require_adapter()


async def demo(folder: Path, *arguments: str, rounds: int, **environment: str) -> dict[str, Any]:
    """Runs a demo to its end and returns its JSON."""
    code, out, err = await covey(
        *("demo", "--participants", "1", "--rounds", str(rounds), "--folder", str(folder), "--json"),
        *arguments,
        environment=os.environ | environment,
        timeout=250,
    )
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


async def test_the_demo_trains_on_the_gpu_as_on_the_cpu(tmp_path: Path, adapter: Adapter) -> None:
    """It reaches 95 %, names the adapter, and ends within half a percent of the CPU's accuracy."""
    gpu = await demo(tmp_path / "gpu", "--backend", "gpu", rounds=4)
    cpu = await demo(tmp_path / "cpu", rounds=4)

    assert (gpu["backend"], gpu["adapter"], gpu["fallback_reason"]) == ("GPU_WGPU", adapter.name, None)
    assert (cpu["backend"], cpu["adapter"], cpu["fallback_reason"]) == ("CPU_WASM", None, "PREFERENCE")
    assert gpu["accuracy"] >= 0.95
    assert abs(gpu["accuracy"] - cpu["accuracy"]) <= 0.005
    assert gpu["checkpoint_sha256"] != cpu["checkpoint_sha256"]  # who took part is written in it
    for on_gpu, on_cpu in zip(gpu["history"], cpu["history"], strict=True):
        assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], rel=0.05)


async def test_without_an_adapter_the_demo_says_why(tmp_path: Path) -> None:
    """It trains on the CPU all the same."""
    result = await demo(tmp_path / "demo", "--backend", "gpu", rounds=1, **NO_DRIVER)

    assert (result["backend"], result["adapter"]) == ("CPU_WASM", None)
    assert result["fallback_reason"] == "NO_ADAPTER"
    assert result["fallback_message"]


async def test_a_probe_says_what_would_run(adapter: Adapter) -> None:
    """With the GPU, without it, and under a budget that is too small, without any mesh."""
    asked = {
        "GPU_WGPU": (("--backend", "gpu"), {}),
        "PREFERENCE": (("--backend", "cpu"), {}),
        "BUDGET": (("--backend", "gpu", "--gpu-memory", "1"), {}),
        "NO_ADAPTER": (("--backend", "gpu"), NO_DRIVER),
    }
    for expected, (arguments, environment) in asked.items():
        code, out, err = await covey(
            "probe", str(DIGITS), *arguments, "--json", environment=os.environ | environment
        )
        assert code == 0, err
        found = json.loads(out)
        assert expected in (found["backend"], found["fallback_reason"])
        assert found["message"]
        assert found["adapter"] == (adapter.name if found["backend"] == "GPU_WGPU" else None)

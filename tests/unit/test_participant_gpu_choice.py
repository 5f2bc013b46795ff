"""What the device does about a GPU that fails, again and again."""

from typing import Any

import pytest

from covey_kit.errors import Reason
from covey_participant.domain.backend import Fallback
from covey_participant.domain.device import MOST_DEVICE_ERRORS, DeviceControl
from covey_participant.domain.failure import BackendFailure
from covey_participant.domain.invitations import InvitationState
from covey_participant.domain.values import (
    Adapter,
    Assignment,
    Backend,
    Blob,
    Config,
    Device,
    DeviceSettings,
    GpuNeeds,
    Kind,
    Package,
    Preference,
)

MODULE = Blob("a" * 64, 10)
GPU = Adapter("Big GPU", "DiscreteGPU", "Vulkan")
CONFIG = Config(0, 1, 1.0, 1)


class Known:
    """A GPU about which everything is known, and who asked."""

    def __init__(self, plan_bytes: int | None = None) -> None:
        self.bytes = plan_bytes
        self.asked = 0

    async def found(self) -> None:
        """The adapters are known."""
        self.asked += 1

    async def plan_bytes(self, package: Package, config: Config) -> int | None:
        """What the plan takes."""
        return self.bytes


class Nobody:
    """Answers go nowhere."""

    async def respond(self, invitation_id: str, *, accept: bool) -> InvitationState:
        """Never asked here."""
        raise AssertionError


def control(gpu: Known, **settings: Any) -> DeviceControl:
    """A device with one GPU."""

    async def save(settings: DeviceSettings) -> None:
        pass

    device = Device("Linux", 2, None, "wasmtime", "1", (GPU,))
    return DeviceControl(
        settings=DeviceSettings(**settings), save=save, device=lambda: device, answers=Nobody(), gpu=gpu
    )


def assignment(job: str = "job", kind: Kind = Kind.TRAIN, *, experience: bool = False) -> Assignment:
    """Work that a GPU could do."""
    package = Package(
        "p",
        "1",
        MODULE,
        8,
        gpu=GpuNeeds(),
        shader_archive=MODULE,
        experience=experience,
        dataset_inputs=not experience,
    )
    return Assignment("a", 1, job, 1, kind, package, CONFIG)


async def test_a_failed_assignment_runs_on_the_cpu_and_the_next_on_the_gpu() -> None:
    """One failure says nothing about the next assignment."""
    device = control(Known())
    failure = BackendFailure(Reason.DEVICE, "device lost")

    redone = await device.choose(assignment(), failure)
    after = await device.choose(assignment())

    assert (redone.backend, redone.fallback, redone.message) == (
        Backend.CPU_WASM,
        Fallback.DEVICE_ERROR,
        "device lost",
    )
    assert (after.backend, after.fallback) == (Backend.GPU_WGPU, None)


async def test_a_job_whose_gpu_work_keeps_failing_stays_on_the_cpu() -> None:
    """After three failures it isn't tried again with this job; another job's GPU work still runs."""
    device = control(Known())
    for number in range(MOST_DEVICE_ERRORS):
        assert (await device.choose(assignment())).backend is Backend.GPU_WGPU
        await device.choose(assignment(), BackendFailure(Reason.STEP_TIMEOUT, f"hang {number}"))
    kept = await device.choose(assignment())
    other = await device.choose(assignment("another"))

    assert (kept.backend, kept.fallback) == (Backend.CPU_WASM, Fallback.DEVICE_ERROR)
    assert "hang 2" in kept.message
    assert other.backend is Backend.GPU_WGPU


@pytest.mark.parametrize("fallback", [Fallback.LIMITS, Fallback.BUDGET])
async def test_what_showed_only_with_the_plan_keeps_its_own_reason(fallback: Fallback) -> None:
    """A plan that is too large for this device is no failure of the device."""
    device = control(Known())
    failure = BackendFailure(Reason.LIMIT_EXCEEDED, "too large", fallback=fallback)

    for _ in range(MOST_DEVICE_ERRORS + 1):
        assert (await device.choose(assignment(), failure)).fallback is fallback
    assert (await device.choose(assignment())).backend is Backend.GPU_WGPU


async def test_a_known_plan_is_held_against_the_budget() -> None:
    """The setting in force at the moment of the choice counts."""
    device = control(Known(2 << 20), gpu_memory_budget_mib=1)
    before = await device.choose(assignment())
    await device.set(gpu_memory_budget_mib=2)
    after = await device.choose(assignment())

    assert before.fallback is Fallback.BUDGET
    assert after.backend is Backend.GPU_WGPU


@pytest.mark.parametrize(("kind", "experience"), [(Kind.INITIALIZE, False), (Kind.EVALUATE, True)])
async def test_what_the_module_does_itself_is_no_fallback(kind: Kind, experience: bool) -> None:
    """Initial weights and evaluation by playing are the CPU's on every device."""
    choice = await control(Known()).choose(assignment(kind=kind, experience=experience))

    assert (choice.backend, choice.fallback) == (Backend.CPU_WASM, None)
    assert choice.message


async def test_the_cpu_needs_no_look_for_gpus() -> None:
    """A device that prefers its CPU doesn't wait for drivers."""
    gpu = Known()
    choice = await control(gpu, preference=Preference.CPU).choose(assignment())

    assert choice.fallback is Fallback.PREFERENCE
    assert gpu.asked == 0

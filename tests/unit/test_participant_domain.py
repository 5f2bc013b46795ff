"""The device's decisions: backends, invitations, stages, waits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey_kit.errors import FailedPrecondition, NotFound, Reason
from covey_participant.domain.backend import Choice, Fallback, choose_backend
from covey_participant.domain.backoff import Backoff
from covey_participant.domain.execution import Execution, Stage
from covey_participant.domain.failure import MOST_BYTES, WorkFailure, bounded
from covey_participant.domain.invitations import (
    Invitation,
    Invitations,
    InvitationState,
    accepts_by_itself,
)
from covey_participant.domain.values import (
    Adapter,
    Assignment,
    Backend,
    Blob,
    Chunk,
    Config,
    DeviceSettings,
    GpuNeeds,
    HeldOut,
    Kind,
    Package,
    Preference,
)

MODULE = Blob("a" * 64, 10)
PACKAGE = Package("digits", "1", MODULE, 8, gpu=GpuNeeds({"max-buffer-size": 100}), shader_archive=MODULE)
GPU = Adapter("Big GPU", "DiscreteGPU", "Vulkan", {"max-buffer-size": 100}, frozenset({"shader-f16"}))
SMALL = replace(GPU, limits={"max-buffer-size": 99})
SETTINGS = DeviceSettings()


@dataclass(frozen=True)
class World:
    """Everything that decides about a backend; as it is made, the GPU is taken."""

    package: Package = PACKAGE
    settings: DeviceSettings = SETTINGS
    adapters: tuple[Adapter, ...] = (GPU,)
    device_error: str = ""

    def set(self, **changes: Any) -> "World":
        """The same with changes."""
        return replace(self, **changes)

    def needs(self, **changes: Any) -> "World":
        """The same with a package that asks more of a GPU, if it asks anything."""
        gpu = self.package.gpu
        return self.set(package=replace(self.package, gpu=replace(gpu, **changes) if gpu else None))

    def choose(self) -> Choice:
        """What is chosen; the plan takes 2 MiB."""
        return choose_backend(
            self.package, self.settings, self.adapters, plan_bytes=2 << 20, device_error=self.device_error
        )


# --- backends ---------------------------------------------------------------------------------


def test_the_gpu_runs_when_everything_fits() -> None:
    """No fallback, and the adapter is named; experience on a GPU is hybrid."""
    chosen = choose_backend(PACKAGE, SETTINGS, (GPU,), plan_bytes=10)
    hybrid = choose_backend(replace(PACKAGE, experience=True, dataset_inputs=False), SETTINGS, (GPU,))

    assert (chosen.backend, chosen.fallback, chosen.adapter) == (Backend.GPU_WGPU, None, GPU)
    assert "Big GPU" in chosen.message
    assert hybrid.backend is Backend.HYBRID


@pytest.mark.parametrize(
    ("reason", "package", "settings", "adapters", "plan_bytes"),
    [
        (Fallback.PREFERENCE, PACKAGE, DeviceSettings(Preference.CPU), (GPU,), None),
        (Fallback.NOT_DECLARED, replace(PACKAGE, gpu=None), SETTINGS, (GPU,), None),
        (Fallback.NO_ARCHIVE, replace(PACKAGE, shader_archive=None), SETTINGS, (GPU,), None),
        (Fallback.NO_ADAPTER, PACKAGE, SETTINGS, (), None),
        (Fallback.LIMITS, PACKAGE, SETTINGS, (SMALL,), None),
        (Fallback.FEATURES, replace(PACKAGE, gpu=GpuNeeds({}, ("timestamps",))), SETTINGS, (GPU,), None),
        (Fallback.BUDGET, PACKAGE, DeviceSettings(gpu_memory_budget_mib=1), (GPU,), (1 << 20) + 1),
        (Fallback.EXPERIENCE_OVER_DATASET, replace(PACKAGE, experience=True), SETTINGS, (GPU,), None),
    ],
)
def test_each_obstacle_has_its_reason(
    reason: Fallback,
    package: Package,
    settings: DeviceSettings,
    adapters: tuple[Adapter, ...],
    plan_bytes: int | None,
) -> None:
    """The CPU with that reason, in words too; even where the device would rather have the GPU."""
    chosen = choose_backend(package, settings, adapters, plan_bytes=plan_bytes)

    assert (chosen.backend, chosen.fallback) == (Backend.CPU_WASM, reason)
    assert chosen.message


def test_the_first_obstacle_is_named() -> None:
    """Where everything is wrong, the order of the checks decides; a failure of the GPU comes last."""
    worst = replace(PACKAGE, gpu=None, shader_archive=None, experience=True)
    order = [
        choose_backend(worst, DeviceSettings(Preference.CPU), ()).fallback,
        choose_backend(worst, SETTINGS, (), device_error="lost").fallback,
        choose_backend(replace(PACKAGE, shader_archive=None), SETTINGS, (), device_error="lost").fallback,
        choose_backend(PACKAGE, SETTINGS, (SMALL,), device_error="lost").fallback,
        choose_backend(PACKAGE, SETTINGS, (GPU,), device_error="lost").fallback,
    ]

    assert order == [
        Fallback.PREFERENCE,
        Fallback.NOT_DECLARED,
        Fallback.NO_ARCHIVE,
        Fallback.LIMITS,
        Fallback.DEVICE_ERROR,
    ]


STEPS: tuple[tuple[Fallback, Callable[[World], World]], ...] = (
    (Fallback.PREFERENCE, lambda w: w.set(settings=replace(w.settings, preference=Preference.CPU))),
    (Fallback.NOT_DECLARED, lambda w: w.set(package=replace(w.package, gpu=None))),
    (Fallback.NO_ARCHIVE, lambda w: w.set(package=replace(w.package, shader_archive=None))),
    (Fallback.NO_ADAPTER, lambda w: w.set(adapters=())),
    (Fallback.LIMITS, lambda w: w.needs(limits={"max-buffer-size": 101})),
    (Fallback.FEATURES, lambda w: w.needs(features=("timestamps",))),
    (Fallback.BUDGET, lambda w: w.set(settings=replace(w.settings, gpu_memory_budget_mib=1))),
    (
        Fallback.EXPERIENCE_OVER_DATASET,
        lambda w: w.set(package=replace(w.package, experience=True, dataset_inputs=True)),
    ),
    (Fallback.DEVICE_ERROR, lambda w: w.set(device_error="lost")),
)
"""Each precondition and how to take it away, in the order in which they are checked."""


@pytest.mark.parametrize("preference", [Preference.AUTO, Preference.GPU])
@pytest.mark.parametrize("experience", [False, True])
def test_the_first_of_all_that_fails_is_the_reason(preference: Preference, experience: bool) -> None:
    """All 512 combinations of what may be missing: the GPU if and only if nothing is."""
    package = replace(PACKAGE, experience=experience, dataset_inputs=not experience)
    whole = World(package, DeviceSettings(preference))
    for missing in product((False, True), repeat=len(STEPS)):
        world, expected = whole, [step[0] for step, gone in zip(STEPS, missing, strict=True) if gone]
        for (_, take_away), gone in zip(STEPS, missing, strict=True):
            world = take_away(world) if gone else world
        chosen = world.choose()

        if expected:
            assert (chosen.backend, chosen.fallback) == (Backend.CPU_WASM, expected[0]), expected
            assert chosen.message
            assert chosen.adapter is None
        else:
            assert chosen.backend is (Backend.HYBRID if experience else Backend.GPU_WGPU)
            assert (chosen.fallback, chosen.adapter) == (None, GPU)


def test_auto_takes_no_software_gpu() -> None:
    """Only where everything else fits is that the reason; the preference GPU takes it."""
    software = replace(GPU, name="llvmpipe", adapter_type="CPU")
    auto = choose_backend(PACKAGE, SETTINGS, (software,))
    small = choose_backend(PACKAGE, SETTINGS, (replace(SMALL, adapter_type="CPU"),))
    wanted = choose_backend(PACKAGE, DeviceSettings(Preference.GPU), (software,))

    assert (auto.backend, auto.fallback) == (Backend.CPU_WASM, Fallback.PREFERENCE)
    assert "llvmpipe" in auto.message
    assert small.fallback is Fallback.LIMITS
    assert (wanted.backend, wanted.adapter) == (Backend.GPU_WGPU, software)


def test_the_best_adapter_that_is_able_is_taken() -> None:
    """The first with limits and features; where none has them, the best one's shortcoming is the reason."""
    second = replace(GPU, name="Second GPU")
    software = replace(GPU, name="llvmpipe", adapter_type="CPU")

    assert choose_backend(PACKAGE, SETTINGS, (SMALL, second)).adapter == second
    assert choose_backend(PACKAGE, SETTINGS, (SMALL, software)).fallback is Fallback.LIMITS
    assert choose_backend(PACKAGE, DeviceSettings(Preference.GPU), (SMALL, software)).adapter == software
    assert choose_backend(PACKAGE, SETTINGS, (software, second)).adapter == second


def test_limits_that_are_unknown_or_too_low_are_all_named() -> None:
    """Every limit that falls short is in the words, with what was found."""
    needs = GpuNeeds({"max-buffer-size": 200, "max-unheard-of": 1})

    chosen = choose_backend(replace(PACKAGE, gpu=needs), SETTINGS, (GPU,))

    assert "max-buffer-size is 100, required 200" in chosen.message
    assert "max-unheard-of is unknown, required 1" in chosen.message


# --- waits ------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=40))
def test_waits_double_and_stay_within_their_bounds(draws: list[float]) -> None:
    """Each wait lies between half and all of min(most, first · 2ⁿ)."""
    numbers = iter(draws)
    backoff = Backoff(0.2, 10.0, lambda: next(numbers))

    for n in range(len(draws)):
        bound = min(10.0, 0.2 * 2.0**n)
        assert bound / 2 <= backoff.next() <= bound


def test_a_success_begins_anew() -> None:
    """After `reset` the first wait comes again."""
    backoff = Backoff(0.2, 10.0, lambda: 0.0)
    waits = [backoff.next() for _ in range(3)]
    backoff.reset()

    assert waits == [0.1, 0.2, 0.4]
    assert backoff.next() == 0.1


# --- invitations ------------------------------------------------------------------------------


def invitation(state: InvitationState = InvitationState.PENDING, name: str = "i") -> Invitation:
    """An invitation."""
    return Invitation(name, "job", "Job", "digits", "1", "", "a" * 64, 10, 1.0, state)


@pytest.mark.parametrize("state", list(InvitationState))
@pytest.mark.parametrize("accept_all", [True, False])
def test_only_pending_invitations_are_accepted_by_themselves(
    state: InvitationState, accept_all: bool
) -> None:
    """And only where the device's person said so."""
    expected = accept_all and state is InvitationState.PENDING

    assert accepts_by_itself(invitation(state), accept_all=accept_all) is expected


def test_answers_must_fit_the_invitations_state() -> None:
    """The same answer again is fine, another one isn't, nor one to an invitation that ended."""
    known = Invitations()
    known.take(invitation())
    assert known.check_answer("i", accept=True) == invitation()
    known.answered("i", InvitationState.ACCEPTED)
    assert known.check_answer("i", accept=True) == invitation(InvitationState.ACCEPTED)

    with pytest.raises(FailedPrecondition) as other:
        known.check_answer("i", accept=False)
    known.end("i")
    with pytest.raises(FailedPrecondition, match="REVOKED"):
        known.check_answer("i", accept=True)
    with pytest.raises(NotFound):
        known.check_answer("nothing", accept=True)
    assert other.value.reason is Reason.INVITATION_STATE


def test_an_answered_invitation_stays_answered_when_it_ends() -> None:
    """DECLINED isn't overwritten by the end of the job."""
    known = Invitations()
    known.take(invitation(InvitationState.DECLINED))
    known.end("i")
    known.end("nothing")

    assert [found.state for found in known.all()] == [InvitationState.DECLINED]


# --- stages -----------------------------------------------------------------------------------


def assignment(**changes: object) -> Assignment:
    """A training assignment of two chunks with 3 and 4 examples."""
    chunks = (Chunk("a", MODULE, 3), Chunk("b", MODULE, 4))
    made = Assignment("r1.a0", 1, "job", 1, Kind.TRAIN, PACKAGE, Config(0, 1, 1.0, 1), chunks=chunks)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_time_is_summed_by_stage_back_and_forth() -> None:
    """Going back to a stage goes on counting; the present one counts until now."""
    execution = Execution(assignment(), started=10.0)
    assert not execution.enter(Stage.FETCHING, 11.0)
    assert execution.enter(Stage.LOADING, 12.0)
    assert execution.enter(Stage.TRAINING, 12.5)
    execution.transfer = (1, 2)
    assert execution.enter(Stage.LOADING, 14.5)

    assert execution.durations(15.0) == {Stage.FETCHING: 2.0, Stage.LOADING: 1.0, Stage.TRAINING: 2.0}
    assert execution.transfer is None


def test_units_are_known_only_where_they_are() -> None:
    """Chunks say how many; held-out data only when job or manifest do."""
    held_out = HeldOut(MODULE, first=2, units=None)
    evaluation = assignment(kind=Kind.EVALUATE, chunks=(), held_out=held_out)

    assert assignment().units == 7
    assert evaluation.units is None
    assert replace(evaluation, package=replace(PACKAGE, validation_examples=10)).units == 8
    assert replace(evaluation, held_out=replace(held_out, units=5)).units == 5
    assert assignment(kind=Kind.INITIALIZE, chunks=()).units == 0


# --- failures ---------------------------------------------------------------------------------


@given(st.text(max_size=3000), st.integers(8, 5000))
def test_messages_are_cut_to_bytes_without_breaking_a_character(text: str, most: int) -> None:
    """At most so many bytes of valid UTF-8, and unchanged when it fits."""
    cut = bounded(text, most)

    assert len(cut.encode()) <= most
    if len(text.encode("utf-8", "replace")) <= most:
        assert cut == text.encode("utf-8", "replace").decode()


def test_the_devices_own_trouble_isnt_the_packages_fault() -> None:
    """Unless said otherwise, DEVICE blames nobody, a trap blames the package."""
    assert not WorkFailure(Reason.DEVICE, "disk").package_fault
    assert WorkFailure(Reason.MODULE_TRAP, "trap").package_fault
    assert not WorkFailure(Reason.WORKER_DIED, "killed", package_fault=False).package_fault
    assert len(WorkFailure(Reason.MODULE_STATUS, "x" * 10000).message.encode()) == MOST_BYTES

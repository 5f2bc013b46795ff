"""Plans: all that is wrong is found at once, with its place, before a driver is asked."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from covey_kit.errors import Reason
from covey_participant.domain.backend import Fallback
from covey_participant.domain.values import Adapter, Blob, Config, GpuNeeds, Package
from covey_participant.runtime.gpu.adapters import memory_bound
from covey_participant.runtime.gpu.assess import assess
from covey_participant.runtime.gpu.facts import package_facts
from covey_participant.runtime.gpu.plan import Kind, Phase, Role, memory_bytes
from support.gpu_plans import LINEAR, adapter_facts, linear_archive, linear_facts, linear_plan

Change = Callable[[dict[str, Any]], None]


def found(change: Change, **limits: int) -> list[tuple[str, str, str]]:
    """(kind, place, description) of everything that is wrong with the changed plan."""
    plan = copy.deepcopy(linear_plan())
    change(plan)
    assessment = assess(linear_archive(plan), linear_facts(), adapter_facts(**limits))
    assert (assessment.plan is None) == bool(assessment.violations)
    return [(v.kind.value, v.place.removeprefix("plan.json:"), v.description) for v in assessment.violations]


def test_a_good_plan_is_worked_out() -> None:
    """Counts, roles, phases and memory of the linear model."""
    assessment = assess(linear_archive(), linear_facts(), adapter_facts())

    plan = assessment.plan
    assert plan is not None
    assert not assessment.violations
    assert {buffer.name: buffer.count for buffer in plan.buffers} == {
        "weight": 8,
        "bias": 1,
        "x": 128,
        "t": 16,
        "difference": 16,
        "settings": 4,
        "sums": 1,
    }
    assert [p.name for p in plan.phases[Phase.TRAIN]] == ["forward", "descend"]
    assert plan.phases[Phase.UPDATE] == ()
    assert plan.pipelines[0].workgroups == (1, 1, 1)
    assert plan.slots == 16
    assert plan.metrics_buffer is not None
    assert plan.metrics_buffer.role is Role.METRICS
    # 25 words that stay; 512 + 3 · 256 bytes a minibatch, twice; 36 bytes of weights on their way.
    assert assessment.memory_bytes == 4 * 25 + 2 * 1280 + 36
    assert plan.memory_bytes == 4 * 25 + 2 * 16 * 1280 + 36


def test_fewer_minibatches_a_submission_when_memory_is_short() -> None:
    """The budget first costs speed, then the GPU."""
    archive, facts = linear_archive(), linear_facts()

    roomy = assess(archive, facts, adapter_facts(), 10_000).plan
    tight = assess(archive, facts, adapter_facts(), 2_696).plan
    over = assess(archive, facts, adapter_facts(), 2_695)

    assert roomy is not None
    assert tight is not None
    assert 1 < roomy.slots < 16
    assert roomy.memory_bytes <= 10_000
    assert (tight.slots, tight.memory_bytes) == (1, 2_696)
    assert [v.kind for v in over.violations] == [Kind.BUDGET]
    assert over.memory_bytes == 2_696
    assert "2696 bytes" in over.violations[0].description


def set_in(path: list[Any], value: Any) -> Change:
    """Sets a value deep in the plan."""

    def change(plan: dict[str, Any]) -> None:
        at: Any = plan
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return change


def append(path: list[Any], value: Any) -> Change:
    """Appends to a list deep in the plan."""

    def change(plan: dict[str, Any]) -> None:
        at: Any = plan
        for step in path:
            at = at[step]
        at.append(value)

    return change


SCRATCH = {"name": "more", "element": "F32", "count": "1"}


@pytest.mark.parametrize(
    ("change", "kind", "place", "words"),
    [
        (set_in(["buffers", 0, "count"], "batchSize - 16"), "PLAN", "buffers[0].count", "is 0"),
        (set_in(["buffers", 0, "count"], "batchSize - 99"), "PLAN", "buffers[0].count", "below 0"),
        (set_in(["buffers", 0, "count"], "weight"), "PLAN", "buffers[0].count", "unknown name 'weight'"),
        (set_in(["buffers", 0, "count"], "7"), "PLAN", "buffers[0].count", "has 8 elements"),
        (set_in(["buffers", 0, "element"], "U32"), "PLAN", "buffers[0].element", "weights are F32"),
        (
            set_in(["buffers", 0, "parameter"], "nowhere"),
            "PLAN",
            "buffers[0].parameter",
            "no parameter 'nowhere'",
        ),
        (set_in(["buffers", 0, "parameter"], "bias"), "PLAN", "buffers", "'bias' must have exactly one"),
        (append(["buffers"], {**SCRATCH, "name": "bias"}), "PLAN", "buffers", "'bias' is there 2 times"),
        (append(["buffers"], SCRATCH), "PLAN", "buffers", "no pipeline binds buffer 'more'"),
        (append(["buffers"], {**SCRATCH, "tensor": 1}), "PLAN", "buffers", "tensor 1 has 2 buffers"),
        (append(["buffers"], {**SCRATCH, "metrics": True}), "PLAN", "buffers", "found 2"),
        (set_in(["buffers", 6, "metrics"], False), "PLAN", "buffers", "`metrics: true`"),
        (set_in(["buffers", 6, "count"], "3"), "PLAN", "buffers[6].count", "expected 1 elements"),
        (set_in(["buffers", 5, "count"], "2"), "PLAN", "buffers[5].count", "2 elements for 3 fields"),
        (
            set_in(["buffers", 5, "uniform", "fields"], ["learningRate", "momentum"]),
            "PLAN",
            "buffers[5].uniform.fields[1]",
            "unknown hyperparameter 'momentum'",
        ),
        (
            set_in(["buffers", 5, "element"], "U32"),
            "PLAN",
            "buffers[5].uniform.fields[0]",
            "isn't a whole U32",
        ),
        (set_in(["buffers", 4, "count"], "100000000"), "LIMITS", "buffers[4].count", "max-buffer-size"),
        (set_in(["pipelines", 1, "name"], "forward"), "PLAN", "pipelines", "'forward' is there 2 times"),
        (
            set_in(["pipelines", 0, "module"], "other.wgsl"),
            "PLAN",
            "pipelines[0].module",
            "there are: linear.wgsl",
        ),
        (
            set_in(["pipelines", 0, "entryPoint"], "main"),
            "PLAN",
            "pipelines[0].entryPoint",
            "descend, forward",
        ),
        (
            set_in(["pipelines", 0, "workgroups"], ["1", "2 / 0"]),
            "PLAN",
            "pipelines[0].workgroups[1]",
            "by zero",
        ),
        (
            set_in(["pipelines", 0, "workgroups"], ["1", "1", "65536"]),
            "LIMITS",
            "pipelines[0].workgroups[2]",
            "in z is 65536",
        ),
        (
            set_in(["pipelines", 0, "bindings", 0, "buffer"], "q"),
            "PLAN",
            "pipelines[0].bindings[0].buffer",
            "no buffer 'q'",
        ),
        (
            set_in(["pipelines", 0, "bindings", 1, "binding"], 0),
            "PLAN",
            "pipelines[0].bindings",
            "binding 0 is there 2",
        ),
        (
            set_in(["pipelines", 0, "bindings", 0, "access"], "READ_WRITE"),
            "PLAN",
            "pipelines[0].bindings[0].access",
            "filled by the host",
        ),
        (
            set_in(["pipelines", 0, "bindings", 0], {"binding": 0, "buffer": "bias", "access": "READ"}),
            "PLAN",
            "pipelines[0].bindings",
            "would alias",
        ),
        (set_in(["train", 0, "pipeline"], "q"), "PLAN", "train[0].pipeline", "no pipeline 'q'"),
        (set_in(["train"], []), "PLAN", "train", "there are no steps"),
        (set_in(["evaluate"], []), "PLAN", "evaluate", "there are no steps"),
    ],
)
def test_each_thing_that_is_wrong_is_found(change: Change, kind: str, place: str, words: str) -> None:
    """Each is reported with who has to change something, its place and what was found."""
    assert any((k, p) == (kind, place) and words in d for k, p, d in found(change)), found(change)


@pytest.mark.parametrize(
    ("limits", "place", "words"),
    [
        ({"max_storage_buffers_per_shader_stage": 5}, "pipelines[0].bindings", "storage buffers is 6"),
        ({"max_uniform_buffers_per_shader_stage": 0}, "pipelines[0].bindings", "uniform buffers is 1"),
        ({"max_storage_buffer_binding_size": 511}, "pipelines[0].bindings[0]", "512"),
        ({"max_uniform_buffer_binding_size": 15}, "pipelines[0].bindings[5]", "'settings' in bytes is 16"),
        ({"max_buffer_size": 511}, "buffers[2].count", "takes 512 bytes"),
        ({"max_compute_workgroup_size_x": 15}, "pipelines[0].entryPoint", "size in x is 16"),
        ({"max_compute_invocations_per_workgroup": 15}, "pipelines[0].entryPoint", "workgroup's size is 16"),
        ({"max_compute_workgroup_storage_size": 63}, "pipelines[0].entryPoint", "memory in bytes is 64"),
        ({"max_compute_workgroups_per_dimension": 0}, "pipelines[0].workgroups[0]", "in x is 1"),
    ],
)
def test_each_limit_is_held(limits: dict[str, int], place: str, words: str) -> None:
    """Limits that drivers check late or not at all are checked against the adapter."""
    wrong = found(lambda plan: None, **limits)

    assert {kind for kind, _, _ in wrong} == {"LIMITS"}
    assert any(p == place and words in d for _, p, d in wrong), wrong


def test_everything_is_reported_at_once() -> None:
    """Three mistakes in three places are three violations, in the error too."""

    def change(plan: dict[str, Any]) -> None:
        plan["buffers"][4]["count"] = "0"
        plan["pipelines"][1]["entryPoint"] = "nowhere"
        plan["evaluate"][0]["pipeline"] = "q"

    plan = linear_plan()
    change(plan)
    assessment = assess(linear_archive(plan), linear_facts(), adapter_facts())
    error = assessment.error()

    assert error.reason is Reason.SHADER_INVALID
    assert {v.field for v in error.violations} == {
        "plan.json:buffers[4].count",
        "plan.json:pipelines[1].entryPoint",
        "plan.json:evaluate[0].pipeline",
    }
    assert assessment.memory_bytes is None


def test_modules_that_cannot_be_taken_apart_are_named() -> None:
    """A shader of which neither size nor storage is known doesn't reach the driver."""
    archive = linear_archive(None, {"linear.wgsl": LINEAR + "/*"})

    wrong = assess(archive, linear_facts(), adapter_facts()).violations

    assert {v.place for v in wrong} == {"plan.json:pipelines[0].module", "plan.json:pipelines[1].module"}


def test_metrics_may_bring_their_own_counts() -> None:
    """Twice as many elements as metrics are pairs of sum and count."""
    assert not found(set_in(["buffers", 6, "count"], "2"))


def test_experience_needs_an_update() -> None:
    """An experience package trains by UPDATE, and is evaluated by playing."""
    plan = linear_plan()
    plan["update"], plan["train"], plan["evaluate"] = plan["train"], [], []
    experience = replace(linear_facts(), experience=True)

    assert assess(linear_archive(plan), experience, adapter_facts()).plan is not None
    wrong = assess(linear_archive(), experience, adapter_facts()).violations
    assert [v.place for v in wrong] == ["plan.json:update"]


def test_facts_come_from_package_and_settings() -> None:
    """The model's own hyperparameters are matched in order; the three that all have are always there."""
    needs = GpuNeeds(parameters=(("w", 12), ("scale", 1)), hyperparameters=("momentum", "decay"))
    package = Package("p", "1", Blob("0" * 64, 1), 13, metrics=("loss",), experience=True, gpu=needs)

    facts = package_facts(package, Config(1, 4, 0.5, 2, (0.9, 0.1)))

    assert list(facts.parameters.items()) == [("w", 12), ("scale", 1)]
    assert facts.hyperparameters == {
        "momentum": 0.9,
        "decay": 0.1,
        "batchSize": 4.0,
        "learningRate": 0.5,
        "localEpochs": 2.0,
    }
    assert (facts.metrics, facts.training, facts.evaluation, facts.experience) == (1, True, False, True)
    assert facts.batch_size == 4


def test_who_must_change_something_is_told() -> None:
    """A plan that is wrong anywhere outweighs limits, and limits outweigh the budget."""
    plan = linear_plan()
    archive, facts = linear_archive(plan), linear_facts()
    small = adapter_facts(max_buffer_size=511)
    plan["train"] = []

    assert assess(archive, facts, adapter_facts(), 1).fallback is Fallback.BUDGET
    assert assess(archive, facts, small, 1).fallback is Fallback.LIMITS
    assert assess(linear_archive(plan), facts, small, 1).fallback is Fallback.DEVICE_ERROR


def test_shared_memory_bounds_what_a_plan_may_take() -> None:
    """Where buffers lie in the machine's memory, half of it is the most; elsewhere only the budget counts."""
    shared, own = adapter_facts(), Adapter("card", "DiscreteGPU", "Vulkan")

    most = memory_bound(shared, None)
    assert most is not None
    assert 0 < most < 1 << 50
    assert memory_bound(shared, 1000) == 1000
    assert (memory_bound(shared, 1 << 60) or 0) < 1 << 50
    assert memory_bound(own, None) is None
    assert memory_bound(own, 1 << 60) == 1 << 60


def test_memory_counts_what_is_on_its_way() -> None:
    """Weights travel in pieces: a gigabyte of them needs 16 MiB more, not another gigabyte."""
    plan = assess(linear_archive(), linear_facts(), adapter_facts()).plan
    assert plan is not None
    large = replace(plan.buffers[0], count=1 << 28)

    assert memory_bytes((large,), 4) == (1 << 30) + (16 << 20)

"""The experience packages as a host meets them: files, ABI, units and seeds, the order of calls."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import protovalidate
import pytest
from google.protobuf import json_format

from covey.v1 import package_pb2
from support.experience_harness import ExperienceModule
from support.experience_packages import PACKAGES, Facts
from support.experience_reference import decode
from support.packages import OWN_FIELDS, manifest, weight_count
from support.wasm_harness import EVALUATE, PLAY, TRAIN, UPDATE, ModuleError, WasmModule

BAD_ARGUMENT, BAD_DATA, BAD_STATE, NO_MEMORY, UNSUPPORTED, DIVERGED = range(-1, -7, -1)


@pytest.fixture(params=list(PACKAGES))
def facts(request: pytest.FixtureRequest) -> Facts:
    """Each package in turn."""
    found: Facts = PACKAGES[request.param]
    return found


@pytest.fixture
def module(facts: Facts) -> ExperienceModule:
    """A fresh instance with the manifest's defaults and the weights of round 0."""
    made = ExperienceModule(facts.path)
    made.check("initialize", 1)
    return made


def fresh(module: ExperienceModule, **changes: float) -> ExperienceModule:
    """Another instance with the same weights."""
    other = ExperienceModule(module.package, changes)
    other.set_weights(module.all_weights())
    return other


# ---- Files ------------------------------------------------------------------------------------


def test_manifest_is_a_valid_model_package(facts: Facts) -> None:
    """The manifest is a ModelPackage of the contract with units of its own, and breaks none of its rules."""
    package = json_format.Parse((facts.path / "manifest.json").read_text(), package_pb2.ModelPackage())

    protovalidate.validate(package)
    assert package.name == facts.path.name
    assert package.work_source.kind == package_pb2.WorkSource.EXPERIENCE
    assert package.work_source.inputs == "none"
    assert package.work_source.evaluation_units == 100
    assert not package.data_formats
    assert package.metrics[0].name == "return"
    assert package.metrics[0].direction == package_pb2.MetricSpec.MAXIMIZE


def test_declared_files_are_the_files(facts: Facts) -> None:
    """Sizes and digests of the manifest are those of the module and the auxiliary weights."""
    declared = [manifest(facts.path)["module"], *manifest(facts.path).get("auxiliaryWeights", [])]
    for entry in declared:
        data = (facts.path / entry["fileName"]).read_bytes()

        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())


# ---- ABI --------------------------------------------------------------------------------------


def test_module_imports_nothing(facts: Facts, module: ExperienceModule) -> None:
    """The module imports nothing and exports ABI 1 for experience; auxiliary weights where there are some."""
    names = "abi alloc free configure weights initialize load begin step metrics predict error experience"
    expected = {"memory"} | {f"covey_{name}" for name in [*names.split(), "load_experience"]}
    if "auxiliaryWeights" in manifest(facts.path):
        expected.add("covey_load_auxiliary")

    assert not module.module.imports
    assert {each.name for each in module.module.exports} == expected
    assert module.call("abi") == 1


def test_initial_weights_are_a_function_of_the_seed(module: ExperienceModule) -> None:
    """Round-0 weights repeat for a seed, differ between seeds; biases are 0; play begins close to uniform."""
    one = module.all_weights()
    module.check("initialize", 2)
    two = module.all_weights()
    module.check("initialize", 1)
    at = 0

    np.testing.assert_array_equal(module.all_weights(), one)
    assert one.size == weight_count(module.package)
    for entry in manifest(module.package)["parameters"]:
        size = int(np.prod(entry["shape"]))
        part, other = one[at : at + size], two[at : at + size]
        at += size
        if entry["name"].endswith("bias"):
            assert not part.any()
        else:
            assert (part != other).mean() > 0.99
            scale = 0.01 * 3**0.5 if entry["name"] == "actor.output.weight" else 3**0.5
            inputs = entry["shape"][0] if "hidden" in entry["name"] else entry["shape"][1]
            assert (
                abs(part).max()
                <= scale * (2 if "hidden" in entry["name"] else 1) ** 0.5 / inputs**0.5 * 1.0001
            )


def test_configuration_bounds_are_the_manifests(module: ExperienceModule) -> None:
    """Each hyperparameter is taken at the manifest's least and greatest value and refused beyond, by name."""
    for entry in manifest(module.package)["hyperparameters"]:
        name, whole = entry["name"], entry["name"] in ("batchSize", "localEpochs")
        module.setting(**{name: entry["min"]})
        module.setting(**{name: entry["max"]})
        wrong = [entry["min"] - 1, entry["max"] + 1]
        if not whole:
            wrong += [float("nan"), float("inf"), -float("inf"), np.nextafter(entry["max"], np.inf)]
        for value in wrong:
            with pytest.raises(ModuleError, match=name) as caught:
                module.setting(**{name: value})
            assert caught.value.status == BAD_ARGUMENT
    assert module.call("begin", PLAY, 0, 1) == BAD_STATE


def test_wrong_configurations_are_refused(module: ExperienceModule) -> None:
    """Another version, a wrong number of hyperparameters and a cut buffer are errors that say so."""
    own = len(manifest(module.package)["hyperparameters"]) - len(OWN_FIELDS)
    with pytest.raises(ModuleError, match="version 2"):
        module.configure([0.9] * own, version=2)
    with pytest.raises(ModuleError, match=f"expected {own}"):
        module.configure([0.9] * (own + 1))
    with pytest.raises(ModuleError, match="at least 32 bytes"):
        module.give("configure", bytes(31))


@pytest.mark.parametrize(
    ("phase", "first", "units", "status", "words"),
    [
        (TRAIN, 0, 1, UNSUPPORTED, "phase 1"),
        (5, 0, 1, UNSUPPORTED, "phase 5"),
        (PLAY, -1, 1, BAD_ARGUMENT, "begin at 0"),
        (PLAY, 0, -1, BAD_ARGUMENT, "begin at 0"),
        (PLAY, 2**63 - 1, 1, BAD_ARGUMENT, "begin at 0"),
        (UPDATE, 0, 1, BAD_STATE, "covey_load_experience comes first"),
    ],
)
def test_work_that_cannot_begin(
    module: ExperienceModule, phase: int, first: int, units: int, status: int, words: str
) -> None:
    """What can't be begun is refused in words, and nothing is then in progress."""
    with pytest.raises(ModuleError, match=words) as caught:
        module.check("begin", phase, first, units)

    assert caught.value.status == status
    assert module.call("step") == BAD_STATE


def test_calls_out_of_order_are_refused(facts: Facts) -> None:
    """Play before configuration, experience before play or during it, chunks at any time: errors in words."""
    bare = WasmModule(facts.path / "model.wasm", 256)
    span = bare.put(bytes(8))
    assert bare.call("begin", PLAY, 0, 1) == BAD_STATE
    assert bare.call("experience", span) == BAD_STATE
    assert bare.call("load", span, 8) == UNSUPPORTED
    module = ExperienceModule(facts.path)
    module.check("initialize", 1)
    module.check("begin", PLAY, 0, 1000)
    module.check("step")

    with pytest.raises(ModuleError, match="before a PLAY has finished"):
        module.record()


def test_update_takes_the_units_of_its_record_alone(module: ExperienceModule) -> None:
    """UPDATE must be begun on the first unit and the number of units that the loaded experience has."""
    assert module.load_experience(module.play(40, 3)) == 3
    for first, units in ((0, 3), (41, 3), (40, 2), (40, 4), (40, 0)):
        with pytest.raises(ModuleError, match="other units than the 3"):
            module.check("begin", UPDATE, first, units)
    module.check("begin", UPDATE, 40, 3)


# ---- Units and seeds ----------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [1, 2, 4])
def test_a_split_range_is_the_same_range(module: ExperienceModule, ranges: int) -> None:
    """12 units played in 1, 2 or 4 ranges, by several instances: the same record, the same new weights."""
    base, whole = module.all_weights(), module.play(100, 12)
    metrics = module.update(whole, 100)
    learnt = module.all_weights()
    module.set_weights(base)
    size = 12 // ranges
    parts = [fresh(module).play(100 + k * size, size) for k in reversed(range(ranges))]
    joined = b"".join(reversed(parts))
    again = fresh(module)

    assert joined == whole
    assert again.update(joined, 100) == metrics
    assert again.all_weights().tobytes() == learnt.tobytes() != base.tobytes()


def test_units_are_numbered_in_the_record(facts: Facts, module: ExperienceModule) -> None:
    """Unit n is the same episode wherever its range begins; other units and seeds are other episodes."""
    episodes = decode(module.play(2**40, 4), facts.stored, facts.observe)
    later = decode(module.play(2**40 + 2, 2), facts.stored, facts.observe)
    other = decode(fresh(module, seed=2).play(2**40, 1), facts.stored, facts.observe)

    assert [episode.unit for episode in episodes] == [2**40 + n for n in range(4)]
    for here, there in zip(episodes[2:], later, strict=True):
        assert here.stored == there.stored
        assert here.actions.tobytes() == there.actions.tobytes()
    assert len({episode.stored[-1] for episode in [*episodes, *other]}) == 5


def test_update_is_repeatable_and_seeded(module: ExperienceModule) -> None:
    """The same record gives the same weights twice in one instance; another seed shuffles otherwise."""
    base, record = module.all_weights(), module.play(0, 6)
    learnt = []
    for seed in (1, 1, 2):
        module.setting(seed=seed)
        module.set_weights(base)
        module.update(record, 0)
        learnt.append(module.all_weights().tobytes())

    assert learnt[0] == learnt[1] != learnt[2]


def test_metrics_come_from_the_record(facts: Facts, module: ExperienceModule) -> None:
    """After UPDATE, return and length are those of the episodes played; so they are after PLAY."""
    record = module.play(0, 9)
    played = module.named_metrics()
    episodes = decode(record, facts.stored, facts.observe)
    found = module.update(record, 0)

    for metrics in (played, found):
        assert metrics["return"] == pytest.approx(np.mean([e.rewards.sum() for e in episodes]), rel=1e-6)
        assert metrics["length"] == np.mean([len(e.actions) for e in episodes])
    assert played["policyLoss"] is None
    assert found["policyLoss"] is not None


def test_no_units_are_no_work(module: ExperienceModule) -> None:
    """A range of no units has an empty record, teaches nothing and measures nothing."""
    base = module.all_weights()
    record = module.play(5, 0)
    metrics = module.update(record, 5)

    assert record == b""
    assert set(metrics.values()) == {None}
    np.testing.assert_array_equal(module.all_weights(), base)


def test_evaluation_plays_fixed_units(module: ExperienceModule) -> None:
    """Evaluation doesn't depend on the seed or the split, records nothing and changes no weights."""
    base, metrics = module.all_weights(), module.evaluate(20)
    sums = np.zeros(2 * len(module.names))
    for first, units in ((0, 7), (7, 13)):
        other = fresh(module, seed=99)
        other.evaluate(units, first)
        sums += other.view(other.call("metrics"), 2 * len(module.names), "<f8")

    assert metrics["return"] == pytest.approx(sums[0] / sums[1], rel=1e-12)
    assert sums[1] == 20
    assert metrics["entropy"] is None
    assert module.call("experience", module.put(bytes(8))) == BAD_STATE
    np.testing.assert_array_equal(module.all_weights(), base)


def left(module: ExperienceModule) -> Iterator[int]:
    """What each step says is left, to the end."""
    while units := module.check("step"):
        yield units


def test_units_left_fall_to_nothing(module: ExperienceModule) -> None:
    """Units left never rise, begin at most at units x epochs, and are 0 at the end alone."""
    module.setting(localEpochs=3)
    module.check("begin", PLAY, 0, 40)
    played = [40, *left(module)]
    record = module.record()
    module.load_experience(record)
    module.check("begin", UPDATE, 0, 40)
    updated = [120, *left(module)]

    assert len(updated) > 2
    for found in (played, updated):
        assert found == sorted(found, reverse=True)
    assert module.check("step") == 0


def test_memory_does_not_grow(module: ExperienceModule) -> None:
    """From the eighth assignment to the fortieth, an instance takes no more memory."""
    memory: Any = module.memory
    base, pages = module.all_weights(), []
    for turn in range(40):
        units = 1 + turn % 3
        module.set_weights(base)
        module.update(module.play(0, units), 0)
        if turn in (8, 39):
            pages.append(memory.size(module.store))

    assert pages[0] == pages[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_weights_that_are_no_numbers_are_an_error(module: ExperienceModule, value: float) -> None:
    """Outputs that aren't finite end play, evaluation and learning with a sentence, never with a result."""
    record = module.play(0, 2)
    module.set_weights(np.full(module.count, value, np.float32))
    for phase in (PLAY, EVALUATE):
        with pytest.raises(ModuleError, match="aren't finite") as caught:
            module.run(phase, 0, 2)
        assert caught.value.status == DIVERGED
    with pytest.raises(ModuleError, match="finite") as caught:
        module.update(record, 0)
    assert caught.value.status == DIVERGED


def test_memory_limit_is_an_error_in_words(facts: Facts) -> None:
    """Where the host's limit ends, PLAY or loading fails with NO_MEMORY instead of a trap."""
    module = ExperienceModule(facts.path, pages=32)
    module.check("initialize", 1)
    with pytest.raises(ModuleError, match="memory") as caught:
        module.play(0, 4000)

    assert caught.value.status == NO_MEMORY


def test_predictions_are_probabilities(facts: Facts, module: ExperienceModule) -> None:
    """A prediction has a probability for each label; an input of another size, or none of it, is refused."""
    stored = decode(module.play(0, 1), facts.stored, facts.observe)[0].stored[0]
    labels = manifest(facts.path)["inference"]["labels"]
    found = np.frombuffer(module.predict(stored, 4 * len(labels)), "<f4")

    np.testing.assert_allclose(found.sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(found, 1 / len(labels), atol=0.05)
    for wrong in (stored[:-1], stored + b"\0", b"\xff" * len(stored)):
        with pytest.raises(ModuleError):
            module.predict(wrong, 4 * len(labels))
    with pytest.raises(ModuleError, match="probabilities need"):
        module.predict(stored, 4 * len(labels) - 1)


def test_tensors_are_those_of_both_networks(facts: Facts) -> None:
    """The manifest names each tensor of both networks once, in the order of models/include/covey_policy.h."""
    names = [entry["name"] for entry in json.loads((facts.path / "manifest.json").read_text())["parameters"]]
    layers = [f"{part}.{kind}" for part in ("hidden1", "hidden2") for kind in ("weight", "bias")]
    hidden = [f"{net}.{layer}" for net in ("actor", "critic") for layer in layers]

    assert names == [
        *hidden,
        "actor.output.weight",
        "critic.output.weight",
        "actor.output.bias",
        "critic.output.bias",
    ]

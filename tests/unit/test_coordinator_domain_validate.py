"""What can be a job, and everything that is wrong with what can't."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey_coordinator.convert.spec import settings_from_proto, settings_to_proto
from covey_coordinator.domain.aggregation import Strategy
from covey_coordinator.domain.plan import sequence_seed
from covey_coordinator.domain.spec import (
    Chunk,
    FileSpec,
    HyperparameterSpec,
    JobSpec,
    NamedFileSpec,
    Origin,
    PackageSpec,
    ParameterSpec,
    SettingsRequest,
    UploadedFile,
)
from covey_coordinator.domain.validate import MAX_WEIGHTS, validate_job
from covey_kit.errors import InvalidArgument, Reason

MODULE = FileSpec("model.wasm", 8, "a" * 64)
PACKAGE = PackageSpec(
    name="small",
    version="1",
    description="",
    unit="example",
    experience=False,
    inputs="dataset",
    module=MODULE,
    parameters=(ParameterSpec("w", (2, 3)), ParameterSpec("b", ())),
    data_formats=("small-v1",),
    training=True,
    evaluation=False,
    inference=False,
    describes_inference=False,
    min_units=None,
    max_units=None,
    metrics=("loss",),
    hyperparameters=(
        HyperparameterSpec("batchSize", 4, 1, 8),
        HyperparameterSpec("learningRate", 0.1, 0.0, 1.0),
        HyperparameterSpec("momentum", 0.5, 0.0, 0.9),
    ),
    gpu=False,
    shader_archive=None,
    validation=None,
    auxiliary_weights=(),
    auxiliary_files=(),
    validation_examples=None,
    manifest=b"",
)
CHUNK = Chunk("c0", "c0.bin", 7, "b" * 64, "small-v1", 5)
FILES = (UploadedFile("model.wasm", 8, "a" * 64), UploadedFile("c0.bin", 7, "b" * 64))


def check(
    package: PackageSpec = PACKAGE,
    chunks: tuple[Chunk, ...] = (CHUNK,),
    files: tuple[UploadedFile, ...] = FILES,
    **settings: Any,
) -> JobSpec:
    """Validates a job that is right but for what a test changes."""
    return validate_job(package, chunks, SettingsRequest(**settings), files)


def violations(**changes: Any) -> dict[str, str]:
    """What is wrong with a changed job, by field."""
    with pytest.raises(InvalidArgument) as caught:
        check(**changes)
    return {violation.field: violation.description for violation in caught.value.violations}


def test_a_right_job_is_right() -> None:
    """The counts that everything else depends on come out of the manifest."""
    spec = check()

    assert spec.package.weight_count == 7
    assert spec.settings.batch_size == 4
    assert spec.settings.hyperparameters == (("momentum", 0.5),)
    assert (spec.settings.epochs, spec.settings.target_round) == (1, None)
    assert spec.settings.aggregation.strategy is Strategy.FED_AVG


def test_a_file_that_differs_is_named_with_both_sides() -> None:
    """Name, size and digest: what was declared, and what was found."""
    found = violations(files=(UploadedFile("module.wasm", 8, "a" * 64), UploadedFile("c0.bin", 9, "c" * 64)))

    assert found["package.module"] == (
        "declared 'model.wasm', found no such file (files: c0.bin, module.wasm)"
    )
    assert found["dataset.chunks[0].bytes"] == "'c0.bin': declared 7 bytes, found 9"
    assert found["dataset.chunks[0].sha256"] == f"'c0.bin': declared {'b' * 64}, found {'c' * 64}"


def test_the_reason_is_that_of_the_first_group() -> None:
    """Package before data before settings; all violations are there whatever the reason."""
    for changes, reason in (
        ({"files": FILES[:1]}, Reason.DATASET_MISMATCH),
        ({"batch_size": 9}, Reason.SETTINGS_MISMATCH),
        ({"files": (), "batch_size": 9}, Reason.PACKAGE_MISMATCH),
    ):
        with pytest.raises(InvalidArgument) as caught:
            check(**changes)
        assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"training": False}, "package.capabilities.training"),
        ({"inputs": "none"}, "package.work_source.inputs"),
        ({"min_units": 3, "max_units": 2}, "package.work_source.min_units"),
        ({"parameters": (ParameterSpec("w", (MAX_WEIGHTS, 2)),)}, "package.parameters"),
        ({"parameters": (ParameterSpec("w", (2,)), ParameterSpec("w", (2,)))}, "package.parameters"),
        ({"inference": True}, "package.inference"),
        ({"describes_inference": True}, "package.inference"),
        ({"validation": MODULE}, "package"),
        ({"validation": MODULE}, "package.capabilities.evaluation"),
        (
            {"auxiliary_weights": (NamedFileSpec("base", MODULE), NamedFileSpec("base", MODULE))},
            "package.auxiliary_weights",
        ),
        (
            {"hyperparameters": (HyperparameterSpec("batchSize", 0.5, 0, 8),)},
            "package.hyperparameters[0].default",
        ),
        (
            {"hyperparameters": (HyperparameterSpec("learningRate", 0, 0, 8),)},
            "package.hyperparameters[0].default",
        ),
    ],
)
def test_manifests_that_contradict_themselves(changes: Any, field: str) -> None:
    """A manifest can be right field by field and wrong as a whole."""
    assert field in violations(package=replace(PACKAGE, **changes))


def test_chunks_must_fit_the_package() -> None:
    """Chunks in unknown formats, with too few or too many examples, and no chunks at all."""
    bounded = replace(PACKAGE, min_units=6, max_units=9)
    assert "6 to 9 units" in violations(package=bounded)["dataset.chunks[0].example_count"]
    bounded = replace(PACKAGE, min_units=6)
    assert "at least 6 units" in violations(package=bounded)["dataset.chunks[0].example_count"]
    other = replace(CHUNK, format="other")
    assert "reads small-v1" in violations(chunks=(other,))["dataset.chunks[0].format"]
    assert "at least one chunk" in violations(chunks=())["dataset.chunks"]
    assert (
        "'c0' is there more than once"
        in violations(chunks=(CHUNK, replace(CHUNK, file_name="x")))["dataset.chunks"]
    )
    assert (
        "'c0.bin' is there more than once"
        in violations(chunks=(CHUNK, replace(CHUNK, id="x")))["dataset.chunks"]
    )


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"batch_size": 9}, "settings.batch_size"),
        ({"learning_rate": 1.5}, "settings.learning_rate"),
        ({"hyperparameters": (("momentum", 1.0),)}, "settings.hyperparameters['momentum']"),
        ({"hyperparameters": (("batchSize", 1.0),)}, "settings.hyperparameters['batchSize']"),
        ({"validation_interval": 1}, "settings.validation_interval"),
        ({"silence_timeout": 20.0, "assignment_timeout": 10.0}, "settings.silence_timeout"),
        ({"experience": True}, "settings.experience"),
        ({"momentum": 0.5}, "settings.aggregation.momentum"),
        ({"strategy": "FED_ADAM", "momentum": 0.5}, "settings.aggregation.momentum"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], field: str) -> None:
    """Bounds of the package, settings of other strategies, and settings that contradict each other."""
    assert set(violations(**settings)) == {field}


def test_too_many_rounds() -> None:
    """Passes times rounds has a bound."""
    chunks = tuple(replace(CHUNK, id=f"c{n}", file_name=f"c{n}.bin") for n in range(20))
    assert "settings.epochs" in violations(chunks=chunks, epochs=1_000_000, assignments_per_round=1)


def test_many_chunks_take_little_time() -> None:
    """The contract's 100,000 chunks are checked in a moment: nothing is quadratic."""
    chunks = tuple(replace(CHUNK, id=f"c{n}", file_name=f"c{n}.bin") for n in range(100_000))
    files = (FILES[0], *(UploadedFile(c.file_name, c.size, c.sha256) for c in chunks))

    assert len(check(chunks=chunks, files=files).chunks) == 100_000


def test_a_short_deadline_shortens_the_silence() -> None:
    """A short assignment_timeout alone is no contradiction."""
    settings = check(assignment_timeout=5.0).settings

    assert (settings.silence_timeout, settings.assignment_timeout) == (5.0, 5.0)


def test_a_target_decides_over_epochs() -> None:
    """With a target round there are no passes wanted."""
    settings = check(target_round=7, epochs=3).settings

    assert (settings.target_round, settings.epochs) == (7, None)


PLAYER = replace(
    PACKAGE, unit="game", experience=True, inputs="none", data_formats=(), evaluation=True, evaluation_units=5
)


def test_an_experience_job_needs_no_data() -> None:
    """It has no chunks; its rounds are its epochs; its sequence is seeded from the job's seed."""
    spec = check(package=PLAYER, chunks=(), epochs=3, seed=4)

    assert spec.settings.units_per_assignment == 32
    assert spec.origin == Origin(sequence_seed=sequence_seed(4, 0))
    assert spec.package.can_validate


@pytest.mark.parametrize(
    ("package", "settings", "field", "words"),
    [
        ({"max_units": 0}, {}, "package.work_source.max_units", "at least 1"),
        ({"min_units": 9, "max_units": 8}, {}, "package.work_source.min_units", "which is 8"),
        ({"min_units": 2**31}, {}, "package.work_source.min_units", "at most 2147483647"),
        ({"evaluation": False}, {}, "package.capabilities.evaluation", "evaluation_units is 5"),
        (
            {"min_units": 3},
            {"experience": True, "units_per_assignment": 2},
            "settings.experience.units_per_assignment",
            "expected 3 to 2147483647",
        ),
        (
            {},
            {"units_per_assignment": 2**31 - 1, "target_round": 10**7, "assignments_per_round": 10**4},
            "settings.experience.units_per_assignment",
            "expected at most 9223372036854775807",
        ),
    ],
)
def test_what_cannot_be_an_experience_job(
    package: dict[str, Any], settings: dict[str, Any], field: str, words: str
) -> None:
    """Each rule names its field and its bounds."""
    found = violations(package=replace(PLAYER, **package), chunks=(), **settings)

    assert words in found[field]


@given(
    epochs=st.none() | st.integers(1, 100),
    target=st.none() | st.integers(1, 100),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    rate=st.none() | st.floats(1e-9, 1.0),
    momentum=st.floats(0, 0.9),
    strategy=st.sampled_from([None, *(s.value for s in Strategy)]),
    interval=st.just(None),
    silence=st.none() | st.integers(1, 600).map(float),
)
def test_settings_survive_the_contract(
    epochs: int | None,
    target: int | None,
    seed: int | None,
    rate: float | None,
    momentum: float,
    strategy: str | None,
    interval: None,
    silence: float | None,
) -> None:
    """Settings in force come back from their message as they were."""
    settings = check(
        epochs=epochs,
        target_round=target,
        seed=seed,
        learning_rate=rate,
        hyperparameters=(("momentum", momentum),),
        strategy=strategy,
        validation_interval=interval,
        silence_timeout=silence,
    ).settings

    assert settings_from_proto(settings_to_proto(settings)) == settings

"""Job settings from files and from the command line."""

from pathlib import Path

import pytest

from covey.settings import parse_settings, read_settings
from covey.v1 import job_pb2
from covey_kit.errors import InvalidArgument, Reason


def violations(value: dict[str, object], *assignments: str) -> dict[str, str]:
    """Parses settings that must be refused and returns what was wrong, by path."""
    with pytest.raises(InvalidArgument) as refused:
        parse_settings(value, assignments)

    assert refused.value.reason is Reason.SETTINGS_MISMATCH
    return {violation.field: violation.description for violation in refused.value.violations}


def test_json_and_toml_files_say_the_same(tmp_path: Path) -> None:
    """Both have the contract's names, and enums may go without their prefix."""
    (tmp_path / "s.json").write_text(
        '{"epochs": 3, "silenceTimeout": "20s", "aggregation": {"strategy": "FED_ADAM"},'
        ' "hyperparameters": {"momentum": 0.5}}'
    )
    (tmp_path / "s.toml").write_text(
        'epochs = 3\nsilenceTimeout = "20s"\n[aggregation]\nstrategy = "fed_adam"\n'
        "[hyperparameters]\nmomentum = 0.5\n"
    )

    from_json = parse_settings(read_settings(tmp_path / "s.json"))
    from_toml = parse_settings(read_settings(tmp_path / "s.toml"))

    assert from_json == from_toml
    assert from_json.aggregation.strategy == job_pb2.AGGREGATION_STRATEGY_FED_ADAM
    assert from_json.silence_timeout.seconds == 20


def test_rounds_is_read_as_epochs() -> None:
    """The legacy name still works, and both names together are refused."""
    assert parse_settings({"rounds": 4}).epochs == 4
    assert "legacy name" in violations({"rounds": 4, "epochs": 5})["rounds"]


def test_assignments_change_one_setting_each() -> None:
    """A dotted path reaches into parts, values are JSON or text, and the last one wins."""
    settings = parse_settings(
        {"epochs": 1, "seed": 7},
        [
            "epochs=2",
            "epochs=3",
            "aggregation.strategy=fed_avg_m",
            "aggregation.momentum=0.8",
            "hyperparameters.shift=2",
            "assignmentTimeout=60s",
        ],
    )

    assert settings.epochs == 3
    assert settings.seed == 7
    assert settings.aggregation.momentum == 0.8
    assert settings.hyperparameters == {"shift": 2.0}
    assert settings.assignment_timeout.seconds == 60


def test_absent_settings_stay_absent() -> None:
    """What nobody set isn't sent, so that the coordinator's defaults hold."""
    assert parse_settings({}) == job_pb2.JobSettings()
    assert not parse_settings({}, ["seed=0"]).HasField("epochs")
    assert parse_settings({}, ["seed=0"]).HasField("seed")


def test_all_violations_are_told_at_once() -> None:
    """Unknown names, wrong types and malformed assignments come together."""
    found = violations({"epoch": 1, "seed": "x"}, "nonsense", "aggregation.momentum=high")

    assert set(found) == {"epoch", "seed", "nonsense", "aggregation.momentum"}
    assert "did you mean 'epochs'?" in found["epoch"]


def test_bounds_of_the_contract_hold() -> None:
    """What the server would refuse is refused here, with the same rules."""
    found = violations({"epochs": 0, "learningRate": -1, "aggregation": {"beta1": 1.5}})

    assert set(found) == {"epochs", "learningRate", "aggregation.beta1"}


def test_an_assignment_into_a_value_is_refused() -> None:
    """`epochs.x=1` has no place to go."""
    assert violations({"epochs": 1}, "epochs.x=1") == {"epochs.x=1": "epochs is a value, it has no parts"}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("s.toml", "epochs = ", "isn't valid TOML"),
        ("s.json", "{", "isn't valid JSON"),
        ("s.json", "[]", "expected an object"),
    ],
)
def test_a_file_that_cant_be_parsed_is_told_in_words(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    """The format is named."""
    (tmp_path / name).write_text(text)

    with pytest.raises(InvalidArgument) as refused:
        read_settings(tmp_path / name)

    assert words in refused.value.violations[0].description


def test_a_missing_file_is_told_in_words(tmp_path: Path) -> None:
    """With its path."""
    with pytest.raises(InvalidArgument, match=r"none\.json"):
        read_settings(tmp_path / "none.json")

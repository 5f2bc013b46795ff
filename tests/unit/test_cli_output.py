"""How commands speak: exit codes, errors, JSON, help."""

import inspect
import json
from pathlib import Path

import pytest
import typer

from covey.cli import _errors
from covey.cli._main import app, run
from covey.cli._output import Out, plain
from covey.v1 import common_pb2, job_pb2, package_pb2
from covey.words import duration, mean_text, metric_text, size, stage_word
from covey_kit.errors import DataLoss, InvalidArgument, Reason, Violation
from support.small_package import save, write_package


def commands() -> list[list[str]]:
    """Returns every command as its words."""
    found: list[list[str]] = [[]]

    def walk(group: typer.Typer, words: list[str]) -> None:
        for command in group.registered_commands:
            assert command.callback is not None
            found.append([*words, command.name or command.callback.__name__])
        for inner in group.registered_groups:
            assert inner.typer_instance is not None
            name = inner.typer_instance.info.name
            assert isinstance(name, str)
            found.append([*words, name])
            walk(inner.typer_instance, [*words, name])

    walk(app, [])
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_has_help_and_every_leaf_an_example(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Help is on stdout, exits with 0, and shows how the command is called."""
    code = run([*words, "--help"])

    told = capsys.readouterr()
    assert (code, told.err) == (0, "")
    assert f"Usage: covey {' '.join(words)}".rstrip() in told.out
    assert "..." not in told.out.split("Commands:", 1)[-1] or "Commands:" not in told.out, (
        "they fit their line"
    )
    if "COMMAND" not in told.out:
        assert f"covey {' '.join(words)}" in told.out.split("Example", 1)[1].replace("\n ", "")


def test_every_leaf_command_takes_json() -> None:
    """Scripts can rely on it everywhere but in `join`, which has nothing to return."""
    for words in commands():
        group = app
        if len(words) == 2:
            group = next(
                g.typer_instance
                for g in app.registered_groups
                if g.typer_instance is not None and g.typer_instance.info.name == words[0]
            )
        for command in group.registered_commands:
            callback = command.callback
            if words and callback is not None and command.name == words[-1] and words != ["join"]:
                assert "as_json" in inspect.signature(callback).parameters, words


def test_wrong_usage_is_2_and_says_where_help_is(capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, nothing on stdout."""
    for arguments in (["job", "create"], ["nope"], ["job", "show", "a", "b"], ["invite", "j", "--what"]):
        assert run(arguments) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("error: ")
        assert "--help" in told.err


def test_with_json_errors_are_one_object_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stdout stays empty; code, reason and every violation are there."""
    manifest = write_package(tmp_path)
    manifest["module"]["sha256"] = "0" * 64
    manifest["validation"]["bytes"] = 3
    save(tmp_path, manifest)

    code = run(["package", "check", str(tmp_path), "--json"])

    told = capsys.readouterr()
    error = json.loads(told.err)["error"]
    assert (code, told.out) == (1, "")
    assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "PACKAGE_MISMATCH")
    assert [v["field"] for v in error["violations"]] == ["module.sha256", "validation.bytes"]


def test_violations_are_listed_under_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Each on a line with its path; what the sentence tells of them isn't told twice."""
    error = InvalidArgument(
        Reason.INVALID_FIELD,
        "three things are wrong: a: told here; b.c: told below",
        violations=[Violation("a", "told here"), Violation("b.c", "told below"), Violation("", "no path")],
    )

    assert _errors.report(error, as_json=False) == 1

    assert capsys.readouterr().err == (
        "error: three things are wrong\n  a: told here\n  b.c: told below\n  no path\n"
    )


def test_unexpected_errors_are_one_line_unless_details_are_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """COVEY_DEBUG=1 shows the traceback."""
    monkeypatch.delenv("COVEY_DEBUG", raising=False)
    _errors.report(KeyError("x"), as_json=False)
    brief = capsys.readouterr().err
    monkeypatch.setenv("COVEY_DEBUG", "1")
    _errors.report(KeyError("x"), as_json=False)

    assert brief == "error: unexpected KeyError: 'x'; run with COVEY_DEBUG=1 for details\n"
    assert "KeyError: 'x'" in capsys.readouterr().err.splitlines()[0]


def test_the_first_of_several_concurrent_errors_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Groups are an accident of how the work was done."""
    group = ExceptionGroup("both", [DataLoss(Reason.BLOB_CORRUPT, "damaged"), KeyError("x")])

    assert _errors.report(group, as_json=False) == 1

    assert capsys.readouterr().err == "error: damaged\n"


def test_messages_become_json_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """proto3's JSON makes 64-bit integers strings; programs get numbers, in maps and lists too."""
    job = job_pb2.Job(job_id="j", settings=job_pb2.JobSettings(seed=-5))
    job.progress.units_done = 1 << 40
    job.current_round.assignments.add(units=7)
    requirements = package_pb2.GpuRequirements(limits={"max-buffer-size": 1 << 33})

    value = plain(job)
    Out(as_json=True).value(value)

    assert value["progress"] == {"unitsDone": 1 << 40}
    assert value["settings"] == {"seed": -5}
    assert value["currentRound"]["assignments"] == [{"units": 7}]
    assert plain(requirements) == {"limits": {"max-buffer-size": 1 << 33}}
    assert json.loads(capsys.readouterr().out) == value


def test_what_isnt_known_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    """Absent, over a count of zero, unspecified: never 0 and never NaN."""
    absent = common_pb2.MetricValue(name="loss", count=3)
    empty = common_pb2.MetricValue(name="loss", sum=0, count=0)

    assert mean_text([absent], "loss") == mean_text([empty], "loss") == mean_text([], "loss") == "—"
    assert metric_text([]) is None
    assert (size(None), duration(None), stage_word(common_pb2.STAGE_UNSPECIFIED)) == ("—", "—", "—")
    Out(as_json=False).facts([("a", None), ("longer", 0)])
    Out(as_json=False).table(("X", "#Y"), [(None, 0)])
    Out(as_json=False).table(("X",), [], empty="nothing here")

    told = capsys.readouterr().out
    assert told.startswith("a       —\nlonger  0\n")
    assert "—" in told.split("longer", 1)[1]
    assert told.endswith("nothing here\n")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_have_binary_units(value: int, text: str) -> None:
    """With one decimal."""
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.04, "0.0 s"), (59.9, "59.9 s"), (125, "2 m 05 s"), (3725, "1 h 02 m")]
)
def test_durations_grow_coarser(value: float, text: str) -> None:
    """Seconds, minutes, hours."""
    assert duration(value) == text

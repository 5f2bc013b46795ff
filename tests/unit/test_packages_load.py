"""Packages on disk: everything that differs from the manifest is said at once, with its path."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey.packages import load
from covey_kit.errors import InvalidArgument, Reason
from support.small_package import declare, save, write_package

ZEROS = "0" * 64


def violations(folder: Path) -> dict[str, str]:
    """Loads a package that must be refused and returns what was wrong, by path."""
    with pytest.raises(InvalidArgument) as refused:
        load(folder)

    assert refused.value.reason is Reason.PACKAGE_MISMATCH
    found = {violation.field: violation.description for violation in refused.value.violations}
    assert len(found) == len(refused.value.violations)
    return found


def test_a_valid_package_is_loaded_with_its_weight_count_and_files(tmp_path: Path) -> None:
    """The weight count sums the shapes' products, a scalar counting one; all declared files are listed."""
    write_package(tmp_path)

    package = load(tmp_path)

    assert package.weight_count == 7
    assert [item.path for item in package.files()] == ["module", "validation", "auxiliaryWeights[0]"]
    assert package.validation_path == tmp_path / "validation.bin"


def test_every_kind_of_mismatch_is_reported_at_once(tmp_path: Path) -> None:
    """A missing file, a wrong size and a wrong digest in different files all come in one error."""
    manifest = write_package(tmp_path)
    manifest["module"]["sha256"] = ZEROS
    manifest["validation"]["bytes"] = 3
    manifest["auxiliaryWeights"][0]["fileName"] = "lost.bin"
    save(tmp_path, manifest)

    found = violations(tmp_path)

    assert set(found) == {"module.sha256", "validation.bytes", "auxiliaryWeights[0].fileName"}
    assert ZEROS in found["module.sha256"]
    assert declare(tmp_path / "model.wasm")["sha256"] in found["module.sha256"]
    assert found["validation.bytes"] == "validation.bin: declared 3 bytes, found 8"
    assert "lost.bin" in found["auxiliaryWeights[0].fileName"]


def test_a_changed_file_differs_in_size_and_digest(tmp_path: Path) -> None:
    """Both facts are told, since either alone would mislead."""
    write_package(tmp_path)
    (tmp_path / "extra.bin").write_bytes(b"other")

    found = violations(tmp_path)

    assert set(found) == {"auxiliaryWeights[0].bytes", "auxiliaryWeights[0].sha256"}


def test_unknown_keys_are_refused_wherever_they_stand_and_all_are_named(tmp_path: Path) -> None:
    """A key that the contract doesn't know is an error with its path, and a likely spelling is offered."""
    manifest = write_package(tmp_path)
    manifest["modul"] = {}
    manifest["module"]["size"] = 8
    manifest["parameters"][1]["dtype"] = "F32"
    save(tmp_path, manifest)

    found = violations(tmp_path)

    assert set(found) == {"modul", "module.size", "parameters[1].dtype"}
    assert "did you mean 'module'?" in found["modul"]


def test_a_key_in_snake_case_is_refused_with_its_spelling(tmp_path: Path) -> None:
    """Manifests are written in lowerCamelCase alone."""
    write_package(tmp_path, format_version=1)

    found = violations(tmp_path)

    assert found == {"format_version": "unknown key; it is written 'formatVersion'"}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"formatVersion": "one"}, "formatVersion", 'expected an integer from 0 to 4294967295, found "one"'),
        ({"formatVersion": -1}, "formatVersion", "expected an integer from 0 to 4294967295, found -1"),
        ({"name": 7}, "name", "expected a string, found 7"),
        ({"module": "model.wasm"}, "module", 'expected an object, found "model.wasm"'),
        ({"parameters": {}}, "parameters", "expected an array, found an object"),
        ({"dataFormats": [1]}, "dataFormats[0]", "expected a string, found 1"),
        (
            {"capabilities": {"training": "yes"}},
            "capabilities.training",
            'expected true or false, found "yes"',
        ),
        (
            {"workSource": {"kind": "DATA", "inputs": "dataset", "unit": "example"}},
            "workSource.kind",
            'expected one of DATASET, EXPERIENCE, found "DATA"',
        ),
        ({"limits": {"stepSeconds": "long"}}, "limits.stepSeconds", 'expected a number, found "long"'),
        (
            {"backends": [{"kind": "CPU_WASM"}, {"kind": "GPU_WGPU", "requires": {"limits": {"x": "many"}}}]},
            'backends[1].requires.limits["x"]',
            'expected an integer from 0 to 2^64 - 1, found "many"',
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_what_was_expected(
    tmp_path: Path, changes: dict[str, Any], path: str, words: str
) -> None:
    """Each type of the contract has its words."""
    write_package(tmp_path, **changes)

    assert violations(tmp_path) == {path: words}


def test_bounds_of_the_contract_are_told_with_json_names(tmp_path: Path) -> None:
    """Broken rules carry the path as the manifest spells it, map keys and list places included."""
    manifest = write_package(tmp_path, formatVersion=2)
    manifest["parameters"][0]["shape"] = [0]
    manifest["workSource"]["inputs"] = "both"
    manifest["hyperparameters"][0]["default"] = 9.0
    save(tmp_path, manifest)

    found = violations(tmp_path)

    assert {"formatVersion", "parameters[0].shape[0]", "workSource.inputs", "hyperparameters[0]"} <= set(
        found
    )
    assert found["formatVersion"] == "must equal 1"


def test_bounds_and_files_are_reported_together(tmp_path: Path) -> None:
    """A manifest that can be read is compared with the files even when it breaks a rule."""
    manifest = write_package(tmp_path, version="")
    manifest["module"]["bytes"] = 1
    save(tmp_path, manifest)

    assert set(violations(tmp_path)) == {"version", "module.bytes"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "isn't valid JSON"),
        (b"\xff\xfe\xfd", "isn't valid JSON"),
        (b"[]", "expected an object, found an array"),
        (b"null", "expected an object, found null"),
        (b'{"formatVersion": NaN}', "NaN isn't a JSON number"),
        (b"[" * 200_000, "nested too deeply"),
    ],
)
def test_a_manifest_that_is_no_object_is_refused(tmp_path: Path, text: bytes, words: str) -> None:
    """Whatever the file holds, the answer is a sentence and not a traceback."""
    (tmp_path / "manifest.json").write_bytes(text)

    found = violations(tmp_path)

    assert set(found) == {""}
    assert words in found[""]


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """Which of the two counts would depend on the reader."""
    manifest = write_package(tmp_path)
    text = json.dumps(manifest)
    (tmp_path / "manifest.json").write_text(text[:-1] + ', "version": "2.0.0"}', "utf-8")

    assert violations(tmp_path)["version"] == "the key 'version' stands twice in one object"


def test_a_folder_without_manifest_and_no_folder_at_all_are_told_apart(tmp_path: Path) -> None:
    """Both say what a package is made of."""
    assert "can't be read: No such file" in violations(tmp_path)[""]
    assert "isn't a folder" in violations(tmp_path / "nothing")[""]


def test_a_file_name_that_leads_out_of_the_folder_is_never_opened(tmp_path: Path) -> None:
    """A separator in a name is a broken rule, and the file isn't looked for."""
    (tmp_path / "secret").write_bytes(b"secret")
    folder = tmp_path / "package"
    manifest = write_package(folder)
    manifest["module"]["fileName"] = "../secret"
    save(folder, manifest)

    found = violations(folder)

    assert set(found) == {"module.fileName"}
    assert "secret" not in found["module.fileName"]


def test_names_are_unique_within_their_list(tmp_path: Path) -> None:
    """Parameters, metrics and hyperparameters are known by their names."""
    manifest = write_package(tmp_path)
    for key in ("parameters", "metrics", "hyperparameters"):
        manifest[key].append(manifest[key][0])
    save(tmp_path, manifest)

    found = violations(tmp_path)

    assert {"parameters[2].name", "metrics[1].name", "hyperparameters[1].name"} <= set(found)


def test_one_name_for_two_fields_is_refused(tmp_path: Path) -> None:
    """Files are uploaded by name: a name stands for one field."""
    manifest = write_package(tmp_path)
    manifest["auxiliaryWeights"][0] |= {"fileName": "validation.bin"}
    save(tmp_path, manifest)

    found = [v.description for v in _refused(tmp_path)]

    assert any("'validation.bin' is declared 2 times" in text for text in found)


def _refused(folder: Path) -> Any:
    with pytest.raises(InvalidArgument) as refused:
        load(folder)
    return refused.value.violations

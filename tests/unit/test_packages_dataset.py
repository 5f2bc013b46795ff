"""Dataset manifests: found, compared, fitted to the package, and written."""

import json
from pathlib import Path

import pytest

from covey.packages import describe_dataset, load, load_dataset
from covey.packages._package import Package
from covey_kit.errors import InvalidArgument, Reason
from support.small_package import write_dataset, write_package


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """A package that reads `small-v1`."""
    write_package(tmp_path / "package")
    return load(tmp_path / "package")


def violations(manifest: Path, package: Package | None = None, files: Path | None = None) -> dict[str, str]:
    """Loads a dataset that must be refused and returns what was wrong, by path."""
    with pytest.raises(InvalidArgument) as refused:
        load_dataset(manifest, package, files)

    assert refused.value.reason is Reason.DATASET_MISMATCH
    return {violation.field: violation.description for violation in refused.value.violations}


def test_files_are_found_in_a_folder_beside_the_manifest(tmp_path: Path, package: Package) -> None:
    """`dataset.json` with `train/*.bin` needs no further words."""
    write_dataset(tmp_path)

    dataset = load_dataset(tmp_path / "dataset.json", package)

    assert dataset.example_count == 10
    assert dataset.paths["chunk-1.bin"] == tmp_path / "train" / "chunk-1.bin"


def test_every_kind_of_mismatch_is_reported_at_once(tmp_path: Path, package: Package) -> None:
    """Missing, shorter, changed, and of a format that the package doesn't read: one error tells all."""
    rows = write_dataset(tmp_path, 4)
    (tmp_path / "train" / "chunk-0.bin").unlink()
    rows[1]["bytes"] = 99
    rows[2]["sha256"] = "0" * 64
    rows[3]["format"] = "other-v1"
    (tmp_path / "dataset.json").write_text(json.dumps(rows))

    found = violations(tmp_path / "dataset.json", package)

    assert set(found) == {"[0].fileName", "[1].bytes", "[2].sha256", "[3].format"}
    assert found["[3].format"] == "'other-v1'; the package reads small-v1"


def test_ids_and_names_are_unique(tmp_path: Path) -> None:
    """Each repetition is told at its own place, with the place of the first."""
    rows = write_dataset(tmp_path)
    (tmp_path / "dataset.json").write_text(json.dumps([*rows, rows[0]]))

    found = violations(tmp_path / "dataset.json")

    assert found == {
        "[2].id": "'chunk-0' is the same as [0].id; names are unique",
        "[2].fileName": "'chunk-0.bin' is the same as [0].fileName; names are unique",
    }


def test_unknown_keys_and_types_are_told_with_the_chunks_place(tmp_path: Path) -> None:
    """A chunk's fields are as strict as a package's."""
    rows = write_dataset(tmp_path)
    rows[0]["examples"] = 5
    rows[1]["exampleCount"] = "five"
    (tmp_path / "dataset.json").write_text(json.dumps(rows))

    found = violations(tmp_path / "dataset.json")

    assert set(found) == {"[0].examples", "[1].exampleCount"}


def test_a_file_in_two_folders_needs_a_choice(tmp_path: Path) -> None:
    """Which one is meant isn't guessed; --files says it."""
    write_dataset(tmp_path)
    other = tmp_path / "copy"
    other.mkdir()
    (other / "chunk-0.bin").write_bytes((tmp_path / "train" / "chunk-0.bin").read_bytes())

    found = violations(tmp_path / "dataset.json")

    assert set(found) == {"[0].fileName"}
    assert "lies in 2 folders" in found["[0].fileName"]
    assert load_dataset(tmp_path / "dataset.json", files=tmp_path / "train").example_count == 10


@pytest.mark.parametrize("text", ["{}", "7", "null"])
def test_a_manifest_is_an_array(tmp_path: Path, text: str) -> None:
    """Anything else is refused in words."""
    (tmp_path / "dataset.json").write_text(text)

    assert violations(tmp_path / "dataset.json") == {"": "dataset.json: expected an array of chunks"}


def test_a_dataset_package_needs_chunks(tmp_path: Path, package: Package) -> None:
    """An empty list isn't a dataset to train on."""
    (tmp_path / "dataset.json").write_text("[]")

    found = violations(tmp_path / "dataset.json", package)

    assert found == {"": "the package trains on a dataset, and this one has no chunks"}


def test_a_package_that_reads_no_data_takes_no_chunks(tmp_path: Path) -> None:
    """Experience packages with inputs "none" refuse a dataset."""
    source = {"kind": "EXPERIENCE", "inputs": "none", "unit": "episode"}
    write_package(tmp_path / "package", workSource=source, dataFormats=[])
    write_dataset(tmp_path)

    found = violations(tmp_path / "dataset.json", load(tmp_path / "package"))

    assert list(found) == [""]
    assert "reads no data" in found[""]


def test_a_manifest_is_described_from_files_and_loads_again(tmp_path: Path, package: Package) -> None:
    """What `covey data manifest` writes is what `covey job create` reads."""
    write_dataset(tmp_path)
    files = sorted((tmp_path / "train").iterdir())

    rows = describe_dataset(files, "small-v1", lambda path: 5 if path.name == "chunk-0.bin" else 6)
    (tmp_path / "dataset.json").write_text(json.dumps(rows))

    assert load_dataset(tmp_path / "dataset.json", package).example_count == 11


def test_files_that_make_no_dataset_are_all_named(tmp_path: Path) -> None:
    """Equal names, an empty file and a missing one are told together."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.bin").write_bytes(b"x")
    (tmp_path / "empty.bin").touch()
    files = [tmp_path / "a/same.bin", tmp_path / "b/same.bin", tmp_path / "empty.bin", tmp_path / "lost.bin"]

    with pytest.raises(InvalidArgument) as refused:
        describe_dataset(files, "small-v1", lambda _path: 1)

    found = {Path(v.field).name: v.description for v in refused.value.violations}
    assert set(found) == {"same.bin", "empty.bin", "lost.bin"}

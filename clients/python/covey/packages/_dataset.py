"""Dataset manifests and the files that they list."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.packages._files import Declared, compare, plain_name
from covey.packages._package import Package
from covey.packages._rules import broken_rules, repeated
from covey.packages._strict import decode, fill
from covey.v1 import dataset_pb2
from covey_kit.bulk import digest_file
from covey_kit.errors import InvalidArgument, Reason, Violation

__all__ = ["Dataset", "describe_dataset", "load_dataset"]


@dataclass(frozen=True)
class Dataset:
    """A dataset whose files are what its manifest declares.

    Attributes:
        manifest: the parsed manifest.
        paths: where each chunk's file lies, by file name.
    """

    manifest: dataset_pb2.DatasetManifest
    paths: Mapping[str, Path]

    @property
    def example_count(self) -> int:
        """Examples in all chunks."""
        return sum(chunk.example_count for chunk in self.manifest.chunks)

    def files(self) -> list[Declared]:
        """Every chunk's file, in the manifest's order."""
        return [
            Declared(f"[{index}]", chunk.file_name, chunk.bytes, chunk.sha256)
            for index, chunk in enumerate(self.manifest.chunks)
        ]


def load_dataset(path: Path | str, package: Package | None = None, files: Path | None = None) -> Dataset:
    """Loads a dataset manifest and compares every file with it.

    Files are looked for in `files`, or else beside the manifest and in the folders beside it
    (`dataset.json` with `train/*.bin`). Reads and hashes every file: from a coroutine, call it in a thread.

    Raises:
        InvalidArgument: DATASET_MISMATCH with every violation, each with its path in the manifest,
            what was declared and what was found.
    """
    path = Path(path)
    manifest, violations = _read(path)
    folders = [files] if files is not None else _folders(path.parent)
    found = {
        name: [folder / name for folder in folders if (folder / name).is_file()]
        for name in (chunk.file_name for chunk in manifest.chunks)
        if plain_name(name)  # what isn't one was refused already, and is never looked for
    }
    looked_in = " or ".join(str(folder) for folder in folders[:4]) + (" or …" if len(folders) > 4 else "")
    for index, chunk in enumerate(manifest.chunks):
        if chunk.file_name not in found:
            continue
        places = found[chunk.file_name]
        if len(places) > 1:
            where = ", ".join(map(str, places))
            text = f"{chunk.file_name!r} lies in {len(places)} folders: {where}; name one with --files"
            violations.append(Violation(f"[{index}].fileName", text))
            continue
        item = Declared(f"[{index}]", chunk.file_name, chunk.bytes, chunk.sha256)
        violations += compare(item, places[0] if places else None, looked_in)
    if package is not None and (manifest.chunks or not violations):  # else it couldn't be read
        violations += _fit(manifest, package)
    if violations:
        raise InvalidArgument(Reason.DATASET_MISMATCH, f"{path} isn't a valid dataset", violations=violations)
    return Dataset(manifest, {name: places[0] for name, places in found.items()})


def _folders(root: Path) -> list[Path]:
    beside = sorted(child for child in root.iterdir() if child.is_dir()) if root.is_dir() else []
    return [root, *beside]


def _read(path: Path) -> tuple[dataset_pb2.DatasetManifest, list[Violation]]:
    manifest = dataset_pb2.DatasetManifest()
    try:
        text = path.read_bytes()
    except OSError as error:
        return manifest, [Violation("", f"{path} can't be read: {error.strerror}")]
    value, violations = decode(text, path.name)
    if violations:
        return manifest, violations
    if not isinstance(value, list):
        return manifest, [Violation("", f"{path.name}: expected an array of chunks")]
    for index, item in enumerate(value):
        violations += fill(manifest.chunks.add(), item, f"[{index}]", what="a chunk")
    if not violations:
        violations = [
            Violation(v.field.removeprefix("chunks"), v.description) for v in broken_rules(manifest)
        ]
        violations += repeated("[{}].id", [chunk.id for chunk in manifest.chunks])
        violations += repeated("[{}].fileName", [chunk.file_name for chunk in manifest.chunks])
    return manifest, violations


def _fit(manifest: dataset_pb2.DatasetManifest, package: Package) -> list[Violation]:
    """Returns what stands between a dataset and a package."""
    formats = list(package.manifest.data_formats)
    source = package.manifest.work_source
    if source.inputs == "none":
        if manifest.chunks:
            return [Violation("", 'the package reads no data (inputs "none"); leave --data out')]
        return []
    if not manifest.chunks:
        return [Violation("", "the package trains on a dataset, and this one has no chunks")]
    return [
        Violation(f"[{index}].format", f"{chunk.format!r}; the package reads {', '.join(formats)}")
        for index, chunk in enumerate(manifest.chunks)
        if chunk.format not in formats
    ]


def describe_dataset(
    files: Sequence[Path], format_id: str, count: Callable[[Path], int]
) -> list[dict[str, Any]]:
    """Returns the dataset manifest of `files` as the JSON value that `dataset.json` holds.

    Args:
        files: the chunks, in the order in which the manifest lists them.
        format_id: the format that they all have.
        count: gives the number of examples in a file, as the package's loader counts them.

    Raises:
        InvalidArgument: DATASET_MISMATCH: two files have one name, a file is empty or can't be read.
    """
    violations = []
    rows = []
    names: dict[str, Path] = {}
    for path in files:
        if path.name in names:
            text = f"{names[path.name]} and {path} have the same name; names are unique in a dataset"
            violations.append(Violation(str(path), text))
            continue
        names[path.name] = path
        try:
            size, sha256 = digest_file(path)
        except OSError as error:
            violations.append(Violation(str(path), f"can't be read: {error.strerror}"))
            continue
        if size == 0:
            violations.append(Violation(str(path), "is empty; a chunk has at least one byte"))
            continue
        rows.append(
            {
                "id": path.stem,
                "fileName": path.name,
                "bytes": size,
                "sha256": sha256,
                "format": format_id,
                "exampleCount": count(path),
            }
        )
    manifest = dataset_pb2.DatasetManifest()
    if not violations:
        for index, row in enumerate(rows):
            violations += fill(manifest.chunks.add(), row, f"[{index}]", what="a chunk")
        violations += broken_rules(manifest)
    if violations:
        raise InvalidArgument(
            Reason.DATASET_MISMATCH, "these files don't make a dataset", violations=violations
        )
    return rows

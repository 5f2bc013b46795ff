"""A model package as a folder on disk."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from covey.packages._files import Declared, compare, plain_name, repeated_names
from covey.packages._rules import broken_rules, repeated
from covey.packages._strict import decode, fill
from covey.v1 import package_pb2
from covey_kit.errors import InvalidArgument, Reason, Violation

__all__ = ["MANIFEST", "Package", "load", "read_manifest"]

MANIFEST = "manifest.json"
"""File name of every package's manifest."""


@dataclass(frozen=True)
class Package:
    """A package whose files are what its manifest declares.

    Attributes:
        folder: where it lies.
        manifest: the parsed manifest.
    """

    folder: Path
    manifest: package_pb2.ModelPackage

    @property
    def weight_count(self) -> int:
        """Number of trained weights: the sum of the products of the parameters' shapes."""
        return sum(prod(parameter.shape) for parameter in self.manifest.parameters)

    @property
    def module_path(self) -> Path:
        """The WebAssembly module."""
        return self.folder / self.manifest.module.file_name

    @property
    def validation_path(self) -> Path | None:
        """The held-out file; None when the package has none."""
        if not self.manifest.HasField("validation"):
            return None
        return self.folder / self.manifest.validation.file_name

    def files(self) -> list[Declared]:
        """Every file that the manifest declares, in its order."""
        return list(_declared(self.manifest))

    def path_of(self, file_name: str) -> Path:
        """Where a declared file lies."""
        return self.folder / file_name


def _declared(manifest: package_pb2.ModelPackage) -> Iterator[Declared]:
    single = (
        ("module", manifest.module, True),
        ("shaderArchive", manifest.shader_archive, manifest.HasField("shader_archive")),
        ("validation", manifest.validation, manifest.HasField("validation")),
    )
    for path, file, present in single:
        if present:
            yield Declared(path, file.file_name, file.bytes, file.sha256)
    several = (
        ("auxiliaryWeights", manifest.auxiliary_weights),
        ("auxiliaryFiles", manifest.auxiliary_files),
    )
    for path, files in several:
        for index, named in enumerate(files):
            yield Declared(f"{path}[{index}]", named.file_name, named.bytes, named.sha256)


def read_manifest(folder: Path) -> tuple[package_pb2.ModelPackage, list[Violation]]:
    """Returns the manifest in `folder` and everything that is wrong with it as a text and as a message.

    The message is empty when the text can't be read as one.
    """
    manifest = package_pb2.ModelPackage()
    path = folder / MANIFEST
    if not folder.is_dir():
        return manifest, [Violation("", f"{folder} isn't a folder; a package is a folder with {MANIFEST}")]
    try:
        text = path.read_bytes()
    except OSError as error:
        return manifest, [Violation("", f"{path} can't be read: {error.strerror}")]
    value, violations = decode(text, MANIFEST)
    if value is None:
        return manifest, violations or [Violation("", f"{MANIFEST}: expected an object, found null")]
    violations += fill(manifest, value)
    if violations and not manifest.ByteSize():
        return manifest, violations
    named = {violation.field for violation in violations}  # what couldn't be read isn't judged as well
    return manifest, violations + [
        broken
        for broken in broken_rules(manifest) + _repeated_names(manifest)
        if not (named and not broken.field) and not any(_touch(broken.field, field) for field in named)
    ]


def _touch(one: str, other: str) -> bool:
    """Says whether one of two paths is the other or lies within it."""
    return (
        one == other or one.startswith((f"{other}.", f"{other}[")) or other.startswith((f"{one}.", f"{one}["))
    )


def _repeated_names(manifest: package_pb2.ModelPackage) -> list[Violation]:
    lists = {
        "parameters[{}].name": [one.name for one in manifest.parameters],
        "metrics[{}].name": [one.name for one in manifest.metrics],
        "hyperparameters[{}].name": [one.name for one in manifest.hyperparameters],
        "auxiliaryWeights[{}].name": [one.name for one in manifest.auxiliary_weights],
        "auxiliaryFiles[{}].name": [one.name for one in manifest.auxiliary_files],
    }
    return [violation for path, names in lists.items() for violation in repeated(path, names)]


def file_violations(folder: Path, manifest: package_pb2.ModelPackage) -> list[Violation]:
    """Returns how the files in `folder` differ from the manifest. Reads and hashes each of them."""
    declared = list(_declared(manifest))
    violations = list(repeated_names(declared))
    for item in declared:
        if plain_name(item.file_name):
            violations += compare(item, folder / item.file_name, str(folder))
    return violations


def load(folder: Path | str) -> Package:
    """Loads a package: its manifest, and its files compared with it. The module isn't run.

    Reads and hashes every file: from a coroutine, call it in a thread.

    Raises:
        InvalidArgument: PACKAGE_MISMATCH with every violation, each with its path in the manifest,
            what was declared and what was found.
    """
    folder = Path(folder)
    manifest, violations = read_manifest(folder)
    if manifest.ByteSize():  # what can be read is compared, so that everything is said at once
        violations = violations + file_violations(folder, manifest)
    if violations:
        raise InvalidArgument(
            Reason.PACKAGE_MISMATCH, f"{folder} isn't a valid package", violations=violations
        )
    return Package(folder, manifest)

"""What a package's module says and does, run here in a sandboxed worker process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from covey.packages._package import Package, file_violations, read_manifest
from covey_kit.errors import InvalidArgument, Reason, Unimplemented, Violation

if TYPE_CHECKING:  # NumPy takes a quarter of the time in which a command starts
    import numpy as np
    import numpy.typing as npt

    from covey_participant.runtime.local import LocalRunner

__all__ = ["PackageReport", "check_package", "count_examples", "run_inference"]

NEEDS = "running a module needs the participant's runtime; install covey[participant]"


@dataclass(frozen=True)
class PackageReport:
    """What `check_package` found.

    Attributes:
        package: the package; None when it has violations.
        violations: everything that is wrong, each with its path in the manifest.
        module_checked: whether the module was loaded and asked.
        validation_examples: examples in the held-out file, as the loader counts them; None: no such file, or
            the module wasn't asked.
    """

    package: Package | None
    violations: list[Violation] = field(default_factory=list)
    module_checked: bool = False
    validation_examples: int | None = None


def check_package(folder: Path | str) -> PackageReport:
    """Checks a package: manifest, files, and the module itself.

    The module must load, export what its capabilities need, speak ABI 1, and have room for the weights that
    the manifest declares and make them finite (how many it means, it can't say); its loader must take the
    held-out file, and the shader archive must hold a plan. They are asked only when the files are what the
    manifest declares, and not at all where the participant's runtime isn't installed.

    Blocks: call it in a thread from a coroutine.
    """
    folder = Path(folder)
    manifest, violations = read_manifest(folder)
    if manifest.ByteSize():
        violations = violations + file_violations(folder, manifest)
    if violations:
        return PackageReport(None, violations)
    package = Package(folder, manifest)
    try:
        runner = _runner()
    except Unimplemented:
        return PackageReport(package)
    with runner:
        violations = [
            Violation("module", problem) for problem in runner.check_module(manifest, package.module_path)
        ]
        examples, more = _validation(runner, package) if not violations else (None, [])
    violations += more + _shader_archive(package)
    if violations:
        return PackageReport(None, violations, module_checked=True)
    return PackageReport(package, module_checked=True, validation_examples=examples)


def _validation(runner: "LocalRunner", package: Package) -> tuple[int | None, list[Violation]]:
    """Returns the held-out file's examples, and what is wrong with it."""
    manifest, path = package.manifest, package.validation_path
    if path is None:
        return None, []
    try:
        (found,) = runner.count_examples(manifest, package.module_path, [path])
    except InvalidArgument as error:
        return None, [Violation("validation", error.message)]
    if manifest.HasField("validation_example_count") and manifest.validation_example_count != found:
        text = f"declared {manifest.validation_example_count:,}, the module's loader counts {found:,}"
        return None, [Violation("validationExampleCount", text)]
    return found, []


def _shader_archive(package: Package) -> list[Violation]:
    """Returns what is wrong with the shader archive by itself; `covey probe` says what a GPU makes of it."""
    if not package.manifest.HasField("shader_archive"):
        return []
    from covey_participant.runtime.gpu.archive import read_archive

    try:
        read_archive(package.path_of(package.manifest.shader_archive.file_name).read_bytes())
    except InvalidArgument as error:
        return [
            Violation("shaderArchive", f"{one.field}: {one.description}" if one.field else one.description)
            for one in error.violations
        ] or [Violation("shaderArchive", error.message)]
    return []


def count_examples(package: Package, files: Sequence[Path]) -> dict[Path, int]:
    """Returns the number of examples in each file, as the package's own loader counts them.

    Blocks: call it in a thread from a coroutine.

    Raises:
        InvalidArgument: the module refuses a file, in its own words.
        Unimplemented: the participant's runtime isn't installed.
    """
    with _runner() as runner:
        counts = runner.count_examples(package.manifest, package.module_path, files)
    return dict(zip(files, counts, strict=True))


def run_inference(package: Package, weights: "npt.NDArray[np.float32]", data: bytes, capacity: int) -> bytes:
    """Runs one inference with these weights and returns the bytes of the output tensors.

    Blocks: call it in a thread from a coroutine.

    Args:
        package: the package.
        weights: flat f32, in manifest order.
        data: the input tensors' bytes, one after the other.
        capacity: most bytes of output.

    Raises:
        InvalidArgument: the module refuses the input, in its own words.
        Unimplemented: the participant's runtime isn't installed.
    """
    with _runner() as runner:
        return runner.predict(package.manifest, package.module_path, weights, data, capacity)


def _runner() -> "LocalRunner":
    try:
        from covey_participant.runtime.local import LocalRunner
    except ModuleNotFoundError as error:
        raise Unimplemented(Reason.NOT_IMPLEMENTED, f"{NEEDS} ({error.name} is missing)") from error
    return LocalRunner()

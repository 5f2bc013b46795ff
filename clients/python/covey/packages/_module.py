"""What a package's module says and does, run here in a sandboxed worker process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from covey.packages._package import Package, file_violations, read_manifest
from covey_kit.errors import Reason, Unimplemented, Violation

__all__ = ["PackageReport", "check_package", "count_examples", "run_inference"]

NEEDS = "the module can't be run here: install covey[participant]"


@dataclass(frozen=True)
class PackageReport:
    """What `check_package` found.

    Attributes:
        package: the package; None when it has violations.
        violations: everything that is wrong, each with its path in the manifest.
        module_checked: whether the module was loaded and asked.
        note: why not, in words; empty when it was.
    """

    package: Package | None
    violations: list[Violation] = field(default_factory=list)
    module_checked: bool = False
    note: str = ""


def check_package(folder: Path | str) -> PackageReport:
    """Checks a package: manifest, files, and the module itself (it loads, exports what it must, speaks ABI 1,
    makes as many finite weights as the manifest declares).

    Blocks: call it in a thread from a coroutine.
    """
    folder = Path(folder)
    manifest, violations = read_manifest(folder)
    if manifest.ByteSize():
        violations = violations + file_violations(folder, manifest)
    if violations:
        return PackageReport(None, violations)
    package = Package(folder, manifest)
    return PackageReport(package)


def count_examples(package: Package, files: Sequence[Path]) -> dict[Path, int]:
    """Returns the number of examples in each file, as the package's own loader counts them."""
    raise Unimplemented(Reason.NOT_IMPLEMENTED, NEEDS)


def run_inference(package: Package, weights: npt.NDArray[np.float32], data: bytes, capacity: int) -> bytes:
    """Runs one inference with these weights and returns the bytes of the output tensors."""
    raise Unimplemented(Reason.NOT_IMPLEMENTED, NEEDS)

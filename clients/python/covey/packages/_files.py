"""Declared files against files found."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from covey.packages._strict import join
from covey_kit.bulk import digest_file
from covey_kit.errors import Violation

__all__ = ["Declared", "compare", "plain_name", "repeated_names"]


@dataclass(frozen=True)
class Declared:
    """A file as a manifest declares it.

    Attributes:
        path: path of the declaration in the manifest, such as `module` or `chunks[3]`.
        file_name: its name, without separators.
        size: its size in bytes.
        sha256: its SHA-256, 64 lower-case hex digits.
    """

    path: str
    file_name: str
    size: int
    sha256: str


def plain_name(name: str) -> bool:
    """Says whether `name` names a file in a folder, and nothing outside it."""
    return bool(name) and not set(name) & {"/", "\\", "\0"} and name not in {".", ".."}


def compare(declared: Declared, found: Path | None, looked_in: str) -> Iterator[Violation]:
    """Yields how the file differs from its declaration: name, size, digest."""
    name = declared.file_name
    if found is None or not found.is_file():
        yield Violation(
            join(declared.path, "fileName"), f"declared {name!r}; there is no such file in {looked_in}"
        )
        return
    try:
        size, sha256 = digest_file(found)
    except OSError as error:
        yield Violation(join(declared.path, "fileName"), f"{name!r} can't be read: {error.strerror}")
        return
    if size != declared.size:
        yield Violation(
            join(declared.path, "bytes"), f"{name}: declared {declared.size:,} bytes, found {size:,}"
        )
    if sha256 != declared.sha256:
        yield Violation(join(declared.path, "sha256"), f"{name}: declared {declared.sha256}, found {sha256}")


def repeated_names(declared: Iterable[Declared]) -> Iterator[Violation]:
    """Yields file names that are declared more than once."""
    for name, times in Counter(item.file_name for item in declared).items():
        if times > 1:
            yield Violation("", f"the file name {name!r} is declared {times} times; each file stands once")

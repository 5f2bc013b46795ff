"""Versions that peers tell each other."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["CONTRACT_VERSION", "compatible", "program_version"]

CONTRACT_VERSION = "1.0"
"""Version of the contract in `protos/`. Same major number: compatible."""


def _read() -> str:
    try:
        return version("covey")
    except PackageNotFoundError:
        return "0"


_PROGRAM_VERSION = _read()  # reads files: at import, not while calls are handled


def program_version() -> str:
    """Returns the version of the installed `covey` distribution, or `0` when it isn't installed."""
    return _PROGRAM_VERSION


def compatible(other: str) -> bool:
    """Says whether a peer that speaks contract version `other` (`major.minor`) can be talked to."""
    return other.partition(".")[0] == CONTRACT_VERSION.partition(".")[0]

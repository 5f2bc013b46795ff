"""Versions that peers tell each other."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["CONTRACT_VERSION", "compatible", "program_version"]

CONTRACT_VERSION = "1.0"
"""Version of the contract in `protos/`. Same major number: compatible."""


def program_version() -> str:
    """Returns the version of the installed `covey` distribution, or `0` when it isn't installed."""
    try:
        return version("covey")
    except PackageNotFoundError:
        return "0"


def compatible(other: str) -> bool:
    """Says whether a peer that speaks contract version `other` (`major.minor`) can be talked to."""
    return other.partition(".")[0] == CONTRACT_VERSION.partition(".")[0]

"""What follows from an attempt that failed: another try, or the end of the job."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from covey_coordinator.domain.model import Assignment

__all__ = ["MAX_ATTEMPTS", "PACKAGE_FAULTS", "Verdict", "backoff", "judge"]

PACKAGE_FAULTS = 3
"""A package that fails on so many different participants is at fault."""

MAX_ATTEMPTS = 10
"""Attempts of one assignment that may fail for whatever cause."""


@dataclass(frozen=True)
class Verdict:
    """Whether the work is given up, and why or why not, for people."""

    give_up: bool
    reason: str


def backoff(failures: int, *, first: float = 0.5, most: float = 30.0) -> float:
    """Returns the seconds to wait after the n-th failure in a row: doubling, bounded."""
    return min(most, first * 2.0 ** min(max(failures, 1) - 1, 16))


def judge(assignment: Assignment, siblings: Sequence[Assignment], present: Iterable[str]) -> Verdict:
    """Decides about an assignment whose last attempt failed.

    Args:
        assignment: with the failure among its faults.
        siblings: all assignments of its round (itself included); a validation's is alone.
        present: participants that could do it: accepted and connected.

    Faults of the package count on assignments that nobody has done since: where another participant
    brought a result, the device was at fault after all.
    """
    blamed = {
        fault.participant_id
        for sibling in siblings
        if sibling.result is None
        for fault in sibling.faults
        if fault.package
    }
    if len(blamed) >= PACKAGE_FAULTS:
        return Verdict(give_up=True, reason=f"the package failed on {len(blamed)} different participants")
    here = [fault for fault in assignment.faults if fault.package]
    blamed_here = {fault.participant_id for fault in here}
    untried = [participant for participant in present if participant not in blamed_here]
    if len(here) >= PACKAGE_FAULTS and not untried:
        return Verdict(
            give_up=True,
            reason=f"the package failed {len(here)} times on the only participants there are",
        )
    if len(assignment.faults) >= MAX_ATTEMPTS:
        return Verdict(give_up=True, reason=f"{len(assignment.faults)} attempts of {assignment.id} failed")
    return Verdict(give_up=False, reason=f"attempt {len(assignment.faults)} of at most {MAX_ATTEMPTS} failed")

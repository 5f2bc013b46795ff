"""Why an assignment failed here."""

from covey_kit.errors import Reason
from covey_participant.domain.backend import Fallback

MOST_BYTES = 4096
"""Bound of `Failure.message` in the contract."""

DEVICE_REASONS = frozenset({Reason.DEVICE, Reason.NOT_IMPLEMENTED, Reason.STORAGE_UNAVAILABLE})
"""Reasons that say nothing about the package: another device may do better."""


def bounded(message: str, most_bytes: int = MOST_BYTES) -> str:
    """Returns the message cut to so many bytes of UTF-8, with an ellipsis where something was cut."""
    raw = message.encode("utf-8", "replace")
    if len(raw) <= most_bytes:
        return raw.decode("utf-8")
    return raw[: most_bytes - 3].decode("utf-8", "ignore") + "…"


class WorkFailure(Exception):
    """An assignment that can't be finished here, with a stable reason.

    Attributes:
        reason: stable name of the cause.
        message: what was expected, what was found, where; at most 4,096 bytes.
        package_fault: whether the package is at fault, as far as the device can tell.
    """

    def __init__(self, reason: Reason, message: str, *, package_fault: bool | None = None) -> None:
        self.reason = reason
        self.message = bounded(message)
        self.package_fault = reason not in DEVICE_REASONS if package_fault is None else package_fault
        super().__init__(self.message)


class BackendFailure(WorkFailure):
    """Work that failed because of the backend it ran on: the CPU may still do it.

    Attributes:
        fallback: why: `DEVICE_ERROR`, or `LIMITS` or `BUDGET` where that showed only with the plan at hand.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        package_fault: bool | None = None,
        fallback: Fallback = Fallback.DEVICE_ERROR,
    ) -> None:
        super().__init__(reason, message, package_fault=package_fault)
        self.fallback = fallback


class Cancelled(Exception):
    """The work was stopped because it is no longer wanted."""

"""How long an assignment stays with its participant."""

from dataclasses import dataclass
from enum import StrEnum

from covey_coordinator.domain.model import Lease
from covey_coordinator.domain.spec import Settings

__all__ = ["LeaseEnd", "Presence", "Why", "lease_end"]


class Why(StrEnum):
    """What ends a lease by itself."""

    GONE = "disconnected"
    SILENT = "silent"
    DEADLINE = "out of time"


@dataclass(frozen=True)
class Presence:
    """Whether a participant is connected, and since when it isn't (monotonic time)."""

    connected: bool
    disconnected_at: float


@dataclass(frozen=True)
class LeaseEnd:
    """When a lease ends unless something happens, and for what reason."""

    at: float
    why: Why


def lease_end(lease: Lease, settings: Settings, presence: Presence, grace: float) -> LeaseEnd:
    """Returns the next end of a lease on the monotonic clock. It is lost once `now >= at`.

    Three bounds, the earliest holds: `assignment_timeout` since the handout, whatever is said;
    `silence_timeout` since the last word; and, once its command stream has ended, `grace` seconds
    since then (or since its last word, if that came later): a participant that only lost its
    connection is back within a second or two, one that was killed isn't, and its work mustn't wait
    for the silence timeout.
    """
    ends = [
        LeaseEnd(lease.started + settings.assignment_timeout, Why.DEADLINE),
        LeaseEnd(lease.heard + settings.silence_timeout, Why.SILENT),
    ]
    if not presence.connected:
        ends.append(LeaseEnd(max(presence.disconnected_at, lease.heard) + grace, Why.GONE))
    return min(ends, key=lambda end: end.at)

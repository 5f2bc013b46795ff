"""Which snapshot of each participant is the newest, and whether it is still current."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Generic, TypeVar

__all__ = ["STALE_AFTER_SECONDS", "Execution", "Executions", "Order", "Staleness"]

STALE_AFTER_SECONDS = 10.0
"""Silence after which a snapshot no longer counts as current, by the server's own clock."""

T = TypeVar("T")


class Staleness(StrEnum):
    """Why a snapshot is no longer current."""

    CURRENT = "CURRENT"
    SILENT = "SILENT"
    DISCONNECTED = "DISCONNECTED"


@dataclass(frozen=True, order=True)
class Order:
    """Where a snapshot stands among those of its participant.

    Attributes:
        run_start: when the participant's program was started, seconds since 1970 by the device's clock.
        sequence: number within that run.
    """

    run_start: float
    sequence: int


@dataclass(frozen=True)
class Execution(Generic[T]):
    """The newest that is known of one participant.

    Attributes:
        participant_id: the participant.
        job_id: the job it works for; None when idle.
        snapshot: the snapshot itself; this module doesn't look into it.
        order: where it stands among the participant's snapshots.
        receive_time: when it arrived, seconds since 1970 by the server's clock.
        receive_monotonic: the same on the server's monotonic clock: what staleness is measured with, so
            that a clock that jumps on either machine makes nobody stale.
        streams: open streams of the participant.
    """

    participant_id: str
    job_id: str | None
    snapshot: T
    order: Order
    receive_time: float
    receive_monotonic: float
    streams: int

    def staleness(self, monotonic: float) -> Staleness:
        """Says whether the snapshot is still current at `monotonic`."""
        if self.streams == 0:
            return Staleness.DISCONNECTED
        if monotonic - self.receive_monotonic >= STALE_AFTER_SECONDS:
            return Staleness.SILENT
        return Staleness.CURRENT


class Executions(Generic[T]):
    """The newest snapshot of every participant. Memory is one snapshot a participant."""

    def __init__(self) -> None:
        self._by_id: dict[str, Execution[T]] = {}
        self._streams: dict[str, int] = {}

    def opened(self, participant_id: str) -> None:
        """Counts a stream of the participant."""
        self._set_streams(participant_id, self._streams.get(participant_id, 0) + 1)

    def closed(self, participant_id: str) -> None:
        """Uncounts one; after the last the participant is disconnected at once."""
        self._set_streams(participant_id, self._streams.get(participant_id, 1) - 1)

    def _set_streams(self, participant_id: str, streams: int) -> None:
        if streams > 0:
            self._streams[participant_id] = streams
        else:
            self._streams.pop(participant_id, None)
        known = self._by_id.get(participant_id)
        if known is not None:
            self._by_id[participant_id] = replace(known, streams=max(streams, 0))

    def accept(
        self,
        participant_id: str,
        snapshot: T,
        order: Order,
        *,
        job_id: str | None,
        now: float,
        monotonic: float,
    ) -> bool:
        """Takes a snapshot if it is newer than the one known; says whether it was."""
        known = self._by_id.get(participant_id)
        if known is not None and order <= known.order:
            return False
        self._by_id[participant_id] = Execution(
            participant_id=participant_id,
            job_id=job_id,
            snapshot=snapshot,
            order=order,
            receive_time=now,
            receive_monotonic=monotonic,
            streams=self._streams.get(participant_id, 0),
        )
        return True

    def all(self, job_id: str | None = None) -> list[Execution[T]]:
        """Returns all executions by participant id, or those that work for one job."""
        found = sorted(self._by_id.values(), key=lambda execution: execution.participant_id)
        return [execution for execution in found if job_id is None or execution.job_id == job_id]

    def next_change(self, monotonic: float) -> float | None:
        """Returns the seconds until the next current snapshot becomes silent; None when none will."""
        left = [
            execution.receive_monotonic + STALE_AFTER_SECONDS - monotonic
            for execution in self._by_id.values()
            if execution.staleness(monotonic) is Staleness.CURRENT
        ]
        return max(0.0, min(left)) if left else None

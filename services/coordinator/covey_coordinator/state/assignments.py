"""Assignments in the database: leases, results, failed attempts."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, bindparam, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from covey_coordinator.domain.model import Assignment, AssignmentKind, DeltaFile, Fault, Result
from covey_coordinator.domain.ports import StoredAssignment
from covey_coordinator.domain.spec import Backend
from covey_coordinator.state.jobs import failure_from_bytes, failure_to_bytes
from covey_coordinator.state.rounds import metrics_from_json, metrics_to_json
from covey_coordinator.state.tables import assignments, faults

__all__ = ["SqlAssignments"]

_NO_LEASE: dict[str, Any] = {"participant_id": None, "lease_time": None}
_NO_RESULT: dict[str, Any] = {
    "result_participant_id": None,
    "result_attempt": None,
    "units": None,
    "metrics": None,
    "backend": None,
    "compute_seconds": None,
    "delta_name": None,
    "delta_sha256": None,
    "delta_size": None,
}


def _result(row: Row[Any]) -> Result | None:
    if row.result_participant_id is None:
        return None
    delta = None
    if row.delta_name is not None:
        delta = DeltaFile(row.delta_name, row.delta_sha256, row.delta_size)
    return Result(
        participant_id=row.result_participant_id,
        attempt=row.result_attempt,
        units=row.units,
        metrics=metrics_from_json(row.metrics),
        backend=Backend(row.backend),
        compute_seconds=row.compute_seconds,
        delta=delta,
    )


def _assignment(row: Row[Any], found: Sequence[Fault]) -> StoredAssignment:
    return StoredAssignment(
        id=row.assignment_id,
        index=row.place,
        attempt=row.attempt,
        participant_id=row.participant_id,
        lease_time=row.lease_time,
        result=_result(row),
        faults=tuple(found),
    )


def _fault(row: Row[Any]) -> Fault:
    failure = failure_from_bytes(row.failure)
    assert failure is not None
    return Fault(row.participant_id, row.attempt, row.package, failure)


class SqlAssignments:
    """`AssignmentTable` in SQL."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def _change(self, assignment_id: str, values: dict[str, Any]) -> int:
        statement = update(assignments).where(assignments.c.assignment_id == assignment_id)
        return (await self._connection.execute(statement.values(values))).rowcount

    async def add(self, assignment: Assignment) -> None:
        """Adds one, or frees the one that is there and forgets its result and faults."""
        await self._connection.execute(delete(faults).where(faults.c.assignment_id == assignment.id))
        if await self._change(assignment.id, {**_NO_LEASE, **_NO_RESULT}):
            return
        row = {
            "assignment_id": assignment.id,
            "job_id": assignment.job_id,
            "round": assignment.round,
            "place": assignment.index,
            "kind": assignment.kind.value,
            "attempt": assignment.attempt,
        }
        await self._connection.execute(insert(assignments), row)

    async def of_round(self, job_id: str, round_number: int) -> list[StoredAssignment]:
        """Returns a round's assignments in order, validations left out."""
        of_round = (
            assignments.c.job_id == job_id,
            assignments.c.round == round_number,
            assignments.c.kind != AssignmentKind.EVALUATE.value,
        )
        failed: dict[str, list[Fault]] = {}
        statement = select(faults).join(assignments, assignments.c.assignment_id == faults.c.assignment_id)
        for row in await self._connection.execute(statement.where(*of_round).order_by(faults.c.attempt)):
            failed.setdefault(row.assignment_id, []).append(_fault(row))
        rows = await self._connection.execute(
            select(assignments).where(*of_round).order_by(assignments.c.place)
        )
        return [_assignment(row, failed.get(row.assignment_id, ())) for row in rows]

    async def get(self, assignment_id: str) -> StoredAssignment | None:
        """Returns one."""
        statement = select(assignments).where(assignments.c.assignment_id == assignment_id)
        row = (await self._connection.execute(statement)).one_or_none()
        if row is None:
            return None
        of_it = select(faults).where(faults.c.assignment_id == assignment_id).order_by(faults.c.attempt)
        return _assignment(row, [_fault(fault) for fault in await self._connection.execute(of_it)])

    async def lease(self, handouts: Sequence[tuple[str, int, str]], time: float) -> None:
        """Gives assignments to participants: (assignment, attempt, participant) each."""
        statement = update(assignments).where(assignments.c.assignment_id == bindparam("given"))
        values = {"attempt": bindparam("number"), "participant_id": bindparam("who"), "lease_time": time}
        rows = [{"given": given, "number": attempt, "who": who} for given, attempt, who in handouts]
        await self._connection.execute(statement.values(values), rows)

    async def free(self, assignment_ids: Sequence[str]) -> None:
        """Takes them back."""
        if assignment_ids:
            statement = update(assignments).where(assignments.c.assignment_id == bindparam("freed"))
            await self._connection.execute(
                statement.values(_NO_LEASE), [{"freed": assignment_id} for assignment_id in assignment_ids]
            )

    async def finish(self, assignment_id: str, result: Result) -> None:
        """Writes a result."""
        values = {
            **_NO_LEASE,
            "result_participant_id": result.participant_id,
            "result_attempt": result.attempt,
            "units": result.units,
            "metrics": metrics_to_json(result.metrics),
            "backend": result.backend.value,
            "compute_seconds": result.compute_seconds,
        }
        if result.delta is not None:
            values |= {
                "delta_name": result.delta.name,
                "delta_sha256": result.delta.sha256,
                "delta_size": result.delta.size,
            }
        await self._change(assignment_id, values)

    async def drop_result(self, assignment_id: str) -> None:
        """Forgets a result whose delta was lost."""
        await self._change(assignment_id, _NO_RESULT)

    async def fault(self, assignment_id: str, fault: Fault) -> None:
        """Writes an attempt that failed, and takes the assignment back."""
        row = {
            "assignment_id": assignment_id,
            "attempt": fault.attempt,
            "participant_id": fault.participant_id,
            "package": fault.package,
            "failure": failure_to_bytes(fault.failure),
        }
        await self._connection.execute(insert(faults), row)
        await self._change(assignment_id, _NO_LEASE)

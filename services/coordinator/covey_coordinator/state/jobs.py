"""Jobs in the database, and what belongs to their making and deletion."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Row, delete, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from covey.v1 import common_pb2, dataset_pb2, job_pb2
from covey_coordinator.convert.spec import (
    chunk_to_proto,
    settings_from_proto,
    settings_to_proto,
    spec_from_bytes,
)
from covey_coordinator.convert.values import (
    failure_from_proto,
    failure_to_proto,
    lineage_from_proto,
    lineage_to_proto,
)
from covey_coordinator.domain.model import FailureRecord, JobRecord, JobState
from covey_coordinator.domain.spec import JobSpec, Origin
from covey_coordinator.state.tables import (
    assignments,
    faults,
    holders,
    job_specs,
    jobs,
    requests,
    validations,
)

__all__ = ["SqlHolders", "SqlJobs", "SqlRequests", "failure_from_bytes", "failure_to_bytes"]


def failure_to_bytes(failure: FailureRecord | None) -> bytes | None:
    """Returns a failure as it is stored."""
    return failure_to_proto(failure).SerializeToString() if failure is not None else None


def failure_from_bytes(stored: bytes | None) -> FailureRecord | None:
    """Returns a stored failure."""
    return failure_from_proto(common_pb2.Failure.FromString(stored)) if stored is not None else None


def _to_row(record: JobRecord) -> dict[str, Any]:
    return {
        "job_id": record.job_id,
        "display_name": record.display_name,
        "state": record.state.value,
        "create_time": record.create_time,
        "start_time": record.start_time,
        "end_time": record.end_time,
        "paused_time": record.paused_time,
        "package_name": record.package_name,
        "package_version": record.package_version,
        "unit": record.unit,
        "settings": settings_to_proto(record.settings).SerializeToString(deterministic=True),
        "chunk_count": record.chunk_count,
        "can_validate": record.can_validate,
        "rounds_wanted": record.rounds_wanted,
        "rounds_done": record.rounds_done,
        "units_done": record.units_done,
        "failure": failure_to_bytes(record.failure),
        "last_error": failure_to_bytes(record.last_error),
        "origin": json.dumps(asdict(record.origin)),
        "lineage": lineage_to_proto(record.lineage).SerializeToString()
        if record.lineage is not None
        else None,
    }


def _from_row(row: Row[Any]) -> JobRecord:
    return JobRecord(
        job_id=row.job_id,
        display_name=row.display_name,
        state=JobState(row.state),
        create_time=row.create_time,
        package_name=row.package_name,
        package_version=row.package_version,
        unit=row.unit,
        settings=settings_from_proto(job_pb2.JobSettings.FromString(row.settings)),
        chunk_count=row.chunk_count,
        can_validate=row.can_validate,
        rounds_wanted=row.rounds_wanted,
        rounds_done=row.rounds_done,
        units_done=row.units_done,
        start_time=row.start_time,
        end_time=row.end_time,
        paused_time=row.paused_time,
        failure=failure_from_bytes(row.failure),
        last_error=failure_from_bytes(row.last_error),
        origin=Origin(**json.loads(row.origin)),
        lineage=lineage_from_proto(job_pb2.JobLineage.FromString(row.lineage))
        if row.lineage is not None
        else None,
    )


class SqlJobs:
    """`JobTable` in SQL."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def add(self, record: JobRecord, spec: JobSpec) -> None:
        """Adds a new job."""

        def dataset() -> bytes:
            chunks = [chunk_to_proto(chunk) for chunk in spec.chunks]
            return dataset_pb2.DatasetManifest(chunks=chunks).SerializeToString(deterministic=True)

        await self._connection.execute(insert(jobs), _to_row(record))
        row = {
            "job_id": record.job_id,
            "package": spec.package.manifest,
            "dataset": await asyncio.to_thread(dataset),
        }
        await self._connection.execute(insert(job_specs), row)

    async def save(self, record: JobRecord) -> None:
        """Writes a job's record."""
        statement = update(jobs).where(jobs.c.job_id == record.job_id)
        await self._connection.execute(statement.values(_to_row(record)))

    async def get(self, job_id: str) -> JobRecord | None:
        """Returns a job's record."""
        row = (await self._connection.execute(select(jobs).where(jobs.c.job_id == job_id))).one_or_none()
        return _from_row(row) if row is not None else None

    async def spec(self, job_id: str) -> JobSpec | None:
        """Returns what a job is made of."""
        statement = (
            select(job_specs.c.package, job_specs.c.dataset, jobs.c.settings, jobs.c.origin)
            .join(jobs, jobs.c.job_id == job_specs.c.job_id)
            .where(job_specs.c.job_id == job_id)
        )
        row = (await self._connection.execute(statement)).one_or_none()
        if row is None:
            return None
        settings = settings_from_proto(job_pb2.JobSettings.FromString(row.settings))
        origin = Origin(**json.loads(row.origin))
        return await asyncio.to_thread(spec_from_bytes, row.package, row.dataset, settings, origin)

    async def page(
        self, before: int | None, limit: int, states: Sequence[JobState]
    ) -> list[tuple[int, JobRecord]]:
        """Returns jobs, the newest first, each with its place."""
        statement = select(jobs).order_by(jobs.c.sequence.desc()).limit(limit)
        if before is not None:
            statement = statement.where(jobs.c.sequence < before)
        if states:
            statement = statement.where(jobs.c.state.in_([state.value for state in states]))
        rows = (await self._connection.execute(statement)).all()
        return [(row.sequence, _from_row(row)) for row in rows]

    async def alive(self) -> list[str]:
        """Returns the ids of jobs that haven't ended or have validations to do."""
        ended = [state.value for state in JobState if state.ended]
        waiting = select(validations.c.job_id)
        statement = (
            select(jobs.c.job_id)
            .where(or_(jobs.c.state.not_in(ended), jobs.c.job_id.in_(waiting)))
            .order_by(jobs.c.sequence)
        )
        return list((await self._connection.execute(statement)).scalars())

    async def delete(self, job_id: str) -> None:
        """Deletes a job with everything that belongs to it."""
        # By hand where it is much: not every database has its cascades switched on.
        of_job = select(assignments.c.assignment_id).where(assignments.c.job_id == job_id)
        await self._connection.execute(delete(faults).where(faults.c.assignment_id.in_(of_job)))
        await self._connection.execute(delete(assignments).where(assignments.c.job_id == job_id))
        await self._connection.execute(delete(jobs).where(jobs.c.job_id == job_id))


class SqlRequests:
    """`RequestTable` in SQL."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def get(self, request_id: str) -> tuple[str, str] | None:
        """Returns (fingerprint of the request, job id)."""
        statement = select(requests.c.fingerprint, requests.c.job_id).where(
            requests.c.request_id == request_id
        )
        row = (await self._connection.execute(statement)).one_or_none()
        return (row.fingerprint, row.job_id) if row is not None else None

    async def add(self, request_id: str, fingerprint: str, job_id: str) -> None:
        """Remembers an answer."""
        row = {"request_id": request_id, "fingerprint": fingerprint, "job_id": job_id}
        await self._connection.execute(insert(requests), row)


class SqlHolders:
    """`HolderTable` in SQL."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def add(self, job_id: str) -> None:
        """Remembers that the job's holder must be released."""
        await self._connection.execute(insert(holders), {"job_id": job_id})

    async def remove(self, job_id: str) -> None:
        """Forgets it."""
        await self._connection.execute(delete(holders).where(holders.c.job_id == job_id))

    async def all(self) -> list[str]:
        """Returns the jobs whose holders must be released."""
        return list((await self._connection.execute(select(holders.c.job_id))).scalars())

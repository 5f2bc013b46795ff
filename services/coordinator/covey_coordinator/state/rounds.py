"""Rounds and validations in the database."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Row, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from covey_coordinator.domain.model import CheckpointRef, Metric, OpenRound, RoundRecord
from covey_coordinator.domain.ports import StoredValidation
from covey_coordinator.state.tables import assignments, rounds, validations

__all__ = ["SqlRounds", "SqlValidations", "metrics_from_json", "metrics_to_json"]


def metrics_to_json(metrics: Iterable[Metric]) -> str:
    """Returns metrics as they are stored."""
    return json.dumps([{"name": m.name, "sum": m.sum, "count": m.count} for m in metrics], allow_nan=False)


def metrics_from_json(stored: str | None) -> tuple[Metric, ...]:
    """Returns stored metrics; none when there are none."""
    return tuple(Metric(**entry) for entry in json.loads(stored)) if stored is not None else ()


def _round(row: Row[Any]) -> RoundRecord:
    return RoundRecord(
        round=row.round,
        metrics=metrics_from_json(row.metrics),
        units=row.units,
        assignments=row.assignments,
        participant_ids=tuple(json.loads(row.participant_ids)),
        checkpoint=CheckpointRef(
            row.checkpoint_sha256,
            row.checkpoint_size,
            row.weights_offset,
            row.weights_size,
            row.weights_sha256,
        ),
        start_time=row.start_time,
        end_time=row.end_time,
        no_units=row.no_units,
        validation_metrics=metrics_from_json(row.validation_metrics),
    )


class SqlRounds:
    """`RoundTable` in SQL."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def open(self, job_id: str, opened: OpenRound) -> None:
        """Adds a round that begins, with its assignments."""
        row = {
            "job_id": job_id,
            "round": opened.round,
            "start_time": opened.start_time,
            "assignments": len(opened.assignments),
        }
        await self._connection.execute(insert(rounds), row)
        work = [
            {
                "assignment_id": a.id,
                "job_id": job_id,
                "round": a.round,
                "place": a.index,
                "kind": a.kind.value,
                "attempt": a.attempt,
            }
            for a in opened.assignments
        ]
        await self._connection.execute(insert(assignments), work)

    async def opened(self, job_id: str) -> tuple[int, float] | None:
        """Returns (number, start time) of the round that isn't finished."""
        statement = select(rounds.c.round, rounds.c.start_time).where(
            rounds.c.job_id == job_id, rounds.c.end_time.is_(None)
        )
        row = (await self._connection.execute(statement)).one_or_none()
        return (row.round, row.start_time) if row is not None else None

    async def adopt(self, job_id: str, record: RoundRecord) -> None:
        """Adds a finished round that another job trained: what the job goes on from."""
        row = {
            "job_id": job_id,
            "round": record.round,
            "start_time": record.start_time,
            "assignments": record.assignments,
            "validation_metrics": metrics_to_json(record.validation_metrics),
        }
        await self._connection.execute(insert(rounds), row)
        await self.finish(job_id, record)

    async def finish(self, job_id: str, record: RoundRecord) -> None:
        """Writes a finished round."""
        statement = update(rounds).where(rounds.c.job_id == job_id, rounds.c.round == record.round)
        await self._connection.execute(
            statement.values(
                end_time=record.end_time,
                metrics=metrics_to_json(record.metrics),
                units=record.units,
                participant_ids=json.dumps(record.participant_ids),
                no_units=record.no_units,
                checkpoint_sha256=record.checkpoint.sha256,
                checkpoint_size=record.checkpoint.size,
                weights_offset=record.checkpoint.weights_offset,
                weights_size=record.checkpoint.weights_size,
                weights_sha256=record.checkpoint.weights_sha256,
            )
        )

    async def get(self, job_id: str, round_number: int | None) -> RoundRecord | None:
        """Returns a finished round, or the latest."""
        statement = select(rounds).where(rounds.c.job_id == job_id, rounds.c.end_time.is_not(None))
        if round_number is not None:
            statement = statement.where(rounds.c.round == round_number)
        statement = statement.order_by(rounds.c.round.desc()).limit(1)
        row = (await self._connection.execute(statement)).one_or_none()
        return _round(row) if row is not None else None

    async def page(self, job_id: str, after: int, limit: int) -> list[RoundRecord]:
        """Returns finished rounds after `after`, in order."""
        statement = (
            select(rounds)
            .where(rounds.c.job_id == job_id, rounds.c.end_time.is_not(None), rounds.c.round > after)
            .order_by(rounds.c.round)
            .limit(limit)
        )
        return [_round(row) for row in await self._connection.execute(statement)]


class SqlValidations:
    """`ValidationTable` in SQL."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def pending(self, job_id: str) -> list[StoredValidation]:
        """Returns a job's validations that aren't done, by round."""
        statement = select(validations).where(validations.c.job_id == job_id).order_by(validations.c.round)
        return [
            StoredValidation(row.round, row.scheduled) for row in await self._connection.execute(statement)
        ]

    async def add(self, job_id: str, validation: StoredValidation) -> None:
        """Adds one."""
        row = {"job_id": job_id, "round": validation.round, "scheduled": validation.scheduled}
        await self._connection.execute(insert(validations), row)

    async def finish(self, job_id: str, round_number: int, metrics: Sequence[Metric]) -> None:
        """Writes the metrics to the round and forgets the validation."""
        statement = update(rounds).where(rounds.c.job_id == job_id, rounds.c.round == round_number)
        await self._connection.execute(statement.values(validation_metrics=metrics_to_json(metrics)))
        await self.drop(job_id, [round_number])

    async def drop(self, job_id: str, dropped: Sequence[int]) -> None:
        """Forgets validations."""
        if dropped:
            await self._connection.execute(
                delete(validations).where(validations.c.job_id == job_id, validations.c.round.in_(dropped))
            )

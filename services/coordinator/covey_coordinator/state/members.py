"""Participants and their invitations in the database."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Row, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from covey_coordinator.domain.model import Invitation, InvitationState, ParticipantRecord
from covey_coordinator.domain.spec import Backend
from covey_coordinator.state.tables import invitations, participants

__all__ = ["SqlInvitations", "SqlParticipants"]


class SqlParticipants:
    """`ParticipantTable` in SQL."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def all(self) -> list[ParticipantRecord]:
        """Returns all devices that ever joined."""
        rows = (await self._connection.execute(select(participants))).mappings()
        return [ParticipantRecord(**row) for row in rows]

    async def save(self, record: ParticipantRecord) -> None:
        """Writes one."""
        row = asdict(record)
        statement = update(participants).where(participants.c.participant_id == record.participant_id)
        if (await self._connection.execute(statement.values(row))).rowcount == 0:
            await self._connection.execute(insert(participants), row)


def _invitation(row: Row[Any]) -> Invitation:
    return Invitation(
        invitation_id=row.invitation_id,
        job_id=row.job_id,
        participant_id=row.participant_id,
        state=InvitationState(row.state),
        create_time=row.create_time,
        assignments_done=row.assignments_done,
        failures=row.failures,
        backend=Backend(row.backend) if row.backend is not None else None,
    )


class SqlInvitations:
    """`InvitationTable` in SQL."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def of_job(self, job_id: str) -> list[Invitation]:
        """Returns a job's invitations."""
        statement = select(invitations).where(invitations.c.job_id == job_id)
        return [_invitation(row) for row in await self._connection.execute(statement)]

    async def of_participants(self, participant_ids: Sequence[str]) -> list[Invitation]:
        """Returns the invitations of participants."""
        statement = select(invitations).where(invitations.c.participant_id.in_(participant_ids))
        return [_invitation(row) for row in await self._connection.execute(statement)]

    async def job_of(self, invitation_id: str) -> str | None:
        """Returns the job of an invitation."""
        statement = select(invitations.c.job_id).where(invitations.c.invitation_id == invitation_id)
        return (await self._connection.execute(statement)).scalar_one_or_none()

    async def save(self, invitation: Invitation) -> None:
        """Writes one."""
        row = asdict(invitation)
        row["state"] = invitation.state.value
        row["backend"] = invitation.backend.value if invitation.backend is not None else None
        statement = update(invitations).where(
            invitations.c.job_id == invitation.job_id,
            invitations.c.participant_id == invitation.participant_id,
        )
        if (await self._connection.execute(statement.values(row))).rowcount == 0:
            await self._connection.execute(insert(invitations), row)

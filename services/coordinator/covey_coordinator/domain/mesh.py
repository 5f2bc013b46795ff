"""The mesh: which devices there are, and the command stream of each."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from covey_coordinator.domain.commands import CancelCommand, DrainCommand, Session, WelcomeCommand
from covey_coordinator.domain.invitations import invitation_command
from covey_coordinator.domain.model import InvitationState, ParticipantRecord, parse_assignment_id
from covey_coordinator.domain.moves import take_back
from covey_coordinator.domain.ports import Tokens
from covey_coordinator.domain.world import Member, World
from covey_kit.errors import Aborted, PermissionDenied, Reason, ResourceExhausted, Unavailable

__all__ = ["Held", "Joining", "Mesh"]

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Held:
    """An assignment that a participant still works on or holds a result of."""

    assignment_id: str
    attempt: int


@dataclass(frozen=True)
class Joining:
    """Who joins.

    Attributes:
        credential: what it proves itself with; the first join binds the id to it.
        device: what it runs on, as its serialized message.
    """

    participant_id: str
    display_name: str
    credential: bytes
    device: bytes
    held: Sequence[Held]


class Mesh:
    """Devices that joined, and those that are here now."""

    def __init__(self, world: World, tokens: Tokens) -> None:
        self._world = world
        self._tokens = tokens
        self._stopping = False

    async def join(self, joining: Joining) -> Session:
        """Opens a participant's command stream; an older one of the same participant ends.

        Its first command is the welcome; then come its invitations, and what it needn't hold any more.

        Raises:
            PermissionDenied: CREDENTIAL_MISMATCH.
            ResourceExhausted: LIMIT_EXCEEDED, there are too many devices.
            Unavailable: SHUTTING_DOWN.
        """
        return await self._world.exclusive(lambda: self._join(joining))

    def _record(self, joining: Joining) -> ParticipantRecord:
        """Returns the device's record as it is from now on, or refuses the device."""
        digest = hashlib.sha256(joining.credential).hexdigest()
        now = self._world.clock.now()
        member = self._world.members.get(joining.participant_id)
        if member is None and len(self._world.members) >= self._world.options.max_participants:
            raise ResourceExhausted(
                Reason.LIMIT_EXCEEDED,
                f"this mesh knows {len(self._world.members)} devices, as many as it may; "
                "its operator can raise --max-participants",
            )
        if member is not None and not hmac.compare_digest(member.record.credential_sha256, digest):
            raise PermissionDenied(
                Reason.CREDENTIAL_MISMATCH,
                f"the id {joining.participant_id} belongs to a device with another credential; "
                "choose another id, or bring that device's credential",
                resource=("participant", joining.participant_id),
            )
        return ParticipantRecord(
            participant_id=joining.participant_id,
            display_name=joining.display_name or joining.participant_id,
            credential_sha256=digest,
            device=joining.device,
            join_time=member.record.join_time if member is not None else now,
            last_seen_time=now,
        )

    async def _join(self, joining: Joining) -> Session:
        if self._stopping:
            raise _shutting_down()
        record = self._record(joining)
        async with self._world.store.begin() as tx:
            await tx.participants.save(record)
        now = self._world.clock.monotonic()
        member = self._world.members.setdefault(record.participant_id, Member(record))
        member.record = record
        if member.session is not None:
            member.session.close(
                Aborted(
                    Reason.SESSION_REPLACED,
                    f"{record.participant_id} opened another command stream; this one is over",
                )
            )
        token, seconds = self._tokens.session(record.participant_id)
        session = Session(record.participant_id, expires=now + seconds)
        interval = self._world.options.progress_interval
        session.send(WelcomeCommand(token, self._world.clock.now() + seconds, interval))
        member.session = session
        if member.assignment is None:
            member.idle_since = now
        self._resend_invitations(member)
        await self._reconcile(member, joining.held)
        log.info("participant joined", participant=record.participant_id)
        self._tell_jobs(record.participant_id)
        return session

    def _resend_invitations(self, member: Member) -> None:
        for job in self._world.jobs.values():
            invitation = job.invitations.get(member.record.participant_id)
            if invitation is None or job.record.state.ended:
                continue
            if invitation.state in (InvitationState.PENDING, InvitationState.ACCEPTED):
                member.send(invitation_command(job.record, job.spec, invitation))

    async def _reconcile(self, member: Member, held: Sequence[Held]) -> None:
        """Compares what the participant holds with what it is counted on for.

        What is still its own it keeps; what it doesn't hold any more goes to the queue at once; what it
        holds for nothing it is told to drop. A result that was accepted isn't dropped here: the
        participant may not know yet, and sends it again.
        """
        who = member.record.participant_id
        mine = member.assignment
        kept = False
        for item in held:
            if mine is not None and (mine.id, mine.attempt) == (item.assignment_id, item.attempt):
                kept = True
                if mine.lease is not None:
                    mine.lease.heard = self._world.clock.monotonic()
                continue
            job = self._world.jobs.get(parse_assignment_id(item.assignment_id))
            assignment = job.assignment(item.assignment_id) if job is not None else None
            result = assignment.result if assignment is not None else None
            if result is None or (result.participant_id, result.attempt) != (who, item.attempt):
                member.send(
                    CancelCommand(item.assignment_id, item.attempt, "it isn't yours any more, or is done")
                )
        if mine is not None and not kept:
            job = self._world.jobs[mine.job_id]
            await take_back(self._world, job, [mine], f"{who} came back without it", tell=False)

    def left(self, session: Session) -> None:
        """Notes that a stream ended. Its assignment waits for the participant for a short grace."""
        member = self._world.members[session.participant_id]
        if member.session is not session:
            return
        member.session = None
        member.disconnected_at = self._world.clock.monotonic()
        member.record = replace(member.record, last_seen_time=self._world.clock.now())
        log.info("participant left", participant=session.participant_id)
        self._tell_jobs(session.participant_id)

    def _tell_jobs(self, participant_id: str) -> None:
        for job in self._world.jobs.values():
            if participant_id in job.invitations:
                self._world.changed(job)
        self._world.desk_wake.set()

    def drain(self) -> None:
        """Tells everyone that the coordinator stops, and ends all streams."""
        self._stopping = True
        for member in self._world.members.values():
            if member.session is not None:
                member.send(DrainCommand("the coordinator stops; join again with backoff"))
                member.session.close(_shutting_down())

    async def save_last_seen(self) -> None:
        """Writes when each connected device was last heard of; for an orderly end."""

        async def change() -> None:
            async with self._world.store.begin() as tx:
                for member in self._world.members.values():
                    if member.session is not None:
                        await tx.participants.save(member.record)

        await self._world.exclusive(change)


def _shutting_down() -> Unavailable:
    return Unavailable(
        Reason.SHUTTING_DOWN, "the coordinator stops; join again with backoff", retry_after=1.0
    )

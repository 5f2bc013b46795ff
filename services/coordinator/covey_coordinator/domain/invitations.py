"""Who takes part in which job: asking, answering, taking back, leaving."""

from collections.abc import Sequence
from dataclasses import replace

from covey_coordinator.domain.commands import InvitationCommand, InvitationEndedCommand
from covey_coordinator.domain.model import Invitation, InvitationState, JobRecord
from covey_coordinator.domain.moves import take_back
from covey_coordinator.domain.ports import Tokens
from covey_coordinator.domain.spec import JobSpec
from covey_coordinator.domain.world import JobRun, JobSight, World, job_not_found
from covey_kit.errors import FailedPrecondition, NotFound, Reason
from covey_kit.ids import new_id

__all__ = ["Answer", "Invitations", "invitation_command"]


class Answer:
    """What an answer to an invitation brought.

    Attributes:
        grant: token to read the job's files; empty when declined.
    """

    def __init__(self, invitation: Invitation, grant: str) -> None:
        self.job_id = invitation.job_id
        self.state = invitation.state
        self.grant = grant


def invitation_command(record: JobRecord, spec: JobSpec, invitation: Invitation) -> InvitationCommand:
    """Returns what tells a participant of an invitation."""
    package = spec.package
    return InvitationCommand(
        invitation=invitation,
        job_display_name=record.display_name,
        package_name=package.name,
        package_version=package.version,
        package_description=package.description,
        module_sha256=package.module.sha256,
        total_bytes=spec.total_bytes,
    )


def _not_found(invitation_id: str) -> NotFound:
    return NotFound(
        Reason.INVITATION_NOT_FOUND,
        f"there is no invitation {invitation_id}",
        resource=("invitation", invitation_id),
    )


class Invitations:
    """Invitations of all jobs."""

    def __init__(self, world: World, tokens: Tokens) -> None:
        self._world = world
        self._tokens = tokens

    async def invite(self, job_id: str, participant_ids: Sequence[str], *, all_connected: bool) -> JobSight:
        """Invites participants.

        Raises:
            NotFound: JOB_NOT_FOUND; PARTICIPANT_NOT_FOUND names all unknown ids, nobody was invited.
            FailedPrecondition: JOB_STATE: the job has ended.
        """
        return await self._world.exclusive(lambda: self._invite(job_id, participant_ids, all_connected))

    async def _invite(self, job_id: str, participant_ids: Sequence[str], all_connected: bool) -> JobSight:  # noqa: FBT001 - private
        job = await self._alive(job_id)
        unknown = sorted(p for p in participant_ids if p not in self._world.members)
        if unknown:
            raise NotFound(
                Reason.PARTICIPANT_NOT_FOUND,
                f"nobody of that name ever joined: {', '.join(unknown)}; nobody was invited",
                resource=("participant", ", ".join(unknown)),
            )
        chosen = set(participant_ids)
        if all_connected:
            chosen |= {p for p, member in self._world.members.items() if member.session is not None}
        asked = []
        for participant_id in sorted(chosen):
            before = job.invitations.get(participant_id)
            if before is not None and before.state in (InvitationState.PENDING, InvitationState.ACCEPTED):
                continue
            asked.append(
                replace(
                    before or Invitation("", job_id, participant_id, InvitationState.PENDING, 0.0),
                    invitation_id=new_id("inv", 16),
                    state=InvitationState.PENDING,
                    create_time=self._world.clock.now(),
                )
            )
        if asked:
            async with self._world.store.begin() as tx:
                for invitation in asked:
                    await tx.invitations.save(invitation)
        for invitation in asked:
            job.invitations[invitation.participant_id] = invitation
            member = self._world.members[invitation.participant_id]
            member.send(invitation_command(job.record, job.spec, invitation))
        self._world.changed(job)
        return job

    async def _alive(self, job_id: str) -> JobRun:
        job = self._world.jobs.get(job_id)
        if job is not None and not job.record.state.ended:
            return job
        record = job.record if job is not None else None
        if record is None:
            record = await self._world.store.read(lambda tx: tx.jobs.get(job_id))
        if record is None:
            raise job_not_found(job_id)
        raise FailedPrecondition(
            Reason.JOB_STATE,
            f"job {job_id} is {record.state}: nobody can be invited any more",
            resource=("job", job_id),
            metadata={"state": record.state.value},
        )

    async def revoke(self, invitation_id: str) -> str:
        """Takes an invitation back and returns its job. Taking it back again changes nothing.

        Raises:
            NotFound: INVITATION_NOT_FOUND.
        """
        return await self._world.exclusive(lambda: self._revoke(invitation_id))

    async def _revoke(self, invitation_id: str) -> str:
        job, invitation = await self._find(invitation_id)
        if invitation.state is not InvitationState.REVOKED:
            await self._end(job, invitation, InvitationState.REVOKED, "the invitation was taken back")
            self._world.members[invitation.participant_id].send(
                InvitationEndedCommand(
                    invitation.invitation_id, invitation.job_id, "the owner took the invitation back"
                )
            )
        return invitation.job_id

    async def _find(self, invitation_id: str) -> tuple[JobRun | None, Invitation]:
        job_id = await self._world.store.read(lambda tx: tx.invitations.job_of(invitation_id))
        if job_id is None:
            raise _not_found(invitation_id)
        job, known = await self._of_job(job_id)
        return job, next(i for i in known if i.invitation_id == invitation_id)

    async def _of_job(self, job_id: str) -> tuple[JobRun | None, list[Invitation]]:
        job = self._world.jobs.get(job_id)
        if job is not None:
            return job, list(job.invitations.values())
        return None, await self._world.store.read(lambda tx: tx.invitations.of_job(job_id))

    async def _end(
        self, job: JobRun | None, invitation: Invitation, state: InvitationState, reason: str
    ) -> None:
        """Writes the new state and takes back what the participant has of the job."""
        ended = replace(invitation, state=state)
        async with self._world.store.begin() as tx:
            await tx.invitations.save(ended)
        if job is None:
            return
        job.invitations[ended.participant_id] = ended
        his = [a for a in job.assignments() if a.lease and a.lease.participant_id == ended.participant_id]
        await take_back(self._world, job, his, reason)
        self._world.changed(job)

    async def respond(self, who: str, invitation_id: str, *, accept: bool) -> Answer:
        """Takes a participant's answer. The same answer again changes nothing.

        Raises:
            NotFound: INVITATION_NOT_FOUND: not an invitation of the caller.
            FailedPrecondition: INVITATION_STATE (answered otherwise, revoked), JOB_STATE (the job ended).
        """
        return await self._world.exclusive(lambda: self._respond(who, invitation_id, accept))

    async def _respond(self, who: str, invitation_id: str, accept: bool) -> Answer:  # noqa: FBT001 - private
        job, invitation = await self._find(invitation_id)
        if invitation.participant_id != who:
            raise _not_found(invitation_id)
        wanted = InvitationState.ACCEPTED if accept else InvitationState.DECLINED
        if invitation.state is not wanted:
            if invitation.state is not InvitationState.PENDING:
                raise FailedPrecondition(
                    Reason.INVITATION_STATE,
                    f"invitation {invitation_id} is {invitation.state}; it can't become {wanted}",
                    resource=("invitation", invitation_id),
                    metadata={"state": invitation.state.value},
                )
            if job is None or job.record.state.ended:
                raise FailedPrecondition(
                    Reason.JOB_STATE,
                    f"job {invitation.job_id} has ended; its invitations can't be answered any more",
                    resource=("job", invitation.job_id),
                )
            invitation = replace(invitation, state=wanted)
            async with self._world.store.begin() as tx:
                await tx.invitations.save(invitation)
            job.invitations[who] = invitation
            self._world.changed(job)
        return Answer(invitation, self._tokens.grant(who, invitation.job_id) if accept else "")

    async def leave(self, who: str, job_id: str) -> None:
        """Ends a participant's part in a job. Leaving again changes nothing.

        Raises:
            NotFound: JOB_NOT_FOUND: the caller isn't part of such a job.
        """
        await self._world.exclusive(lambda: self._leave(who, job_id))

    async def _leave(self, who: str, job_id: str) -> None:
        job, known = await self._of_job(job_id)
        invitation = next((i for i in known if i.participant_id == who), None)
        if invitation is None or invitation.state not in (InvitationState.ACCEPTED, InvitationState.LEFT):
            raise NotFound(
                Reason.JOB_NOT_FOUND, f"{who} isn't part of a job {job_id}", resource=("job", job_id)
            )
        if invitation.state is InvitationState.ACCEPTED:
            await self._end(job, invitation, InvitationState.LEFT, "you left the job")

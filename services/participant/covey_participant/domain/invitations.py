"""Invitations that the device has, and whether it accepts them by itself."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from covey_kit.errors import FailedPrecondition, NotFound, Reason


class InvitationState(StrEnum):
    """Where an invitation stands."""

    PENDING = "PENDING"
    ACCEPTED = "ACCEPTED"
    DECLINED = "DECLINED"
    REVOKED = "REVOKED"
    LEFT = "LEFT"


@dataclass(frozen=True)
class Invitation:
    """A request to take part in a job. `create_time` is in unix seconds."""

    invitation_id: str
    job_id: str
    job_display_name: str
    package_name: str
    package_version: str
    package_description: str
    module_sha256: str
    total_bytes: int
    create_time: float
    state: InvitationState


class Invitations:
    """What came from the coordinator, by id. The coordinator's word holds; this is a mirror of it."""

    def __init__(self) -> None:
        self._known: dict[str, Invitation] = {}

    def take(self, invitation: Invitation) -> None:
        """Keeps what the coordinator sent."""
        self._known[invitation.invitation_id] = invitation

    def end(self, invitation_id: str) -> None:
        """Notes that it no longer holds."""
        known = self._known.get(invitation_id)
        if known is not None and known.state in (InvitationState.PENDING, InvitationState.ACCEPTED):
            self._known[invitation_id] = replace(known, state=InvitationState.REVOKED)

    def answered(self, invitation_id: str, state: InvitationState) -> Invitation | None:
        """Notes what the coordinator made of an answer, and returns the invitation as it is now."""
        known = self._known.get(invitation_id)
        if known is None:
            return None
        self._known[invitation_id] = replace(known, state=state)
        return self._known[invitation_id]

    def check_answer(self, invitation_id: str, *, accept: bool) -> Invitation:
        """Returns the invitation if it can be answered so.

        Raises:
            NotFound: `INVITATION_NOT_FOUND`.
            FailedPrecondition: `INVITATION_STATE`: answered otherwise, or ended.
        """
        known = self._known.get(invitation_id)
        if known is None:
            raise NotFound(
                Reason.INVITATION_NOT_FOUND,
                f"this device has no invitation {invitation_id}; list them to see which it has",
                resource=("invitation", invitation_id),
            )
        same = InvitationState.ACCEPTED if accept else InvitationState.DECLINED
        if known.state not in (InvitationState.PENDING, same):
            raise FailedPrecondition(
                Reason.INVITATION_STATE,
                f"invitation {invitation_id} is {known.state.value}: it can't be {same.value} any more",
                resource=("invitation", invitation_id),
            )
        return known

    def all(self) -> list[Invitation]:
        """Returns all of them by time."""
        return sorted(self._known.values(), key=lambda i: (i.create_time, i.invitation_id))

    def forget_missing(self, present: Iterable[str]) -> None:
        """Drops pending ones that a fresh connection didn't name again."""
        named = set(present)
        self._known = {
            key: value
            for key, value in self._known.items()
            if key in named or value.state is not InvitationState.PENDING
        }


def accepts_by_itself(invitation: Invitation, *, accept_all: bool) -> bool:
    """Whether the device accepts without asking its person. Anything that isn't pending is left alone."""
    return accept_all and invitation.state is InvitationState.PENDING

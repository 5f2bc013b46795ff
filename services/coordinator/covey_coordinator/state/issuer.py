"""Tokens for participants, signed with the coordinator's key."""

from covey_kit.caller import Role
from covey_kit.tokens import SigningKey

__all__ = ["Issuer"]

_SESSION_SECONDS = 7 * 86400.0
_GRANT_SECONDS = 86400.0


class Issuer:
    """`Tokens` with a signing key. A grant lasts a day and is given anew with each assignment."""

    def __init__(self, key: SigningKey) -> None:
        self._key = key

    def session(self, participant_id: str) -> tuple[str, float]:
        """Returns a session token and the seconds that it lasts."""
        return self._key.issue(participant_id, Role.PARTICIPANT, _SESSION_SECONDS), _SESSION_SECONDS

    def grant(self, participant_id: str, job_id: str) -> str:
        """Returns a token to read a job's files."""
        return self._key.issue(participant_id, Role.GRANT, _GRANT_SECONDS, job_id=job_id)

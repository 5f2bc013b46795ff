"""Who is calling, as the interceptor found out from the token."""

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ANONYMOUS", "Caller", "Role", "current_caller", "set_caller"]


class Role(StrEnum):
    """`Role` of `policy.proto` without its prefix, in lower case as in tokens."""

    ANYONE = "anyone"
    OWNER = "owner"
    VIEWER = "viewer"
    PARTICIPANT = "participant"
    SERVICE = "service"
    GRANT = "grant"


@dataclass(frozen=True)
class Caller:
    """The caller of the current call.

    Attributes:
        role: what it may do.
        subject: who it is: a participant id, a service name, an owner's name. Empty for `ANYONE`.
        job_id: the job that a grant is for; None for every other role.
    """

    role: Role
    subject: str = ""
    job_id: str | None = None


ANONYMOUS = Caller(Role.ANYONE)
_caller: ContextVar[Caller] = ContextVar("covey_caller", default=ANONYMOUS)


def current_caller() -> Caller:
    """Returns the caller of the call being handled; `ANONYMOUS` outside of one."""
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """Sets the caller for the rest of the current task. For the interceptor and for tests."""
    _caller.set(caller)

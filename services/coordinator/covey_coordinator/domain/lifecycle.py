"""A job's life: which command is allowed in which state."""

from enum import StrEnum

from covey_coordinator.domain.model import JobState
from covey_kit.errors import FailedPrecondition, Reason

__all__ = ["Command", "next_state", "require_deletable"]


class Command(StrEnum):
    """What an owner may tell a job."""

    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"


_MOVES = {
    (Command.START, JobState.CREATED): JobState.RUNNING,
    (Command.START, JobState.RUNNING): JobState.RUNNING,
    (Command.PAUSE, JobState.RUNNING): JobState.PAUSED,
    (Command.PAUSE, JobState.PAUSED): JobState.PAUSED,
    (Command.RESUME, JobState.PAUSED): JobState.RUNNING,
    (Command.RESUME, JobState.RUNNING): JobState.RUNNING,
    (Command.STOP, JobState.CREATED): JobState.STOPPED,
    (Command.STOP, JobState.RUNNING): JobState.STOPPED,
    (Command.STOP, JobState.PAUSED): JobState.STOPPED,
    (Command.STOP, JobState.STOPPED): JobState.STOPPED,
}

_ADVICE = {
    (Command.START, JobState.PAUSED): "resume it",
    (Command.PAUSE, JobState.CREATED): "start it first",
    (Command.RESUME, JobState.CREATED): "start it",
}


def _refuse(job_id: str, state: JobState, command: str, advice: str) -> FailedPrecondition:
    what_next = f"; {advice}" if advice else ""
    return FailedPrecondition(
        Reason.JOB_STATE,
        f"job {job_id} is {state}: a job in that state can't be told to {command}{what_next}",
        resource=("job", job_id),
        metadata={"state": state.value},
    )


def next_state(job_id: str, state: JobState, command: Command) -> JobState:
    """Returns the state after the command; the same state when the command changes nothing.

    Raises:
        FailedPrecondition: JOB_STATE, names the state and what to do instead.
    """
    move = _MOVES.get((command, state))
    if move is None:
        raise _refuse(job_id, state, command.value, _ADVICE.get((command, state), ""))
    return move


def require_deletable(job_id: str, state: JobState) -> None:
    """Checks that a job in this state may be forgotten.

    Raises:
        FailedPrecondition: JOB_STATE.
    """
    if state in (JobState.RUNNING, JobState.PAUSED):
        raise _refuse(job_id, state, "delete", "stop it first")

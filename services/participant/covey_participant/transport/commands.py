"""What the coordinator's commands do here."""

from covey_participant.domain.desk import Desk
from covey_participant.domain.device import DeviceControl
from covey_participant.domain.invitations import Invitation
from covey_participant.domain.values import Assignment


class DeskCommands:
    """Hands the coordinator's commands to desk and control."""

    def __init__(self, desk: Desk, control: DeviceControl) -> None:
        self._desk = desk
        self._control = control

    def joined(self, progress_interval: float) -> None:
        """The stream is open."""
        self._desk.progress_interval = progress_interval
        self._control.joined()

    def left(self, reason: str) -> None:
        """The stream ended."""
        self._control.left(reason)

    def invited(self, invitation: Invitation) -> None:
        """An invitation came, or came again."""
        self._control.invited(invitation)

    def uninvited(self, invitation_id: str, reason: str) -> None:
        """An invitation or an accepted job ended."""
        self._control.uninvited(invitation_id, reason)

    def assigned(self, assignment: Assignment) -> None:
        """Work came."""
        self._desk.accept(assignment)

    def cancelled(self, assignment_id: str, attempt: int, reason: str) -> None:
        """Work is no longer wanted."""
        self._desk.cancel(assignment_id, attempt, reason)

    def held(self) -> list[tuple[str, int]]:
        """Returns what is in hand."""
        return self._desk.held

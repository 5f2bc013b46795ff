"""One assignment being worked on: its stage, the time in each, and how far it is."""

from dataclasses import dataclass, field
from enum import StrEnum

from covey_participant.domain.backend import Choice
from covey_participant.domain.values import Assignment


class Stage(StrEnum):
    """What a device is doing."""

    IDLE = "IDLE"
    FETCHING = "FETCHING"
    COMPILING = "COMPILING"
    LOADING = "LOADING"
    PLAYING = "PLAYING"
    TRAINING = "TRAINING"
    EVALUATING = "EVALUATING"
    UPLOADING = "UPLOADING"


@dataclass
class Execution:
    """What is known of a running assignment. Times are monotonic seconds, handed in.

    Attributes:
        stage: what is being done; `enter` changes it.
        units_done: units done, each counted once; None: not known.
        work_rate: units of work per second of the module's own time; None before the first measurement.
        transfer: (bytes done, bytes in all) of the running transfer; None when none runs.
        choice: what it runs on; None before it was chosen.
    """

    assignment: Assignment
    started: float
    stage: Stage = Stage.FETCHING
    units_done: int | None = None
    work_rate: float | None = None
    transfer: tuple[int, int] | None = None
    choice: Choice | None = None
    workers: int | None = None
    module_loaded: bool = False
    _entered: float = field(init=False)
    _spent: dict[Stage, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._entered = self.started

    def enter(self, stage: Stage, now: float) -> bool:
        """Goes over to a stage (back too: chunk by chunk) and returns whether that was a change."""
        if stage is self.stage:
            return False
        self._spent[self.stage] = self._spent.get(self.stage, 0.0) + now - self._entered
        self.stage = stage
        self._entered = now
        self.transfer = None
        return True

    def durations(self, now: float) -> dict[Stage, float]:
        """Returns the seconds spent in each stage so far, in the order in which they were first entered."""
        spent = dict(self._spent)
        spent[self.stage] = spent.get(self.stage, 0.0) + now - self._entered
        return spent

"""What the coordinator knows: records (immutable, as they are on disk) and the work in hand (mutable)."""

from dataclasses import dataclass, field
from enum import StrEnum

from covey_coordinator.domain.plan import UnitRange
from covey_coordinator.domain.spec import BEGINNING, Backend, Chunk, Origin, Settings, Stage
from covey_kit.errors import Reason

__all__ = [
    "Assignment",
    "AssignmentKind",
    "AssignmentStatus",
    "CheckpointRef",
    "DeltaFile",
    "FailureRecord",
    "Fault",
    "Invitation",
    "InvitationState",
    "JobRecord",
    "JobState",
    "Lease",
    "Lineage",
    "Metric",
    "OpenRound",
    "ParticipantRecord",
    "Progress",
    "Result",
    "RoundRecord",
    "Validation",
    "assignment_id",
    "parse_assignment_id",
    "validation_id",
]


class JobState(StrEnum):
    """Where a job's life stands."""

    CREATED = "CREATED"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"

    @property
    def ended(self) -> bool:
        """Whether nothing will be trained any more."""
        return self in (JobState.COMPLETED, JobState.STOPPED, JobState.FAILED)


class InvitationState(StrEnum):
    """Where an invitation stands."""

    PENDING = "PENDING"
    ACCEPTED = "ACCEPTED"
    DECLINED = "DECLINED"
    REVOKED = "REVOKED"
    LEFT = "LEFT"


class AssignmentKind(StrEnum):
    """What an assignment is about."""

    INITIALIZE = "INITIALIZE"
    TRAIN = "TRAIN"
    EVALUATE = "EVALUATE"


class AssignmentStatus(StrEnum):
    """Where an assignment stands."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    DONE = "DONE"


@dataclass(frozen=True)
class Metric:
    """A metric summed over `count`; `sum` is None when there was nothing to measure."""

    name: str
    sum: float | None
    count: float


@dataclass(frozen=True)
class FailureRecord:
    """Why something failed. `participant_id` and `assignment_id` are empty when it wasn't on one."""

    reason: Reason
    message: str
    participant_id: str
    assignment_id: str
    time: float


@dataclass(frozen=True)
class Lineage:
    """Where a continued job came from.

    Attributes:
        round: of the checkpoint.
        new_queue: True when the queue or the sequence began anew.
    """

    source_job_id: str
    round: int
    checkpoint_sha256: str
    new_queue: bool


@dataclass(frozen=True)
class JobRecord:
    """A job as it is on disk. Times are unix seconds.

    Attributes:
        paused_time: since when it is paused; None when it isn't.
        chunk_count: chunks of its dataset; 0: an experience job.
        rounds_wanted: the final round.
        rounds_done: finished rounds, round 0 not counted; −1 before round 0.
        units_done: units trained in finished rounds.
        failure: what ended it.
        last_error: the last thing that went wrong on the way.
    """

    job_id: str
    display_name: str
    state: JobState
    create_time: float
    package_name: str
    package_version: str
    unit: str
    settings: Settings
    chunk_count: int
    can_validate: bool
    rounds_wanted: int
    rounds_done: int = -1
    units_done: int = 0
    start_time: float | None = None
    end_time: float | None = None
    paused_time: float | None = None
    failure: FailureRecord | None = None
    last_error: FailureRecord | None = None
    origin: Origin = BEGINNING
    lineage: Lineage | None = None


@dataclass(frozen=True)
class Invitation:
    """A participant as a job sees it. There is one for each (job, participant).

    Attributes:
        invitation_id: changes when the participant is asked again.
        assignments_done: results accepted.
        failures: attempts that failed.
        backend: what its last result ran on.
    """

    invitation_id: str
    job_id: str
    participant_id: str
    state: InvitationState
    create_time: float
    assignments_done: int = 0
    failures: int = 0
    backend: Backend | None = None


@dataclass(frozen=True)
class ParticipantRecord:
    """A device that joined.

    Attributes:
        credential_sha256: hex digest of what the device proves itself with.
        device: what it runs on, as its serialized message.
    """

    participant_id: str
    display_name: str
    credential_sha256: str
    device: bytes
    join_time: float
    last_seen_time: float


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint file in storage and where the weights lie in it."""

    sha256: str
    size: int
    weights_offset: int
    weights_size: int
    weights_sha256: str


@dataclass(frozen=True)
class RoundRecord:
    """A finished round."""

    round: int
    metrics: tuple[Metric, ...]
    units: int
    assignments: int
    participant_ids: tuple[str, ...]
    checkpoint: CheckpointRef
    start_time: float
    end_time: float
    no_units: bool
    validation_metrics: tuple[Metric, ...] = ()


@dataclass(frozen=True)
class DeltaFile:
    """A delta on disk: the name of its spill file, its digest and size."""

    name: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Result:
    """What an assignment brought. `delta` is None for evaluations."""

    participant_id: str
    attempt: int
    units: int
    metrics: tuple[Metric, ...]
    backend: Backend
    compute_seconds: float | None
    delta: DeltaFile | None


@dataclass(frozen=True)
class Fault:
    """An attempt that failed.

    Attributes:
        package: True when the package is at fault as far as anyone can tell.
    """

    participant_id: str
    attempt: int
    package: bool
    failure: FailureRecord


@dataclass
class Progress:
    """What a participant last said of its assignment. None: not said."""

    stage: Stage | None = None
    units_done: int | None = None
    transfer_bytes_done: int | None = None
    transfer_bytes_total: int | None = None
    workers: int | None = None
    backend: Backend | None = None


@dataclass
class Lease:
    """Who has an assignment, since when, and when that one was last heard of.

    Attributes:
        start_time: unix seconds when it was handed out.
        started: the same on the monotonic clock.
        heard: monotonic time of the last word about it.
    """

    participant_id: str
    start_time: float
    started: float
    heard: float
    progress: Progress = field(default_factory=Progress)


@dataclass
class Assignment:
    """A piece of work of the round in hand, or a validation.

    Attributes:
        units: units in it; None when the device counts.
        attempt: how often it was handed out.
        lease: who has it now.
        not_before: monotonic time before which a participant that failed on it doesn't get it again.
        pending_since: unix seconds since when nobody has it.
        unit_range: units that the model generates; None: the work is data.
    """

    id: str
    job_id: str
    round: int
    index: int
    kind: AssignmentKind
    chunks: tuple[Chunk, ...]
    units: int | None
    pending_since: float
    attempt: int = 0
    lease: Lease | None = None
    result: Result | None = None
    faults: list[Fault] = field(default_factory=list)
    not_before: float = 0.0
    unit_range: UnitRange | None = None

    @property
    def status(self) -> AssignmentStatus:
        """Where it stands."""
        if self.result is not None:
            return AssignmentStatus.DONE
        return AssignmentStatus.RUNNING if self.lease is not None else AssignmentStatus.PENDING

    @property
    def participant_id(self) -> str:
        """Who has it or did it; empty when nobody."""
        if self.result is not None:
            return self.result.participant_id
        return self.lease.participant_id if self.lease is not None else ""


@dataclass
class OpenRound:
    """The round in work.

    Attributes:
        aggregating_since: unix seconds since when its results are put together; None when they aren't.
    """

    round: int
    start_time: float
    assignments: list[Assignment]
    aggregating_since: float | None = None


@dataclass
class Validation:
    """A validation that isn't done.

    Attributes:
        checkpoint: what is validated.
        scheduled: True when the job's settings asked for it: the job isn't completed before.
    """

    round: int
    scheduled: bool
    checkpoint: CheckpointRef
    assignment: Assignment


def assignment_id(job_id: str, round_number: int, index: int) -> str:
    """Returns the id of an assignment of a round: always the same for the same work."""
    return f"{job_id}.r{round_number}.a{index}"


def validation_id(job_id: str, round_number: int) -> str:
    """Returns the id of the assignment that validates a round."""
    return f"{job_id}.v{round_number}"


def parse_assignment_id(text: str) -> str:
    """Returns the job's id in an assignment id; the whole text when it isn't one."""
    return text.partition(".")[0]

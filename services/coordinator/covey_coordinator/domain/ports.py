"""What the domain needs of the world outside, as interfaces."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from covey_coordinator.domain.model import (
    Assignment,
    CheckpointRef,
    DeltaFile,
    Fault,
    Invitation,
    JobRecord,
    JobState,
    Metric,
    OpenRound,
    ParticipantRecord,
    Result,
    RoundRecord,
)
from covey_coordinator.domain.spec import Backend, ChunkOrder, JobSpec, PackageSpec

T = TypeVar("T")

__all__ = [
    "AssignmentTable",
    "BlobStorage",
    "CheckpointFacts",
    "CheckpointFile",
    "Checkpoints",
    "Fold",
    "HolderTable",
    "InvitationTable",
    "JobTable",
    "ParticipantTable",
    "QueuePosition",
    "RequestTable",
    "RoundSummary",
    "RoundTable",
    "Store",
    "StoredAssignment",
    "StoredValidation",
    "Tokens",
    "Transaction",
    "ValidationTable",
]


class JobTable(Protocol):
    """Jobs, by id."""

    async def add(self, record: JobRecord, spec: JobSpec) -> None:
        """Adds a new job."""

    async def save(self, record: JobRecord) -> None:
        """Writes a job's record."""

    async def get(self, job_id: str) -> JobRecord | None:
        """Returns a job's record."""

    async def spec(self, job_id: str) -> JobSpec | None:
        """Returns what a job is made of."""

    async def page(
        self, before: int | None, limit: int, states: Sequence[JobState]
    ) -> list[tuple[int, JobRecord]]:
        """Returns jobs before `before` in `states` (empty: all), the newest first, each with its place."""

    async def alive(self) -> list[str]:
        """Returns the ids of jobs that haven't ended or have validations to do."""

    async def delete(self, job_id: str) -> None:
        """Deletes a job with everything that belongs to it."""


class RequestTable(Protocol):
    """Creations that were answered, by request id."""

    async def get(self, request_id: str) -> tuple[str, str] | None:
        """Returns (fingerprint of the request, job id)."""

    async def add(self, request_id: str, fingerprint: str, job_id: str) -> None:
        """Remembers an answer."""


class ParticipantTable(Protocol):
    """Devices that ever joined."""

    async def all(self) -> list[ParticipantRecord]:
        """Returns all of them."""

    async def save(self, record: ParticipantRecord) -> None:
        """Writes one."""


class InvitationTable(Protocol):
    """Invitations: one for each (job, participant)."""

    async def of_job(self, job_id: str) -> list[Invitation]:
        """Returns a job's invitations."""

    async def job_of(self, invitation_id: str) -> str | None:
        """Returns the job of an invitation."""

    async def of_participants(self, participant_ids: Sequence[str]) -> list[Invitation]:
        """Returns the invitations of participants."""

    async def save(self, invitation: Invitation) -> None:
        """Writes one."""


class RoundTable(Protocol):
    """Rounds, open and finished."""

    async def open(self, job_id: str, opened: OpenRound) -> None:
        """Adds a round that begins, with its assignments."""

    async def opened(self, job_id: str) -> tuple[int, float] | None:
        """Returns (number, start time) of the round that isn't finished."""

    async def finish(self, job_id: str, record: RoundRecord) -> None:
        """Writes a finished round."""

    async def adopt(self, job_id: str, record: RoundRecord) -> None:
        """Adds a finished round that another job trained: what the job goes on from."""

    async def get(self, job_id: str, round_number: int | None) -> RoundRecord | None:
        """Returns a finished round, or the latest."""

    async def page(self, job_id: str, after: int, limit: int) -> list[RoundRecord]:
        """Returns finished rounds after `after`, in order."""


@dataclass(frozen=True)
class StoredAssignment:
    """What is on disk of an assignment."""

    id: str
    index: int
    attempt: int
    participant_id: str | None
    lease_time: float | None
    result: Result | None
    faults: tuple[Fault, ...]


class AssignmentTable(Protocol):
    """Assignments: who has them, what they brought, how they failed."""

    async def add(self, assignment: Assignment) -> None:
        """Adds one (a validation's), or frees the one that is there and forgets its result and faults."""

    async def of_round(self, job_id: str, round_number: int) -> list[StoredAssignment]:
        """Returns a round's assignments in order, validations left out."""

    async def get(self, assignment_id: str) -> StoredAssignment | None:
        """Returns one."""

    async def lease(self, handouts: Sequence[tuple[str, int, str]], time: float) -> None:
        """Gives assignments to participants: (assignment, attempt, participant) each."""

    async def free(self, assignment_ids: Sequence[str]) -> None:
        """Takes them back."""

    async def finish(self, assignment_id: str, result: Result) -> None:
        """Writes a result."""

    async def drop_result(self, assignment_id: str) -> None:
        """Forgets a result whose delta was lost."""

    async def fault(self, assignment_id: str, fault: Fault) -> None:
        """Writes an attempt that failed, and takes the assignment back."""


@dataclass(frozen=True)
class StoredValidation:
    """A validation that isn't done."""

    round: int
    scheduled: bool


class ValidationTable(Protocol):
    """Validations that aren't done."""

    async def pending(self, job_id: str) -> list[StoredValidation]:
        """Returns a job's, by round."""

    async def add(self, job_id: str, validation: StoredValidation) -> None:
        """Adds one."""

    async def finish(self, job_id: str, round_number: int, metrics: Sequence[Metric]) -> None:
        """Writes the metrics to the round and forgets the validation."""

    async def drop(self, job_id: str, rounds: Sequence[int]) -> None:
        """Forgets validations."""


class HolderTable(Protocol):
    """Holders in storage that must be released: of jobs deleted, or not made in the end."""

    async def add(self, job_id: str) -> None:
        """Remembers that the job's holder must be released."""

    async def remove(self, job_id: str) -> None:
        """Forgets it: it was released, or the job was made."""

    async def all(self) -> list[str]:
        """Returns the jobs whose holders must be released."""


class Transaction(Protocol):
    """All tables, in one transaction."""

    @property
    def jobs(self) -> JobTable:
        """Jobs."""

    @property
    def requests(self) -> RequestTable:
        """Requests answered."""

    @property
    def participants(self) -> ParticipantTable:
        """Participants."""

    @property
    def invitations(self) -> InvitationTable:
        """Invitations."""

    @property
    def rounds(self) -> RoundTable:
        """Rounds."""

    @property
    def assignments(self) -> AssignmentTable:
        """Assignments."""

    @property
    def validations(self) -> ValidationTable:
        """Validations."""

    @property
    def holders(self) -> HolderTable:
        """Holders to release."""


class Store(Protocol):
    """The database. What a transaction wrote is on disk when its block ends without an error."""

    def begin(self) -> AbstractAsyncContextManager[Transaction]:
        """Begins a transaction; commits at the end of the block, rolls back on an error."""

    async def read(self, query: Callable[[Transaction], Awaitable[T]]) -> T:
        """Runs a query that only reads; to its end, also when the caller is cancelled."""
        ...


@dataclass(frozen=True)
class RoundSummary:
    """What a round's checkpoint says beside its weights."""

    round: int
    metrics: tuple[Metric, ...]
    units: int
    backends: tuple[Backend, ...]


@dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint on the coordinator's own disk.

    Attributes:
        no_units: True when every delta had zero units.
    """

    name: str
    sha256: str
    size: int
    no_units: bool


class Fold(Protocol):
    """The sum of a round's deltas, in assignment order."""

    async def add(self, index: int, delta: DeltaFile, units: int) -> None:
        """Adds the next delta; `index` must be the next one."""


class Checkpoints(Protocol):
    """Makes checkpoint files and keeps the last one of each job."""

    def begin(self, spec: JobSpec) -> Fold:
        """Begins to sum up a round."""

    async def finish(
        self, fold: Fold, job_id: str, spec: JobSpec, summary: RoundSummary, base: CheckpointRef | None
    ) -> CheckpointFile:
        """Makes the checkpoint of a round; fetches the base from storage when it isn't here any more."""

    async def upload(
        self, job_id: str, spec: JobSpec, summary: RoundSummary, file: CheckpointFile
    ) -> CheckpointRef:
        """Writes a checkpoint to storage and records it there. Repeating it is harmless."""

    async def discard(self, job_id: str, round_number: int) -> None:
        """Removes the deltas of a finished round, and every checkpoint file but that round's."""

    async def forget(self, job_id: str) -> None:
        """Removes every file of a job."""

    async def jobs(self) -> list[str]:
        """Returns the jobs that files are there of."""

    async def recover(self, job_id: str, round_number: int, accepted: list[DeltaFile]) -> set[str]:
        """Tidies the deltas of a job's open round; returns the names of those that are gone or damaged."""


@dataclass(frozen=True)
class QueuePosition:
    """Where the queue of chunks stands, as a checkpoint says it.

    Attributes:
        manifest_sha256: which dataset it is, see `spec.manifest_sha256`.
    """

    pass_number: int
    next_index: int
    manifest_sha256: str
    chunk_order: ChunkOrder


@dataclass(frozen=True)
class CheckpointFacts:
    """What a stored checkpoint that was read whole says of itself.

    Attributes:
        seed: its job's seed; None in version 1, as is all that follows.
        strategy: how its round was aggregated.
        optimizer: its optimizer tensors.
        queue: where its queue of chunks stands; None in experience jobs.
        sequence: (seed, next unit) of its sequence; None in dataset jobs.
        auxiliary_weights: digests by name.
    """

    format_version: int
    round: int
    metrics: tuple[Metric, ...]
    units: int
    seed: int | None
    strategy: str | None
    optimizer: tuple[str, ...]
    queue: QueuePosition | None
    sequence: tuple[int, int] | None
    auxiliary_weights: dict[str, str]


class BlobStorage(Protocol):
    """What the coordinator asks of storage beside checkpoints."""

    async def missing(self, files: Sequence[tuple[str, int]]) -> list[str]:
        """Returns the digests, of (digest, size) pairs, that aren't stored with that size."""

    async def hold(self, job_id: str, digests: Sequence[str]) -> None:
        """References blobs for a job."""

    async def release(self, job_id: str) -> None:
        """Drops a job's references and its checkpoints."""

    async def examine(self, sha256: str, package: PackageSpec) -> CheckpointFacts:
        """Has a stored checkpoint read whole and compared with the package; returns what it says of itself.

        Raises InvalidArgument (CHECKPOINT_INVALID) with every problem, FailedPrecondition (BLOB_MISSING).
        """

    async def adopt(
        self, job_id: str, spec: JobSpec, round_number: int, checkpoint: CheckpointRef
    ) -> CheckpointRef:
        """Records a stored checkpoint as one of the job's own and references it."""


class Tokens(Protocol):
    """Who may do what, signed."""

    def session(self, participant_id: str) -> tuple[str, float]:
        """Returns a session token and the seconds that it lasts."""

    def grant(self, participant_id: str, job_id: str) -> str:
        """Returns a token to read a job's files."""

"""What can go wrong, as plain exceptions that any room may raise.

The gRPC edge maps them to `google.rpc.Status` (`covey_kit.status`), and clients get the same
exceptions back, so that a caller needn't know whether the callee is local.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

__all__ = [
    "Aborted",
    "AlreadyExists",
    "CoveyError",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "OutOfRange",
    "PermissionDenied",
    "Reason",
    "ResourceExhausted",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Violation",
    "error_class",
]


class Reason(StrEnum):
    """`ErrorReason` of `errors.proto` without its prefix; a test keeps the two equal."""

    INVALID_FIELD = "INVALID_FIELD"
    PACKAGE_MISMATCH = "PACKAGE_MISMATCH"
    DATASET_MISMATCH = "DATASET_MISMATCH"
    SETTINGS_MISMATCH = "SETTINGS_MISMATCH"
    BLOB_MISSING = "BLOB_MISSING"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    PAGE_TOKEN = "PAGE_TOKEN"  # noqa: S105 - the name of an error, not a secret

    BLOB_NOT_FOUND = "BLOB_NOT_FOUND"
    BLOB_REFERENCED = "BLOB_REFERENCED"
    DIGEST_MISMATCH = "DIGEST_MISMATCH"
    SIZE_MISMATCH = "SIZE_MISMATCH"
    OFFSET_MISMATCH = "OFFSET_MISMATCH"
    BLOB_CORRUPT = "BLOB_CORRUPT"
    STORAGE_FULL = "STORAGE_FULL"
    STORAGE_UNAVAILABLE = "STORAGE_UNAVAILABLE"
    RANGE = "RANGE"

    JOB_NOT_FOUND = "JOB_NOT_FOUND"
    JOB_STATE = "JOB_STATE"
    PARTICIPANT_NOT_FOUND = "PARTICIPANT_NOT_FOUND"
    INVITATION_NOT_FOUND = "INVITATION_NOT_FOUND"
    INVITATION_STATE = "INVITATION_STATE"
    NOT_ENOUGH_PARTICIPANTS = "NOT_ENOUGH_PARTICIPANTS"
    ASSIGNMENT_LOST = "ASSIGNMENT_LOST"
    DELTA_NOT_FINITE = "DELTA_NOT_FINITE"
    UNITS_INVALID = "UNITS_INVALID"
    METRIC_INVALID = "METRIC_INVALID"
    ROUND_NOT_FOUND = "ROUND_NOT_FOUND"
    SESSION_REPLACED = "SESSION_REPLACED"

    CHECKPOINT_NOT_FOUND = "CHECKPOINT_NOT_FOUND"
    CHECKPOINT_INVALID = "CHECKPOINT_INVALID"

    TOKEN_MISSING = "TOKEN_MISSING"  # noqa: S105 - the name of an error, not a secret
    TOKEN_INVALID = "TOKEN_INVALID"  # noqa: S105 - the name of an error, not a secret
    TOKEN_EXPIRED = "TOKEN_EXPIRED"  # noqa: S105 - the name of an error, not a secret
    ROLE_FORBIDDEN = "ROLE_FORBIDDEN"
    NO_GRANT = "NO_GRANT"
    CREDENTIAL_MISMATCH = "CREDENTIAL_MISMATCH"
    CONTRACT_VERSION = "CONTRACT_VERSION"

    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    NOT_IMPLEMENTED = "NOT_IMPLEMENTED"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    DEADLINE = "DEADLINE"
    INTERNAL = "INTERNAL"
    UNREACHABLE = "UNREACHABLE"

    MODULE_INVALID = "MODULE_INVALID"
    MODULE_EXPORT_MISSING = "MODULE_EXPORT_MISSING"
    MODULE_TRAP = "MODULE_TRAP"
    MODULE_STATUS = "MODULE_STATUS"
    STEP_TIMEOUT = "STEP_TIMEOUT"
    MEMORY_LIMIT = "MEMORY_LIMIT"
    EXAMPLE_COUNT = "EXAMPLE_COUNT"
    WORKER_DIED = "WORKER_DIED"
    RESULT_NOT_FINITE = "RESULT_NOT_FINITE"
    DEVICE = "DEVICE"
    SHADER_INVALID = "SHADER_INVALID"


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong with a request.

    Attributes:
        field: path of the field as in the contract, such as `package.module.sha256`.
        description: what was expected and what was found.
    """

    field: str
    description: str


class CoveyError(Exception):
    """An error with a stable reason. `str(error)` is the sentence for people.

    Attributes:
        reason: stable name of the cause.
        message: what was expected, what was found, where, what to do next. Goes to the caller:
            no secrets, no paths of the server.
        violations: every violation of the request, not only the first.
        metadata: facts for programs (names to values).
        resource: (type, name) of what was not found or stands in the way.
        retry_after: seconds after which a retry makes sense; None: a retry doesn't help.
    """

    code: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        violations: Sequence[Violation] = (),
        metadata: Mapping[str, str] | None = None,
        resource: tuple[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.violations = tuple(violations)
        self.metadata = dict(metadata or {})
        self.resource = resource
        self.retry_after = retry_after


class InvalidArgument(CoveyError):
    """The request is wrong whatever the state; sending it again won't help."""

    code = "INVALID_ARGUMENT"


class FailedPrecondition(CoveyError):
    """The state forbids it now."""

    code = "FAILED_PRECONDITION"


class NotFound(CoveyError):
    """What the request names isn't there."""

    code = "NOT_FOUND"


class AlreadyExists(CoveyError):
    """Something else is there under that name."""

    code = "ALREADY_EXISTS"


class PermissionDenied(CoveyError):
    """The caller may not."""

    code = "PERMISSION_DENIED"


class Unauthenticated(CoveyError):
    """Nobody knows who the caller is."""

    code = "UNAUTHENTICATED"


class ResourceExhausted(CoveyError):
    """A bound on size, memory or number."""

    code = "RESOURCE_EXHAUSTED"


class Aborted(CoveyError):
    """The caller lost what it worked on."""

    code = "ABORTED"


class OutOfRange(CoveyError):
    """Past the end."""

    code = "OUT_OF_RANGE"


class Unimplemented(CoveyError):
    """A later version answers this."""

    code = "UNIMPLEMENTED"


class Unavailable(CoveyError):
    """Nobody answers now; retry with backoff."""

    code = "UNAVAILABLE"


class DataLoss(CoveyError):
    """Stored bytes are damaged."""

    code = "DATA_LOSS"


class DeadlineExceeded(CoveyError):
    """The call took longer than its bound."""

    code = "DEADLINE_EXCEEDED"


class Internal(CoveyError):
    """A fault of the server."""

    code = "INTERNAL"


_CLASSES: dict[str, type[CoveyError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        FailedPrecondition,
        NotFound,
        AlreadyExists,
        PermissionDenied,
        Unauthenticated,
        ResourceExhausted,
        Aborted,
        OutOfRange,
        Unimplemented,
        Unavailable,
        DataLoss,
        DeadlineExceeded,
        Internal,
    )
}


def error_class(code: str) -> type[CoveyError]:
    """Returns the exception for a canonical gRPC code name; `Internal` for codes that Covey never sends."""
    return _CLASSES.get(code, Internal)

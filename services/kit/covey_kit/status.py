"""`CoveyError` to `google.rpc.Status` and back."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from covey_kit.errors import CoveyError, Internal, Reason, Unavailable, Violation, error_class

__all__ = ["DOMAIN", "from_rpc_error", "from_status", "rpc_errors", "to_status"]

DOMAIN = "covey"
"""`ErrorInfo.domain` of every error."""


def _pack(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def to_status(error: CoveyError) -> status_pb2.Status:
    """Returns the status with all its details: ErrorInfo always; BadRequest, PreconditionFailure,
    ResourceInfo and RetryInfo where they say something."""
    details = [
        _pack(error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=error.metadata))
    ]
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad.field_violations.add(field=violation.field, description=violation.description)
        details.append(_pack(bad))
    if error.code == "FAILED_PRECONDITION":
        failure = error_details_pb2.PreconditionFailure()
        failure.violations.add(
            type=error.reason.value,
            subject=error.resource[1] if error.resource else "",
            description=error.message,
        )
        details.append(_pack(failure))
    if error.resource:
        kind, name = error.resource
        details.append(
            _pack(
                error_details_pb2.ResourceInfo(
                    resource_type=kind, resource_name=name, description=error.message
                )
            )
        )
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.code),
        message=error.message,
        details=details,
    )


def from_status(status: status_pb2.Status) -> CoveyError:
    """Returns the error that a status was made from. A status that isn't ours keeps its code and message."""
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    resource = error_details_pb2.ResourceInfo()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        for target in (info, bad, resource, retry):
            detail.Unpack(target)
    cls = error_class(code_pb2.Code.Name(status.code))
    reason = Reason(info.reason) if info.reason in Reason.__members__ else _default_reason(cls.code)
    return cls(
        reason,
        status.message,
        violations=[Violation(v.field, v.description) for v in bad.field_violations],
        metadata=info.metadata,
        resource=(resource.resource_type, resource.resource_name) if resource.resource_type else None,
        retry_after=retry.retry_delay.ToMilliseconds() / 1000 if retry.HasField("retry_delay") else None,
    )


def _default_reason(code: str) -> Reason:
    return {
        "UNAVAILABLE": Reason.UNREACHABLE,
        "DEADLINE_EXCEEDED": Reason.DEADLINE,
        "UNIMPLEMENTED": Reason.NOT_IMPLEMENTED,
        "RESOURCE_EXHAUSTED": Reason.LIMIT_EXCEEDED,
    }.get(code, Reason.INTERNAL)


def from_rpc_error(error: grpc.RpcError) -> CoveyError:
    """Returns the error behind what a gRPC call raised, also when it never reached a server."""
    status = None
    if isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        try:
            status = rpc_status.from_call(error)  # type: ignore[arg-type]  # aio errors have the same methods
        except ValueError:  # code and details disagree: not one of ours
            status = None
        if status is None:
            code, text = error.code(), error.details() or ""
            cls = error_class(code.name)
            if cls is Unavailable:
                return Unavailable(Reason.UNREACHABLE, f"nobody answers: {text}", retry_after=1.0)
            return cls(_default_reason(cls.code), text or code.name)
        return from_status(status)
    return Internal(Reason.INTERNAL, str(error))


@contextmanager
def rpc_errors() -> Iterator[None]:
    """Turns what gRPC calls raise into `CoveyError`s."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error

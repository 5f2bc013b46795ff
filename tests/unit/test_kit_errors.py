"""The vocabulary of errors, and its way over the wire and back."""

import grpc
import pytest

from covey.v1 import errors_pb2
from covey_kit.errors import (
    CoveyError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Reason,
    Violation,
    error_class,
)
from covey_kit.status import from_status, to_status


def test_reasons_are_those_of_the_contract() -> None:
    """Each reason of errors.proto has its twin in Python and none is made up."""
    contract = {
        name.removeprefix("ERROR_REASON_")
        for name in errors_pb2.ErrorReason.keys()  # noqa: SIM118 - an enum wrapper isn't a dict
        if name != "ERROR_REASON_UNSPECIFIED"
    }

    assert {reason.value for reason in Reason} == contract


def test_every_error_class_has_a_grpc_code_of_its_own() -> None:
    """Each subclass maps to a canonical code that gRPC knows, and back to itself."""
    classes = CoveyError.__subclasses__()

    assert len({cls.code for cls in classes}) == len(classes)
    for cls in classes:
        assert cls.code in grpc.StatusCode.__members__
        assert error_class(cls.code) is cls


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument(
            Reason.PACKAGE_MISMATCH,
            "model.wasm: declared 3 bytes, found 4",
            violations=[Violation("package.module.bytes", "declared 3, found 4"), Violation("a", "b")],
        ),
        NotFound(Reason.JOB_NOT_FOUND, "no job x", resource=("job", "x"), metadata={"job": "x"}),
        FailedPrecondition(Reason.JOB_STATE, "it is PAUSED", resource=("job", "x"), retry_after=2.5),
    ],
)
def test_errors_survive_the_wire(error: CoveyError) -> None:
    """What a server raises, the client raises: class, reason, message and all details."""
    back = from_status(to_status(error))

    assert type(back) is type(error)
    assert (back.reason, back.message, back.violations) == (error.reason, error.message, error.violations)
    assert (back.metadata, back.resource, back.retry_after) == (
        error.metadata,
        error.resource,
        error.retry_after,
    )

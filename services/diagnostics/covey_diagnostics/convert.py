"""Snapshots and executions between the contract and the domain."""

from covey.v1 import diagnostics_service_pb2, snapshot_pb2
from covey_diagnostics.domain import Execution, Order, Staleness

__all__ = ["execution_to_proto", "order_from_proto"]

_STALENESS = {
    Staleness.CURRENT: diagnostics_service_pb2.ParticipantExecution.STALENESS_UNSPECIFIED,
    Staleness.SILENT: diagnostics_service_pb2.ParticipantExecution.STALENESS_SILENT,
    Staleness.DISCONNECTED: diagnostics_service_pb2.ParticipantExecution.STALENESS_DISCONNECTED,
}


def order_from_proto(snapshot: snapshot_pb2.Snapshot) -> Order:
    """Returns where `snapshot` stands among those of its participant."""
    return Order(snapshot.run_start_time.ToMicroseconds() / 1e6, snapshot.sequence)


def execution_to_proto(
    execution: Execution[snapshot_pb2.Snapshot], monotonic: float
) -> diagnostics_service_pb2.ParticipantExecution:
    """Returns `execution` as it stands at `monotonic`."""
    found = diagnostics_service_pb2.ParticipantExecution(
        snapshot=execution.snapshot, staleness=_STALENESS[execution.staleness(monotonic)]
    )
    found.receive_time.FromMicroseconds(round(execution.receive_time * 1e6))
    return found

"""No method of the contract is forgotten."""

import importlib

import pytest
from google.protobuf import descriptor_pool

from covey.v1 import (
    coordinator_service_pb2_grpc,
    diagnostics_service_pb2_grpc,
    participant_service_pb2_grpc,
    server_service_pb2_grpc,
    storage_service_pb2_grpc,
    work_service_pb2_grpc,
)

SERVICERS = [
    (
        "CoordinatorService",
        coordinator_service_pb2_grpc.CoordinatorServiceServicer,
        "covey_coordinator.transport.coordinator:CoordinatorServicer",
    ),
    (
        "WorkService",
        work_service_pb2_grpc.WorkServiceServicer,
        "covey_coordinator.transport.work:WorkServicer",
    ),
    (
        "StorageService",
        storage_service_pb2_grpc.StorageServiceServicer,
        "covey_storage.transport.servicer:StorageServicer",
    ),
    (
        "DiagnosticsService",
        diagnostics_service_pb2_grpc.DiagnosticsServiceServicer,
        "covey_diagnostics.transport:DiagnosticsServicer",
    ),
    (
        "ParticipantService",
        participant_service_pb2_grpc.ParticipantServiceServicer,
        "covey_participant.transport.participant_servicer:ParticipantServicer",
    ),
    ("ServerService", server_service_pb2_grpc.ServerServiceServicer, "covey_kit.serve:ServerServicer"),
]


@pytest.mark.parametrize(("service", "base", "path"), SERVICERS, ids=[name for name, _, _ in SERVICERS])
def test_every_method_is_answered_by_our_own_code(service: str, base: type, path: str) -> None:
    """A method added to the contract fails here until its servicer has it."""
    module, _, name = path.partition(":")
    servicer = getattr(importlib.import_module(module), name)

    methods = descriptor_pool.Default().FindServiceByName(f"covey.v1.{service}").methods
    missing = [m.name for m in methods if getattr(servicer, m.name) is getattr(base, m.name)]

    assert missing == []


def test_every_service_of_the_contract_is_listed_here() -> None:
    """A service added to the contract fails here until somebody serves it."""
    pool = descriptor_pool.Default()
    files = {pool.FindServiceByName(f"covey.v1.{name}").file.name for name, _, _ in SERVICERS}
    services = {service for file in files for service in pool.FindFileByName(file).services_by_name}

    assert services == {name for name, _, _ in SERVICERS}

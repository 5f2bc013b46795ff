"""The policies that the contract carries."""

import json

from google.protobuf import descriptor_pool

from covey_kit.caller import Role
from covey_kit.policy import policies, service_config

SERVICES = (
    "CoordinatorService",
    "WorkService",
    "ParticipantService",
    "StorageService",
    "DiagnosticsService",
    "ServerService",
)


def test_every_method_has_a_policy_with_roles_and_a_bound() -> None:
    """No method is without roles, and none without a deadline or an idle bound, but watches and Join."""
    pool = descriptor_pool.Default()
    unbounded = set()
    for name in SERVICES:
        for method in pool.FindServiceByName(f"covey.v1.{name}").methods:
            policy = policies()[f"/covey.v1.{name}/{method.name}"]
            assert policy.roles, policy.method
            if policy.deadline is None and policy.idle_timeout is None:
                unbounded.add(method.name)

    assert unbounded == {"Join", "WatchJob", "WatchState", "WatchSnapshots"}


def test_only_calls_that_may_be_repeated_are_retried() -> None:
    """Streams are never retried by the channel."""
    pool = descriptor_pool.Default()
    for name in SERVICES:
        for method in pool.FindServiceByName(f"covey.v1.{name}").methods:
            policy = policies()[f"/covey.v1.{name}/{method.name}"]
            if method.client_streaming or method.server_streaming:
                assert not policy.retry, policy.method
            if policy.retry:
                assert method.GetOptions().idempotency_level in {1, 2}, policy.method


def test_the_service_config_is_what_grpc_takes() -> None:
    """Every policy becomes a method config with its own timeout."""
    config = json.loads(json.dumps(service_config()))
    by_name = {
        f"/{entry['name'][0]['service']}/{entry['name'][0]['method']}": entry
        for entry in config["methodConfig"]
    }

    assert set(by_name) == set(policies())
    assert by_name["/covey.v1.CoordinatorService/GetJob"]["timeout"] == "10s"
    assert "timeout" not in by_name["/covey.v1.StorageService/WriteBlob"]


def test_who_may_read_blobs() -> None:
    """Viewers and participants without a grant can't read blobs."""
    assert policies()["/covey.v1.StorageService/ReadBlob"].roles == {Role.OWNER, Role.SERVICE, Role.GRANT}

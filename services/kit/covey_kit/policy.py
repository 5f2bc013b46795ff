"""The policies of all methods, read from the options in the contract."""

from dataclasses import dataclass
from functools import cache

from google.protobuf import descriptor

from covey.v1 import (
    coordinator_service_pb2,
    diagnostics_service_pb2,
    participant_service_pb2,
    policy_pb2,
    server_service_pb2,
    storage_service_pb2,
    work_service_pb2,
)
from covey_kit.caller import Role

__all__ = ["MethodPolicy", "policies", "service_config"]

_FILES = (
    coordinator_service_pb2,
    diagnostics_service_pb2,
    participant_service_pb2,
    server_service_pb2,
    storage_service_pb2,
    work_service_pb2,
)
_RETRY_POLICY = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


@dataclass(frozen=True)
class MethodPolicy:
    """What the contract says of one method.

    Attributes:
        method: `/covey.v1.Service/Method`.
        roles: who may call.
        deadline: default deadline in seconds; None for streams that last.
        idle_timeout: longest silence of a bulk stream in seconds; None: unbounded.
        retry: whether a client may repeat the call by itself on UNAVAILABLE.
        command: whether it changes something on an owner's behalf, and so belongs into the audit log.
    """

    method: str
    roles: frozenset[Role]
    deadline: float | None
    idle_timeout: float | None
    retry: bool
    command: bool


def _read(method: descriptor.MethodDescriptor) -> MethodPolicy | None:
    options = method.GetOptions()
    if not options.HasExtension(policy_pb2.policy):
        return None
    policy = options.Extensions[policy_pb2.policy]
    names = (policy_pb2.Role.Name(role).removeprefix("ROLE_") for role in policy.roles)
    roles = frozenset(Role[name] for name in names)
    return MethodPolicy(
        method=f"/{method.containing_service.full_name}/{method.name}",
        roles=roles,
        deadline=policy.default_deadline.ToMilliseconds() / 1000
        if policy.HasField("default_deadline")
        else None,
        idle_timeout=policy.idle_timeout.ToMilliseconds() / 1000 if policy.HasField("idle_timeout") else None,
        retry=policy.retry == policy_pb2.RETRY_UNAVAILABLE,
        command=options.idempotency_level != options.NO_SIDE_EFFECTS and Role.OWNER in roles,
    )


@cache
def policies() -> dict[str, MethodPolicy]:
    """Returns the policy of every method of the contract by `/covey.v1.Service/Method`."""
    found = {}
    for file in _FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                policy = _read(method)
                if policy is not None:
                    found[policy.method] = policy
    return found


@cache
def service_config() -> dict[str, object]:
    """Returns the gRPC service config (https://grpc.io/docs/guides/service-config/) that the policies
    make: a timeout for each method with a deadline, retries where they are safe."""
    configs = []
    for policy in policies().values():
        _, service, method = policy.method.split("/")
        config: dict[str, object] = {"name": [{"service": service, "method": method}]}
        if policy.deadline is not None:
            config["timeout"] = f"{policy.deadline:g}s"
        if policy.retry:
            config["retryPolicy"] = _RETRY_POLICY
        configs.append(config)
    return {"methodConfig": configs}

"""What every port does before a handler runs, over a real connection."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import structlog.testing
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from covey.v1 import common_pb2
from covey.v1 import diagnostics_service_pb2 as diag
from covey.v1 import diagnostics_service_pb2_grpc as diag_grpc
from covey.v1 import server_service_pb2 as server
from covey.v1 import server_service_pb2_grpc as server_grpc
from covey.v1 import storage_service_pb2 as storage
from covey.v1 import storage_service_pb2_grpc as storage_grpc
from covey_kit.caller import Role, current_caller
from covey_kit.channel import connect
from covey_kit.deadline import remaining
from covey_kit.errors import (
    CoveyError,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Reason,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from covey_kit.serve import Host, ServeOptions
from covey_kit.status import rpc_errors
from covey_kit.tokens import SigningKey, Verifier

SHA = "0" * 64


class Servicer(storage_grpc.StorageServiceServicer):
    """Answers with what the kit tells it."""

    async def StatBlob(self, request: storage.StatBlobRequest, context: Any) -> storage.StatBlobResponse:
        caller = current_caller()
        holders = [caller.role.value, caller.subject, caller.job_id or ""]
        return storage.StatBlobResponse(blob=storage.StoredBlob(holders=holders))

    async def QueryWrite(
        self, request: storage.QueryWriteRequest, context: Any
    ) -> storage.QueryWriteResponse:
        await asyncio.sleep(60)
        raise AssertionError

    async def DeleteBlob(
        self, request: storage.DeleteBlobRequest, context: Any
    ) -> storage.DeleteBlobResponse:
        raise RuntimeError("secret path /etc/shadow")

    async def GetInventory(
        self, request: storage.GetInventoryRequest, context: Any
    ) -> storage.GetInventoryResponse:
        inside = remaining()
        task = asyncio.create_task(_remaining())
        assert inside is not None
        return storage.GetInventoryResponse(
            blob_count=round(inside), next_page_token="none" if await task is None else "inherited"
        )

    async def WriteBlob(
        self, request_iterator: AsyncIterator[storage.WriteBlobRequest], context: Any
    ) -> storage.WriteBlobResponse:
        size = 0
        async for request in request_iterator:
            size += len(request.data)
        return storage.WriteBlobResponse(blob=common_pb2.BlobRef(sha256=SHA, size_bytes=size))

    async def ReadBlob(
        self, request: storage.ReadBlobRequest, context: Any
    ) -> AsyncIterator[storage.ReadBlobResponse]:
        yield storage.ReadBlobResponse(data=b"x")
        raise NotFound(Reason.BLOB_NOT_FOUND, "gone", resource=("blob", request.sha256))


async def _remaining() -> float | None:
    return remaining()


class App:
    """Serves the servicer above."""

    service_names = ("covey.v1.StorageService",)

    def register(self, server: grpc.aio.Server) -> None:
        storage_grpc.add_StorageServiceServicer_to_server(Servicer(), server)  # type: ignore[abstract]  # unfilled methods answer UNIMPLEMENTED

    async def start(self) -> None:
        pass

    async def drain(self) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.fixture
def key() -> SigningKey:
    """The key whose tokens the server trusts."""
    return SigningKey.generate()


@pytest.fixture
async def address(key: SigningKey) -> AsyncIterator[str]:
    """Address of a running server."""
    host = Host([App()], Verifier([key.public_pem]), ServeOptions())
    yield await host.start()
    await host.stop(grace=0)


async def stat(address: str, token: str | None, sha: str = SHA) -> list[str]:
    async with connect(address, token) as channel:
        with rpc_errors():
            request = storage.StatBlobRequest(sha256=sha)
            found = await storage_grpc.StorageServiceStub(channel).StatBlob(request)
        return list(found.blob.holders)


async def test_handlers_learn_who_calls(address: str, key: SigningKey) -> None:
    """Role, subject and job of the token reach the handler."""
    assert await stat(address, key.issue("p1", Role.GRANT, 60, job_id="j")) == ["grant", "p1", "j"]


async def test_no_token_an_alien_token_and_a_wrong_role_are_told_apart(address: str, key: SigningKey) -> None:
    """UNAUTHENTICATED for nobody we know, PERMISSION_DENIED for somebody who may not."""
    with pytest.raises(Unauthenticated) as missing:
        await stat(address, None)
    with pytest.raises(Unauthenticated) as alien:
        await stat(address, SigningKey.generate().issue("me", Role.OWNER, 60))
    with pytest.raises(PermissionDenied) as viewer:
        await stat(address, key.issue("v", Role.VIEWER, 60))
    with pytest.raises(PermissionDenied) as participant:
        await stat(address, key.issue("p", Role.PARTICIPANT, 60))

    assert missing.value.reason is Reason.TOKEN_MISSING
    assert alien.value.reason is Reason.TOKEN_INVALID
    assert viewer.value.reason is Reason.ROLE_FORBIDDEN
    assert participant.value.reason is Reason.NO_GRANT


async def test_bounds_are_enforced_with_field_paths(address: str, key: SigningKey) -> None:
    """A request out of bounds never reaches the handler; the violation names the field."""
    with pytest.raises(InvalidArgument) as caught:
        await stat(address, key.issue("me", Role.OWNER, 60), sha="nonsense")

    assert [violation.field for violation in caught.value.violations] == ["sha256"]


async def test_stream_headers_are_checked_and_bulk_bytes_pass(address: str, key: SigningKey) -> None:
    """Client streams: a bad header is refused, data isn't looked at."""
    async with connect(address, key.issue("me", Role.OWNER, 60)) as channel:
        stub = storage_grpc.StorageServiceStub(channel)

        async def write(sha: str) -> storage.WriteBlobResponse:
            async def messages() -> AsyncIterator[storage.WriteBlobRequest]:
                blob = common_pb2.BlobRef(sha256=sha, size_bytes=3)
                header = storage.WriteBlobHeader(blob=blob)
                yield storage.WriteBlobRequest(header=header)
                yield storage.WriteBlobRequest(data=b"abc")

            with rpc_errors():
                return await stub.WriteBlob(messages())

        assert (await write(SHA)).blob.size_bytes == 3
        with pytest.raises(InvalidArgument) as caught:
            await write("nonsense")
        with pytest.raises(InvalidArgument), rpc_errors():
            await stub.WriteBlob(_one(storage.WriteBlobRequest()))

    assert [violation.field for violation in caught.value.violations] == ["header.blob.sha256"]


async def _drain(channel: grpc.aio.Channel, got: list[bytes]) -> None:
    request = storage.ReadBlobRequest(sha256=SHA)
    with rpc_errors():
        async for message in storage_grpc.StorageServiceStub(channel).ReadBlob(request):
            got.append(message.data)  # noqa: PERF401 - what came before the error counts


async def _one(message: Any) -> AsyncIterator[Any]:
    yield message


async def test_errors_in_the_middle_of_a_stream_keep_their_details(address: str, key: SigningKey) -> None:
    """What was sent before arrives, then the error with its resource."""
    got: list[bytes] = []
    async with connect(address, key.issue("me", Role.OWNER, 60)) as channel:
        with pytest.raises(NotFound) as caught:
            await _drain(channel, got)

    assert got == [b"x"]
    assert caught.value.resource == ("blob", SHA)


async def test_a_fault_of_the_server_tells_no_secrets(address: str, key: SigningKey) -> None:
    """The caller gets a request id to look for in the log, nothing else."""
    async with connect(address, key.issue("me", Role.OWNER, 60)) as channel:
        with pytest.raises(Internal) as caught, rpc_errors():
            await storage_grpc.StorageServiceStub(channel).DeleteBlob(storage.DeleteBlobRequest(sha256=SHA))

    assert "shadow" not in str(caught.value)
    assert caught.value.metadata["request_id"] in str(caught.value)


async def test_commands_of_owners_are_logged_and_reads_are_not(address: str, key: SigningKey) -> None:
    """The audit line names method, caller and result; refused commands are in it too."""
    with structlog.testing.capture_logs() as lines:
        async with connect(address, key.issue("ada", Role.OWNER, 60)) as channel:
            stub = storage_grpc.StorageServiceStub(channel)
            header = storage.WriteBlobHeader(blob=common_pb2.BlobRef(sha256=SHA))
            await stub.WriteBlob(_one(storage.WriteBlobRequest(header=header)))
            await stub.StatBlob(storage.StatBlobRequest(sha256=SHA))
            with pytest.raises(InvalidArgument), rpc_errors():
                await stub.DeleteBlob(storage.DeleteBlobRequest(sha256="nonsense"))

    audit = [(line["method"], line["who"], line["result"]) for line in lines if line["event"] == "command"]
    assert audit == [
        ("/covey.v1.StorageService/WriteBlob", "ada", "OK"),
        ("/covey.v1.StorageService/DeleteBlob", "ada", "INVALID_FIELD"),
    ]


async def test_calls_end_at_their_deadline(address: str, key: SigningKey) -> None:
    """A handler that hangs is cut at the caller's deadline."""
    async with connect(address, key.issue("me", Role.OWNER, 60)) as channel:
        with pytest.raises(DeadlineExceeded), rpc_errors():
            await storage_grpc.StorageServiceStub(channel).QueryWrite(
                storage.QueryWriteRequest(sha256=SHA), timeout=0.2
            )


async def test_the_deadline_is_the_calls_and_not_of_tasks_it_starts(address: str, key: SigningKey) -> None:
    """The handler sees what is left; a task that outlives the call isn't bound by it."""
    async with connect(address, key.issue("me", Role.OWNER, 60)) as channel:
        found = await storage_grpc.StorageServiceStub(channel).GetInventory(
            storage.GetInventoryRequest(), timeout=7
        )

    assert found.blob_count == 7
    assert found.next_page_token == "none"


async def test_methods_of_services_that_arent_there_are_unimplemented(address: str, key: SigningKey) -> None:
    """Asking the wrong port gets UNIMPLEMENTED."""
    async with connect(address, key.issue("me", Role.OWNER, 60)) as channel:
        with pytest.raises(Unimplemented), rpc_errors():
            await diag_grpc.DiagnosticsServiceStub(channel).ListParticipantExecutions(
                diag.ListParticipantExecutionsRequest()
            )


async def test_every_port_has_info_health_and_reflection(address: str) -> None:
    """All three answer without a token."""
    async with connect(address) as channel:
        info = await server_grpc.ServerServiceStub(channel).GetServerInfo(server.GetServerInfoRequest())
        stub: Any = health_pb2_grpc.HealthStub(channel)
        health = await stub.Check(health_pb2.HealthCheckRequest(service="covey.v1.StorageService"))
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        reflecting: Any = reflection_pb2_grpc.ServerReflectionStub(cast("Any", channel))
        answers = reflecting.ServerReflectionInfo(_one(request))
        listed = [s.name async for a in answers for s in a.list_services_response.service]

    assert info.contract_version == "1.0"
    assert list(info.services) == ["covey.v1.ServerService", "covey.v1.StorageService"]
    assert info.limits.message_bytes > info.limits.bulk_message_bytes > 0
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert {"covey.v1.StorageService", "covey.v1.ServerService", "grpc.health.v1.Health"} <= set(listed)


async def test_a_taken_port_and_an_open_port_are_refused_in_words(address: str, key: SigningKey) -> None:
    """A second server on the port, and plain text beyond loopback, are errors that say what to do."""
    verifier = Verifier([key.public_pem])

    second = Host([], verifier, ServeOptions(port=int(address.rpartition(":")[2])))
    with pytest.raises(OSError, match="the port is taken"):
        await second.start()
    await second.stop()
    with pytest.raises(ValueError, match="--insecure"):
        Host([], verifier, ServeOptions(host="0.0.0.0"))
    with pytest.raises(ValueError, match="both"):
        Host([], verifier, ServeOptions(tls_cert=Path("x")))


async def test_nobody_there_is_unreachable() -> None:
    """The error says that nobody answers."""
    with pytest.raises(Unavailable) as caught:
        await stat("127.0.0.1:1", None)

    assert caught.value.reason is Reason.UNREACHABLE


def test_every_error_has_words() -> None:
    """An error without a message can't be made by accident."""
    assert str(CoveyError(Reason.INTERNAL, "what happened")) == "what happened"

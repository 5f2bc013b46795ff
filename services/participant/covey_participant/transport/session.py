"""The stream of commands from the coordinator: joined, kept, and joined again."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import grpc.aio
import structlog

from covey.v1 import work_service_pb2, work_service_pb2_grpc
from covey_kit.channel import connect
from covey_kit.errors import (
    CoveyError,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    Reason,
    Unavailable,
)
from covey_kit.status import rpc_errors
from covey_kit.validation import check
from covey_kit.version import CONTRACT_VERSION
from covey_participant import convert
from covey_participant.domain.backoff import Backoff
from covey_participant.domain.invitations import Invitation
from covey_participant.domain.values import Assignment, Device, Identity

log = structlog.get_logger(__name__)

WELCOME_SECONDS = 15.0

_FATAL = frozenset({Reason.CREDENTIAL_MISMATCH, Reason.CONTRACT_VERSION})
"""Trying again changes nothing: a person must do something."""


class Commands(Protocol):
    """Who acts on what the coordinator says."""

    def joined(self, progress_interval: float) -> None:
        """The stream is open."""

    def left(self, reason: str) -> None:
        """The stream ended."""

    def invited(self, invitation: Invitation) -> None:
        """An invitation came, or came again."""

    def uninvited(self, invitation_id: str, reason: str) -> None:
        """An invitation or an accepted job ended."""

    def assigned(self, assignment: Assignment) -> None:
        """Work came."""

    def cancelled(self, assignment_id: str, attempt: int, reason: str) -> None:
        """Work is no longer wanted."""

    def held(self) -> list[tuple[str, int]]:
        """Returns what is in hand."""
        ...


class Links:
    """Channels to the three services, as the last welcome named them.

    Args:
        address: the coordinator's `HOST:PORT`.
        connect_to: makes a channel (for TLS); the default is plain text.
    """

    def __init__(
        self,
        address: str,
        connect_to: Callable[[str, Callable[[], str]], grpc.aio.Channel] = connect,
    ) -> None:
        self._connect = connect_to
        self._token = ""
        self._coordinator_address = address
        self.coordinator = connect_to(address, self._current_token)
        self._storage: tuple[str, grpc.aio.Channel] = (address, self.coordinator)
        self._diagnostics: tuple[str, grpc.aio.Channel] = (address, self.coordinator)
        self._connected = False

    def _current_token(self) -> str:
        return self._token

    async def welcome(self, token: str, storage_address: str, diagnostics_address: str) -> None:
        """Takes over a session's token and addresses."""
        self._token = token
        self._storage = await self._moved(self._storage, storage_address)
        self._diagnostics = await self._moved(self._diagnostics, diagnostics_address)
        self._connected = True

    async def _moved(self, old: tuple[str, grpc.aio.Channel], address: str) -> tuple[str, grpc.aio.Channel]:
        address = address or self._coordinator_address
        if address == old[0]:
            return old
        if old[1] is not self.coordinator:
            await old[1].close()
        if address == self._coordinator_address:
            return address, self.coordinator
        return address, self._connect(address, self._current_token)

    def storage(self) -> grpc.aio.Channel:
        """Returns the channel to storage."""
        return self._storage[1]

    def diagnostics(self) -> grpc.aio.Channel | None:
        """Returns the channel to diagnostics; None before the first welcome."""
        return self._diagnostics[1] if self._connected else None

    async def close(self) -> None:
        """Closes all of them at once."""
        for channel in {
            id(c): c for c in (self._storage[1], self._diagnostics[1], self.coordinator)
        }.values():
            await channel.close(None)


class Session:
    """Joins, hands each command to `commands`, and joins again when the stream ends.

    Args:
        links: channels; the welcome's token and addresses go into it.
        identity, display_name, device: what is said when joining.
        commands: acts on what comes.
        backoff: waits between tries.
    """

    def __init__(
        self,
        links: Links,
        *,
        identity: Identity,
        display_name: str,
        device: Callable[[], Device],
        commands: Commands,
        backoff: Backoff,
    ) -> None:
        self._links = links
        self._stub = work_service_pb2_grpc.WorkServiceStub(links.coordinator)
        self._identity = identity
        self._display_name = display_name
        self._device = device
        self._commands = commands
        self._backoff = backoff
        self._quiet = False

    async def run(self) -> None:
        """Stays joined until cancelled.

        Raises:
            PermissionDenied: `CREDENTIAL_MISMATCH`: the id belongs to another device.
            FailedPrecondition: `CONTRACT_VERSION`: one side is too old.
        """
        while True:
            try:
                await self._join()
                self._ended("the coordinator ended the stream")
            except (PermissionDenied, FailedPrecondition) as error:
                if error.reason in _FATAL:
                    self._commands.left(error.message)
                    raise
                self._ended(error.message)
            except CoveyError as error:
                self._ended(error.message)
            except TimeoutError:
                self._ended(f"no welcome within {WELCOME_SECONDS:g} s")
            await asyncio.sleep(self._backoff.next())

    def _ended(self, reason: str) -> None:
        self._commands.left(reason)
        if not self._quiet:  # once, not at every try
            self._quiet = True
            log.warning("not connected to the coordinator; trying again until it answers", reason=reason)

    async def _join(self) -> None:
        with rpc_errors():
            call = self._stub.Join(self._request())
            try:
                async with asyncio.timeout(WELCOME_SECONDS):
                    first = await call.read()
                if not isinstance(first, work_service_pb2.JoinResponse):
                    raise Unavailable(Reason.UNREACHABLE, "the stream ended before it began")
                await self._welcome(first)
                while isinstance(message := await call.read(), work_service_pb2.JoinResponse):
                    await self._act_safely(message)
            finally:
                call.cancel()

    def _request(self) -> work_service_pb2.JoinRequest:
        return work_service_pb2.JoinRequest(
            participant_id=self._identity.participant_id,
            display_name=self._display_name,
            credential=self._identity.credential,
            device=convert.device_to_proto(self._device()),
            contract_version=CONTRACT_VERSION,
            held=[
                work_service_pb2.HeldAssignment(assignment_id=key[0], attempt=key[1])
                for key in self._commands.held()
            ],
        )

    async def _welcome(self, message: work_service_pb2.JoinResponse) -> None:
        if message.WhichOneof("command") != "welcome":
            raise Unavailable(Reason.UNREACHABLE, "the first command wasn't a welcome")
        welcome = message.welcome
        await self._links.welcome(welcome.session_token, welcome.storage_address, welcome.diagnostics_address)
        self._backoff.reset()
        self._quiet = False
        interval = welcome.progress_interval.ToMilliseconds() / 1000 or 2.0
        log.info("joined", participant=self._identity.participant_id, display_name=self._display_name)
        self._commands.joined(interval)

    async def _act_safely(self, message: work_service_pb2.JoinResponse) -> None:
        """Acts on a command; one that breaks the contract is left aside, whatever it is."""
        try:
            check(message)
            await self._act(message)
        except (InvalidArgument, ValueError) as error:
            log.warning("a command that isn't of this contract was left aside", reason=str(error))

    async def _act(self, message: work_service_pb2.JoinResponse) -> None:
        match message.WhichOneof("command"):
            case "welcome":
                await self._welcome(message)
            case "invitation":
                self._commands.invited(convert.invitation_from_proto(message.invitation))
            case "invitation_ended":
                ended = message.invitation_ended
                self._commands.uninvited(ended.invitation_id, ended.reason)
            case "assignment":
                self._commands.assigned(convert.assignment_from_proto(message.assignment))
            case "cancel":
                cancel = message.cancel
                self._commands.cancelled(cancel.assignment_id, cancel.attempt, cancel.reason)
            case "drain":
                log.info("the coordinator stops soon", reason=message.drain.reason)
            case _:
                log.warning("a command of a newer contract was left aside")

"""The device as a whole: what is set, whom it belongs to, what it was invited to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

import structlog

from covey_kit.errors import CoveyError, InvalidArgument, Reason, Unavailable, Violation
from covey_participant.domain.backend import Choice, choose_backend
from covey_participant.domain.invitations import (
    Invitation,
    Invitations,
    InvitationState,
    accepts_by_itself,
)
from covey_participant.domain.values import Assignment, Device, DeviceSettings, Package

log = structlog.get_logger(__name__)


class Answers(Protocol):
    """Carries an answer to the coordinator."""

    async def respond(self, invitation_id: str, *, accept: bool) -> InvitationState:
        """Answers, and returns where the invitation stands then. Raises CoveyError."""
        ...


class DeviceControl:
    """Settings, invitations and the state of the connection, for the person at the device.

    Args:
        settings: in force at the start.
        save: keeps settings; awaited before they are in force.
        device: describes the device.
        answers: carries answers to invitations.
    """

    def __init__(
        self,
        *,
        settings: DeviceSettings,
        save: Callable[[DeviceSettings], Awaitable[None]],
        device: Callable[[], Device],
        answers: Answers,
    ) -> None:
        self.settings = settings
        self.device = device
        self.invitations = Invitations()
        self.connected = False
        self.disconnected_reason = "not connected yet"
        self._save = save
        self._answers = answers
        self._news = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()

    # --- settings -----------------------------------------------------------------------------

    async def set(self, **changes: Any) -> DeviceSettings:
        """Changes settings, on disk first; they hold from the next assignment on."""
        settings = replace(self.settings, **changes)
        await self._save(settings)
        self.settings = settings
        self.changed()
        return settings

    async def set_max_local_workers(self, workers: int) -> DeviceSettings:
        """Bounds the local workers of an assignment.

        Raises:
            InvalidArgument: 0, or more than the device's cores.
        """
        cores = self.device().cpus
        if not 1 <= workers <= cores:
            what = f"expected 1 to {cores} (the device's cores), found {workers}"
            raise InvalidArgument(
                Reason.INVALID_FIELD,
                f"max_local_workers: {what}",
                violations=[Violation("max_local_workers", what)],
            )
        return await self.set(max_local_workers=workers)

    @property
    def workers_allowed(self) -> int:
        """Local workers that an assignment may use."""
        return self.settings.max_local_workers or self.device().cpus

    # --- backends -----------------------------------------------------------------------------

    def choose(self, assignment: Assignment, device_error: str = "") -> Choice:
        """Picks the backend for an assignment. `device_error`: what the GPU failed with when it tried."""
        return self.probe(assignment.package, device_error)

    def probe(self, package: Package, device_error: str = "") -> Choice:
        """Says which backend a package would get here, and why not the GPU."""
        return choose_backend(package, self.settings, self.device().adapters, device_error=device_error)

    # --- connection ---------------------------------------------------------------------------

    def joined(self) -> None:
        """The coordinator answers."""
        self.connected, self.disconnected_reason = True, ""
        self.changed()

    def left(self, reason: str) -> None:
        """The coordinator is gone."""
        self.connected, self.disconnected_reason = False, reason
        self.changed()

    # --- invitations --------------------------------------------------------------------------

    def invited(self, invitation: Invitation) -> None:
        """Keeps an invitation, and accepts it if that is the device's policy."""
        self.invitations.take(invitation)
        self.changed()
        if accepts_by_itself(invitation, accept_all=self.settings.accept_all):
            task = asyncio.create_task(self._accept(invitation))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif invitation.state is InvitationState.PENDING:
            log.info(
                "invited: waiting for an answer",
                invitation=invitation.invitation_id,
                job=invitation.job_display_name or invitation.job_id,
                package=f"{invitation.package_name} {invitation.package_version}",
                bytes=invitation.total_bytes,
            )

    def uninvited(self, invitation_id: str, reason: str) -> None:
        """Notes that an invitation ended."""
        log.info("invitation ended", invitation=invitation_id, reason=reason)
        self.invitations.end(invitation_id)
        self.changed()

    async def _accept(self, invitation: Invitation) -> None:
        try:
            await self.respond(invitation.invitation_id, accept=True)
        except CoveyError as error:
            log.warning("invitation not accepted", invitation=invitation.invitation_id, message=error.message)

    async def respond(self, invitation_id: str, *, accept: bool) -> Invitation:
        """Answers an invitation.

        Raises:
            NotFound, FailedPrecondition: there is no such invitation, or it can't be answered so.
            Unavailable: the device isn't connected.
        """
        known = self.invitations.check_answer(invitation_id, accept=accept)
        if not self.connected:
            raise Unavailable(
                Reason.UNREACHABLE, f"the coordinator can't be told now: {self.disconnected_reason}"
            )
        state = await self._answers.respond(invitation_id, accept=accept)
        log.info("invitation answered", invitation=invitation_id, job=known.job_id, state=state.value)
        answered = self.invitations.answered(invitation_id, state)
        self.changed()
        return answered or replace(known, state=state)

    # --- watching -----------------------------------------------------------------------------

    def changed(self) -> None:
        """Says that there is something new to show."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def changes(self) -> AsyncIterator[None]:
        """Yields at once and then whenever something changed; changes meanwhile are one."""
        while True:
            news = self._news
            yield
            await news.wait()

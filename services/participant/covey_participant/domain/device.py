"""The device as a whole: what is set, whom it belongs to, what it was invited to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

import structlog

from covey_kit.errors import CoveyError, InvalidArgument, Reason, Unavailable, Violation
from covey_participant.domain.backend import Choice, Fallback, choose_backend
from covey_participant.domain.failure import BackendFailure
from covey_participant.domain.invitations import (
    Invitation,
    Invitations,
    InvitationState,
    accepts_by_itself,
)
from covey_participant.domain.values import (
    Assignment,
    Backend,
    Config,
    Device,
    DeviceSettings,
    Kind,
    Package,
    Preference,
)

log = structlog.get_logger(__name__)

MOST_DEVICE_ERRORS = 3
"""Failures of the GPU after which the rest of a job runs on the CPU here: a hang takes a step's time."""

MOST_JOBS = 256


class Gpu(Protocol):
    """What is known of the GPU."""

    async def found(self) -> None:
        """Returns once the device knows its adapters."""
        ...

    async def plan_bytes(self, package: Package, config: Config) -> int | None:
        """Returns the GPU memory that a package's plan takes; None: its archive isn't here yet."""
        ...


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
        gpu: what is known of the GPU.
    """

    def __init__(
        self,
        *,
        settings: DeviceSettings,
        save: Callable[[DeviceSettings], Awaitable[None]],
        device: Callable[[], Device],
        answers: Answers,
        gpu: Gpu,
    ) -> None:
        self.settings = settings
        self.device = device
        self.invitations = Invitations()
        self.connected = False
        self.disconnected_reason = "not connected yet"
        self._save = save
        self._answers = answers
        self._gpu = gpu
        self._failures: dict[str, list[str]] = {}
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

    async def choose(self, assignment: Assignment, failure: BackendFailure | None = None) -> Choice:
        """Picks the backend for an assignment. A job whose GPU work keeps failing here stays on the CPU."""
        failures = self._failures.setdefault(assignment.job_id, [])
        error, failed_as = "", Fallback.DEVICE_ERROR
        if failure is not None:
            error, failed_as = failure.message, failure.fallback
            if failed_as is Fallback.DEVICE_ERROR:
                failures.append(error)
        elif len(failures) >= MOST_DEVICE_ERRORS:
            error = (
                f"{failures[-1]} (the GPU failed {len(failures)} times with this job: it isn't tried again)"
            )
        if len(self._failures) > MOST_JOBS:
            del self._failures[next(iter(self._failures))]
        choice = await self._choose(assignment.package, assignment.config, error, failed_as)
        return _modules_own(assignment, choice)

    async def adapters_found(self) -> None:
        """Returns once the device knows its adapters."""
        await self._gpu.found()

    async def probe(self, package: Package, config: Config) -> Choice:
        """Says which backend a package would get here, and why not the GPU."""
        return await self._choose(package, config)

    async def _choose(
        self,
        package: Package,
        config: Config,
        error: str = "",
        failed_as: Fallback = Fallback.DEVICE_ERROR,
    ) -> Choice:
        plan_bytes = None
        if package.gpu is not None and self.settings.preference is not Preference.CPU:
            await self._gpu.found()
            plan_bytes = await self._gpu.plan_bytes(package, config)
        return choose_backend(
            package,
            self.settings,
            self.device().adapters,
            plan_bytes=plan_bytes,
            device_error=error,
            failed_as=failed_as,
        )

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


def _modules_own(assignment: Assignment, choice: Choice) -> Choice:
    """Returns the CPU for what is the module's own work on every backend: it isn't a fallback."""
    if choice.backend is Backend.CPU_WASM:
        return choice
    if assignment.kind is Kind.INITIALIZE:
        return Choice(Backend.CPU_WASM, None, "the module makes the initial weights")
    if assignment.package.experience and assignment.kind is Kind.EVALUATE:
        return Choice(Backend.CPU_WASM, None, "experience is evaluated by playing")
    return choice

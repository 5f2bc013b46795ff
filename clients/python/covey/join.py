"""Takes part in a mesh with this device."""

import asyncio
import signal
from collections.abc import Callable

from covey_participant.app import ParticipantApp, ParticipantSettings

__all__ = ["run"]

INTERRUPTED = 130


async def run(settings: ParticipantSettings, on_ready: Callable[[str, str], None]) -> None:
    """Takes part until SIGINT or SIGTERM, which give the work back; a second signal ends at once.

    Args:
        settings: the coordinator, the folder, what is allowed here.
        on_ready: called with the participant's id and the address of its local control (empty: none).

    Raises:
        FailedPrecondition: another process has the folder, or the versions of the contract don't fit.
        PermissionDenied: the id belongs to another device.
        OSError: the folder can't be written.
    """
    participant = await ParticipantApp.open(settings)
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            participant.stop()
            return
        participant.kill_now()
        raise SystemExit(INTERRUPTED)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    await participant.run(lambda control: on_ready(participant.identity.participant_id, control))

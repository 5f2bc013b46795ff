"""Child processes that never outlive their parent, however it ends."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from covey.parent import PARENT_VARIABLE

__all__ = ["Child"]

STOP_SECONDS = 6.0
LOG_TAIL_BYTES = 2000


class Child:
    """`python -m covey …` in a process group of its own, its errors in a log file.

    Args:
        name: how people call it.
        arguments: of the `covey` command.
        log: file that its standard error is appended to.
    """

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self.arguments = list(arguments)
        self.log = log
        self.restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id, also its group's; None before it was started."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.returncode if self._process else None

    async def start(self, on_line: Callable[[str], None] | None = None) -> None:
        """Starts it.

        Args:
            on_line: called with each line of its standard output.
        """
        # What the user set for a mesh of their own (TLS, folders, tokens) isn't meant for this one.
        environment = {name: text for name, text in os.environ.items() if not name.startswith("COVEY_")}
        environment |= {PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                # -P: a folder named `covey` where the user happens to be isn't the program.
                *(sys.executable, "-P", "-m", "covey", *self.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self._reader = asyncio.create_task(self._read(self._process, on_line))

    async def _read(self, process: asyncio.subprocess.Process, on_line: Callable[[str], None] | None) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if on_line is not None:
                on_line(line.decode("utf-8", "replace").rstrip("\n"))

    async def wait(self) -> int:
        """Waits for its end and returns its code; negative: the signal that killed it."""
        assert self._process is not None, "started before it is waited for"
        return await self._process.wait()

    def ending(self) -> str:
        """Says in words how it ended, with the last lines that it logged."""
        code = self.returncode
        if code is None:
            how = "still runs"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with code {code}"
        with contextlib.suppress(OSError):
            text = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace")
            last = [line for line in text.splitlines() if line.strip()][-3:]
            if last:
                return f"{self.name} {how}; its last lines: {' | '.join(last)}"
        return f"{self.name} {how}"

    def signal_group(self, number: int) -> None:
        """Sends a signal to it and to everything that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def stop(self) -> None:
        """Asks it to end, waits a bounded time, and kills what is left of its group. Idempotent."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self.signal_group(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        self.signal_group(signal.SIGKILL)
        await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

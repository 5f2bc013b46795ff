"""The parent's side of one worker process: start it, give it jobs, watch its time, kill it."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

from covey_kit.errors import Reason
from covey_participant.domain.failure import Cancelled, WorkFailure

from . import protocol
from .protocol import HEADER, Job, Outcome, Progress, ProtocolError, Step

START_SECONDS = 30.0
CANCEL_SECONDS = 0.6
GRACE_SECONDS = 0.5
"""Between two signs of life lie at most 0.25 s and one call into the module."""

LAST_WORDS = 4096

_PACKAGE_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})


@dataclass(frozen=True)
class TimeLimits:
    """Longest times, in seconds.

    Attributes:
        call: one call into the module (`limits.stepSeconds`).
        compile: compiling the module.
        host: the worker's own work between two signs of life, such as writing a result.
    """

    call: float = 60.0
    compile: float = 120.0
    host: float = 300.0

    def of(self, step: Step) -> float:
        """Returns how long a worker may be silent there."""
        if step is Step.COMPILE:
            return self.compile
        if step is Step.HOST:
            return self.host
        return self.call + GRACE_SECONDS


OnProgress = Callable[[Progress], None]
OnLog = Callable[[str, str], None]


def _ignore_progress(_progress: Progress) -> None:
    """Takes progress that nobody asked for."""


def _ignore_log(_level: str, _text: str) -> None:
    """Takes log lines that nobody asked for."""


class WorkerProcess:
    """One worker. It does one job at a time; after a failure of its own it is dead and stays so."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        # Popen's own kill() would collect the exit status before asyncio does, and lose it.
        self._pidfd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
        self._last_words = b""
        self.patient = True
        """Whether a job that is cancelled is asked to stop before the process is killed."""
        self._listener = asyncio.create_task(self._listen_to_stderr())

    @classmethod
    async def start(cls) -> "WorkerProcess":
        """Starts a worker and waits until it is ready.

        Raises:
            WorkFailure: `DEVICE`: it can't be started; its last words are quoted.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-m",
                "covey_participant.runtime.worker",
                str(theirs.fileno()),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                # The number of BLAS threads is all it is told: it has one thread, and may start no other.
                env={"OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise WorkFailure(Reason.DEVICE, f"a worker process can't be started: {error}") from error
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(process, reader, writer)
        try:
            async with asyncio.timeout(START_SECONDS):
                frame = await worker._receive()
            if frame["type"] != "ready":
                raise ProtocolError("a worker begins with `ready`")
        except (TimeoutError, ProtocolError, EOFError) as error:
            await worker.kill()
            raise WorkFailure(Reason.DEVICE, f"a worker process doesn't start: {worker._end()}") from error
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can take a job."""
        return self._process.returncode is None and not self._writer.is_closing()

    async def run(
        self,
        job: Job,
        limits: TimeLimits,
        on_progress: OnProgress = _ignore_progress,
        on_log: OnLog = _ignore_log,
    ) -> Outcome:
        """Does a job. Cancelling the caller stops it: between two steps, else by killing the worker.

        Raises:
            WorkFailure: with the reason; after `STEP_TIMEOUT` and `WORKER_DIED` the worker is gone.
        """
        try:
            self._writer.write(protocol.encode(job.encode()))
            return await self._follow(limits, on_progress, on_log)
        except asyncio.CancelledError:
            await self._cancel()
            raise
        except (EOFError, ConnectionError, ProtocolError) as error:
            await self.kill()
            detail = f" ({error})" if isinstance(error, ProtocolError) else ""
            raise WorkFailure(
                Reason.WORKER_DIED,
                f"the worker process ended while it ran the package: {self._end()}{detail}",
                package_fault=self._looks_like_package(),
            ) from error

    async def _follow(self, limits: TimeLimits, on_progress: OnProgress, on_log: OnLog) -> Outcome:
        step = Step.HOST
        while True:
            try:
                async with asyncio.timeout(limits.of(step)):
                    event = protocol.parse_event(await self._receive())
            except TimeoutError:
                await self.kill()
                raise _timeout(step, limits) from None
            if isinstance(event, Outcome):
                return event
            if isinstance(event, Progress):
                step = event.step
                on_progress(event)
            else:
                on_log(*event)

    async def _cancel(self) -> None:
        """Stops the job that runs: by asking, then by killing. Isn't interrupted by a second cancellation."""
        if not self.patient:
            await self.kill()
            return
        with contextlib.suppress(ConnectionError):
            self._writer.write(protocol.encode({"type": "cancel"}))
        try:
            async with asyncio.timeout(CANCEL_SECONDS):
                while not isinstance(protocol.parse_event(await self._receive()), Outcome):
                    pass
        except (Cancelled, WorkFailure):
            return
        except BaseException as error:
            await self.kill()
            if not isinstance(error, TimeoutError | EOFError | ConnectionError | ProtocolError):
                raise

    async def _receive(self) -> dict[str, object]:
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > protocol.MOST_FRAME:
                raise ProtocolError(f"a frame of {size} bytes is over the bound")
            return protocol.decode(await self._reader.readexactly(size))
        except asyncio.IncompleteReadError as error:
            raise EOFError from error

    async def kill(self) -> None:
        """Kills the process and waits until it is gone. Idempotent."""
        self.kill_now()
        await asyncio.shield(self._process.wait())
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)
        await self._listener
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    def kill_now(self) -> None:
        """Sends SIGKILL without waiting."""
        self._writer.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                if self._pidfd is not None:
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                else:
                    os.kill(self._process.pid, signal.SIGKILL)

    async def _listen_to_stderr(self) -> None:
        assert self._process.stderr is not None
        while part := await self._process.stderr.read(4096):
            self._last_words = (self._last_words + part)[-LAST_WORDS:]

    def _looks_like_package(self) -> bool:
        code = self._process.returncode
        return code is not None and code < 0 and -code in _PACKAGE_SIGNALS

    def _end(self) -> str:
        code = self._process.returncode
        if code is None:
            how = "it is still there"
        elif code < 0:
            how = f"signal {signal.Signals(-code).name}"
        else:
            how = f"exit status {code}"
        lines = self._last_words.decode("utf-8", "replace").strip().splitlines()
        return f"{how}: {lines[-1][:500]}" if lines else how


def _timeout(step: Step, limits: TimeLimits) -> WorkFailure:
    if step is Step.COMPILE:
        return WorkFailure(
            Reason.MODULE_INVALID,
            f"compiling the module took longer than {limits.compile:g} s; the worker was killed",
        )
    if step is Step.HOST:
        return WorkFailure(
            Reason.DEVICE,
            f"reading or writing files took longer than {limits.host:g} s; the worker was killed",
        )
    return WorkFailure(
        Reason.STEP_TIMEOUT,
        f"one call into the module took longer than {limits.call:g} s (limits.stepSeconds); it was killed",
    )

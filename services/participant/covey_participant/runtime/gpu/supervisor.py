"""The parent's side of the GPU worker: the CPU's supervisor, another program, failures that say GPU."""

import asyncio
import os
import socket
import sys
from pathlib import Path

from covey_kit.errors import Reason
from covey_participant.domain.failure import WorkFailure
from covey_participant.runtime.pool import WorkerPool
from covey_participant.runtime.protocol import Job, Outcome, ProtocolError
from covey_participant.runtime.supervisor import (
    OnLog,
    OnProgress,
    TimeLimits,
    WorkerProcess,
    _ignore_log,
    _ignore_progress,
)

from .adapters import environment
from .failure import GpuFailure
from .protocol import gpu_failure

START_SECONDS = 60.0


class GpuWorkerProcess(WorkerProcess):
    """One GPU worker. After a failure of its device or of its own it is dead and stays so."""

    @classmethod
    async def start(cls, cache: Path | None = None) -> "GpuWorkerProcess":
        """Starts a worker and waits until it is ready; it opens the GPU with its first job.

        Args:
            cache: folder (0700) in which the driver may keep compiled shaders.

        Raises:
            GpuFailure: `DEVICE`: it can't be started; its last words are quoted.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-m",
                "covey_participant.runtime.gpu.worker",
                str(theirs.fileno()),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=environment(cache),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise GpuFailure(Reason.DEVICE, f"a GPU worker can't be started: {error}") from error
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
            raise GpuFailure(Reason.DEVICE, f"a GPU worker doesn't start: {worker._end()}") from error
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def run(
        self,
        job: Job,
        limits: TimeLimits,
        on_progress: OnProgress = _ignore_progress,
        on_log: OnLog = _ignore_log,
    ) -> Outcome:
        """Does a job, as `WorkerProcess.run` does.

        Raises:
            GpuFailure: what failed is the GPU's half, or the process died or had to be killed.
            WorkFailure: anything else: it would fail on the CPU too.
        """
        try:
            return await super().run(job, limits, on_progress, on_log)
        except GpuFailure as failure:
            if failure.reason is Reason.DEVICE:
                await self.kill()  # whatever state its driver is in, the next job gets another process
            raise
        except WorkFailure as failure:
            if self.alive:
                raise
            raise _death(failure, limits) from failure

    async def _receive(self) -> dict[str, object]:
        frame = await super()._receive()
        failure = gpu_failure(frame)
        if failure is not None:
            raise failure
        return frame


def _death(failure: WorkFailure, limits: TimeLimits) -> GpuFailure:
    """Returns what a dead GPU worker means. The module may have had its part: the CPU will show."""
    if failure.reason is Reason.STEP_TIMEOUT:
        message = f"the GPU (or the module that feeds it) didn't come back within {limits.call:g} s"
        return GpuFailure(Reason.STEP_TIMEOUT, f"{message} (limits.stepSeconds); the worker was killed")
    if failure.reason is Reason.MODULE_INVALID:
        message = f"compiling the module and the shaders took longer than {limits.compile:g} s"
        return GpuFailure(Reason.STEP_TIMEOUT, f"{message}; the worker was killed")
    return GpuFailure(failure.reason, failure.message, package_fault=failure.package_fault)


class GpuPool(WorkerPool):
    """One GPU worker, kept from one job to the next and started anew after it died.

    Args:
        cache: folder (0700) in which the driver may keep compiled shaders.
    """

    def __init__(self, cache: Path | None = None) -> None:
        super().__init__(1)
        self._cache = cache

    async def _start(self) -> WorkerProcess:
        self._started += 1
        return await GpuWorkerProcess.start(self._cache)

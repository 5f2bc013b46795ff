"""Worker processes, kept from one job to the next."""

import asyncio
import contextlib

from .protocol import Job, Outcome
from .supervisor import OnLog, OnProgress, TimeLimits, WorkerProcess, _ignore_log, _ignore_progress


class WorkerPool:
    """Runs jobs on up to `size` workers; the one used last goes first: its module and weights are there."""

    def __init__(self, size: int = 1) -> None:
        self._slots = asyncio.Semaphore(size)
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._closed = False
        self._started = 0

    @property
    def busy(self) -> int:
        """Workers that run a job now."""
        return len(self._busy)

    @property
    def pids(self) -> list[int]:
        """Process ids of all workers."""
        return [worker.pid for worker in (*self._idle, *self._busy)]

    @property
    def started(self) -> int:
        """Workers started so far."""
        return self._started

    async def warm_up(self) -> None:
        """Starts one worker ahead of the first job."""
        if not self._idle and not self._busy:
            worker = await self._start()
            if self._closed:
                await worker.kill()
            else:
                self._idle.append(worker)

    async def run(
        self,
        job: Job,
        limits: TimeLimits,
        on_progress: OnProgress = _ignore_progress,
        on_log: OnLog = _ignore_log,
    ) -> Outcome:
        """Does a job on a worker of its own, starting one if none is idle.

        Raises:
            WorkFailure: with the reason. The pool goes on.
        """
        async with self._slots:
            worker = await self._take()
            self._busy.add(worker)
            try:
                return await worker.run(job, limits, on_progress, on_log)
            finally:
                self._busy.discard(worker)
                if worker.alive and not self._closed:
                    self._idle.append(worker)
                else:
                    worker.kill_now()

    async def close(self) -> None:
        """Kills every worker and waits until all are gone. Idempotent."""
        self._closed = True
        workers = [*self._idle, *self._busy]
        self._idle.clear()
        for worker in workers:
            worker.kill_now()
        for worker in workers:
            with contextlib.suppress(OSError):
                await worker.kill()

    def interrupt(self) -> None:
        """Has jobs that are cancelled from now on killed at once, without being asked to stop first."""
        for worker in self._busy:
            worker.patient = False

    def kill_now(self) -> None:
        """Sends SIGKILL to every worker without waiting."""
        self._closed = True
        for worker in (*self._idle, *self._busy):
            worker.kill_now()

    async def _take(self) -> WorkerProcess:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            await worker.kill()
        return await self._start()

    async def _start(self) -> WorkerProcess:
        self._started += 1
        return await WorkerProcess.start()

"""A coordinator and participants as processes of this machine, started again when one dies."""

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from covey.demo._processes import Child
from covey_kit.errors import DeadlineExceeded, Internal, Reason

__all__ = ["DemoMesh"]

READY_SECONDS = 60.0
MOST_RESTARTS = 3
RESTART_PAUSE_SECONDS = 0.3


class DemoMesh:
    """One `covey up` and some `covey join`, each in a process of its own. An async context manager.

    A process that dies is started again with the same folder (at most three times), since that is what a
    mesh promises to survive.

    Args:
        folder: where their state and logs go.
        participants: how many devices.
        on_note: called with a sentence when something happens to a process.
        pid_file: kept up to date with the ids of the processes, as JSON.
        backend: what the devices would rather run on: `auto`, `cpu` or `gpu`.

    Attributes:
        address: of the coordinator, once `start` returned.
        token_file: the owner's token, likewise.
    """

    def __init__(
        self,
        folder: Path,
        participants: int,
        on_note: Callable[[str], None],
        pid_file: Path | None = None,
        backend: str = "cpu",
    ) -> None:
        self._folder = folder
        self._count = participants
        self._note = on_note
        self._pid_file = pid_file
        self._backend = backend
        self._children: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.address = ""
        self.token_file = Path()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def failure(self) -> asyncio.Future[None]:
        """Gets an exception when a process can't be kept alive and the mesh is of no use without it."""
        return self._failed

    @property
    def participants(self) -> list[Child]:
        """The processes of the participants."""
        return self._children[1:]

    def endings(self) -> str:
        """Says how the participants that don't run ended; empty when all run."""
        return "; ".join(child.ending() for child in self.participants if child.returncode is not None)

    async def _start(self) -> None:
        logs = self._folder / "logs"
        await asyncio.to_thread(logs.mkdir, parents=True, exist_ok=True)
        coordinator = Child("the coordinator", self._up_arguments("127.0.0.1:0"), logs / "coordinator.log")
        self._children.append(coordinator)
        ready = await self._start_coordinator(coordinator)
        self.address, self.token_file = ready["address"], Path(ready["token_file"])
        coordinator.arguments = self._up_arguments(self.address)
        self._watchers.append(asyncio.create_task(self._keep(coordinator)))
        for number in range(1, self._count + 1):
            name = f"participant-{number}"
            child = Child(name, self._join_arguments(name), logs / f"{name}.log")
            self._children.append(child)
            await child.start()
            self._watchers.append(asyncio.create_task(self._keep(child)))
        self._write_pids()

    def _up_arguments(self, listen: str) -> list[str]:
        folder = str(self._folder / "coordinator")
        return ["up", "--listen", listen, "--folder", folder, "--no-remember", "--json"]

    def _join_arguments(self, name: str) -> list[str]:
        folder = str(self._folder / name)
        return [
            "join",
            self.address,
            "--name",
            name,
            "--folder",
            folder,
            "--accept-all",
            "--backend",
            self._backend,
        ]

    def participant_folders(self) -> list[Path]:
        """Returns the devices' state folders."""
        return [self._folder / child.name for child in self.participants]

    async def _start_coordinator(self, child: Child) -> dict[str, Any]:
        """Starts `covey up` and returns what it says of itself once it answers."""
        ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def on_line(line: str) -> None:
            if not ready.done():
                ready.set_result(json.loads(line))

        await child.start(on_line)
        ended = asyncio.create_task(child.wait())
        either: set[asyncio.Future[Any]] = {ready, ended}
        try:
            await asyncio.wait(either, timeout=READY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                return ready.result()
            if ended.done():
                raise Internal(Reason.INTERNAL, child.ending())
            raise DeadlineExceeded(
                Reason.DEADLINE, f"{child.name} wasn't ready after {READY_SECONDS:.0f} s; {child.ending()}"
            )
        finally:
            ended.cancel()

    async def _keep(self, child: Child) -> None:
        """Starts a child again whenever it ends before it should."""
        while True:
            await child.wait()
            if self._stopping.is_set():
                return
            what = child.ending() if child.restarts == MOST_RESTARTS else child.ending().split(";")[0]
            if child.restarts == MOST_RESTARTS:
                self._give_up(child, what)
                return
            child.restarts += 1
            self._note(f"{what}; starting it again")
            child.signal_group(signal.SIGKILL)  # what it started and left behind
            await asyncio.sleep(RESTART_PAUSE_SECONDS)
            if self._stopping.is_set():
                return
            await child.start()
            self._write_pids()

    def _give_up(self, child: Child, what: str) -> None:
        alive = [one for one in self.participants if one.returncode is None]
        if child is not self._children[0] and alive:
            self._note(f"{what}; the others go on without it")
        elif not self._failed.done():
            self._failed.set_exception(
                Internal(Reason.INTERNAL, f"{what}; it was started {MOST_RESTARTS} times again")
            )

    def _write_pids(self) -> None:
        if self._pid_file is None:
            return
        pids = {
            "coordinator": self._children[0].pid,
            "participants": {c.name: c.pid for c in self.participants},
        }
        temporary = self._pid_file.with_name(f"{self._pid_file.name}.new")
        temporary.write_text(json.dumps(pids) + "\n", "utf-8")
        temporary.replace(self._pid_file)

    def kill(self) -> None:
        """Kills everything at once. Safe in a signal handler of the event loop."""
        self._stopping.set()
        for child in self._children:
            child.signal_group(signal.SIGKILL)

    async def stop(self) -> None:
        """Ends all processes, participants first, and waits until they are gone."""
        self._stopping.set()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(child.stop() for child in self.participants))
        for child in self._children[:1]:
            await child.stop()
        if self._failed.done():
            self._failed.exception()  # was told, or came too late to matter

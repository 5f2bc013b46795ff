"""A mesh of real processes for end-to-end and fault tests, in both shapes in which it can be deployed.

Every process runs in a group of its own and is known by its id; `Mesh.close` ends them all and fails the test
when anything that they started is still there.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

import psutil

from covey.client import Client, connect
from covey_kit.tokens import SigningKey
from support.eventually import eventually
from support.packages import ROOT

Shape = Literal["one process", "three processes"]

SHAPES: tuple[Shape, ...] = ("one process", "three processes")

READY_SECONDS = 40.0
STOP_SECONDS = 15.0


class Server:
    """A process of the mesh that can be killed and started again."""

    def __init__(
        self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.arguments = list(arguments)
        self.log = log
        self.output = log.with_suffix(".out")
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Its process id, also its group's."""
        assert self._process is not None, f"{self.name} wasn't started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.returncode if self._process else None

    async def start(self) -> None:
        """Starts it; its output goes to files."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log, self.output.open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    async def printed(self, pattern: str) -> str:
        """Waits until its output matches, and returns the first group."""

        def found() -> str | None:
            match = re.search(pattern, self.output.read_text("utf-8", "replace"))
            if match:
                return match.group(1)
            if self.returncode is not None:
                raise RuntimeError(f"{self.name} ended with {self.returncode}: {self.tail()}")
            return None

        text = await eventually(found, READY_SECONDS, f"{self.name} prints {pattern}", 0.02)
        assert text is not None
        return text

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text("utf-8", "replace")[-3000:]

    def descendants(self) -> list[psutil.Process]:
        """What it started and what that started."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    async def kill(self) -> None:
        """Kills it as a crash would: the process alone, without any warning."""
        assert self._process is not None, f"{self.name} wasn't started"
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def suspend(self) -> None:
        """Stops it in the middle of whatever it does (SIGSTOP)."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on."""
        os.kill(self.pid, signal.SIGCONT)

    async def stop(self) -> int:
        """Asks it to end (SIGTERM) and returns its exit code; it has a bounded time."""
        assert self._process is not None, f"{self.name} wasn't started"
        if self._process.returncode is None:
            self._process.terminate()
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        assert self._process.returncode is not None
        return self._process.returncode

    def kill_group(self) -> None:
        """Kills whatever is left of its group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class Mesh:
    """Servers and participants below one folder.

    Args:
        folder: state and logs.
        shape: `covey up`, or coordinator, storage and diagnostics as processes of their own.
    """

    def __init__(self, folder: Path, shape: Shape = "one process") -> None:
        self.folder = folder
        self.shape = shape
        self.address = ""
        self.servers: dict[str, Server] = {}
        self.participants: dict[str, Server] = {}
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("COVEY_")
        } | {"COVEY_CONFIG_FOLDER": str(folder / "config"), "PYTHONUNBUFFERED": "1"}
        self._ids: set[int] = set()

    @property
    def home(self) -> Path:
        """The coordinator's state folder."""
        return self.folder / "state" / "coordinator"

    @property
    def coordinator(self) -> Server:
        """The process in which the coordinator runs."""
        return self.servers["coordinator"]

    @property
    def token_file(self) -> Path:
        """The owner's token."""
        return self.home / "owner.token"

    async def start(self) -> None:
        """Starts the servers."""
        if self.shape == "one process":
            arguments = ["-m", "covey", "up", "--folder", str(self.folder / "state"), "--json"]
            pattern = r'"address": "([^"]+)"'
            self.address = await self._serve("coordinator", arguments, pattern)
            return
        await asyncio.to_thread(SigningKey.load_or_create, self.home / "signing-key.pem")
        trusted = ["--trusted-key", str(self.home / "signing-key.pub")]
        state = self.folder / "state" / "storage"
        ready = r"is ready on (\S+)"
        storage = await self._serve(
            "storage", ["-m", "covey_storage", "serve", "--folder", str(state), *trusted], ready
        )
        diagnostics = await self._serve("diagnostics", ["-m", "covey_diagnostics", "serve", *trusted], ready)
        self.address = await self._serve(
            "coordinator",
            [
                *("-m", "covey_coordinator", "serve", "--folder", str(self.home)),
                *("--storage", storage, "--diagnostics", diagnostics),
            ],
            ready,
        )

    async def _serve(self, name: str, arguments: list[str], pattern: str) -> str:
        server = self.server(name, [*arguments, "--listen", "127.0.0.1:0"])
        self.servers[name] = server
        await self.start_server(server)
        address = await server.printed(pattern)
        server.arguments = [*arguments, "--listen", address]  # a restart takes the same port
        return address

    def server(self, name: str, arguments: Sequence[str]) -> Server:
        """Returns a process that isn't started yet, with this mesh's environment."""
        return Server(name, arguments, self.folder / "logs" / f"{name}.log", self._environment)

    async def start_server(self, server: Server) -> None:
        """Starts a process (again) and keeps its id for the check at the end."""
        await server.start()
        self._ids.add(server.pid)

    async def join(self, name: str, *arguments: str) -> Server:
        """Starts a participant that accepts everything, on the CPU (`arguments` may say otherwise)."""
        folder = str(self.folder / "participants" / name)
        device = ["--name", name, "--folder", folder, "--backend", "cpu", "--accept-all"]
        server = self.server(name, ["-m", "covey", "join", self.address, *device, *arguments])
        self.participants[name] = server
        await self.start_server(server)
        return server

    async def connected(self, client: Client, count: int) -> list[str]:
        """Waits until so many participants are connected and returns their ids."""

        async def ids() -> list[str]:
            for server in self.participants.values():
                assert server.returncode in {None, -signal.SIGKILL}, server.tail()
            found = await client.participants.list(connected_only=True)
            return [one.participant_id for one in found] if len(found) >= count else []

        return await eventually(ids, READY_SECONDS, f"{count} participants connected", 0.05)

    def client(self) -> Client:
        """Returns an owner's client. Use it as a context manager."""
        return connect(self.address, token_file=self.token_file)

    async def covey(self, *arguments: str, timeout: float = 60.0) -> tuple[int, str, str]:
        """Runs a `covey` command against this mesh and returns (exit code, stdout, stderr)."""
        environment = self._environment | {
            "COVEY_COORDINATOR": self.address,
            "COVEY_TOKEN_FILE": str(self.token_file),
        }
        return await covey(*arguments, environment=environment, timeout=timeout)

    async def close(self) -> None:
        """Ends everything, and fails when a process outlives it."""
        everyone = [*self.participants.values(), *reversed(self.servers.values())]
        started = {process.pid: process for server in everyone for process in server.descendants()}
        try:
            running = [server for server in everyone if server.returncode is None]
            for server in running:
                with contextlib.suppress(ProcessLookupError):
                    server.resume()
            codes = await asyncio.gather(*(server.stop() for server in running), return_exceptions=True)
            failed = [
                f"{server.name}: {code!r}\n{server.tail()}"
                for server, code in zip(running, codes, strict=True)
                if code != 0
            ]
            assert not failed, "SIGTERM should have ended these with 0:\n" + "\n".join(failed)
            await eventually(
                lambda: not [p for p in started.values() if alive(p)],
                5.0,
                f"workers {list(started)} are gone",
            )
        finally:
            for server in everyone:
                server.kill_group()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            for server in self.servers.values():
                server.kill_group()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


def alive(process: psutil.Process) -> bool:
    """Says whether a process runs; one that only waits to be collected doesn't."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes_with(text: str) -> list[psutil.Process]:
    """Returns the running processes whose command line has `text` (such as a folder of this test)."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if alive(process) and any(text in word for word in process.cmdline()):
                found.append(process)
    return found


async def covey(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    cwd: Path = ROOT,
) -> tuple[int, str, str]:
    """Runs `python -m covey` and returns (exit code, stdout, stderr)."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "covey", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(environment) if environment is not None else None,
        cwd=cwd,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout):
            out, err = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@contextlib.asynccontextmanager
async def running(folder: Path, participants: int, shape: Shape = "one process") -> AsyncIterator[Mesh]:
    """A mesh whose participants are connected."""
    async with Mesh(folder, shape) as mesh:
        for number in range(1, participants + 1):
            await mesh.join(f"p{number}")
        async with mesh.client() as client:
            await mesh.connected(client, participants)
        yield mesh

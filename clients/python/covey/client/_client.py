"""The way in: `connect`."""

from pathlib import Path
from types import TracebackType
from typing import Self

from covey.client._checkpoints import Checkpoints
from covey.client._connection import Connection
from covey.client._diagnostics import Diagnostics
from covey.client._jobs import Jobs
from covey.client._participants import Participants
from covey.client._storage import Storage
from covey.context import Server, resolve
from covey.v1 import server_service_pb2

__all__ = ["Client", "connect"]


class Client:
    """A mesh as its owner sees it. An async context manager: entering it checks that a coordinator answers.

    Attributes:
        jobs: make, run and watch jobs.
        participants: who joined, and invitations.
        checkpoints: the results.
        storage: blobs.
        diagnostics: what each device is doing.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.storage = Storage(connection)
        self.jobs = Jobs(connection, self.storage)
        self.participants = Participants(connection)
        self.checkpoints = Checkpoints(connection)
        self.diagnostics = Diagnostics(connection)

    @property
    def server(self) -> Server:
        """The coordinator that this client talks to, and where its address came from."""
        return self._connection.server

    async def server_info(self) -> server_service_pb2.GetServerInfoResponse:
        """Returns what the coordinator serves and its limits."""
        return await self._connection.open()

    async def close(self) -> None:
        """Closes the connections."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        try:
            await self._connection.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def connect(
    address: str | None = None,
    *,
    token: str | None = None,
    token_file: Path | str | None = None,
    root_cert: Path | None = None,
) -> Client:
    """Returns a client of the coordinator at `address`. Call it where an event loop runs.

    Args:
        address: `HOST:PORT`. None: `COVEY_COORDINATOR`, else the last `covey up` on this machine.
        token: the owner's token itself. None: the one in `token_file`.
        token_file: None: `COVEY_TOKEN_FILE`, else the file that `covey up` remembered for the address.
        root_cert: PEM certificates to trust. what `covey up` remembered for the
            address. With certificates the channel is TLS, without it is plain text.

    Raises:
        InvalidArgument: the address isn't `HOST:PORT`, or the token file can't be read.
    """
    server = resolve(address, token_file)
    return Client(Connection(server, token or server.token(), root_cert or server.root_cert))

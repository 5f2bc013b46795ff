"""The worker process: takes jobs from its parent over an inherited socket, one at a time, until that closes.

Started as `python -I -m covey_participant.runtime.worker SOCKET_FD PARENT_PID` with an empty environment.
"""

import os
import select
import socket
import sys
import traceback

from covey_participant.domain.failure import Cancelled, WorkFailure

from . import protocol, sandbox, seccomp
from .protocol import HEADER, Job, Progress, ProtocolError


class ParentGone(Exception):
    """The parent closed the socket."""


class Channel:
    """Frames over the inherited socket, blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, frame: dict[str, object]) -> None:
        """Sends a frame."""
        try:
            self._socket.sendall(protocol.encode(frame))
        except OSError as error:
            raise ParentGone from error

    def receive(self) -> dict[str, object]:
        """Waits for the next frame."""
        (size,) = HEADER.unpack(self._exactly(HEADER.size))
        if size > protocol.MOST_FRAME:
            raise ProtocolError(f"a frame of {size} bytes is over the bound")
        return protocol.decode(self._exactly(size))

    def pending(self) -> bool:
        """Returns whether a frame has begun to arrive."""
        return bool(self._poll.poll(0))

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(size - len(parts))
            except OSError as error:
                raise ParentGone from error
            if not part:
                raise ParentGone
            parts += part
        return bytes(parts)


def serve(channel: Channel) -> None:
    """Runs jobs until the parent closes the socket."""
    from .program import Program

    def report(progress: Progress) -> None:
        channel.send(progress.encode())
        if channel.pending() and channel.receive()["type"] == "cancel":
            raise Cancelled

    def log(level: str, text: str) -> None:
        channel.send({"type": "log", "level": level, "text": text})

    program = Program(report, log)
    sandbox.harden()
    seccomp.deny_system_calls()
    channel.send({"type": "ready"})
    while True:
        frame = channel.receive()
        if frame["type"] != "job":
            continue  # a cancellation that came after the end
        try:
            channel.send(program.run(Job.decode(frame)).encode())
        except WorkFailure as failure:
            channel.send(protocol.failure_frame(failure))
        except Cancelled:
            channel.send({"type": "cancelled"})


def main() -> None:
    """Serves on the socket whose descriptor is the first argument; the second is the parent's process id."""
    sandbox.die_with_parent(int(sys.argv[2]))
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        serve(Channel(sock))
    except ParentGone:
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the parent reports the last words as WORKER_DIED
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()

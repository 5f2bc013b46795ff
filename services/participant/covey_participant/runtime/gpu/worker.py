"""The GPU worker process: the same channel and jobs as `runtime/worker.py`, and a device besides.

Started as `python -I -m covey_participant.runtime.gpu.worker SOCKET_FD PARENT_PID` by `supervisor.py`.
Several errors of wgpu abort the process, and waits for a GPU have no bound: whatever happens here, the
parent sees a failure or kills the process, and starts another one for the next job.
"""

import os
import resource
import socket
import sys
import traceback
from pathlib import Path

from covey_participant.domain.failure import Cancelled, WorkFailure
from covey_participant.runtime import sandbox, seccomp
from covey_participant.runtime.protocol import Progress
from covey_participant.runtime.worker import Channel, ParentGone

from .protocol import GpuJob, encode_failure

MOST_FILES = 256


THREADS = ("clone", "clone3")
"""Calls that a driver can't do without: it starts threads whenever it likes. Programs stay out of reach."""


def harden() -> None:
    """As `sandbox.harden` and `seccomp`, but with threads and files enough for a driver."""
    os.umask(0o077)
    os.chdir("/")
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: sandbox.MOST_FILE_BYTES,
        resource.RLIMIT_NOFILE: MOST_FILES,
    }
    for which, most in limits.items():
        _, hard = resource.getrlimit(which)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (bound, bound))
    if sys.platform == "linux":
        sandbox._prctl(sandbox._PR_SET_NO_NEW_PRIVS, 1)  # noqa: SLF001 - the twin of `sandbox.harden`
        Path("/proc/self/oom_score_adj").write_text(str(sandbox.OOM_SCORE))
        seccomp.deny_system_calls(THREADS)


def serve(channel: Channel) -> None:
    """Runs jobs until the parent closes the socket."""
    from .program import GpuProgram

    def report(progress: Progress) -> None:
        channel.send(progress.encode())
        if channel.pending() and channel.receive()["type"] == "cancel":
            raise Cancelled

    def log(level: str, text: str) -> None:
        channel.send({"type": "log", "level": level, "text": text})

    program = GpuProgram(report, log)
    harden()
    channel.send({"type": "ready"})
    while True:
        frame = channel.receive()
        if frame["type"] != "job":
            continue  # a cancellation that came after the end
        try:
            channel.send(program.run(GpuJob.decode(frame)).encode())
        except WorkFailure as failure:
            channel.send(encode_failure(failure))
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
    except BaseException:  # noqa: BLE001 - the parent reports the last words
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()

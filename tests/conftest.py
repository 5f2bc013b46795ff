"""What every test gets: a bounded hypothesis, and a watch over the event loop."""

import importlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

# Whoever starts the tests in the background has SIGINT ignored and hands that on to its children: then Ctrl-C
# could not be tested.
_MAIN = threading.current_thread() is threading.main_thread()
if _MAIN and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A test has one deadline, pytest's: on a shared machine hypothesis' own per-example one only makes noise.
# In CI the examples are the same on every run, so that a red run means a change and not luck.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

WATCHED = ("covey_kit", "covey_coordinator", "covey_diagnostics", "covey_participant", "covey_storage")
"""Packages whose code may not block a running event loop."""

BLOCKING = (
    "time.sleep",
    "io.BufferedReader.read",
    "io.BufferedWriter.write",
    "io.BufferedRandom.read",
    "io.BufferedRandom.write",
    "os.read",
    "os.write",
    "os.sendfile",
    "sqlite3.Connection.execute",
    "sqlite3.Connection.commit",
    "sqlite3.Cursor.execute",
    "sqlite3.Cursor.fetchall",
    "sqlite3.Cursor.fetchone",
)
"""Calls that wait for a disk or a clock. A stat or an unlink takes microseconds: those are left alone."""


@pytest.fixture(autouse=True)
def _event_loop_watch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a call that blocks the event loop from our own code; `@pytest.mark.may_block` switches it off."""
    if request.node.get_closest_marker("may_block"):
        yield
        return
    watch = BlockBuster(scanned_modules=[importlib.import_module(name) for name in WATCHED])
    chosen = [watch.functions[name] for name in BLOCKING if name in watch.functions]
    for function in chosen:
        function.activate()
    try:
        yield
    finally:
        for function in chosen:
            function.deactivate()

"""The heap's settings, in processes of their own: they hold for a whole process."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="these are glibc's settings")

SCRIPT = """
from pathlib import Path
from covey_kit.memory import give_back, tune_malloc

def resident():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

assert tune_malloc()
blocks = []
for _ in range(200):
    blocks += [bytearray(b"x" * (1 << 20)), bytearray(b"y" * 600)]  # a small one that stays between each two
before = resident()
del blocks[::2]
kept = resident()
assert give_back()
print(before - kept, kept - resident())
"""


def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    """Tuned, the heap keeps what was freed between live objects; `give_back` returns it to the kernel."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
    freed_alone, given_back = map(float, done.stdout.split())

    assert freed_alone < 20
    assert given_back > 150

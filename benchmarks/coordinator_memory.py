"""How much memory the coordinator needs for a model, with few participants and with many.

    python benchmarks/coordinator_memory.py [--megabytes 100] [--rounds 2] [--participants 2 8]

Coordinator, storage and diagnostics run as processes of their own; scripted devices push deltas of random
values for 8 assignments a round, as many at once as there are devices. FedAdam: the strategy with the most
state. The peak is what the kernel counted (VmHWM), from before the job is created to after its last round.

The bounds that tests/integration/test_coordinator_memory.py holds: the peak with 8 participants is at most
1.2 times that with 2, and at most 6 times the weights above idle.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.coordinator_memory import Memory, measure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the model, MiB of f32")
    parser.add_argument("--rounds", type=int, default=2, help="rounds after round 0")
    parser.add_argument("--participants", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--folder", type=Path, help="where state goes (default: a temporary folder)")
    options = parser.parse_args()
    count = int(options.megabytes * (1 << 20) / 4)
    found: list[tuple[Memory, float]] = []
    for participants in options.participants:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            begin = time.perf_counter()
            memory = asyncio.run(measure(Path(folder), participants, count=count, rounds=options.rounds))
            found.append((memory, time.perf_counter() - begin))
    print(f"model: {count:,} weights, {4 * count / 1e6:.0f} MB; FedAdam, {options.rounds} rounds\n")
    print("participants   idle MB   peak MB   peak above idle, x weights   job, s")
    for memory, seconds in found:
        print(
            f"{memory.participants:>12}{memory.idle_bytes / 1e6:>10.0f}{memory.peak_bytes / 1e6:>10.0f}"
            f"{memory.ratio:>29.2f}{seconds:>9.1f}"
        )
    if len(found) > 1:
        first, last = found[0][0], found[-1][0]
        print(
            f"\npeak with {last.participants} participants / with {first.participants}: "
            f"{last.peak_bytes / first.peak_bytes:.2f}"
        )


if __name__ == "__main__":
    main()

"""Runs every benchmark of this folder, one after the other, and prints what each measured.

make bench                       all of them
make bench ARGS=aggregation      those whose names contain the word
"""

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Runs the benchmarks whose names contain one of the arguments; returns the number that failed."""
    folder = Path(__file__).parent
    words = sys.argv[1:]
    failed = []
    for script in sorted(folder.glob("*.py")):
        if script.name in {"run.py", "__init__.py"} or script.name.startswith("_"):
            continue
        if words and not any(word in script.stem for word in words):
            continue
        print(f"\n== {script.stem}\n", flush=True)
        if subprocess.run([sys.executable, str(script)], check=False).returncode:
            failed.append(script.stem)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())

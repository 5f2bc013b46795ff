"""Runs every static check and shows the output of those that fail (`make lint`).

One failing check doesn't hide the next. Names on the command line choose: tools/lint.py ruff mypy
"""

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

TYPED = ("clients/python/covey", "services", "tests", "tools", "models", "benchmarks", "examples")
"""Folders that mypy reads, as far as they exist and hold Python."""


def python(script: str, *arguments: str) -> list[str]:
    """Returns the command that runs one of our tools."""
    return [sys.executable, f"tools/{script}", *arguments]


def program(name: str, *arguments: str) -> list[str]:
    """Returns the command that runs a program of this environment."""
    return [str(BIN / name), *arguments]


def checks() -> dict[str, list[str]]:
    """Returns each check's command by its name."""
    typed = [folder for folder in TYPED if next((ROOT / folder).rglob("*.py"), None)]
    return {
        "mypy": program("mypy", "--no-error-summary", *typed),
        "ruff": program("ruff", "check", "--quiet", "--output-format=concise", "."),
        "format": program("ruff", "format", "--check", "--output-format=concise", "."),
        "imports": program("lint-imports", "--no-cache"),
        "contract": python("check_contract.py"),
        "generated": python("generate.py", "--check"),
        "models": [sys.executable, "models/build.py", "--check"],
        "sizes": python("check_sizes.py"),
        "docstrings": python("check_docstrings.py"),
        "lock": python("lock.py", "--check"),
    }


def run(command: list[str]) -> tuple[float, str | None]:
    """Returns how many seconds a check took, and its output if it failed."""
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip() or "failed without a word"
    return time.monotonic() - start, said if done.returncode else None


def main() -> None:
    """Runs the checks named, or all, two at a time."""
    available = checks()
    parser = argparse.ArgumentParser(description="Run the static checks.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(available)} (default: all)")
    names = parser.parse_args().names or list(available)
    unknown = [name for name in names if name not in available]
    if unknown:
        parser.error(f"no such check: {', '.join(unknown)}; there are {', '.join(available)}")
    failed = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = pool.map(run, [available[name] for name in names])
        for name, (seconds, complaint) in zip(names, results, strict=True):
            print(f"{'ok  ' if complaint is None else 'FAIL'} {name} ({seconds:.1f} s)", flush=True)
            if complaint is not None:
                failed.append(name)
                print("\n".join(f"    {line}" for line in complaint.splitlines()), flush=True)
    if failed:
        sys.exit(f"lint: {', '.join(failed)} failed; `make fix` repairs style and format")


if __name__ == "__main__":
    main()

"""Keeps requirements.lock in step with pyproject.toml (`make lock`).

tools/lock.py                resolve, keeping the versions that still fit
tools/lock.py --upgrade      resolve anew, taking the newest versions
tools/lock.py --check        offline: fail if the lock lacks something that pyproject.toml asks for
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
HEADER = """\
# Exact versions of everything, for CPython 3.11 to 3.13. Made by `make lock`; don't edit.
"""
PINNED = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)", re.MULTILINE)


def resolve(*, upgrade: bool) -> None:
    """Rewrites the lock. Needs the package registry."""
    uv = str(Path(sys.executable).parent / "uv")
    command = [uv, "pip", "compile", "--universal", "--python-version", "3.11"]
    command += ["--extra=dev", "--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    command += ["--upgrade"] if upgrade else []
    command += ["pyproject.toml", f"--output-file={LOCK}"]
    subprocess.run(command, cwd=ROOT, check=True)
    LOCK.write_text(HEADER + LOCK.read_text("utf-8").removeprefix(HEADER), "utf-8")


def violations() -> list[str]:
    """Returns what pyproject.toml asks for and the lock doesn't give, one sentence each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    locked: dict[str, set[str]] = {}
    text = LOCK.read_text("utf-8")
    for match in PINNED.finditer(text):
        locked.setdefault(canonicalize_name(match["name"]), set()).add(match["version"])
    bad = []
    for line in [*project["dependencies"], *(item for group in extras.values() for item in group)]:
        wanted = Requirement(line)
        if wanted.name == project["name"]:
            continue
        versions = locked.get(canonicalize_name(wanted.name))
        if versions is None:
            bad.append(f"{wanted} isn't in requirements.lock")
        else:
            bad += [
                f"{wanted} is locked at {version}"
                for version in sorted(versions)
                if version not in wanted.specifier
            ]
    if "://" in text:
        bad.append("requirements.lock holds an address; it must hold names, versions and hashes only")
    return sorted(set(bad))


def main() -> None:
    """Parses the command line and resolves or checks."""
    parser = argparse.ArgumentParser(description="Lock every dependency.")
    parser.add_argument("--check", action="store_true", help="fail if the lock doesn't cover pyproject.toml")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    arguments = parser.parse_args()
    if not arguments.check:
        resolve(upgrade=arguments.upgrade)
    bad = violations()
    if bad:
        sys.exit(
            "requirements.lock is out of step (run `make lock`):\n" + "\n".join(f"  {line}" for line in bad)
        )
    print("requirements.lock: in step with pyproject.toml")


if __name__ == "__main__":
    main()

"""Checks the contract: format, lint, and that it breaks nobody who speaks an earlier version.

The earlier version is the image (protos/covey.binpb) at a commit:

* the one named by BREAKING_AGAINST, if set;
* on a branch, where it left main;
* on main, the version before the one at HEAD, or HEAD's own if the working tree's differs from it.

A break that is meant carries a trailer in its commit message, where a reviewer sees it:

    Contract-Break: GetJob.name was never filled; clients read Job.title
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGE = "protos/covey.binpb"
TRAILER = "Contract-Break"


def git(*arguments: str) -> bytes | None:
    """Returns what git printed, or None where it failed (no repository, no such commit or file)."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


def lines(output: bytes | None) -> list[str]:
    """Splits git's output."""
    return [] if output is None else output.decode().split()


def buf(*arguments: str) -> list[str]:
    """Runs buf of this environment; returns its complaints, one a line."""
    program = str(Path(sys.executable).parent / "buf")
    done = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    return (done.stdout + done.stderr).strip().splitlines() or [f"buf {arguments[0]} failed without a word"]


def reference() -> str | None:
    """Returns the commit to compare with, or None where there is no earlier image."""
    named = os.environ.get("BREAKING_AGAINST")
    if named:
        if git("cat-file", "-e", f"{named}:{IMAGE}") is None:
            sys.exit(f"BREAKING_AGAINST={named}: there is no {IMAGE} at that commit")
        return named
    head = lines(git("rev-parse", "HEAD"))
    for main in ("origin/main", "main"):
        base = lines(git("merge-base", "HEAD", main))
        if base and base != head and git("cat-file", "-e", f"{base[0]}:{IMAGE}") is not None:
            return base[0]
    versions = lines(git("log", "-n2", "--format=%H", "--", IMAGE))
    changed = git("diff", "--quiet", "HEAD", "--", IMAGE) is None
    position = 0 if changed else 1
    return versions[position] if len(versions) > position else None


def announced(since: str) -> list[str]:
    """Returns the reasons for breaks that commits after `since` announce."""
    found = git("log", f"--format=%(trailers:key={TRAILER},valueonly)", f"{since}..HEAD")
    return [line for line in (found or b"").decode().splitlines() if line.strip()]


def breaking() -> list[str]:
    """Returns what the present image breaks, with the way out."""
    since = reference()
    if since is None:
        print("contract: no earlier image to compare with, breaking changes not checked")
        return []
    image = git("show", f"{since}:{IMAGE}")
    assert image is not None
    with tempfile.NamedTemporaryFile(suffix=".binpb") as earlier:
        earlier.write(image)
        earlier.flush()
        found = buf("breaking", IMAGE, "--against", earlier.name, "--config", "buf.yaml")
    if not found:
        return []
    reasons = announced(since)
    if reasons:
        print(f"contract: {len(found)} breaking changes since {since[:10]}, announced: {'; '.join(reasons)}")
        return []
    advice = f"add a new field or method instead, or say why in the commit message: '{TRAILER}: <reason>'"
    return [*found, f"(compared with {since[:10]}) {advice}"]


def main() -> None:
    """Runs every check and reports everything found."""
    found = {
        "buf format (run `make fix`)": buf("format", ".", "--path", "protos", "--diff", "--exit-code"),
        "buf lint": buf("lint", IMAGE, "--config", "buf.yaml"),
        "buf breaking": breaking(),
    }
    bad = {name: complaints for name, complaints in found.items() if complaints}
    for name, complaints in bad.items():
        print(f"{name}:", *complaints, sep="\n  ")
    if bad:
        sys.exit(1)
    print("contract: formatted, linted, compatible")


if __name__ == "__main__":
    main()

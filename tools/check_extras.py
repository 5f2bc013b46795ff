"""Checks that each service's extra is enough for it, and not more (`make extras`).

Builds the wheel, installs it with one extra at a time into an environment of its own, and imports every
module of the packages that such an installation is for. Versions come from requirements.lock.

    tools/check_extras.py [EXTRA...]     all, or those named ("core" is the distribution without extras)
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"


@dataclass(frozen=True)
class Extra:
    """What an extra is for, and what must not come with it; `later` are modules that need other extras."""

    packages: tuple[str, ...]
    absent: tuple[str, ...]
    later: tuple[str, ...] = ()


DATABASE = ("aiosqlite", "obstore", "sqlalchemy")
RUNTIME = ("wasmtime", "wgpu")
EXTRAS = {
    # `covey up` hosts the services and `covey join` is a participant: with their extras, as in "all".
    "core": Extra(("covey", "covey_kit", "buf"), DATABASE + RUNTIME, ("covey.up", "covey.join")),
    "all": Extra(("covey", "covey_kit", "buf"), ()),
    "coordinator": Extra(("covey_coordinator",), ("obstore", *RUNTIME)),
    "diagnostics": Extra(("covey_diagnostics",), ("obstore", *RUNTIME)),
    "participant": Extra(("covey_participant",), DATABASE),
    "storage": Extra(("covey_storage",), RUNTIME),
}

IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys, traceback
packages, absent, later = ([name for name in text.split(",") if name] for text in sys.argv[1:4])
bad = [f"{name} is installed and must not be" for name in absent if importlib.util.find_spec(name)]
count = 0
for package in packages:
    names = [package]
    top = importlib.import_module(package)
    names += [m.name for m in pkgutil.walk_packages(top.__path__, package + ".", onerror=lambda name: None)]
    for name in names:
        if name in later:
            continue
        count += 1
        try:
            importlib.import_module(name)
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            bad.append(f"{name}: {type(error).__name__}: {error} ({where.filename}:{where.lineno})")
print("\\n".join(bad) if bad else f"{count} modules")
sys.exit(bool(bad))
"""


def build_wheel(folder: Path) -> Path:
    """Builds the wheel into `folder` with what this environment has, without asking a registry."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the wheel can't be built: {done.stderr.strip()}")
    return next(folder.glob("covey-*.whl"))


def missing_from_wheel(wheel: Path) -> list[str]:
    """Returns what the wheel ought to carry besides the modules, and doesn't."""
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = ["covey/py.typed", "covey_kit/py.typed"]
    if (ROOT / "models/digits/manifest.json").exists():
        wanted += ["covey/_models/digits/manifest.json", "covey/_models/digits/model.wasm"]
    return [f"the wheel lacks {name}" for name in wanted if name not in held]


def install(environment: Path, requirement: str) -> str:
    """Makes `environment` and installs `requirement` there; returns what went wrong, or nothing."""
    python = environment / "bin" / "python"
    uv = [str(Path(sys.executable).parent / "uv"), "--quiet", "--no-progress"]
    constraints = environment.with_suffix(".txt")
    # pip demands hashes of everything once a constraint has one; the wheel has none.
    pins = [line.removesuffix(" \\") for line in LOCK.read_text("utf-8").splitlines() if "==" in line]
    constraints.write_text("\n".join(pins) + "\n", "utf-8")
    attempts = [
        [
            [*uv, "venv", "--python", sys.executable, str(environment)],
            [*uv, "pip", "install", "--python", str(python), "-c", str(constraints), requirement],
        ],
        [
            [sys.executable, "-m", "venv", "--clear", str(environment)],
            [str(python), "-m", "pip", "install", "--quiet", "-c", str(constraints), requirement],
        ],
    ]
    said = ""
    for commands in attempts:
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = done.stderr.strip()
                break
        else:
            return ""
    return said


def check(name: str, wheel: Path, folder: Path) -> list[str]:
    """Installs one extra and imports its packages; returns every violation."""
    extra = EXTRAS[name]
    environment = folder / name
    requirement = f"covey[{name}] @ {wheel.as_uri()}" if name != "core" else f"covey @ {wheel.as_uri()}"
    failure = install(environment, requirement)
    if failure:
        return [f"{name}: can't be installed: {failure}"]
    arguments = [",".join(extra.packages), ",".join(extra.absent), ",".join(extra.later)]
    command = [str(environment / "bin" / "python"), "-I", "-c", IMPORT_ALL, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        return [f"{name}: {line}" for line in (done.stdout + done.stderr).strip().splitlines()]
    print(f"extra {name}: {done.stdout.strip()} of {', '.join(extra.packages)} import")
    return []


def main() -> None:
    """Checks the extras named, or all."""
    parser = argparse.ArgumentParser(description="Install each extra alone and import its packages.")
    parser.add_argument("extras", nargs="*", choices=[*EXTRAS, []], help="which (default: all)")
    names = parser.parse_args().extras or list(EXTRAS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheel = build_wheel(folder)
        bad = missing_from_wheel(wheel)
        for name in names:
            bad += check(name, wheel, folder)
    if bad:
        sys.exit("extras:\n" + "\n".join(f"  {line}" for line in bad))


if __name__ == "__main__":
    main()

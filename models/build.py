"""Compiles the model packages beside this file and keeps their manifests true.

    python models/build.py [NAME ...]      compile, write model.wasm and shaders.zip, refresh manifest.json
    python models/build.py --check [NAME]  build elsewhere and compare with the files that are there

A package is a folder with `manifest.json` and C sources in `src/`. All of `src/*.c` are compiled into the one
module that the manifest names. With `shaders/`, its `plan.json` and `*.wgsl` are packed into the archive that
the manifest names. The results depend on the sources and the compiler's version alone: not on the folder, the
machine or the time.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parent
# Another version compiles to other bytes, and a module's digest is part of every checkpoint's identity.
ZIG_VERSION = "0.17.1"
FLAGS = (
    "--target=wasm32-freestanding",
    "-std=c11",
    "-ffreestanding",
    "-nostdlib",
    "-O3",
    "-msimd128",
    "-mno-relaxed-simd",  # its results differ from machine to machine
    "-ffp-contract=off",  # a fused multiply-add rounds once, two instructions twice
    "-g0",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wl,-z,stack-size=65536",  # lies below the data: running over it traps
    "-Wl,--no-entry",
    "-Wl,--strip-all",
)


class BuildError(Exception):
    """A package can't be built, or isn't what its sources say; the message says why."""


def packages(names: list[str]) -> list[Path]:
    """The folders of the packages asked for; all of them when none is named."""
    found = {path.parent.name: path.parent for path in sorted(MODELS.glob("*/manifest.json"))}
    unknown = [name for name in names if name not in found]
    if unknown:
        raise BuildError(f"no package {', '.join(unknown)} in {MODELS}; there are: {', '.join(found)}")
    return [found[name] for name in names] if names else list(found.values())


def require_compiler() -> None:
    """Refuses to build with anything but the pinned compiler."""
    try:
        version = importlib.metadata.version("ziglang")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version != ZIG_VERSION:
        raise BuildError(f"needs ziglang {ZIG_VERSION}, found {version}: pip install ziglang=={ZIG_VERSION}")


def compile_module(package: Path, target: Path) -> None:
    """Compiles the sources of `package` into `target`.

    The compiler sees copies at fixed relative paths, in a folder of their own, so that no path of this
    machine can get into the module.
    """
    with tempfile.TemporaryDirectory(prefix="covey-build-") as scratch:
        root = Path(scratch)
        shutil.copytree(MODELS / "include", root / "include")
        shutil.copytree(package / "src", root / "src")
        sources = sorted(path.relative_to(root).as_posix() for path in (root / "src").glob("*.c"))
        if not sources:
            raise BuildError(f"{package.name}: no C sources in {package / 'src'}")
        command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, "-Iinclude", *sources, "-o", "model.wasm"]
        # A cache of the build's own: the shared one may belong to another user or be read-only.
        caches = {"ZIG_LOCAL_CACHE_DIR": str(root / "local"), "ZIG_GLOBAL_CACHE_DIR": str(root / "global")}
        done = subprocess.run(
            command,
            cwd=root,
            env=os.environ | caches,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        if done.returncode != 0:
            raise BuildError(f"{package.name}: the compiler failed\n{done.stderr.strip()}")
        target.write_bytes((root / "model.wasm").read_bytes())


def pack_shaders(package: Path, target: Path) -> None:
    """Packs `shaders/plan.json` and `shaders/*.wgsl` into `target`, the plan first.

    Stored, not compressed: what a compressor makes of the same bytes differs from version to version.
    """
    folder = package / "shaders"
    names = ["plan.json", *sorted(path.name for path in folder.glob("*.wgsl"))]
    if not (folder / "plan.json").is_file():
        raise BuildError(f"{package.name}: no plan.json in {folder}")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3  # what external_attr means doesn't depend on where it was packed
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, (folder / name).read_bytes())


def make(package: Path, folder: Path) -> list[Path]:
    """Builds what a package's sources make into `folder`, under the names of its manifest."""
    manifest = json.loads((package / "manifest.json").read_text())
    made = [folder / manifest["module"]["fileName"]]
    compile_module(package, made[0])
    archive = manifest.get("shaderArchive")
    if (archive is not None) != (package / "shaders").is_dir():
        raise BuildError(
            f"{package.name}: shaders/ and the manifest's shaderArchive go together, found one of them only"
        )
    if archive is not None:
        made.append(folder / archive["fileName"])
        pack_shaders(package, made[-1])
    return made


def files(node: Any) -> Iterator[dict[str, Any]]:
    """Every object of a manifest that declares a file."""
    if isinstance(node, dict):
        if "fileName" in node:
            yield node
        for value in node.values():
            yield from files(value)
    elif isinstance(node, list):
        for value in node:
            yield from files(value)


def render(manifest: dict[str, Any]) -> str:
    """The manifest as it is written: two spaces, and lists of plain values on one line."""
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    flat = re.compile(r"\[\s*([^\[\]{}]*?)\s*\]")
    return flat.sub(lambda match: "[" + re.sub(r"\s*\n\s*", " ", match.group(1)) + "]", text) + "\n"


def refreshed(package: Path, made: list[Path]) -> str:
    """The package's manifest with the sizes and digests of its files; those in `made` lie there."""
    fresh = {path.name: path for path in made}
    manifest = json.loads((package / "manifest.json").read_text())
    for entry in files(manifest):
        path = fresh.get(entry["fileName"], package / entry["fileName"])
        if not path.is_file():
            raise BuildError(f"{package.name}: the manifest declares {entry['fileName']}, which isn't there")
        data = path.read_bytes()
        entry["bytes"] = len(data)
        entry["sha256"] = hashlib.sha256(data).hexdigest()
    return render(manifest)


def build(package: Path) -> str:
    """Builds a package in place; returns what was done."""
    with tempfile.TemporaryDirectory(prefix="covey-made-") as scratch:
        made = make(package, Path(scratch))
        text = refreshed(package, made)
        for path in made:
            (package / path.name).write_bytes(path.read_bytes())
        (package / "manifest.json").write_text(text)
        return "\n".join(described(package, path) for path in made)


def described(package: Path, path: Path) -> str:
    """One line about a file that was made."""
    data = path.read_bytes()
    return f"{package.name}: {path.name}, {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()}"


def check(package: Path) -> str:
    """Builds a package elsewhere and compares; raises with every difference found."""
    wrong = []
    with tempfile.TemporaryDirectory(prefix="covey-check-") as scratch:
        made = make(package, Path(scratch))
        for path in made:
            there = package / path.name
            expected = hashlib.sha256(path.read_bytes()).hexdigest()
            found = hashlib.sha256(there.read_bytes()).hexdigest() if there.is_file() else "nothing"
            if expected != found:
                verb = "compile to" if path.suffix == ".wasm" else "make"
                wrong.append(
                    f"{path.name} isn't what the sources {verb}: expected sha256 {expected}, found {found}"
                )
        if refreshed(package, made) != (package / "manifest.json").read_text():
            wrong.append("manifest.json doesn't have the sizes and digests of its files, or our formatting")
    if wrong:
        raise BuildError(f"{package.name}: {'; '.join(wrong)}. Run: python models/build.py {package.name}")
    return f"{package.name}: {', '.join(path.name for path in made)}: what its sources make"


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="packages (default: all)")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a rebuild differs")
    arguments = parser.parse_args()
    failed = False
    try:
        require_compiler()
        chosen = packages(arguments.names)
    except BuildError as error:
        print(f"models/build.py: {error}", file=sys.stderr)
        return 1
    for package in chosen:
        try:
            print(check(package) if arguments.check else build(package))
        except BuildError as error:
            print(f"models/build.py: {error}", file=sys.stderr)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

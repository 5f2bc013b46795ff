"""The wheel that users install: what it carries, and that it stands alone."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "buf",
    "covey",
    "covey_coordinator",
    "covey_diagnostics",
    "covey_kit",
    "covey_participant",
    "covey_storage",
}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Builds the wheel and returns the names of the files in it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("covey-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_package_is_top_level_and_nothing_else_is(names: set[str]) -> None:
    """Folders of the repository map to import packages; tests, tools and protos stay out."""
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}

    assert top == PACKAGES


def test_types_and_licence_travel_along(names: set[str]) -> None:
    """Every hand-written package is marked as typed, and the licence is in the metadata."""
    typed = {name.split("/")[0] for name in names if name.endswith("/py.typed")}

    assert typed == PACKAGES - {"buf"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_demo_package_travels_along(names: set[str]) -> None:
    """`covey demo` works from an installed wheel: its model package is inside, its C sources aren't."""
    carried = {name.removeprefix("covey/_models/digits/") for name in names if "/_models/" in name}

    assert {"manifest.json", "model.wasm", "validation.bin"} <= carried
    assert any(name.startswith("data/") for name in carried)
    assert not any(name.endswith((".c", ".h")) for name in carried)


@pytest.mark.parametrize("module", ["covey.v1.work_service_pb2", "covey.v1.common_pb2"])
def test_messages_import_without_grpc_or_numpy(module: str) -> None:
    """A program that only reads messages pays for Protobuf, not for a server."""
    script = (
        f"import {module}, sys; print(*[m for m in ('grpc', 'numpy', 'protovalidate') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == ""

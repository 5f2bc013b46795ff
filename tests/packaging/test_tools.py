"""The checks of this repository find what they are there to find."""

from pathlib import Path

import pytest

import check_docstrings
import check_sizes
import lock


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Points the tools to an empty folder."""
    for tool in (check_sizes, check_docstrings, lock):
        monkeypatch.setattr(tool, "ROOT", tmp_path)
    return tmp_path


def test_a_function_is_measured_without_its_docstring(root: Path) -> None:
    """Explaining a function doesn't bring it nearer to its ceiling."""
    (root / "a.py").write_text('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n')

    measured = {what: found for what, found, _, _ in check_sizes.measure("a.py")}

    assert measured == {"a.py": 6, "a.py::f": 2}


def test_methods_and_inner_functions_are_measured_by_their_path(root: Path) -> None:
    """A violation names the method, not just the file."""
    (root / "a.py").write_text("class A:\n    def f(self):\n        def g():\n            pass\n")

    assert [what for what, *_ in check_sizes.measure("a.py")] == ["a.py", "a.py::A.f", "a.py::A.f.g"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("services/storage/covey_storage/domain/blobs.py", 400),
        ("services/storage/covey_storage/transport/blobs.py", 300),
        ("services/storage/covey_storage/storage_servicer.py", 300),
        ("tests/unit/test_blobs.py", 600),
    ],
)
def test_the_ceiling_depends_on_the_room(name: str, expected: int) -> None:
    """Servicers are kept smaller than other modules, tests may be longer."""
    assert check_sizes.ceiling(name)[0] == expected


def test_a_test_without_a_behaviour_is_found(root: Path) -> None:
    """A missing docstring and one that only repeats a word are both reported; inner helpers are not."""
    path = root / "test_a.py"
    path.write_text(
        '"""Module."""\n'
        "async def test_a():\n    def helper(): ...\n"
        'def test_b():\n    """Works."""\n'
        'def test_c():\n    """It says what happens."""\n'
    )

    assert [line.split()[0] for line in check_docstrings.violations(path)] == ["test_a.py:2:", "test_a.py:4:"]


def test_the_lock_must_cover_every_requirement(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A requirement without a pin, a pin outside its range and an address are all reported at once."""
    (root / "pyproject.toml").write_text(
        '[project]\nname = "x"\ndependencies = ["a>=2", "b"]\n'
        '[project.optional-dependencies]\ndev = ["c", "x[dev]"]\n'
    )
    locked = root / "requirements.lock"
    locked.write_text("--index-url https://example.org\na==1.0 \\\n    --hash=sha256:00\nc==3\n")
    monkeypatch.setattr(lock, "LOCK", locked)

    found = lock.violations()

    assert len(found) == 3
    assert any("a>=2 is locked at 1.0" in line for line in found)
    assert any("b isn't in" in line for line in found)
    assert any("address" in line for line in found)

"""`covey package check` looks into what it calls valid."""

import hashlib
import json
import shutil
from pathlib import Path

from covey.packages import check_package
from support.packages import DIGITS


def test_a_shader_archive_that_isnt_one_is_named(tmp_path: Path) -> None:
    """Garbage with the right size and digest isn't a valid archive."""
    folder = tmp_path / "digits"
    shutil.copytree(DIGITS, folder, ignore=shutil.ignore_patterns("data", "src", "samples", "shaders"))
    garbage = b"not a zip" * 80
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shaderArchive"] |= {"bytes": len(garbage), "sha256": hashlib.sha256(garbage).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / manifest["shaderArchive"]["fileName"]).write_bytes(garbage)

    report = check_package(folder)

    assert report.package is None
    assert {violation.field for violation in report.violations} == {"shaderArchive"}

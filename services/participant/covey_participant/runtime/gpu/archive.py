"""Reads a shader archive: a zip of `plan.json` and `*.wgsl`, from someone who may mean harm.

Whatever is unusual is refused rather than interpreted, because two readers that interpret a zip differently
are how one thing gets checked and another one used.
"""

import re
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO

from google.protobuf import json_format

from covey.v1 import shader_plan_pb2
from covey_kit.errors import InvalidArgument, Reason, Violation
from covey_kit.validation import violations

PLAN = "plan.json"
MOST_ARCHIVE_BYTES = 8 << 20
MOST_ENTRIES = 257
"""256 modules and the plan."""
MOST_DIRECTORY_BYTES = MOST_ENTRIES * 512
MOST_FILE_BYTES = 256 << 10
MOST_PLAN_BYTES = 1 << 20
MOST_TOTAL_BYTES = 8 << 20
MOST_RATIO = 100
"""WGSL and JSON that people write shrink to a tenth at best."""
RATIO_FROM_BYTES = 64 << 10
MOST_VIOLATIONS = 100

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}\.wgsl|plan\.json", re.ASCII)
_END = b"PK\x05\x06"
_END_BYTES = 22
_END64_LOCATOR = b"PK\x06\x07"
_END64_LOCATOR_BYTES = 20
_ENCRYPTED = 0x1 | 0x40 | 0x2000
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True)
class ShaderArchive:
    """What an archive held.

    Attributes:
        plan: the plan as written; its fields are in the contract's bounds, nothing else is checked yet.
        modules: WGSL source by file name.
    """

    plan: shader_plan_pb2.ShaderPlan
    modules: Mapping[str, str]


def read_archive(content: bytes) -> ShaderArchive:
    """Returns the plan and the modules of an archive. Takes time and memory proportional to 8 MiB at most.

    Raises:
        InvalidArgument: `SHADER_INVALID`, with every violation; fields are `shaderArchive/FILE` and
            `plan.json` field paths.
    """
    files, wrong = _unpack(content)
    plan = shader_plan_pb2.ShaderPlan()
    if PLAN in files:
        wrong += _parse_plan(files[PLAN], plan)
    modules = {}
    for name, raw in files.items():
        if name != PLAN:
            try:
                modules[name] = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                wrong.append(_violation(name, f"expected UTF-8, found byte {error.start} that isn't"))
    if wrong:
        raise invalid("the shader archive can't be used", wrong)
    return ShaderArchive(plan, modules)


def invalid(what: str, wrong: list[Violation]) -> InvalidArgument:
    """Returns the error that lists all violations, the first few in its sentence too."""
    shown = "; ".join(f"{v.field}: {v.description}" for v in wrong[:8])
    more = f" (and {len(wrong) - 8} more)" if len(wrong) > 8 else ""
    return InvalidArgument(Reason.SHADER_INVALID, f"{what}: {shown}{more}", violations=wrong)


def _violation(name: str, description: str) -> Violation:
    return Violation(f"shaderArchive/{name}" if name else "shaderArchive", description)


def _unpack(content: bytes) -> tuple[dict[str, bytes], list[Violation]]:
    """Returns what could be read, and everything that is wrong."""
    problem = _envelope(content)
    if problem:
        return {}, [_violation("", problem)]
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            entries = archive.infolist()
            wrong = _entries(entries)
            if wrong:
                return {}, wrong
            files = {}
            for entry in entries:
                raw, problem = _read(archive, entry)
                if problem:
                    wrong.append(_violation(entry.filename, problem))
                else:
                    files[entry.filename] = raw
            return files, wrong
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError) as error:
        return {}, [_violation("", f"isn't a zip that can be read: {error}")]


def _envelope(content: bytes) -> str | None:
    """Checks what zipfile would take in good faith: where the directory lies, and how large it is."""
    if len(content) > MOST_ARCHIVE_BYTES:
        return f"expected at most {MOST_ARCHIVE_BYTES} bytes, found {len(content)}"
    end = len(content) - _END_BYTES
    if end < 0 or content[end : end + 4] != _END or content[-2:] != b"\0\0":
        return "isn't a zip that ends with its directory (a comment after it isn't allowed)"
    if content[max(0, end - _END64_LOCATOR_BYTES) :].startswith(_END64_LOCATOR):
        return "is a zip64, which isn't allowed"
    count = int.from_bytes(content[end + 10 : end + 12], "little")
    size = int.from_bytes(content[end + 12 : end + 16], "little")
    start = int.from_bytes(content[end + 16 : end + 20], "little")
    if count > MOST_ENTRIES or size > MOST_DIRECTORY_BYTES:
        return f"expected at most {MOST_ENTRIES} files, found {count} (a directory of {size} bytes)"
    if start + size != end or not content.startswith(b"PK"):
        return "its directory doesn't lie where it says, or something was put before the zip"
    return None


def _entries(entries: list[zipfile.ZipInfo]) -> list[Violation]:
    """Checks what the directory announces; nothing is unpacked before all of it is in order."""
    wrong = []
    if len(entries) > MOST_ENTRIES:
        wrong.append(_violation("", f"expected at most {MOST_ENTRIES} files, found {len(entries)}"))
    counts = Counter(entry.filename.lower() for entry in entries)
    wrong += [
        _violation(_shown(name), f"is there {times} times (upper and lower case count as equal)")
        for name, times in counts.items()
        if times > 1
    ]
    for entry in entries:
        wrong += [_violation(_shown(entry.orig_filename), text) for text in _entry(entry)]
    total = sum(entry.file_size for entry in entries)
    if total > MOST_TOTAL_BYTES:
        wrong.append(_violation("", f"expected at most {MOST_TOTAL_BYTES} bytes unpacked, found {total}"))
    if PLAN not in {entry.filename for entry in entries}:
        wrong.append(_violation(PLAN, "is missing"))
    return wrong


def _entry(entry: zipfile.ZipInfo) -> list[str]:
    wrong = []
    if entry.orig_filename != entry.filename or not _NAME.fullmatch(entry.filename):
        wrong.append("expected plan.json or NAME.wgsl (letters, digits, '_', '.', '-'), no folders")
    mode = entry.external_attr >> 16
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        wrong.append("isn't a regular file (a link, a folder or a device)")
    if entry.flag_bits & _ENCRYPTED:
        wrong.append("is encrypted")
    if entry.compress_type not in _METHODS:
        wrong.append(f"expected stored or deflated, found compression method {entry.compress_type}")
    most = MOST_PLAN_BYTES if entry.filename == PLAN else MOST_FILE_BYTES
    if entry.file_size > most:
        wrong.append(f"expected at most {most} bytes unpacked, found {entry.file_size}")
    if entry.file_size > max(RATIO_FROM_BYTES, MOST_RATIO * entry.compress_size):
        wrong.append(
            f"expected a compression of at most {MOST_RATIO} to 1, found {entry.compress_size} bytes for "
            f"{entry.file_size}"
        )
    return wrong


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> tuple[bytes, str | None]:
    """Returns the unpacked file, whose size and checksum must be those announced."""
    try:
        with archive.open(entry) as file:
            raw = file.read(entry.file_size + 1)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, zlib.error) as error:
        return b"", f"can't be unpacked: {error}"
    if len(raw) != entry.file_size:
        return b"", f"announced {entry.file_size} bytes, unpacked {len(raw)}"
    return raw, None


def _shown(name: str) -> str:
    return name.encode("unicode_escape").decode("ascii")[:120]


def _parse_plan(raw: bytes, plan: shader_plan_pb2.ShaderPlan) -> list[Violation]:
    try:
        json_format.Parse(raw.decode("utf-8"), plan)
    except UnicodeDecodeError as error:
        return [Violation(PLAN, f"expected UTF-8, found byte {error.start} that isn't")]
    except (json_format.ParseError, RecursionError) as error:
        return [Violation(PLAN, f"isn't the JSON of covey.v1.ShaderPlan: {str(error)[:500]}")]
    return [Violation(f"{PLAN}:{_camel(v.field)}", v.description) for v in violations(plan)[:MOST_VIOLATIONS]]


def _camel(path: str) -> str:
    """Returns a field path as it reads in JSON."""
    return re.sub(r"_([a-z])", lambda found: found[1].upper(), path)

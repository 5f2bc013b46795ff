"""Shader archives: what is read, and what is refused without being unpacked."""

import io
import json
import stat
import struct
import time
import zipfile
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey_kit.errors import InvalidArgument, Reason
from covey_participant.runtime.gpu.archive import MOST_FILE_BYTES, read_archive
from support.gpu_plans import LINEAR, archive_bytes, linear_plan


def zipped(files: list[tuple[str | zipfile.ZipInfo, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip of these files, in this order."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files:
            archive.writestr(name, content)
    return buffer.getvalue()


def plan_file() -> tuple[str, bytes]:
    """The linear model's plan."""
    return "plan.json", json.dumps(linear_plan()).encode()


def refused(content: bytes) -> InvalidArgument:
    """The error, which must come quickly."""
    started = time.monotonic()
    with pytest.raises(InvalidArgument) as caught:
        read_archive(content)
    assert time.monotonic() - started < 5
    assert caught.value.reason is Reason.SHADER_INVALID
    return caught.value


def test_an_archive_is_read() -> None:
    """Plan and modules come out as they went in."""
    archive = read_archive(archive_bytes(linear_plan()))

    assert archive.modules == {"linear.wgsl": LINEAR}
    assert [pipeline.name for pipeline in archive.plan.pipelines] == ["forward", "descend"]
    assert archive.plan.buffers[2].tensor == 0
    assert archive.plan.buffers[2].WhichOneof("binding") == "tensor"


@pytest.mark.parametrize(
    "name",
    [
        "../x.wgsl",
        "a/b.wgsl",
        "/x.wgsl",
        "C:\\x.wgsl",
        "x.txt",
        "x.WGSL",
        "plan.json/",
        ".wgsl/",
        "é.wgsl",
        "x.wgsl\n",
    ],
)
def test_unexpected_names_are_refused(name: str) -> None:
    """Nothing but plan.json and plain .wgsl names, whatever a name would mean elsewhere."""
    error = refused(zipped([plan_file(), (name, b"")]))

    assert "no folders" in error.message


def test_a_name_with_a_nul_is_refused() -> None:
    """A name that other readers would cut at a NUL isn't taken."""
    content = zipped([plan_file(), ("xxx.wgsl", b"")]).replace(b"xxx.wgsl", b"x\0x.wgsl")

    assert "no folders" in refused(content).message


def test_names_come_once() -> None:
    """Two files of one name are refused, in any case."""
    with pytest.warns(UserWarning, match="Duplicate"):
        content = zipped([plan_file(), ("a.wgsl", b"1"), ("a.wgsl", b"2")])

    assert "2 times" in refused(content).message
    assert "2 times" in refused(zipped([plan_file(), ("a.wgsl", b""), ("A.wgsl", b"")])).message


def test_links_and_folders_are_refused() -> None:
    """Only regular files."""
    link = zipfile.ZipInfo("a.wgsl")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16

    assert "isn't a regular file" in refused(zipped([plan_file(), (link, b"/etc/passwd")])).message


def test_encrypted_files_are_refused() -> None:
    """The encryption bit is enough."""
    content = bytearray(zipped([plan_file(), ("a.wgsl", b"x")]))
    at = content.rindex(b"PK\x01\x02")
    content[at + 8] |= 1

    assert "is encrypted" in refused(bytes(content)).message


def test_other_compressions_are_refused() -> None:
    """Only what every reader has."""
    assert "compression method 14" in refused(zipped([plan_file()], zipfile.ZIP_LZMA)).message


def test_bombs_are_refused_unopened() -> None:
    """A file that unpacks to a gigabyte is refused by what it announces, as is a sum of many."""
    bomb = zipped([plan_file(), ("a.wgsl", bytes(64 << 20))])
    assert "bytes unpacked" in refused(bomb).message
    dense = zipped([plan_file(), ("a.wgsl", bytes(MOST_FILE_BYTES))])
    assert "100 to 1" in refused(dense).message
    many = [(f"m{i}.wgsl", bytes(range(256)) * (MOST_FILE_BYTES // 256)) for i in range(40)]
    found = refused(zipped([plan_file(), *many])).violations
    assert any(v.field == "shaderArchive" and "bytes unpacked" in v.description for v in found)


def test_a_bomb_that_lies_about_its_size_is_cut_off() -> None:
    """What unpacks to more than announced is refused, and no more than announced is unpacked."""
    content = bytearray(zipped([plan_file(), ("a.wgsl", bytes(64 << 20))]))
    at = content.rindex(b"PK\x01\x02")
    content[at + 24 : at + 28] = struct.pack("<I", 1000)
    content[at + 16 : at + 20] = struct.pack("<I", zlib.crc32(bytes(1000)))
    local = content.index(b"PK\x03\x04", 1)
    content[local + 22 : local + 26] = struct.pack("<I", 1000)

    archive = read_archive(bytes(content))  # the announced 1,000 bytes are all there is

    assert len(archive.modules["a.wgsl"]) == 1000


def test_too_many_files_are_refused() -> None:
    """The directory's length is bounded before it is read."""
    assert (
        "at most 257 files"
        in refused(zipped([plan_file(), *((f"m{i}.wgsl", b"") for i in range(300))])).message
    )
    assert "at most 257 files" in refused(zipped([(f"m{i}", b"") for i in range(60000)])).message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "isn't a zip"),
        (b"PK\x03\x04" + bytes(100), "isn't a zip"),
        (bytes(9 << 20), "at most"),
        (b"#!/bin/sh\n" + archive_bytes(linear_plan()), "doesn't lie where it says"),
        (archive_bytes(linear_plan()) + b"x", "isn't a zip"),
    ],
)
def test_what_is_no_plain_zip_is_refused(content: bytes, words: str) -> None:
    """Nothing before, behind or instead of the zip."""
    assert words in refused(content).message


def test_damage_is_found() -> None:
    """A wrong byte in a file breaks its checksum."""
    content = bytearray(zipped([plan_file(), ("a.wgsl", b"x" * 100)], zipfile.ZIP_STORED))
    content[content.index(b"xxx") + 1] = ord("y")

    assert "can't be unpacked" in refused(bytes(content)).message


def test_the_plan_must_be_there() -> None:
    """An archive without plan.json names what is missing."""
    assert "plan.json" in refused(zipped([("a.wgsl", b"")])).message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"surprise": 1}, "surprise"),
        ({"formatVersion": 2}, "plan.json:formatVersion"),
        ({"buffers": []}, "plan.json:buffers"),
        ({"buffers": [{"name": "a", "element": "F64", "count": "1"}]}, "F64"),
        ({"train": [{"pipeline": "forward"}] * 10000}, "plan.json:train"),
        (
            {"pipelines": [{"name": "x", "module": "../a.wgsl", "entryPoint": "m", "workgroups": ["1"]}]},
            "module",
        ),
    ],
)
def test_the_plan_follows_the_contract(change: dict[str, object], words: str) -> None:
    """Unknown keys and values out of bounds are refused, with their place in the plan."""
    assert (
        words in refused(zipped([("plan.json", json.dumps({**linear_plan(), **change}).encode())], 0)).message
    )


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"\xff\xfe", b'{"a":' * 100000, b'{"formatVersion":1,"formatVersion":1}']
)
def test_what_is_no_plan_is_refused(text: bytes) -> None:
    """Neither nesting nor encoding nor repetition gets through."""
    assert refused(zipped([("plan.json", text)], 0)).violations


def test_modules_are_utf8() -> None:
    """A module that isn't text is refused, with the others named too."""
    error = refused(zipped([plan_file(), ("a.wgsl", b"\xff"), ("b.wgsl", b"\xc0")]))

    assert [violation.field for violation in error.violations] == [
        "shaderArchive/a.wgsl",
        "shaderArchive/b.wgsl",
    ]


@given(st.data())
def test_no_damage_gets_through_unseen(data: st.DataObject) -> None:
    """Whatever byte changes: the same content comes out, or an error."""
    whole = archive_bytes(linear_plan(), {"a.wgsl": "fn a() {}"})
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        archive = read_archive(bytes(content))
    except InvalidArgument:
        return
    assert archive.plan == read_archive(whole).plan
    assert list(archive.modules.values()) == ["fn a() {}"]

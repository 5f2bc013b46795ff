"""What the device keeps: identity, settings, cached blobs."""

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from covey_kit.errors import DataLoss, FailedPrecondition, Reason, ResourceExhausted
from covey_participant.domain.values import Blob, DeviceSettings, Preference
from covey_participant.state.cache import BlobCache
from covey_participant.state.identity import load_or_create
from covey_participant.state.settings import SettingsFile

pytestmark = pytest.mark.may_block


# --- identity ---------------------------------------------------------------------------------


def test_an_identity_is_made_once(tmp_path: Path) -> None:
    """A second start finds the same id and credential, in a file that is its owner's alone."""
    made = load_or_create(tmp_path)

    assert load_or_create(tmp_path) == made
    assert len(made.credential) == 32
    assert made.participant_id.startswith("device-")
    assert (tmp_path / "identity.json").stat().st_mode & 0o777 == 0o600
    assert made.credential.hex() not in repr(made)


def test_an_id_can_be_chosen_once(tmp_path: Path) -> None:
    """The folder keeps to it, and says so when another one is wanted."""
    assert load_or_create(tmp_path, "mine").participant_id == "mine"
    with pytest.raises(FailedPrecondition, match="belongs to mine, not to yours"):
        load_or_create(tmp_path, "yours")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"participantId": "a", "credential": "00"}', b"\xff"]
)
def test_a_damaged_identity_is_never_replaced_silently(tmp_path: Path, content: bytes) -> None:
    """The error names the file and what to do; the file stays."""
    (tmp_path / "identity.json").write_bytes(content)

    with pytest.raises(FailedPrecondition, match=r"identity\.json is damaged"):
        load_or_create(tmp_path)
    assert (tmp_path / "identity.json").read_bytes() == content


# --- settings ---------------------------------------------------------------------------------


def test_settings_come_back(tmp_path: Path) -> None:
    """What was saved is what is loaded; without a file, defaults."""
    file = SettingsFile(tmp_path)
    assert file.load() == DeviceSettings()
    settings = DeviceSettings(Preference.GPU, 2, 512, accept_all=True)
    file.save(settings)

    assert SettingsFile(tmp_path).load() == settings


def test_the_command_line_wins_and_is_kept(tmp_path: Path) -> None:
    """Only what was given changes."""
    SettingsFile(tmp_path).save(DeviceSettings(max_local_workers=2))
    given = SettingsFile(tmp_path).start_with(accept_all=True, preference=None, max_local_workers=None)

    assert given == SettingsFile(tmp_path).load() == DeviceSettings(max_local_workers=2, accept_all=True)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"maxLocalWorkers": -1}', b'{"backendPreference": "TPU"}', b'"x"']
)
def test_damaged_settings_fall_back_to_defaults(tmp_path: Path, content: bytes) -> None:
    """A device must start; what it can't read it doesn't use."""
    (tmp_path / "settings.json").write_bytes(content)

    assert SettingsFile(tmp_path).load() == DeviceSettings()


# --- cache ------------------------------------------------------------------------------------


def read(path: Path) -> bytes:
    """What a file has."""
    return path.read_bytes()


def write(path: Path, content: bytes) -> None:
    """Puts content into a file."""
    path.write_bytes(content)


def blob(content: bytes) -> Blob:
    """A blob's name."""
    return Blob(hashlib.sha256(content).hexdigest(), len(content))


class Source:
    """Brings content to a path, and counts how often."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.fetched = 0

    async def __call__(self, path: Path) -> None:
        self.fetched += 1
        await asyncio.sleep(0)
        write(path, self.content)


def kept(folder: Path) -> set[str]:
    """Names of what a cache has."""
    return {path.name for path in folder.iterdir()}


async def opened(folder: Path, most_bytes: int = 1000) -> BlobCache:
    """A cache."""
    cache = BlobCache(folder, most_bytes)
    await cache.open()
    return cache


async def test_a_blob_is_fetched_once(tmp_path: Path) -> None:
    """By two callers at a time, and by a later run of the program."""
    source, other = Source(b"data"), Source(b"data")
    cache = await opened(tmp_path)

    async def use() -> bytes:
        async with cache.hold(blob(b"data"), source) as path:
            return read(path)

    assert list(await asyncio.gather(use(), use())) == [b"data", b"data"]
    async with (await opened(tmp_path)).hold(blob(b"data"), other):
        pass
    assert (source.fetched, other.fetched) == (1, 0)


@pytest.mark.parametrize("damage", [b"", b"dat", b"DATA", b"data and more"])
async def test_a_damaged_blob_is_fetched_again(tmp_path: Path, damage: bytes) -> None:
    """In the same run and after a restart: what doesn't match its digest is never handed out."""
    cache = await opened(tmp_path)
    source = Source(b"data")
    for fetched in (1, 2):
        async with cache.hold(blob(b"data"), source) as path:
            assert read(path) == b"data"
        assert source.fetched == fetched
        write(path, damage)
        os.utime(path, ns=(1, fetched))
    async with (await opened(tmp_path)).hold(blob(b"data"), source) as path:
        assert read(path) == b"data"


async def test_wrong_content_is_refused(tmp_path: Path) -> None:
    """Whatever brings it: DATA_LOSS, and nothing stays."""
    cache = await opened(tmp_path)
    with pytest.raises(DataLoss) as caught:
        async with cache.hold(blob(b"data"), Source(b"evil")):
            pass
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert kept(tmp_path) == set()


async def test_the_least_recently_used_go_first_and_what_is_held_stays(tmp_path: Path) -> None:
    """The bound holds as soon as it can; the order of use survives a restart."""
    cache = await opened(tmp_path, 30)
    names = [bytes([65 + n]) * 10 for n in range(4)]
    for content in names[:3]:
        async with cache.hold(blob(content), Source(content)):
            pass
    async with cache.hold(blob(names[0]), Source(names[0])), cache.hold(blob(names[3]), Source(names[3])):
        assert kept(tmp_path) == {blob(content).sha256 for content in (names[0], names[2], names[3])}
    assert cache.bytes == 30
    again = await opened(tmp_path, 20)
    assert kept(tmp_path) == {blob(names[0]).sha256, blob(names[3]).sha256}
    assert again.bytes == 20


async def test_what_is_held_may_be_more_than_the_bound(tmp_path: Path) -> None:
    """Work goes before the bound; afterwards it holds again."""
    cache = await opened(tmp_path, 10)
    async with cache.hold(blob(b"a" * 8), Source(b"a" * 8)), cache.hold(blob(b"b" * 8), Source(b"b" * 8)):
        assert cache.bytes == 16
    assert cache.bytes == 8


async def test_a_full_disk_empties_the_cache_before_it_fails(tmp_path: Path) -> None:
    """What isn't held makes room, and the fetch is tried once more."""
    cache = await opened(tmp_path)
    async with cache.hold(blob(b"old"), Source(b"old")):
        pass
    tries = []

    async def fetch(path: Path) -> None:
        tries.append(sorted(kept(tmp_path)))
        if len(tries) == 1:
            raise ResourceExhausted(Reason.STORAGE_FULL, "no room")
        write(path, b"new")

    async with cache.hold(blob(b"new"), fetch):
        pass

    assert tries == [[blob(b"old").sha256], []]


@pytest.mark.parametrize("name", ["../identity.json", "", "a" * 63, "A" * 64, "a" * 63 + "/"])
async def test_what_isnt_a_digest_never_becomes_a_path(tmp_path: Path, name: str) -> None:
    """A coordinator can't make the device look at, or remove, a file of its own choice."""
    write(tmp_path / "identity.json", b"mine")
    cache = await opened(tmp_path / "cache")
    with pytest.raises(DataLoss):
        async with cache.hold(Blob(name, 4), Source(b"data")):
            pass

    assert read(tmp_path / "identity.json") == b"mine"
    assert kept(tmp_path / "cache") == set()

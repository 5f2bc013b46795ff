"""The bytes of visible blobs, through obstore: a folder, or a bucket with the same calls.

Keys: `blobs/ab/abcd…` for what is served, `quarantine/abcd…` for what was found damaged.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import obstore
from obstore.store import AzureStore, GCSStore, HTTPStore, LocalStore, MemoryStore, S3Store, from_url

from covey_kit.bulk import file_blocks, read_ahead
from covey_kit.files import sync_folder
from covey_kit.limits import BULK_BYTES
from covey_storage.domain.model import DIGEST
from covey_storage.domain.ports import Hash
from covey_storage.state.errors import world_errors

__all__ = ["BucketObjects", "FolderObjects", "open_bucket"]

Store: TypeAlias = AzureStore | GCSStore | HTTPStore | LocalStore | MemoryStore | S3Store

_BLOBS = "blobs"
_QUARANTINE = "quarantine"


def _key(sha256: str) -> str:
    """Returns where a blob lies. Digests become names here: nothing else may."""
    if not DIGEST.fullmatch(sha256):
        raise ValueError(f"{sha256!r} isn't a digest")
    return f"{_BLOBS}/{sha256[:2]}/{sha256}"


def _aside(sha256: str) -> str:
    if not DIGEST.fullmatch(sha256):
        raise ValueError(f"{sha256!r} isn't a digest")
    return f"{_QUARANTINE}/{sha256}"


class BucketObjects:
    """`Objects` in any store that obstore speaks to.

    Args:
        store: the bucket. A put that it answered counts as durable.
        scratch: folder for copies of objects that must be local for a while.
    """

    def __init__(self, store: Store, scratch: Path) -> None:
        self._store = store
        self._scratch = scratch

    async def size(self, sha256: str) -> int | None:
        """Returns the size of an object; None when it isn't there."""
        return await self._size(_key(sha256))

    async def _size(self, key: str) -> int | None:
        with world_errors():
            try:
                return (await obstore.head_async(self._store, key))["size"]
            except FileNotFoundError:
                return None

    async def publish(self, sha256: str, path: Path) -> None:
        """Uploads a verified file and removes it here."""
        with world_errors():
            await obstore.put_async(self._store, _key(sha256), path)
            await asyncio.to_thread(path.unlink)

    async def read(self, sha256: str, offset: int, size: int, digest: Hash) -> AsyncGenerator[bytes, None]:
        """Yields a range in blocks, hashed on the way. Ends early when the object is shorter or lost."""
        async with aclosing(self._read(_key(sha256), offset, size, digest)) as blocks:
            async for block in blocks:
                yield block

    async def _read(
        self, key: str, offset: int, size: int, digest: Hash | None
    ) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()

        async def fetch(start: int, length: int) -> Sequence[bytes]:
            try:
                data = await obstore.get_range_async(self._store, key, start=start, length=length)
            except FileNotFoundError:
                return ()
            return await loop.run_in_executor(None, _split, memoryview(data), digest)

        with world_errors():
            async with aclosing(read_ahead(fetch, offset, size)) as blocks:
                async for block in blocks:
                    yield block

    async def delete(self, sha256: str) -> bool:
        """Removes an object, from the quarantine too. False when there was none."""
        found = [await self._delete(key) for key in (_key(sha256), _aside(sha256))]
        return any(found)

    async def _delete(self, key: str) -> bool:
        if await self._size(key) is None:
            return False
        with world_errors():
            try:
                await obstore.delete_async(self._store, key)
            except FileNotFoundError:
                return False
        return True

    async def set_aside(self, sha256: str) -> None:
        """Moves an object to the quarantine; nothing happens when it isn't there."""
        with world_errors():
            try:
                await obstore.rename_async(self._store, _key(sha256), _aside(sha256))
            except FileNotFoundError:
                return

    @asynccontextmanager
    async def local(self, sha256: str) -> AsyncIterator[Path | None]:
        """Gives a copy of the object in the scratch folder."""
        for key in (_key(sha256), _aside(sha256)):
            size = await self._size(key)
            if size is not None:
                break
        else:
            yield None
            return
        with tempfile.NamedTemporaryFile(dir=self._scratch, prefix="copy-") as file:
            async with aclosing(self._read(key, 0, size, None)) as blocks:
                async for block in blocks:
                    with world_errors():
                        await asyncio.to_thread(file.write, block)
            await asyncio.to_thread(file.flush)
            yield Path(file.name)

    async def names(self) -> AsyncIterator[Sequence[str]]:
        """Yields the digests of all objects; a stray file's whole name where it isn't one."""
        with world_errors():
            async for batch in obstore.list(self._store, _BLOBS):
                paths = [meta["path"] for meta in batch]
                yield [_name(path) for path in paths]

    async def remove_stray(self, name: str) -> None:
        """Removes a file that `names` gave and that isn't an object."""
        if not name.startswith(f"{_BLOBS}/"):
            raise ValueError(f"{name!r} isn't a stray file")
        await self._delete(name)


def _name(path: str) -> str:
    sha256 = path.rpartition("/")[2]
    return sha256 if DIGEST.fullmatch(sha256) and path == _key(sha256) else path


def _split(data: memoryview, digest: Hash | None) -> list[bytes]:
    blocks = [bytes(data[start : start + BULK_BYTES]) for start in range(0, len(data), BULK_BYTES)]
    if digest is not None:
        for block in blocks:
            digest.update(block)
    return blocks


class FolderObjects(BucketObjects):
    """`Objects` in a folder of this machine: renamed into place and synced, which LocalStore doesn't do.

    Args:
        folder: holds `blobs/` and `quarantine/`, on the same file system as the parts.
        scratch: see `BucketObjects`.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        super().__init__(LocalStore(folder, automatic_cleanup=False), scratch)
        self._folder = folder
        for name in (_BLOBS, _QUARANTINE):
            (folder / name).mkdir(exist_ok=True)
        sync_folder(folder)

    async def publish(self, sha256: str, path: Path) -> None:
        """Renames a verified, synced file into place."""

        def move() -> None:
            target = self._folder / _key(sha256)
            if not target.parent.is_dir():
                target.parent.mkdir(exist_ok=True)
                sync_folder(target.parent.parent)
            path.replace(target)
            sync_folder(target.parent)

        with world_errors():
            await asyncio.to_thread(move)

    async def _read(
        self, key: str, offset: int, size: int, digest: Hash | None
    ) -> AsyncGenerator[bytes, None]:
        """Reads the file itself: a detour through the store's own buffers costs a third of the speed."""
        with world_errors():
            try:
                source = file_blocks(self._folder / key, offset, size, sha256=digest)
                async with aclosing(source) as blocks:
                    async for block in blocks:
                        yield block
            except FileNotFoundError:
                return

    @asynccontextmanager
    async def local(self, sha256: str) -> AsyncIterator[Path | None]:
        """Gives the file itself."""
        for key in (_key(sha256), _aside(sha256)):
            path = self._folder / key
            if await asyncio.to_thread(path.is_file):
                yield path
                return
        yield None


def open_bucket(url: str) -> Store:
    """Returns the store behind a URL such as `s3://bucket/prefix`; credentials come from the environment.

    Raises ValueError when obstore doesn't know what to do with it.
    """
    try:
        return from_url(url)
    except Exception as error:
        raise ValueError(f"the blob URL {url} can't be used: {error}") from error

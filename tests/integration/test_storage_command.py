"""The `covey-storage` command as people run it."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from covey_kit.blobs import read_bytes, write_bytes
from covey_kit.caller import Role
from covey_kit.channel import connect
from covey_kit.errors import ResourceExhausted
from covey_kit.tokens import SigningKey

pytestmark = pytest.mark.slow


async def start(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    """Starts `covey-storage` with these arguments."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "covey_storage",
        *arguments,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    """Waits for the end; returns exit status and what was said about the failure."""
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, errors.decode()


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    """A signing key, its public half beside it."""
    return SigningKey.load_or_create(tmp_path / "signing-key.pem")


async def test_flags_environment_and_file_count_in_this_order(tmp_path: Path, key: SigningKey) -> None:
    """A flag beats the environment, which beats the file; SIGTERM ends the process with 0."""
    config = tmp_path / "storage.toml"
    config.write_text(
        'listen = "127.0.0.1:1"\nmax-blob-bytes = 10\nmin-free-bytes = 0\n'
        f'folder = "{tmp_path / "wrong"}"\ntrusted-key = ["{tmp_path / "signing-key.pub"}"]\n'
    )
    process = await start(
        "serve",
        "--config",
        str(config),
        "--listen",
        "127.0.0.1:0",
        COVEY_LISTEN="127.0.0.1:2",
        COVEY_STORAGE_FOLDER=str(tmp_path / "right"),
    )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
    address = line.removeprefix("covey-storage is ready on ").strip()
    async with connect(address, key.issue("me", Role.OWNER, 60)) as channel:
        blob = await write_bytes(channel, b"0123456789")
        assert await read_bytes(channel, blob.sha256, max_bytes=10) == b"0123456789"
        with pytest.raises(ResourceExhausted, match="at most 10"):
            await write_bytes(channel, b"01234567890")
    process.terminate()

    status, errors = await ended(process)

    assert status == 0, errors
    assert (tmp_path / "right" / "storage.sqlite").exists()
    assert not (tmp_path / "wrong").exists()


async def test_what_people_can_mend_is_a_line(tmp_path: Path, key: SigningKey) -> None:
    """A missing key, a port beyond loopback without TLS and a bad URL end with 1 and a line, no traceback."""
    folder = ("--folder", str(tmp_path / "s"))
    trusted = ("--trusted-key", str(tmp_path / "signing-key.pub"))
    for arguments, said in (
        (("--trusted-key", str(tmp_path / "nothing.pub")), "nothing.pub"),
        ((*trusted, "--listen", "0.0.0.0:0"), "--tls-cert"),
        ((*trusted, "--blob-url", "nonsense://x"), "nonsense://x"),
        ((*trusted, "--database-url", "what"), "database URL"),
    ):
        status, errors = await ended(await start("serve", *folder, *arguments))
        assert status == 1, errors
        assert said in errors
        assert errors.startswith("error: ")
        assert "Traceback" not in errors


async def test_wrong_usage_exits_with_two(tmp_path: Path) -> None:
    """Without a trusted key, or with a value out of bounds, the command says so and exits with 2."""
    for arguments, said in (
        (("serve",), "--trusted-key"),
        (("serve", "--trusted-key", "x", "--max-blob-bytes", "0"), "--max-blob-bytes"),
    ):
        status, errors = await ended(await start(*arguments))
        assert status == 2
        assert said in errors

"""Which coordinator a command talks to, and with which token."""

import json
import stat
from pathlib import Path

import pytest

from covey import context
from covey_kit.errors import InvalidArgument, Reason


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration folder of this test's own, and none of the caller's variables."""
    for name in (context.COORDINATOR_VARIABLE, context.TOKEN_FILE_VARIABLE, context.FOLDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(context.CONFIG_VARIABLE, str(tmp_path / "config"))
    return tmp_path


def test_without_anything_the_default_address_is_tried_without_a_token() -> None:
    """The first command on a machine names where it looked."""
    server = context.resolve()

    assert (server.address, server.token_file, server.token()) == ("127.0.0.1:7654", None, None)
    assert server.origin == "the default"


def test_the_last_up_is_the_current_one_and_its_token_is_found(home: Path) -> None:
    """`covey up` remembers itself, in a file that only its owner reads."""
    token = home / "owner.token"
    token.write_text("abc.def.ghi\n")
    context.remember("127.0.0.1:1111", home / "other.token", home)
    context.remember("127.0.0.1:2222", token, home)

    server = context.resolve()

    assert (server.address, server.token()) == ("127.0.0.1:2222", "abc.def.ghi")
    assert context.resolve("127.0.0.1:1111").token_file == home / "other.token"
    assert stat.S_IMODE((home / "config" / "servers.json").stat().st_mode) == 0o600


def test_arguments_override_variables_and_variables_the_entry(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flag, then environment, then what `covey up` remembered."""
    context.remember("127.0.0.1:1111", home / "one.token", home)
    monkeypatch.setenv(context.COORDINATOR_VARIABLE, "127.0.0.1:2222")
    monkeypatch.setenv(context.TOKEN_FILE_VARIABLE, str(home / "two.token"))

    from_variables = context.resolve()
    from_arguments = context.resolve("127.0.0.1:3333", home / "three.token")

    assert (from_variables.address, from_variables.token_file) == ("127.0.0.1:2222", home / "two.token")
    assert (from_arguments.address, from_arguments.token_file) == ("127.0.0.1:3333", home / "three.token")


def test_an_up_that_ended_gives_the_place_back(home: Path) -> None:
    """The one before it is current again; an entry that another folder took over is left alone."""
    context.remember("127.0.0.1:1111", home / "one.token", home / "one")
    context.remember("127.0.0.1:2222", home / "two.token", home / "two")

    context.forget("127.0.0.1:1111", home / "another")
    context.forget("127.0.0.1:2222", home / "two")

    assert context.resolve().address == "127.0.0.1:1111"


@pytest.mark.parametrize("address", ["localhost", "host:", ":1", "host:70000", "host:x", "host:0", ""])
def test_an_address_is_host_and_port(address: str) -> None:
    """Everything else is refused before a connection is tried."""
    if address:
        with pytest.raises(InvalidArgument, match="HOST:PORT"):
            context.resolve(address)
    else:
        assert context.resolve(address).address == context.DEFAULT_ADDRESS


def test_a_token_file_that_is_missing_or_holds_no_token_is_named(home: Path) -> None:
    """The words say which file, since it may come from four places."""
    two = home / "two.token"
    two.write_text("one two\n")

    with pytest.raises(InvalidArgument, match=r"lost\.token can't be read"):
        context.resolve(token_file=home / "lost.token").token()
    with pytest.raises(InvalidArgument, match=r"two\.token doesn't hold one token") as refused:
        context.resolve(token_file=two).token()

    assert refused.value.reason is Reason.TOKEN_INVALID


@pytest.mark.parametrize("text", ["{", "[]", '{"servers": 1}'])
def test_a_damaged_entry_file_is_told_and_replaced_by_the_next_up(home: Path, text: str) -> None:
    """A command names the file; `covey up` isn't stopped by it."""
    path = home / "config" / "servers.json"
    path.parent.mkdir()
    path.write_text(text)

    with pytest.raises(InvalidArgument, match=r"servers\.json"):
        context.resolve()
    context.forget("127.0.0.1:1111", home)
    context.remember("127.0.0.1:1111", home / "one.token", home)

    assert json.loads(path.read_text())["current"] == "127.0.0.1:1111"
    assert context.resolve().address == "127.0.0.1:1111"

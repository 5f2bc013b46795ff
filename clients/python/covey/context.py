"""Which coordinator to talk to, and with which token: what `covey up` remembered, unless told otherwise.

`covey up` writes one entry for itself into `servers.json` in the user's configuration folder (mode 0600):

    {"current": "127.0.0.1:7654", "servers": {"127.0.0.1:7654": {"tokenFile": "…", "folder": "…"}}}

`COVEY_COORDINATOR` and `COVEY_TOKEN_FILE` override it, and explicit arguments override both.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey_kit.errors import InvalidArgument, Reason

__all__ = [
    "DEFAULT_ADDRESS",
    "Server",
    "config_folder",
    "data_folder",
    "device_folder",
    "forget",
    "remember",
    "resolve",
]

DEFAULT_ADDRESS = "127.0.0.1:7654"
"""Where `covey up` listens when it isn't told otherwise."""

COORDINATOR_VARIABLE = "COVEY_COORDINATOR"
TOKEN_FILE_VARIABLE = "COVEY_TOKEN_FILE"  # noqa: S105 - the name of a variable, not a secret
FOLDER_VARIABLE = "COVEY_FOLDER"
CONFIG_VARIABLE = "COVEY_CONFIG_FOLDER"


@dataclass(frozen=True)
class Server:
    """A coordinator and how to reach it.

    Attributes:
        address: `HOST:PORT`.
        token_file: file with the owner's (or viewer's) token; None when none is known.
        origin: in words, where the address came from.
        root_cert: PEM certificates to trust; None: it speaks plain text, as far as is known.
    """

    address: str
    token_file: Path | None
    origin: str
    root_cert: Path | None = None

    def token(self) -> str | None:
        """Reads the token; None when there is no token file.

        Raises:
            InvalidArgument: the file can't be read or holds no token.
        """
        if self.token_file is None:
            return None
        try:
            text = self.token_file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it isn't text"
            raise InvalidArgument(
                Reason.TOKEN_MISSING,
                f"the token file {self.token_file} can't be read: {why}; name another with --token-file",
            ) from error
        if not text or any(character.isspace() for character in text):
            raise InvalidArgument(
                Reason.TOKEN_INVALID,
                f"the token file {self.token_file} doesn't hold one token and nothing else",
            )
        return text


def config_folder() -> Path:
    """Where `servers.json` lies: `COVEY_CONFIG_FOLDER`, or the user's configuration folder."""
    import platformdirs

    override = os.environ.get(CONFIG_VARIABLE)
    return Path(override) if override else Path(platformdirs.user_config_dir("covey", appauthor=False))


def data_folder() -> Path:
    """Where `covey up` keeps its state: `COVEY_FOLDER`, or the user's data folder."""
    import platformdirs

    override = os.environ.get(FOLDER_VARIABLE)
    return Path(override) if override else Path(platformdirs.user_data_dir("covey", appauthor=False))


def device_folder(coordinator: str | None = None) -> Path:
    """Where a device keeps its state: the one of that coordinator, or (None) the only one that there is.

    Raises:
        InvalidArgument: there is none, or more than one.
    """
    home = data_folder() / "participants"
    if coordinator is not None:
        return home / coordinator.replace(":", "-")
    found = sorted(child for child in home.iterdir() if child.is_dir()) if home.is_dir() else []
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} devices have" if found else "no device has"
    raise InvalidArgument(
        Reason.INVALID_FIELD, f"{what} a folder in {home}; name the device's folder with --folder"
    )


def _read() -> dict[str, Any]:
    path = config_folder() / "servers.json"
    try:
        known = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {"servers": {}}
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            Reason.INVALID_FIELD, f"{path} can't be read ({error}); delete it, `covey up` writes it anew"
        ) from error
    if not isinstance(known, dict) or not isinstance(known.get("servers"), dict):
        raise InvalidArgument(
            Reason.INVALID_FIELD, f"{path} isn't what `covey up` writes; delete it, it is written anew"
        )
    return known


def _write(known: dict[str, Any]) -> None:
    from covey_kit.tokens import write_secret

    write_secret(config_folder() / "servers.json", (json.dumps(known, indent=2) + "\n").encode())


def remember(address: str, token_file: Path, folder: Path, root_cert: Path | None = None) -> None:
    """Makes `address` the current coordinator. An unreadable `servers.json` is replaced."""
    try:
        known = _read()
    except InvalidArgument:
        known = {"servers": {}}
    entry = {"tokenFile": str(token_file.resolve()), "folder": str(folder.resolve())}
    if root_cert is not None:
        entry["rootCert"] = str(root_cert.resolve())
    known["servers"].pop(address, None)  # the newest stands last
    known["servers"][address] = entry
    known["current"] = address
    _write(known)


def forget(address: str, folder: Path) -> None:
    """Takes the entry of a coordinator that stopped out again, if it is still the one of that folder.

    The default address stays current by being the default.
    """
    try:
        known = _read()
    except InvalidArgument:
        return
    entry = known["servers"].get(address)
    if not isinstance(entry, dict) or entry.get("folder") != str(folder.resolve()):
        return
    del known["servers"][address]
    if known.get("current") == address:
        known.pop("current")
        if known["servers"]:
            known["current"] = next(reversed(known["servers"]))
    _write(known)


def resolve(address: str | None = None, token_file: Path | str | None = None) -> Server:
    """Returns the coordinator meant: by argument, else environment, else current entry, else the default.

    Raises:
        InvalidArgument: the address isn't `HOST:PORT`, or `servers.json` can't be read.
    """
    origin = "as given"
    wanted = address
    if not wanted and os.environ.get(COORDINATOR_VARIABLE):
        wanted, origin = os.environ[COORDINATOR_VARIABLE], f"from {COORDINATOR_VARIABLE}"
    known = _read()
    if not wanted and isinstance(known.get("current"), str):
        wanted, origin = known["current"], "the last `covey up` on this machine"
    if not wanted:
        wanted, origin = DEFAULT_ADDRESS, "the default"
    check_address(wanted)
    entry = known["servers"].get(wanted)
    entry = entry if isinstance(entry, dict) else {}
    file = token_file or os.environ.get(TOKEN_FILE_VARIABLE) or entry.get("tokenFile")
    root_cert = entry.get("rootCert")
    return Server(wanted, Path(file) if file else None, origin, Path(root_cert) if root_cert else None)


def check_address(address: str, *, port_zero: bool = False) -> tuple[str, int]:
    """Returns (host, port) of `HOST:PORT`.

    Raises:
        InvalidArgument: it isn't one.
    """
    host, separator, port = address.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() else -1
    if not separator or not host or not (0 if port_zero else 1) <= number <= 65535:
        raise InvalidArgument(
            Reason.INVALID_FIELD, f"the address {address!r} isn't HOST:PORT, such as {DEFAULT_ADDRESS}"
        )
    return host, number

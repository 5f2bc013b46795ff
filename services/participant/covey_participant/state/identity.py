"""Who this device is: an id and 32 secret bytes, made once and kept in its folder."""

import json
import secrets
from pathlib import Path

from covey_kit.errors import FailedPrecondition, Reason
from covey_kit.ids import new_id
from covey_kit.tokens import write_secret
from covey_participant.domain.values import Identity

CREDENTIAL_BYTES = 32


def load_or_create(folder: Path, wanted_id: str = "") -> Identity:
    """Returns the identity in `folder/identity.json` (0600), making it at the first start. Blocks.

    Args:
        folder: the device's state folder.
        wanted_id: id for a new identity; empty: a random one.

    Raises:
        FailedPrecondition: the file is damaged, or holds another id than the one wanted.
    """
    path = folder / "identity.json"
    if not path.exists():
        made = Identity(wanted_id or new_id("device"), secrets.token_bytes(CREDENTIAL_BYTES))
        document = {"participantId": made.participant_id, "credential": made.credential.hex()}
        write_secret(path, json.dumps(document).encode())
        return made
    identity = _parse(path.read_bytes())
    if identity is None:
        raise FailedPrecondition(
            Reason.DEVICE,
            f"{path} is damaged: put it back from a backup, or remove it to begin as a new device",
            resource=("file", str(path)),
        )
    if wanted_id and identity.participant_id != wanted_id:
        raise FailedPrecondition(
            Reason.DEVICE,
            f"{folder} belongs to {identity.participant_id}, not to {wanted_id}; choose another folder or id",
            resource=("folder", str(folder)),
        )
    return identity


def _parse(content: bytes) -> Identity | None:
    try:
        found = json.loads(content)
        identity = Identity(str(found["participantId"]), bytes.fromhex(found["credential"]))
    except (ValueError, KeyError, TypeError):
        return None
    return identity if len(identity.credential) == CREDENTIAL_BYTES and identity.participant_id else None

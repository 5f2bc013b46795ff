"""One JSON text per message: what makes equal checkpoints equal bytes."""

import json

from google.protobuf import json_format, message

__all__ = ["canonical_json", "dump_json"]


def dump_json(value: object) -> str:
    """Returns the one text of a JSON value: keys sorted, no spaces, ASCII, shortest exact floats.

    Raises ValueError for NaN and infinity, which JSON can't say.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical_json(value: message.Message) -> str:
    """Returns the canonical proto3 JSON of a message: lowerCamelCase names, enums by name, absent is absent.

    Equal messages give equal texts, on every machine and in every run.
    """
    return dump_json(json_format.MessageToDict(value))

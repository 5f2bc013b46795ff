"""The bounds of the contract, enforced on messages."""

from functools import cache

import protovalidate
from google.protobuf import descriptor
from google.protobuf.message import Message

from covey_kit.errors import InvalidArgument, Reason, Violation

__all__ = ["check", "is_bulk", "violations"]


def violations(message: Message) -> list[Violation]:
    """Returns everything in `message` that breaks its `buf.validate` rules, with field paths."""
    return [
        Violation(_path(found), found.proto.message or found.proto.rule_id)
        for found in protovalidate.collect_violations(message)
    ]


def _path(found: protovalidate.Violation) -> str:
    parts: list[str] = []
    field = found.proto.field
    for element in field.elements if field is not None else ():
        text = element.field_name
        subscript = element.subscript
        if subscript is not None:
            value = subscript.value
            text += f"[{value!r}]" if isinstance(value, str) else f"[{value}]"
        parts.append(text)
    return ".".join(parts)


def check(message: Message) -> None:
    """Checks `message` against its rules.

    Raises:
        InvalidArgument: INVALID_FIELD with all violations.
    """
    found = violations(message)
    if found:
        listed = "; ".join(f"{v.field or 'request'}: {v.description}" for v in found[:10])
        more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
        raise InvalidArgument(
            Reason.INVALID_FIELD,
            f"{message.DESCRIPTOR.name}: {listed}{more}",
            violations=found,
        )


@cache
def _bulk_field(kind: descriptor.Descriptor) -> str | None:
    field = kind.fields_by_name.get("data")
    if field is not None and field.type == field.TYPE_BYTES and field.containing_oneof is not None:
        return field.name
    return None


def is_bulk(message: Message) -> bool:
    """Says whether `message` carries bulk bytes (its `data` is set): those aren't validated one by one."""
    name = _bulk_field(message.DESCRIPTOR)
    return name is not None and message.HasField(name)

"""The bounds that stand on the contract's fields, checked where no server has to be asked."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from covey.packages._strict import join
from covey_kit.errors import Violation

__all__ = ["broken_rules", "repeated"]


def broken_rules(message: Message, path: str = "") -> list[Violation]:
    """Returns every rule of the contract that `message` breaks, with paths in JSON names below `path`."""
    import protovalidate

    found = []
    for violation in protovalidate.collect_violations(message):
        proto = violation.proto
        elements = proto.field.elements if proto.field is not None else []
        where = path
        descriptor: Any = message.DESCRIPTOR
        for element in elements:
            field = descriptor.fields_by_name.get(element.field_name) if descriptor else None
            where = join(where, field.json_name if field is not None else element.field_name)
            where += _subscript(element.subscript)
            descriptor = _inner(field)
        found.append(Violation(where, proto.message or proto.rule_id or "not allowed"))
    return found


def repeated(path: str, names: Sequence[str]) -> list[Violation]:
    """Returns a violation for each name that stood earlier in its list; `path` has `{}` for the place."""
    first: dict[str, int] = {}
    found = []
    for index, name in enumerate(names):
        if name in first:
            text = f"{name!r} is the same as {path.format(first[name])}; names are unique"
            found.append(Violation(path.format(index), text))
        first.setdefault(name, index)
    return found


def _inner(field: FieldDescriptor | None) -> Any:
    """Returns the type of the messages inside a field: a map's values, a list's items."""
    if field is None or field.message_type is None:
        return None
    kind = field.message_type
    return kind.fields_by_name["value"].message_type if kind.GetOptions().map_entry else kind


def _subscript(subscript: object) -> str:
    value = getattr(subscript, "value", None)
    if value is None:
        return ""
    return f'["{value}"]' if isinstance(value, str) else f"[{value}]"

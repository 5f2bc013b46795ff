"""Reads JSON that a person wrote into a message of the contract, and says all that is wrong with it."""

import json
from collections.abc import Iterator
from typing import Any

from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from covey_kit.errors import Violation

__all__ = ["decode", "fill", "join"]

MANIFEST_BYTES = 16 << 20
"""Longest JSON text that is read: far beyond every honest manifest."""

_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_INTEGERS = {
    FieldDescriptor.TYPE_UINT32: "an integer from 0 to 4294967295",
    FieldDescriptor.TYPE_INT32: "an integer from -2147483648 to 2147483647",
    FieldDescriptor.TYPE_UINT64: "an integer from 0 to 2^64 - 1",
    FieldDescriptor.TYPE_INT64: "an integer from -2^63 to 2^63 - 1",
}


def decode(text: bytes, what: str) -> tuple[Any, list[Violation]]:
    """Returns the JSON value of `text` and what is wrong with it as JSON (a key that stands twice included).

    The value is None when it can't be read at all.
    """
    if len(text) > MANIFEST_BYTES:
        return None, [Violation("", f"{what} has {len(text):,} bytes; at most {MANIFEST_BYTES:,} are read")]
    twice: list[Violation] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                twice.append(Violation(key, f"the key {key!r} stands twice in one object"))
            seen[key] = value
        return seen

    def constant(name: str) -> Any:
        raise ValueError(f"{name} isn't a JSON number")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant), twice
    except RecursionError:
        return None, [Violation("", f"{what} is nested too deeply")]
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        return None, [Violation("", f"{what} isn't valid JSON: {error}")]


def join(path: str, name: str) -> str:
    """Returns the path of the member `name` of what lies at `path`."""
    return f"{path}.{name}" if path else name


def fill(
    message: Message, value: Any, path: str = "", *, names: str = "lowerCamelCase", what: str = "the manifest"
) -> list[Violation]:
    """Fills `message` from a decoded JSON value; unknown keys are refused.

    Args:
        message: an empty message. Gets every member that can be read, so that the rest can be judged too.
        value: what `decode` returned.
        path: where the value lies, for the violations.
        names: `lowerCamelCase` (what files are written in) or `any` (field names as in the contract too).
        what: how to call the whole in words.

    Returns:
        Every violation, in the order of the text.
    """
    violations = list(_walk(message.DESCRIPTOR, value, path, any_names=names == "any", what=what))
    for key, item in value.items() if isinstance(value, dict) else ():
        part = type(message)()
        try:
            json_format.ParseDict({key: item}, part, ignore_unknown_fields=True)
        except (json_format.ParseError, AttributeError, TypeError) as error:
            if not violations:
                violations.append(Violation(join(path, key), _clean(error)))
        else:
            message.MergeFrom(part)
    return violations


def _walk(descriptor: Any, value: Any, path: str, *, any_names: bool, what: str = "") -> Iterator[Violation]:
    if not isinstance(value, dict):
        yield Violation(path, f"expected an object, found {_found(value)}")
        return
    by_json = {field.json_name: field for field in descriptor.fields}
    by_name = {field.name: field for field in descriptor.fields}
    for key, item in value.items():
        here = join(path, key)
        field = by_json.get(key) or (by_name.get(key) if any_names else None)
        if field is None:
            yield Violation(here, _unknown(key, by_json, by_name, what))
        elif item is not None:
            yield from _field(field, item, here, any_names=any_names)


def _unknown(
    key: str, by_json: dict[str, FieldDescriptor], by_name: dict[str, FieldDescriptor], what: str
) -> str:
    import difflib

    if key in by_name:
        return f"unknown key; it is written {by_name[key].json_name!r}"
    close = difflib.get_close_matches(key, by_json, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(by_json))}"
    return f"unknown key{f' in {what}' if what else ''}; {hint}"


def _field(field: FieldDescriptor, value: Any, path: str, *, any_names: bool) -> Iterator[Violation]:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        if not isinstance(value, dict):
            yield Violation(path, f"expected an object, found {_found(value)}")
            return
        for key, item in value.items():
            yield from _single(
                entry.fields_by_name["value"], item, f"{path}[{json.dumps(key)}]", any_names=any_names
            )
    elif field.is_repeated:
        if not isinstance(value, list):
            yield Violation(path, f"expected an array, found {_found(value)}")
            return
        for index, item in enumerate(value):
            yield from _single(field, item, f"{path}[{index}]", any_names=any_names)
    else:
        yield from _single(field, value, path, any_names=any_names)


def _single(field: FieldDescriptor, value: Any, path: str, *, any_names: bool) -> Iterator[Violation]:
    kind = field.message_type
    if kind is not None and not kind.full_name.startswith("google.protobuf."):
        yield from _walk(kind, value, path, any_names=any_names)
        return
    if kind is not None:
        try:
            json_format.ParseDict(value, message_factory.GetMessageClass(kind)())
        except (json_format.ParseError, AttributeError, TypeError):
            example = {"Duration": '"15s"', "Timestamp": '"2026-01-31T12:00:00Z"'}.get(kind.name, kind.name)
            yield Violation(path, f"expected something like {example}, found {_found(value)}")
        return
    holder = message_factory.GetMessageClass(_owner(field))()
    try:
        json_format.ParseDict({field.json_name: [value] if field.is_repeated else value}, holder)
    except (json_format.ParseError, TypeError):
        yield Violation(path, f"expected {_expected(field)}, found {_found(value)}")


def _owner(field: FieldDescriptor) -> Any:
    assert field.containing_type is not None, "only extensions have none"
    return field.containing_type


def _expected(field: FieldDescriptor) -> str:
    if field.enum_type is not None:
        return "one of " + ", ".join(value.name for value in field.enum_type.values if value.number != 0)
    if field.cpp_type in _FLOATS:
        return "a number"
    return _INTEGERS.get(field.type) or {
        FieldDescriptor.TYPE_BOOL: "true or false",
        FieldDescriptor.TYPE_STRING: "a string",
        FieldDescriptor.TYPE_BYTES: "base64 text",
    }.get(field.type, "another type")


def _found(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "…"


def _clean(error: Exception) -> str:
    return str(error).splitlines()[0]

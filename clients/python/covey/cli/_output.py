"""What commands print: one JSON value for programs, tables and lines for people."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from covey.words import ABSENT

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = ["Out", "plain"]

_PIPE_WIDTH = 240
"""Columns of a table that nobody looks at on a screen: nothing is cut off for grep."""

_WIDE_KINDS = frozenset({"TYPE_INT64", "TYPE_UINT64", "TYPE_SINT64", "TYPE_FIXED64", "TYPE_SFIXED64"})


class Out:
    """Where a command's result goes.

    Attributes:
        json: True: exactly one JSON value (or, for streams, one a line) on stdout, and words on stderr.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.json = as_json

    def value(self, value: Any) -> None:
        """Prints a JSON value on stdout; only with `--json`."""
        if self.json:
            print(json.dumps(value, ensure_ascii=False), flush=True)

    def line(self, text: str) -> None:
        """Prints a line for people: on stdout, or with `--json` nowhere."""
        if not self.json:
            print(text, flush=True)

    def note(self, text: str) -> None:
        """Prints a line that isn't the result: on stderr, always."""
        print(text, file=sys.stderr, flush=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str = "nothing") -> None:
        """Prints a table for people; columns that begin with `#` hold numbers and are set to the right.

        `empty` is printed when there are no rows.
        """
        rows = list(rows)
        if self.json:
            return
        if not rows:
            self.line(empty)
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in columns:
            right = column.startswith("#")
            table.add_column(column.removeprefix("#"), justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(ABSENT if cell is None or cell == "" else str(cell) for cell in row))
        terminal = sys.stdout.isatty()
        Console(width=None if terminal else _PIPE_WIDTH, highlight=False, markup=False).print(table)

    def facts(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Prints names and values under each other, for people."""
        if self.json:
            return
        known = [(name, ABSENT if value is None or value == "" else str(value)) for name, value in pairs]
        width = max((len(name) for name, _ in known), default=0)
        for name, value in known:
            print(f"{name:<{width}}  {value}")


def plain(message: "Message") -> dict[str, Any]:
    """Returns the proto3 JSON of a message, with 64-bit integers as numbers (proto3 makes them strings)."""
    from google.protobuf import json_format

    value: dict[str, Any] = json_format.MessageToDict(message)
    _numbers(message.DESCRIPTOR, value)
    return value


def _numbers(descriptor: Any, value: dict[str, Any]) -> None:
    for field in descriptor.fields:
        if field.json_name not in value:
            continue
        inner = value[field.json_name]
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            target = kind.fields_by_name["value"]
            if target.message_type is not None:
                for item in inner.values():
                    _numbers(target.message_type, item)
            elif _is_wide(target):
                value[field.json_name] = {key: int(item) for key, item in inner.items()}
        elif kind is not None and not kind.full_name.startswith("google.protobuf."):
            for item in inner if isinstance(inner, list) else [inner]:
                _numbers(kind, item)
        elif kind is None and _is_wide(field):
            value[field.json_name] = [int(i) for i in inner] if isinstance(inner, list) else int(inner)


def _is_wide(field: Any) -> bool:
    from google.protobuf.descriptor import FieldDescriptor

    return any(getattr(FieldDescriptor, name) == field.type for name in _WIDE_KINDS)

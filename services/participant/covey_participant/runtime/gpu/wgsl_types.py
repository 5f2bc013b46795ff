"""Sizes of WGSL types and values of constant integers, as far as workgroup memory needs them.

Alignments and sizes follow the table "Alignment and size" of the WGSL specification.
"""

import re
from dataclasses import dataclass, field

MOST_DEPTH = 24
MOST_VALUE = 1 << 53

_SCALARS = {"f32": 4, "i32": 4, "u32": 4, "bool": 4, "f16": 2}
_SHORT = {"f": "f32", "i": "i32", "u": "u32", "h": "f16"}
_INTEGER = re.compile(r"(0[xX][0-9a-fA-F]+|[0-9]+)[iu]?", re.ASCII)
_RANKS = ({"|"}, {"^"}, {"&"}, {"<<", ">>"}, {"+", "-"}, {"*", "/", "%"})
_CASTS = {"u32": 1, "i32": 1, "min": 2, "max": 2}


class WgslError(Exception):
    """What is wrong with the source, or can't be worked out from it."""


@dataclass
class Types:
    """What a module declares at its top: words, by name. Each constant is worked out once."""

    constants: dict[str, list[str]] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    structs: dict[str, list[tuple[dict[str, list[str]], list[str]]]] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)


def split_arguments(words: list[str]) -> list[list[str]]:
    """Splits at the commas outside of brackets (angle brackets too); a trailing comma adds nothing."""
    parts: list[list[str]] = [[]]
    depth = 0
    for word in words:
        if word == "," and depth == 0:
            parts.append([])
            continue
        if word in "([{<":
            depth += 1
        elif word in ")]}>":
            depth -= 1
        elif word == ">>":
            depth -= 2
        parts[-1].append(word)
    return [part for part in parts if part]


def constant(words: list[str], types: Types, depth: int = 0) -> int:
    """Returns the value of a constant integer expression.

    Raises:
        WgslError: it isn't one, or uses more than `+ - * / % << >> & | ^`, casts, `min`, `max` and names.
    """
    return _Constant(words, types, depth).value()


class _Constant:
    def __init__(self, words: list[str], types: Types, depth: int) -> None:
        self._words = [*words, ""]
        self._at = 0
        self._types = types
        self._depth = depth

    def value(self) -> int:
        result = self._ranked(0)
        if self._words[self._at]:
            raise self._unknown()
        return result

    def _ranked(self, rank: int) -> int:
        if rank == len(_RANKS):
            return self._atom()
        left = self._ranked(rank + 1)
        while (sign := self._words[self._at]) in _RANKS[rank]:
            self._at += 1
            left = self._applied(sign, left, self._ranked(rank + 1))
        return left

    def _applied(self, sign: str, left: int, right: int) -> int:
        if sign in ("/", "%"):
            if right == 0:
                raise WgslError("a constant is divided by zero")
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return quotient if sign == "/" else left - right * quotient
        if sign in ("<<", ">>") and not 0 <= right < 32:
            raise WgslError(f"a constant is shifted by {right}")
        result = {
            "+": lambda: left + right,
            "-": lambda: left - right,
            "*": lambda: left * right,
            "<<": lambda: left << right,
            ">>": lambda: left >> right,
            "&": lambda: left & right,
            "|": lambda: left | right,
            "^": lambda: left ^ right,
        }[sign]()
        if abs(result) > MOST_VALUE:
            raise WgslError("a constant is above 2^53")
        return result

    def _atom(self) -> int:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise WgslError("a constant is nested too deeply, or refers to itself")
        value = self._one()
        self._depth -= 1
        return value

    def _one(self) -> int:
        word = self._words[self._at]
        self._at += 1
        if word == "-":
            return -self._atom()
        if word == "(":
            inner = self._ranked(0)
            self._closes()
            return inner
        found = _INTEGER.fullmatch(word)
        if found:
            return self._bounded(int(found[1], 16 if found[1][:2] in ("0x", "0X") else 10))
        if word in _CASTS and self._words[self._at] == "(":
            return self._call(word)
        if word in self._types.constants:
            if word not in self._types.values:
                self._types.values[word] = constant(self._types.constants[word], self._types, self._depth)
            return self._types.values[word]
        self._at -= 1
        raise self._unknown()

    def _call(self, name: str) -> int:
        self._at += 1
        arguments = [self._ranked(0)]
        while self._words[self._at] == ",":
            self._at += 1
            arguments.append(self._ranked(0))
        self._closes()
        if len(arguments) != _CASTS[name]:
            raise WgslError(f"{name}() takes {_CASTS[name]} values here, found {len(arguments)}")
        if name in ("min", "max"):
            return min(arguments) if name == "min" else max(arguments)
        return arguments[0]

    def _closes(self) -> None:
        if self._words[self._at] != ")":
            raise self._unknown()
        self._at += 1

    def _bounded(self, value: int) -> int:
        if value > MOST_VALUE:
            raise WgslError("a constant is above 2^53")
        return value

    def _unknown(self) -> WgslError:
        shown = " ".join(self._words[:16]).strip()
        return WgslError(f"{shown!r} isn't a constant integer that can be worked out before running")


class Sizes:
    """Works out (alignment, size) of types, in bytes."""

    def __init__(self, types: Types) -> None:
        self._types = types
        self._known: dict[str, tuple[int, int]] = {}

    def of(self, words: list[str], depth: int = 0) -> tuple[int, int]:
        """Returns (alignment, size) of a type.

        Raises:
            WgslError: it isn't known, or not of a fixed size.
        """
        if depth > MOST_DEPTH or not words:
            raise WgslError("a type is nested too deeply, or missing")
        name = words[0]
        arguments = split_arguments(_inner(words)) if len(words) > 1 else []
        if not arguments and (name in self._types.aliases or name in self._types.structs):
            if name not in self._known:
                alias = self._types.aliases.get(name)
                self._known[name] = self.of(alias, depth + 1) if alias else self._struct(name, depth)
            return self._known[name]
        if name == "atomic" and len(arguments) == 1:
            return self.of(arguments[0], depth + 1)
        if name == "array":
            return self._array(arguments, depth)
        if name in _SCALARS and not arguments:
            return _SCALARS[name], _SCALARS[name]
        return self._vector(name, arguments, depth)

    def _vector(self, name: str, arguments: list[list[str]], depth: int) -> tuple[int, int]:
        found = re.fullmatch(r"(vec|mat)([234])(?:x([234]))?([fiuh])?", name, re.ASCII)
        if found is None or (found[1] == "mat") != (found[3] is not None):
            raise WgslError(f"the size of type {name!r} isn't known")
        if found[4] and not arguments:
            scalar = _SCALARS[_SHORT[found[4]]]
        elif len(arguments) == 1 and not found[4]:
            scalar = self.of(arguments[0], depth + 1)[1]
        else:
            raise WgslError(f"the size of type {name!r} isn't known")
        rows = int(found[3] or found[2])
        align = scalar * (2 if rows == 2 else 4)
        if found[1] == "vec":
            return align, scalar * rows
        return align, align * int(found[2])

    def _array(self, arguments: list[list[str]], depth: int) -> tuple[int, int]:
        if len(arguments) != 2:
            raise WgslError("an array without a fixed length can't be in workgroup memory")
        align, size = self.of(arguments[0], depth + 1)
        count = constant(arguments[1], self._types)
        if not 1 <= count <= MOST_VALUE:
            raise WgslError(f"an array must have at least one element, found {count}")
        return align, _up(size, align) * count

    def _struct(self, name: str, depth: int) -> tuple[int, int]:
        align, end = 1, 0
        for attributes, words in self._types.structs[name]:
            member_align, size = self.of(words, depth + 1)
            if "align" in attributes:
                member_align = max(member_align, constant(attributes["align"], self._types))
            if "size" in attributes:
                size = max(size, constant(attributes["size"], self._types))
            end = _up(end, member_align) + size
            align = max(align, member_align)
        return align, _up(end, align)


def _inner(words: list[str]) -> list[str]:
    """Returns what stands between the angle brackets of NAME<...>; `>>` at the end closes two."""
    flat: list[str] = []
    for word in words:
        flat += [">", ">"] if word == ">>" else [word]
    if len(flat) < 4 or flat[1] != "<" or flat[-1] != ">":
        raise WgslError(f"{' '.join(words[:8])!r} isn't a type whose size is known")
    return flat[2:-1]


def _up(value: int, align: int) -> int:
    return -(-value // align) * align

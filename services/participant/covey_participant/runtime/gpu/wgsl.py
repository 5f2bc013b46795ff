"""Reads from WGSL what a driver accepts without looking: the workgroup size and storage of each entry point.

This isn't a compiler. It knows declarations at module scope and constant integers; the real compiler checks
all else when a pipeline is made. What it can't work out, it says, so that nothing unknown reaches a driver.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .wgsl_types import Sizes, Types, WgslError, constant, split_arguments

MOST_WORDS = 200_000

_COMMENT = re.compile(r"//[^\n\v\f\r\u0085\u2028\u2029]*|/\*|\*/")
# WGSL's blank space is wider than ASCII's, and what one reader skips another may not.
_WORD = re.compile(
    r"[\s\u0085\u200e\u200f\u2028\u2029]+"
    r"|([A-Za-z_][A-Za-z0-9_]*|0[xX][0-9a-fA-F]+[iu]?|[0-9][0-9a-zA-Z_.]*|<<|>>|->|&&|\|\||.)",
    re.ASCII,
)
_OTHERS = ("enable", "requires", "diagnostic", "const_assert", "var", ";")
"""What may stand at module scope besides and doesn't matter here."""
_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class EntryPoint:
    """A compute entry point.

    Attributes:
        size: the workgroup's size in x, y, z.
        storage: bytes of workgroup memory of every variable that it may reach.
    """

    size: tuple[int, int, int]
    storage: int


@dataclass
class _Function:
    attributes: dict[str, list[str]]
    body: frozenset[str]


@dataclass
class _Module:
    functions: dict[str, _Function] = field(default_factory=dict)
    workgroup: dict[str, list[str]] = field(default_factory=dict)
    types: Types = field(default_factory=Types)


def entry_points(source: str) -> Mapping[str, EntryPoint | WgslError]:
    """Returns each compute entry point of a module by name, or why its size or storage isn't known.

    Raises:
        WgslError: the source can't be taken apart: unbalanced, too long, or not WGSL at module scope.
    """
    module = _read(_words(_without_comments(source)))
    return {
        name: _entry_point(module, name)
        for name, function in module.functions.items()
        if "compute" in function.attributes
    }


def _entry_point(module: _Module, name: str) -> EntryPoint | WgslError:
    try:
        arguments = split_arguments(module.functions[name].attributes.get("workgroup_size", []))
        if not 1 <= len(arguments) <= 3:
            raise WgslError("@workgroup_size must have one to three numbers")
        x, y, z = ([constant(argument, module.types) for argument in arguments] + [1, 1])[:3]
        if min(x, y, z) < 1:
            raise WgslError(f"@workgroup_size must be at least 1, found ({x}, {y}, {z})")
        sizes = Sizes(module.types)
        storage = 0
        for variable in sorted(_reachable(module, name) & module.workgroup.keys()):
            align, size = sizes.of(module.workgroup[variable])
            storage = -(-storage // align) * align + size
        return EntryPoint((x, y, z), storage)
    except WgslError as error:
        return error


def _reachable(module: _Module, name: str) -> set[str]:
    """Returns every name that the function or one that it may call mentions: too many rather than too few."""
    found: set[str] = set()
    todo = [name]
    while todo:
        function = module.functions.get(todo.pop())
        if function is not None:
            fresh = function.body - found
            found |= fresh
            todo += fresh & module.functions.keys()
    return found


def _without_comments(source: str) -> str:
    """Removes comments; block comments nest in WGSL."""
    if "\0" in source:
        raise WgslError("the source holds a NUL character")
    parts, at, depth = [], 0, 0
    for found in _COMMENT.finditer(source):
        if found.start() < at:
            continue  # inside of a line comment that was skipped
        mark = found[0]
        if depth == 0:
            parts.append(source[at : found.start()])
            at = found.start()
        if mark == "/*":
            depth += 1
        elif mark == "*/" and depth:
            depth -= 1
            at = found.end()
        elif depth == 0 and mark != "*/":
            at = found.end()
            parts.append(" ")
    if depth:
        raise WgslError("a block comment doesn't end")
    parts.append(source[at:])
    return " ".join(parts)


def _words(source: str) -> list[str]:
    words = []
    for found in _WORD.finditer(source):
        if found.lastindex:
            words.append(found[0])
            if len(words) > MOST_WORDS:
                raise WgslError(f"the source has more than {MOST_WORDS} words")
    return words


def _read(words: list[str]) -> _Module:
    module = _Module()
    at = 0
    while at < len(words):
        attributes, at = _attributes(words, at)
        if at == len(words):
            break
        end, brace = _declaration_end(words, at)
        _declare(module, attributes, words[at:end], words[brace:end] if brace is not None else [])
        at = end
    return module


def _attributes(words: list[str], at: int) -> tuple[dict[str, list[str]], int]:
    attributes: dict[str, list[str]] = {}
    while at + 1 < len(words) and words[at] == "@":
        name, at = words[at + 1], at + 2
        arguments: list[str] = []
        if at < len(words) and words[at] == "(":
            end = _matching(words, at)
            arguments, at = words[at + 1 : end], end + 1
        attributes[name] = arguments
    return attributes, at


def _matching(words: list[str], at: int) -> int:
    """Returns where the bracket that opens at `at` closes."""
    depth = 0
    for index in range(at, len(words)):
        if words[index] in _OPEN:
            depth += 1
        elif words[index] in _CLOSE:
            depth -= 1
            if depth == 0:
                return index
    raise WgslError(f"a {words[at]!r} isn't closed")


def _declaration_end(words: list[str], at: int) -> tuple[int, int | None]:
    """Returns the index after a declaration, and where its braces open, if it has any."""
    index = at
    while index < len(words):
        word = words[index]
        if word == ";":
            return index + 1, None
        if word == "{":
            return _matching(words, index) + 1, index
        index = _matching(words, index) + 1 if word in _OPEN else index + 1
    raise WgslError(f"the declaration that begins with {' '.join(words[at : at + 4])!r} doesn't end")


def _declare(module: _Module, attributes: dict[str, list[str]], words: list[str], braces: list[str]) -> None:
    kind, types = words[0], module.types
    if kind == "fn" and len(words) > 1:
        module.functions[words[1]] = _Function(attributes, frozenset(words[2:]))
    elif kind == "struct" and len(words) > 1:
        types.structs[words[1]] = _members(braces[1:-1])
    elif kind in ("const", "override") and "=" in words:
        equals = words.index("=")
        types.constants[words[1]] = words[equals + 1 : -1]
    elif kind == "alias" and "=" in words:
        types.aliases[words[1]] = words[words.index("=") + 1 : -1]
    elif words[:4] == ["var", "<", "workgroup", ">"] and len(words) > 6 and words[5] == ":":
        module.workgroup[words[4]] = words[6:-1]
    elif kind == "var" and "workgroup" in words[2:4]:
        raise WgslError(
            f"a workgroup variable is declared in a way that isn't understood: {' '.join(words[:8])!r}"
        )
    elif kind not in _OTHERS:
        raise WgslError(f"{' '.join(words[:8])!r} isn't a declaration that is known")


def _members(words: list[str]) -> list[tuple[dict[str, list[str]], list[str]]]:
    """Returns (attributes, type) of each member of a struct."""
    members = []
    for part in split_arguments(words):
        attributes, at = _attributes(part, 0)
        if len(part) < at + 3 or part[at + 1] != ":":
            raise WgslError(f"a struct's member isn't NAME: TYPE: {' '.join(part[:6])!r}")
        members.append((attributes, part[at + 2 :]))
    return members

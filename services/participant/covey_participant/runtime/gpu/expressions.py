"""Integer expressions of a shader plan, such as `ceil(batchSize * size("hidden.bias"), 64)`.

    sum     := product (("+" | "-") product)*
    product := atom (("*" | "/") atom)*                 "/" rounds down
    atom    := INTEGER | "batchSize" | "(" sum ")" | "size" "(" '"' NAME '"' ")" | "ceil" "(" sum "," sum ")"

Every value on the way lies in [0, 2^53]: a browser's numbers hold it exactly, and no size that a GPU could
have comes near. There are no names but those, so an expression can't refer to another, let alone to itself.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

MOST = 1 << 53
MOST_LENGTH = 256
MOST_DEPTH = 32

_TOKEN = re.compile(r'\s*(?:([0-9]+)|([A-Za-z_][A-Za-z0-9_]*)|"([^"\\\n]*)"|([-+*/(),]))', re.ASCII)


class ExpressionError(Exception):
    """An expression that can't be read, or whose value isn't allowed; the message says what and where."""


@dataclass(frozen=True)
class Names:
    """What an expression may speak of.

    Attributes:
        batch_size: units of one minibatch.
        sizes: elements of each parameter, by the name in the manifest.
    """

    batch_size: int
    sizes: Mapping[str, int]


def evaluate(text: str, names: Names) -> int:
    """Returns the expression's value: at least 1, at most 2^53.

    Raises:
        ExpressionError: unreadable, an unknown name, a value below 0 or above 2^53 on the way, a division by
            zero, a result of 0, longer than 256 characters, or nested more than 32 deep.
    """
    if len(text) > MOST_LENGTH:
        raise ExpressionError(f"expected at most {MOST_LENGTH} characters, found {len(text)}")
    value = _Parser(text, names).whole()
    if value == 0:
        raise ExpressionError(f"{text!r} is 0; expected at least 1")
    return value


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    column: int


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            if text[at:].isspace():
                break
            column = at + len(text[at:]) - len(text[at:].lstrip())
            raise ExpressionError(f"unexpected {text[column]!r} at column {column + 1} of {text!r}")
        kind = ("integer", "name", "string", "sign")[(found.lastindex or 1) - 1]
        yield _Token(kind, found[found.lastindex or 0], found.start(found.lastindex or 0) + 1)
        at = found.end()
    yield _Token("end", "the end", len(text) + 1)


class _Parser:
    """Evaluates while it reads: no tree, one token of look-ahead."""

    def __init__(self, text: str, names: Names) -> None:
        self._text = text
        self._names = names
        self._tokens = _tokens(text)
        self._next = next(self._tokens)
        self._depth = 0

    def whole(self) -> int:
        value = self._sum()
        if self._next.kind != "end":
            raise self._unexpected("an operator or the end")
        return value

    def _sum(self) -> int:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise self._wrong(self._next, f"nested more than {MOST_DEPTH} deep")
        value = self._product()
        while self._next.text in ("+", "-") and self._next.kind == "sign":
            sign = self._take()
            right = self._product()
            value = self._checked(sign, value + right if sign.text == "+" else value - right)
        self._depth -= 1
        return value

    def _product(self) -> int:
        value = self._atom()
        while self._next.text in ("*", "/") and self._next.kind == "sign":
            sign = self._take()
            right = self._atom()
            value = self._checked(
                sign, value * right if sign.text == "*" else self._divided(sign, value, right)
            )
        return value

    def _atom(self) -> int:
        token = self._take()
        if token.kind == "integer":
            return self._checked(token, int(token.text))
        if token.kind == "name":
            found: Callable[[_Token], int] | None = {
                "batchSize": self._batch_size,
                "size": self._size,
                "ceil": self._ceil,
            }.get(token.text)
            if found is None:
                raise self._wrong(
                    token, f'unknown name {token.text!r}; there are batchSize, size("…"), ceil(a, b)'
                )
            return found(token)
        if token.text == "(" and token.kind == "sign":
            value = self._sum()
            self._expect(")")
            return value
        self._next = token
        raise self._unexpected("a number, a name or '('")

    def _batch_size(self, token: _Token) -> int:
        return self._checked(token, self._names.batch_size)

    def _size(self, _token: _Token) -> int:
        self._expect("(")
        name = self._take()
        if name.kind != "string":
            self._next = name
            raise self._unexpected("a parameter's name in double quotes")
        self._expect(")")
        if name.text not in self._names.sizes:
            raise self._wrong(name, f"the manifest has no parameter {name.text!r}")
        return self._checked(name, self._names.sizes[name.text])

    def _ceil(self, token: _Token) -> int:
        self._expect("(")
        top = self._sum()
        self._expect(",")
        bottom = self._sum()
        self._expect(")")
        return self._divided(token, top + bottom - 1 if bottom else top, bottom)

    def _divided(self, token: _Token, top: int, bottom: int) -> int:
        if bottom == 0:
            raise self._wrong(token, "division by zero")
        return top // bottom

    def _checked(self, token: _Token, value: int) -> int:
        if value < 0:
            raise self._wrong(token, f"{value} is below 0")
        if value > MOST:
            raise self._wrong(token, "the value is above 2^53")
        return value

    def _take(self) -> _Token:
        token = self._next
        if token.kind != "end":
            self._next = next(self._tokens)
        return token

    def _expect(self, sign: str) -> None:
        if self._next.kind != "sign" or self._next.text != sign:
            raise self._unexpected(repr(sign))
        self._take()

    def _unexpected(self, expected: str) -> ExpressionError:
        found = "the end" if self._next.kind == "end" else repr(self._next.text)
        return self._wrong(self._next, f"expected {expected}, found {found}")

    def _wrong(self, token: _Token, what: str) -> ExpressionError:
        return ExpressionError(f"{what}, at column {token.column} of {self._text!r}")

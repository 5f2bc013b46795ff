"""The plan's integer expressions against Python's own arithmetic."""

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey_participant.runtime.gpu.expressions import MOST, ExpressionError, Names, evaluate

NAMES = Names(32, {"hidden.weight": 100352, "b": 10})


@dataclass(frozen=True)
class Node:
    """An expression with its text and what Python makes of it; None: not allowed."""

    text: str
    value: int | None


def leaf(number: int) -> Node:
    """A number."""
    return Node(str(number), number if number <= MOST else None)


def joined(left: Node, right: Node, sign: str) -> Node:
    """Two expressions in parentheses with a sign between them."""
    text = f"({left.text}){sign}({right.text})"
    if left.value is None or right.value is None:
        return Node(text, None)
    a, b = left.value, right.value
    values: dict[str, int | None] = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else None}
    value = values[sign]
    return Node(text, value if value is not None and 0 <= value <= MOST else None)


def ceiling(left: Node, right: Node) -> Node:
    """The quotient, rounded up."""
    text = f"ceil({left.text}, {right.text})"
    if left.value is None or not right.value:
        return Node(text, None)
    return Node(text, -(-left.value // right.value))


def nodes() -> st.SearchStrategy[Node]:
    """Expressions of all kinds."""
    leaves = st.one_of(
        st.integers(0, 100).map(leaf),
        st.integers(0, 2 * MOST).map(leaf),
        st.just(Node("batchSize", 32)),
        st.just(Node('size("hidden.weight")', 100352)),
        st.just(Node('size( "b" )', 10)),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(joined, inner, inner, st.sampled_from("+-*/")), st.builds(ceiling, inner, inner)
        ),
        max_leaves=8,
    )


def value_or_error(text: str) -> tuple[int | None, str]:
    """The value, or the error's words."""
    try:
        return evaluate(text, NAMES), ""
    except ExpressionError as error:
        return None, str(error)


@given(nodes())
def test_the_value_is_pythons(node: Node) -> None:
    """Each expression has Python's value, or none where a value on the way is out of bounds."""
    if len(node.text) > 256:
        return
    if not node.value:  # not allowed, or 0
        with pytest.raises(ExpressionError):
            evaluate(node.text, NAMES)
    else:
        assert evaluate(node.text, NAMES) == node.value


@given(st.lists(st.tuples(st.sampled_from("+-*/"), st.integers(1, 1000)), max_size=12), st.integers(1, 1000))
def test_precedence_is_pythons(parts: list[tuple[str, int]], first: int) -> None:
    """Without parentheses, products bind tighter and equals go from left to right."""
    text = str(first) + "".join(f" {sign} {number}" for sign, number in parts)
    expected = eval(text.replace("/", "//"))

    found, words = value_or_error(text)

    assert found == expected if found is not None else any(w in words for w in ("below 0", "is 0", "2^53"))


@given(st.text(alphabet='0123456789+-*/(), "abcsizel.batchSize\n\té٣', max_size=300))
@example("(" * 256)
@example("9" * 256)
@example("٣")
def test_any_text_has_a_value_or_an_error(text: str) -> None:
    """No text crashes, hangs or gives a value out of bounds."""
    found, words = value_or_error(text)

    assert words if found is None else 1 <= found <= MOST


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "found the end"),
        ("batchSize - 33", "below 0"),
        ("1 - 2 + 5", "below 0"),
        ("batchSize - 32", "expected at least 1"),
        ("8 / 0", "division by zero"),
        ("ceil(8, batchSize - 32)", "division by zero"),
        ("9007199254740992 + 1", "2^53"),
        ("9007199254740993", "2^53"),
        ("4294967296 * 4294967296", "2^53"),
        ("a", "unknown name 'a'"),
        ("hidden", "unknown name"),
        ('size("nowhere")', "no parameter 'nowhere'"),
        ("size(hidden)", "double quotes"),
        ("-1", "found '-'"),
        ("1 2", "an operator or the end"),
        ("1.5", "unexpected '.'"),
        ("2 ** 3", "found '*'"),
        ("ceil(1)", "expected ','"),
        ("(1", "expected ')'"),
        ("(" * 40 + "1" + ")" * 40, "32 deep"),
        ("1" + " + 1" * 100, "256 characters"),
        ("batchsize", "unknown name"),
    ],
)
def test_what_is_wrong_is_said(text: str, words: str) -> None:
    """Each error says what was expected or found."""
    with pytest.raises(ExpressionError) as caught:
        evaluate(text, NAMES)

    assert words in str(caught.value)


def test_what_it_is_for() -> None:
    """The examples of the documentation."""
    assert evaluate('ceil(batchSize * size("b"), 64)', NAMES) == 5
    assert evaluate(" ceil( 1, 64 ) ", NAMES) == 1
    assert evaluate("7 / 2 * 2", NAMES) == 6

"""Every test says which behaviour it shows, and every test module what it is about.

(interrogate would do it, but takes a helper inside an async test for a test of its own.)
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORTEST = 3
"""Words that a behaviour needs at least: fewer only repeat the name."""


def outermost(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields the functions of a module and the methods of its classes, but nothing inside a function."""
    pending: list[ast.stmt] = list(tree.body)
    for node in pending:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            pending += node.body


def needed(function: ast.FunctionDef | ast.AsyncFunctionDef, *, shared: bool) -> int:
    """Returns how many words a function owes: a test its behaviour, a fixture or a shared helper its purpose.

    Helpers and fakes of one test file are explained where their names don't do it.
    """
    if function.name.startswith("test_"):
        return SHORTEST
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    if any("overload" in decorator for decorator in decorators) or function.name.startswith("_"):
        return 0
    return 1 if shared or any("fixture" in decorator for decorator in decorators) else 0


def violations(path: Path) -> Iterator[str]:
    """Yields one line for each docstring that is missing or says nothing."""
    name = path.relative_to(ROOT)
    tree = ast.parse(path.read_text("utf-8"), str(name))
    if tree.body and ast.get_docstring(tree) is None:
        yield f"{name}:1: the module doesn't say what it tests"
    for function in outermost(tree):
        said = len((ast.get_docstring(function) or "").split())
        if said < needed(function, shared="support" in name.parts):
            yield f"{name}:{function.lineno}: {function.name} doesn't say what it shows"


def main() -> None:
    """Checks everything under tests/."""
    found = [line for path in sorted((ROOT / "tests").rglob("*.py")) for line in violations(path)]
    if found:
        sys.exit("docstrings that are missing or say nothing:\n" + "\n".join(f"  {line}" for line in found))
    print("docstrings: every test says what it shows")


if __name__ == "__main__":
    main()

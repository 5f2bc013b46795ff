"""Keeps rooms rooms: no module, servicer, function or test file grows past its ceiling.

An exception stands in tools/size-exceptions.toml with its reason and its own ceiling, which only goes down:

    ["services/storage/covey_storage/blobs.py"]
    lines = 430
    reason = "one state machine; splitting it would part a transition from its inverse"

    ["services/storage/covey_storage/blobs.py::Blobs.write"]
    lines = 60
    reason = "..."
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXCEPTIONS = ROOT / "tools" / "size-exceptions.toml"
GENERATED = ("clients/python/covey/v1/", "clients/python/buf/")

MODULE = 400
SERVICER = 300
FUNCTION = 50
TEST_FILE = 600


def sources() -> list[str]:
    """Returns every hand-written Python file that git tracks or would track, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = set(done.stdout.splitlines())
    return sorted(name for name in names if not name.startswith(GENERATED) and (ROOT / name).is_file())


def ceiling(name: str) -> tuple[int, str]:
    """Returns how many lines the file may have, and what it counts as."""
    path = Path(name)
    if path.parts[0] == "tests":
        return TEST_FILE, "test file"
    if "servicer" in path.name or "transport" in path.parts:
        return SERVICER, "servicer"
    return MODULE, "module"


def functions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yields each function and method with its dotted name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def measure(name: str) -> Iterator[tuple[str, int, int, str]]:
    """Yields (what, lines found, lines allowed, kind) for a file and, unless it's a test, its functions.

    A function's lines are those of its signature and body: decorators and the docstring don't count.
    """
    text = (ROOT / name).read_text("utf-8")
    allowed, kind = ceiling(name)
    yield name, len(text.splitlines()), allowed, kind
    if kind == "test file":
        return
    for dotted, node in functions(ast.parse(text, name)):
        end = node.end_lineno or node.lineno
        size = end - node.lineno + 1
        first = node.body[0]
        if ast.get_docstring(node, clean=False) is not None:
            size -= (first.end_lineno or first.lineno) - first.lineno + 1
        yield f"{name}::{dotted}", size, FUNCTION, "function"


def main() -> None:
    """Compares everything with its ceiling and reports all violations at once."""
    exceptions = tomllib.loads(EXCEPTIONS.read_text("utf-8"))
    bad = [
        f"{what}: exception without a reason" for what, entry in exceptions.items() if not entry.get("reason")
    ]
    unused = set(exceptions)
    for name in sources():
        for what, found, allowed, kind in measure(name):
            own = exceptions.get(what, {}).get("lines")
            if found > allowed and own is not None:
                unused.discard(what)
            if found > (allowed if own is None else own):
                bad.append(f"{what}: {found} lines; a {kind} has at most {own or allowed}")
    bad += [
        f"{what}: exception no longer needed, take it out of {EXCEPTIONS.name}" for what in sorted(unused)
    ]
    if bad:
        sys.exit("too large (split it along its concepts):\n" + "\n".join(f"  {line}" for line in bad))
    print("sizes: within their ceilings")


if __name__ == "__main__":
    main()

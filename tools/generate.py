"""Writes the code and the contract image that come from protos/ (`make proto`).

    tools/generate.py           regenerate in place
    tools/generate.py --check   regenerate aside and fail, naming every file that differs

What it writes, and nothing else may live there:

    clients/python/covey/v1/       messages, stubs and their types, one set per proto
    clients/python/buf/validate/   the validation rules' own messages
    protos/covey.binpb             the contract image: descriptors of the whole contract with its comments
"""

import argparse
import filecmp
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
VALIDATE = "buf/validate/validate.proto"
GENERATED = ("clients/python/covey/v1", "clients/python/buf", "protos/covey.binpb")

STUB_REPAIRS = (
    # A handler's context is parametrised by messages, not by what the handler returns.
    (re.compile(r"context: _aio\.ServicerContext\[.+\],$", re.MULTILINE), r"context: _Context,"),
    # grpc.aio also takes a coroutine that writes to its context, which is what bulk streams use.
    (re.compile(r"\) -> (_abc\.AsyncIterator\[.+\]):$", re.MULTILINE), r") -> \1 | _abc.Awaitable[None]:"),
    (
        re.compile(r"^(GRPC_GENERATED_VERSION: str)$", re.MULTILINE),
        r"_Context: _typing.TypeAlias = _aio.ServicerContext[_typing.Any, _typing.Any]\n\n\1",
    ),
    (re.compile(r"^(import abc as _abc_1)$", re.MULTILINE), r"\1\nimport typing as _typing"),
)
"""What mypy-protobuf gets wrong for servers and clients on grpc.aio."""

INIT = {
    "covey/v1/__init__.py": "Generated from protos/covey/v1: the contract's messages, stubs and servicers.",
    "buf/__init__.py": "Generated: the validation rules' package, which generated code imports.",
    "buf/validate/__init__.py": "Generated: the messages of buf/validate/validate.proto.",
}


def validate_descriptor() -> bytes:
    """Returns validate.proto as a serialized FileDescriptorSet.

    The protovalidate package ships no .proto, but the descriptor that it enforces by: taking that one means
    that the rules we compile against are the rules that are checked.
    """
    from protovalidate._gen.buf.validate import validate_pb

    files = descriptor_pb2.FileDescriptorSet()
    files.file.append(descriptor_pb2.FileDescriptorProto.FromString(validate_pb._DESC.proto.to_binary()))
    return files.SerializeToString()


def include_folders() -> list[Path]:
    """Returns where google/protobuf/*.proto and google/rpc/*.proto lie in this environment."""
    tools = importlib.util.find_spec("grpc_tools")
    rpc = importlib.util.find_spec("google.rpc")
    if tools is None or rpc is None or tools.submodule_search_locations is None:
        sys.exit("grpcio-tools or googleapis-common-protos is missing here: run `make setup` first")
    assert rpc.submodule_search_locations is not None
    protobuf = Path(next(iter(tools.submodule_search_locations))) / "_proto"
    return [protobuf, Path(next(iter(rpc.submodule_search_locations))).parent.parent]


def protoc(arguments: list[str]) -> None:
    """Runs protoc with the plugins of this environment; its complaints go to stderr as they are."""
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": scripts + os.pathsep + os.environ.get("PATH", "")}
    command = [sys.executable, "-m", "grpc_tools.protoc", *arguments]
    if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
        sys.exit("protoc failed: see its message above")


def generate(target: Path) -> None:
    """Writes everything under `target`, laid out as in the repository."""
    python = target / "clients" / "python"
    image = target / "protos" / "covey.binpb"
    python.mkdir(parents=True, exist_ok=True)
    image.parent.mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    if not sources:
        sys.exit(f"no .proto file under {PROTOS}")
    with tempfile.TemporaryDirectory() as scratch:
        rules = Path(scratch) / "validate.binpb"
        rules.write_bytes(validate_descriptor())
        shared = [f"--descriptor_set_in={rules}"]
        protoc([*shared, f"--python_out={python}", f"--mypy_out=quiet:{python}", VALIDATE])
        # Generating from the image itself proves that it is complete.
        everything = Path(scratch) / "everything.binpb"
        everything.write_bytes(_all_descriptors(sources, rules, Path(scratch)))
        whole = f"--descriptor_set_in={everything}"
        protoc([whole, f"--python_out={python}", f"--mypy_out=quiet:{python}", *sources])
        with_services = _with_services(everything, sources)
        if with_services:
            protoc(
                [
                    whole,
                    f"--grpc_python_out={python}",
                    f"--mypy_grpc_out=quiet,only_async:{python}",
                    *with_services,
                ]
            )
        shutil.copyfile(everything, image)
    for stub in sorted((python / "covey" / "v1").glob("*_pb2_grpc.pyi")):
        text = stub.read_text("utf-8")
        for wrong, right in STUB_REPAIRS:
            text = wrong.sub(right, text)
        stub.write_text(text, "utf-8")
    for name, text in INIT.items():
        (python / name).write_text(f'"""{text}"""\n', encoding="utf-8")


def _all_descriptors(sources: list[str], rules: Path, scratch: Path) -> bytes:
    """Compiles `sources` to one self-contained set with comments, in the order that imports demand."""
    includes = [f"-I{folder}" for folder in (PROTOS, *include_folders())]
    out = scratch / "sources.binpb"
    flags = ["--include_imports", "--include_source_info"]
    protoc([f"--descriptor_set_in={rules}", *includes, *flags, f"-o{out}", *sources])
    return out.read_bytes()


def _with_services(image: Path, sources: list[str]) -> list[str]:
    """Returns those of `sources` that define a service: the others have no stubs."""
    files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    return [file.name for file in files if file.name in sources and file.service]


def differing(fresh: Path) -> list[str]:
    """Returns the generated paths whose checked-in content isn't what `fresh` holds, or is there in vain."""
    names: set[str] = set()
    for top in (fresh, ROOT):
        for name in GENERATED:
            path = top / name
            files = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
            names.update(str(file.relative_to(top)) for file in files if "__pycache__" not in file.parts)
    bad = []
    for name in sorted(names):
        ours, theirs = ROOT / name, fresh / name
        if not (ours.is_file() and theirs.is_file() and filecmp.cmp(ours, theirs, shallow=False)):
            bad.append(name)
    return bad


def install(fresh: Path, stale: list[str]) -> None:
    """Brings the repository's generated files to what `fresh` holds, touching only those that differ."""
    for name in stale:
        ours, theirs = ROOT / name, fresh / name
        if theirs.is_file():
            ours.parent.mkdir(parents=True, exist_ok=True)
            replacement = ours.with_name(ours.name + ".new")
            shutil.copyfile(theirs, replacement)
            replacement.replace(ours)
        else:
            ours.unlink()


def main() -> None:
    """Parses the command line and generates or checks."""
    parser = argparse.ArgumentParser(description="Generate the code and the image of the contract.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would change")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        stale = differing(fresh)
        if check and stale:
            listing = "\n".join(f"  {name}" for name in stale)
            sys.exit(f"generated files differ from protos/ (run `make proto` and commit):\n{listing}")
        if not check:
            install(fresh, stale)
    print("generated code: up to date" if not stale else f"generated code: {len(stale)} files written")


if __name__ == "__main__":
    main()

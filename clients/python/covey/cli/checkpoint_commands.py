"""`covey checkpoint`: the results of rounds, on the mesh and as files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covey.cli._command import JsonOption, client_command, example, group, run_async
from covey.cli._output import Out, plain
from covey.words import metric_text, size

if TYPE_CHECKING:
    from covey.client import Client
    from covey.v1.checkpoint_pb2 import CheckpointHeader, CheckpointProblem

__all__ = ["add_to"]

app = group("checkpoint", "List, export, verify and inspect checkpoints.")

RoundOption = Annotated[
    int | None, typer.Option("--round", min=0, help="The round.  [default: the latest]", show_default=False)
]


def add_to(root: typer.Typer) -> None:
    """Adds the group to the command."""
    root.add_typer(app)


@client_command(app, "ls", "covey checkpoint ls digits-4f7k2m9c")
async def ls(
    client: "Client", out: Out, job: Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
) -> None:
    """List the checkpoints of a job by round."""
    found = await client.checkpoints.list(job)
    out.value([plain(one) for one in found])
    out.table(
        ("#ROUND", "SHA-256", "#SIZE", "METRICS"),
        [
            (
                one.round,
                one.blob.sha256,
                size(one.blob.size_bytes),
                metric_text(one.header.metrics),
            )
            for one in found
        ],
        empty="no checkpoints yet",
    )


@client_command(app, "export", "covey checkpoint export digits-4f7k2m9c --output digits.safetensors")
async def export(
    client: "Client",
    out: Out,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to.  [default: JOB-ROUND.safetensors]"),
    ] = None,
    round_number: RoundOption = None,
) -> None:
    """Write a checkpoint to a file, verified."""
    import tempfile

    if output is None:
        # The round isn't known before the first message; the file gets its name when it is whole.
        with tempfile.TemporaryDirectory(prefix=".covey-export-", dir=Path.cwd()) as folder:
            whole = Path(folder) / "checkpoint.safetensors"
            record = await client.checkpoints.export(job, whole, round_number)
            output = Path(f"{job}-{record.round}.safetensors")
            whole.replace(output)
    else:
        record = await client.checkpoints.export(job, output, round_number)
    out.value({"path": str(output.absolute()), "checkpoint": plain(record)})
    out.facts(
        [
            ("file", output),
            ("round", record.round),
            ("size", size(record.blob.size_bytes)),
            ("SHA-256", record.blob.sha256),
            ("weights SHA-256", record.header.weights_sha256),
        ]
    )


@app.command("verify", epilog=example("covey checkpoint verify digits.safetensors --package models/digits"))
def verify(
    what: Annotated[str, typer.Argument(metavar="FILE|JOB", help="A file on this machine, or a job's id.")],
    package: Annotated[
        Path | None,
        typer.Option("--package", metavar="DIR", help="The package that it must fit.  [FILE only]"),
    ] = None,
    round_number: RoundOption = None,
    coordinator: Annotated[
        str | None, typer.Option("--coordinator", metavar="HOST:PORT", help="Whom to ask.  [JOB only]")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="The owner's token.  [JOB only]")
    ] = None,
    root_cert: Annotated[
        Path | None,
        typer.Option(
            "--root-cert", metavar="FILE", envvar="COVEY_ROOT_CERT", help="PEM certificates to trust."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every digest, shape and number.

    Exit code 1 when something is wrong. A JOB is checked where it is stored; a FILE here.
    """
    out = Out(as_json=as_json)
    path = Path(what)
    if path.exists() or "/" in what or what.endswith(".safetensors"):
        header, problems, sha256 = _examine(path, package)
    else:

        async def stored() -> tuple[Any, list[Any], str]:
            from covey.client import connect

            async with connect(coordinator, token_file=token_file, root_cert=root_cert) as client:
                record, verdict = await client.checkpoints.verify(what, round_number)
            header = verdict.header if verdict.HasField("header") else None
            return header, list(verdict.problems), record.blob.sha256

        header, problems, sha256 = run_async(stored())
    out.value(
        {
            "valid": not problems,
            "sha256": sha256,
            "problems": [plain(problem) for problem in problems],
            "header": plain(header) if header is not None else None,
        }
    )
    _verdict(out, what, sha256, header, problems)


def _examine(
    path: Path, package: Path | None
) -> tuple["CheckpointHeader | None", list["CheckpointProblem"], str]:
    from covey.packages import load
    from covey.v1.storage_service_pb2 import CheckpointExpectation
    from covey_kit.checkpoints import examine

    expectation = None
    if package is not None:
        manifest = load(package).manifest
        expectation = CheckpointExpectation(
            parameters=manifest.parameters,
            package_name=manifest.name,
            package_version=manifest.version,
            module_sha256=manifest.module.sha256,
        )
    found = examine(path, expectation)
    return found.header, found.problems, found.file_sha256


def _verdict(
    out: Out,
    what: str,
    sha256: str,
    header: "CheckpointHeader | None",
    problems: list["CheckpointProblem"],
) -> None:
    from covey.v1.checkpoint_pb2 import CheckpointProblem
    from covey_kit.errors import DataLoss, Reason, Violation

    if problems:
        kinds = [CheckpointProblem.Kind.Name(p.kind).removeprefix("KIND_").lower() for p in problems]
        raise DataLoss(
            Reason.CHECKPOINT_INVALID,
            f"{what} isn't a valid checkpoint",
            violations=[
                Violation(kind, f"{p.tensor}: {p.message}" if p.tensor else p.message)
                for kind, p in zip(kinds, problems, strict=True)
            ],
        )
    if header is not None:
        out.line(
            f"valid: {header.package_name} {header.package_version}, round {header.round}, "
            f"{header.weight_count:,} weights, SHA-256 {sha256}"
        )


@app.command("inspect", epilog=example("covey checkpoint inspect digits.safetensors"))
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A checkpoint.")],
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint says of itself.

    Nothing is verified: `verify` does that.
    """
    from covey_kit.checkpoints import CheckpointReader

    out = Out(as_json=as_json)
    with CheckpointReader(file) as reader:
        header = reader.header
        layout = {"weights_offset": reader.weights_offset, "weights_bytes": reader.weights_bytes}
    file_bytes = file.stat().st_size
    out.value({"path": str(file.absolute()), "size_bytes": file_bytes, **layout, "header": plain(header)})
    _inspect(out, file, file_bytes, header)


def _inspect(out: Out, file: Path, file_bytes: int, header: "CheckpointHeader") -> None:
    from covey.v1.common_pb2 import Backend
    from covey.v1.job_pb2 import AggregationStrategy

    strategy = header.aggregation.strategy if header.HasField("aggregation") else None
    position = header.position.WhichOneof("position") if header.HasField("position") else None
    where = None
    if position == "dataset":
        queue = header.position.dataset
        where = f"pass {getattr(queue, 'pass')}, chunk {queue.next_index} is next"  # `pass` is Python's word
    elif position == "experience":
        where = f"unit {header.position.experience.next_unit:,} is next"
    out.facts(
        [
            ("file", f"{file}, {size(file_bytes)}"),
            ("version", header.format_version),
            ("package", f"{header.package_name} {header.package_version}"),
            ("module SHA-256", header.module_sha256),
            ("round", header.round),
            ("weights", f"{header.weight_count:,} in {len(header.parameter_names)} tensors"),
            ("weights SHA-256", header.weights_sha256),
            ("metrics", metric_text(header.metrics)),
            ("units", f"{header.units:,}"),
            (
                "aggregation",
                AggregationStrategy.Name(strategy).removeprefix("AGGREGATION_STRATEGY_")
                if strategy is not None
                else None,
            ),
            ("optimizer", ", ".join(tensor.name for tensor in header.optimizer)),
            ("position", where),
            ("seed", header.seed),
            ("backends", ", ".join(Backend.Name(b) for b in header.backends)),
        ]
    )

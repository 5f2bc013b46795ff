"""`covey package` and `covey data`: what model and data authors run before anything is uploaded."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from covey.cli._command import JsonOption, example, group
from covey.cli._output import Out, plain
from covey.words import size

if TYPE_CHECKING:
    from covey.packages import Package, PackageReport

__all__ = ["add_to"]

MODULE_GOOD = "loads, exports what it must, speaks ABI 1, makes finite weights"
MODULE_UNKNOWN = "not checked: install covey[participant]"

package = group("package", "Check model packages.")
data = group("data", "Describe datasets.")


def add_to(root: typer.Typer) -> None:
    """Adds the groups to the command."""
    root.add_typer(package)
    root.add_typer(data)


@package.command("check", epilog=example("covey package check models/digits"))
def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with manifest.json.")],
    as_json: JsonOption = False,
) -> None:
    """Check a package: manifest, files, module.

    Says everything that is wrong at once, what was declared and what was found.
    """
    from covey.packages import check_package
    from covey_kit.errors import InvalidArgument, Reason

    out = Out(as_json=as_json)
    report = check_package(folder)
    if report.violations:
        raise InvalidArgument(
            Reason.PACKAGE_MISMATCH, f"{folder} isn't a valid package", violations=report.violations
        )
    assert report.package is not None, "a package without violations was loaded"
    manifest = report.package.manifest
    out.value(
        {
            "valid": True,
            "name": manifest.name,
            "version": manifest.version,
            "weight_count": report.package.weight_count,
            "module_checked": report.module_checked,
            "validation_examples": report.validation_examples,
            "manifest": plain(manifest),
        }
    )
    _summary(out, report, report.package)


def _held_out(report: "PackageReport", unit: str) -> str | None:
    count = report.validation_examples
    return f"{count:,} {unit}s" if count is not None else None


def _summary(out: Out, report: "PackageReport", loaded: "Package") -> None:
    from covey.v1.common_pb2 import Backend
    from covey.v1.package_pb2 import MetricSpec, WorkSource

    manifest = loaded.manifest
    source = manifest.work_source
    able = [name for name in ("training", "evaluation", "inference") if getattr(manifest.capabilities, name)]
    out.facts(
        [
            ("package", f"{manifest.name} {manifest.version}"),
            ("licence", manifest.license),
            ("work", f"{WorkSource.Kind.Name(source.kind).lower()}, counted in {source.unit}s"),
            ("formats", ", ".join(manifest.data_formats)),
            ("can do", ", ".join(able)),
            ("backends", ", ".join(Backend.Name(spec.kind) for spec in manifest.backends)),
            (
                "metrics",
                ", ".join(
                    f"{m.name} ({MetricSpec.Direction.Name(m.direction).lower()})" for m in manifest.metrics
                ),
            ),
            ("settings", ", ".join(f"{h.name} = {h.default:g}" for h in manifest.hyperparameters)),
            ("weights", f"{loaded.weight_count:,} in {len(manifest.parameters)} tensors"),
            ("module", MODULE_GOOD if report.module_checked else MODULE_UNKNOWN),
            ("held-out data", _held_out(report, source.unit)),
        ]
    )
    rows = [(item.path, item.file_name, size(item.size), item.sha256[:16] + "…") for item in loaded.files()]
    out.table(("FILE", "NAME", "#SIZE", "SHA-256"), rows)
    out.line("valid")


@data.command(
    "manifest",
    epilog=example(
        "covey data manifest train/*.bin --format digits-v1 --package models/digits -o dataset.json"
    ),
)
def manifest(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="The chunks, in order.")],
    format: Annotated[str, typer.Option("--format", metavar="ID", help="The format of all of them.")],
    package_folder: Annotated[
        Path | None,
        typer.Option("--package", metavar="DIR", help="The package whose loader counts the examples."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to.  [default: stdout]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the dataset manifest of some files.

    With sizes, digests, and the numbers of examples as the package's own loader counts them.
    """
    from covey.packages import count_examples, describe_dataset, load
    from covey_kit.errors import InvalidArgument, Reason

    if package_folder is None:
        raise typer.BadParameter(
            "--package is needed: only the package's own loader knows how many examples a file holds"
        )
    out = Out(as_json=as_json)
    loaded = load(package_folder)
    if format not in loaded.manifest.data_formats:
        known = ", ".join(loaded.manifest.data_formats) or "no data"
        raise InvalidArgument(
            Reason.DATASET_MISMATCH, f"--format {format}: {loaded.manifest.name} reads {known}"
        )
    counts = count_examples(loaded, files)
    rows = describe_dataset(files, format, counts.__getitem__)
    text = "[\n" + ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"
    if output is not None:
        output.write_text(text, "utf-8")
    elif not as_json:
        print(text, end="")
    out.value(rows)
    if output is not None:
        examples = sum(row["exampleCount"] for row in rows)
        out.line(f"{output}: {len(rows)} chunks, {examples:,} {loaded.manifest.work_source.unit}s")

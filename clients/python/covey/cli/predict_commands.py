"""`covey predict`: one inference with a checkpoint's weights, here, without any server."""

from pathlib import Path
from typing import Annotated

import typer

from covey.cli._command import JsonOption, example
from covey.cli._output import Out

__all__ = ["add_to"]

SHOWN = 10


def add_to(root: typer.Typer) -> None:
    """Adds the command."""
    root.command(
        "predict",
        epilog=example("covey predict models/digits digits.safetensors models/digits/samples/seven.pgm"),
    )(predict)


def predict(
    package: Annotated[Path, typer.Argument(metavar="PACKAGE", help="Folder with manifest.json.")],
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint of that package.")],
    input: Annotated[
        Path,
        typer.Argument(metavar="INPUT", help="A .npy array, a binary .pgm image, or the raw bytes."),
    ],
    as_json: JsonOption = False,
) -> None:
    """Predict with the weights of a checkpoint.

    Runs here, without any server, in a sandbox.
    """
    from covey.packages import load
    from covey.prediction import predict as run

    out = Out(as_json=as_json)
    result = run(load(package), checkpoint, input)
    out.value(
        {
            "label": result.label,
            "round": result.round,
            "scores": dict(result.ranked()),
            "outputs": dict(result.outputs),
        }
    )
    ranked = result.ranked()
    if not ranked:
        for name, values in result.outputs.items():
            out.line(f"{name}: {' '.join(f'{value:g}' for value in values)}")
        return
    width = max(len(label) for label, _ in ranked)
    for label, score in ranked[:SHOWN]:
        out.line(
            f"{label:>{width}}  {score:7.4f}  {'█' * round(score * 40) if 0 <= score <= 1 else ''}".rstrip()
        )

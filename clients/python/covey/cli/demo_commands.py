"""`covey demo`: a whole mesh on this machine, trained to the end."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from covey.cli._command import JsonOption, example
from covey.cli._options import check_backend
from covey.cli._output import Out

if TYPE_CHECKING:
    from covey.demo import DemoMesh, DemoOptions, DemoResult

__all__ = ["add_to"]

TERMINATED = 143


def add_to(root: typer.Typer) -> None:
    """Adds the command."""
    root.command("demo", epilog=example("covey demo", "covey demo --participants 5 --json"))(demo)


def demo(
    participants: Annotated[
        int, typer.Option("--participants", min=1, max=64, help="Devices, each a process.")
    ] = 3,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds.  [default: 16]")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seeds everything random.")] = 0,
    backend: Annotated[
        str, typer.Option("--backend", metavar="auto|cpu|gpu", help="What the devices run on.")
    ] = "cpu",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder", metavar="DIR", help="Where state goes, and stays.  [default: a temporary one]"
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder's state and logs.")] = False,
    pid_file: Annotated[
        Path | None,
        typer.Option("--pid-file", metavar="FILE", help="Keep the processes' ids in this file, as JSON."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model on a mesh of processes here.

    Starts a coordinator with storage and some participants, each in a process of its own, trains a package
    that reads handwritten digits, and takes everything down again. On the CPU the same seed gives the same
    checkpoint, to the byte, whatever the number of participants. With --backend gpu each device uses its GPU;
    where it can't, it goes on with the CPU and says why. Of a temporary folder the checkpoint alone is kept.
    """
    import tempfile

    from covey.demo import DemoOptions
    from covey.demo._run import DEFAULT_ROUNDS

    temporary = folder is None
    home = Path(tempfile.mkdtemp(prefix="covey-demo-")) if folder is None else folder.absolute()
    options = DemoOptions(
        folder=home / "mesh" if temporary else home,
        checkpoint=home / "checkpoint.safetensors",
        participants=participants,
        rounds=rounds or DEFAULT_ROUNDS,
        seed=seed,
        pid_file=pid_file,
        backend=check_backend(backend) or "cpu",
    )
    finished = False
    try:
        home.mkdir(parents=True, exist_ok=True)
        result = asyncio.run(_run(options, as_json=as_json))
        finished = True
    finally:
        if temporary and not keep:
            _clear(home, all_of_it=not finished)
    _show(Out(as_json=as_json), result)


async def _run(options: "DemoOptions", *, as_json: bool) -> "DemoResult":
    """Runs the demo; the first SIGINT or SIGTERM takes the mesh down, a second one kills it at once."""
    from covey.demo import run_demo
    from covey.demo._view import make_view
    from covey_kit.logging import configure

    configure("warning")
    meshes: list[DemoMesh] = []
    received: list[int] = []
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "asyncio.run made one"

    def on_signal(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()
        for mesh in meshes if len(received) > 1 else ():
            mesh.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        with make_view(sys.stderr if as_json else sys.stdout) as view:
            return await run_demo(options, view, meshes.append)
    except asyncio.CancelledError:
        if received[:1] == [signal.SIGTERM]:
            print("terminated", file=sys.stderr)
            raise SystemExit(TERMINATED) from None
        raise KeyboardInterrupt from None


def _clear(home: Path, *, all_of_it: bool) -> None:
    """Removes a temporary folder: all of it, or everything but the checkpoint."""
    import shutil

    shutil.rmtree(home if all_of_it else home / "mesh", ignore_errors=True)


def _show(out: Out, result: "DemoResult") -> None:
    from covey.demo._view import final_rows
    from covey.words import duration, number

    if out.json:
        print(json.dumps(result.json(), ensure_ascii=False), flush=True)
        return
    columns = ("#ROUND", "#LOSS", "#ACCURACY", "#HELD-OUT ACCURACY", f"#{result.unit.upper()}S", "#TIME")
    out.table(columns, final_rows(result.history))
    out.facts(
        [
            ("package", result.package),
            ("participants", result.participants),
            ("backend", result.backend),
            *_gpu(result),
            ("checkpoint", result.checkpoint_path),
            ("SHA-256", result.checkpoint_sha256),
            ("weights SHA-256", result.weights_sha256),
            ("time", f"{duration(result.seconds)}, of it training {duration(result.training_seconds)}"),
            ("held-out accuracy", number(result.accuracy)),
        ]
    )


def _gpu(result: "DemoResult") -> list[tuple[str, str]]:
    """Returns the rows about the GPU: which one, or why none, each where there is something to say."""
    rows = [("GPU", result.adapter)] if result.adapter else []
    if result.fallback_reason:
        rows.append(("why not the GPU", f"{result.fallback_reason}: {result.fallback_message}"))
    return rows

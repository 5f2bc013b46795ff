"""The commands put together, and what happens when one fails.

Exit codes: 0 it worked, 1 it failed, 2 it was called wrongly, 130 it was interrupted.
"""

import os
import sys
from collections.abc import Sequence

import typer
import typer.main

from covey.cli import (
    checkpoint_commands,
    demo_commands,
    device_commands,
    diag_commands,
    job_commands,
    job_continue,
    join_commands,
    mesh_commands,
    package_commands,
    predict_commands,
    probe_commands,
    up_commands,
)
from covey.cli._errors import INTERRUPTED, report, report_usage

__all__ = ["main", "run"]

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Typer's base of everything that is wrong with the arguments, wherever this version of typer keeps it."""

app = typer.Typer(
    name="covey",
    help="Train one model on many devices.",
    epilog="Begin with: covey demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from covey_kit.version import CONTRACT_VERSION, program_version

        print(f"covey {program_version()} (contract {CONTRACT_VERSION})")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


for module in (
    demo_commands,
    up_commands,
    join_commands,
    device_commands,
    diag_commands,
    job_commands,
    job_continue,
    mesh_commands,
    package_commands,
    checkpoint_commands,
    predict_commands,
    probe_commands,
):
    module.add_to(app)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Everything that goes wrong is reported, never raised."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in arguments
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="covey", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        return report_usage(error, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except Exception as error:  # noqa: BLE001 - the last line of defence: one line for the user, details on demand
        return report(error, as_json=as_json)
    if code == INTERRUPTED:  # typer's own way to tell of Ctrl-C
        print("interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def main() -> None:
    """The entry point of `covey`."""
    sys.exit(run())

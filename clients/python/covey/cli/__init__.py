"""The `covey` command.

Modules here hold one group of commands each, thin over `covey.client` and `covey.packages`. They import only
what is light at module level: `covey --help` has to answer before anyone notices.
"""

import os
import sys

__all__ = ["main"]


def main() -> None:
    """The entry point of `covey`. Ctrl-C while its modules load ends it like any other Ctrl-C."""
    try:
        from covey.cli._main import run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
        os._exit(130)  # half-loaded modules have nothing to clean up
    sys.exit(run())

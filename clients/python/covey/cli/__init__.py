"""The `covey` command.

Modules here hold one group of commands each, thin over `covey.client` and `covey.packages`. They import only
what is light at module level: `covey --help` has to answer before anyone notices.
"""

from covey.cli._main import main

__all__ = ["main"]

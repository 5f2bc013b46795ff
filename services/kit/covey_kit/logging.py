"""structlog, set up once per process: one line a fact, on stderr."""

import logging
import sys
from typing import Any

import structlog

__all__ = ["configure"]


def configure(level: str = "info", *, json: bool = False) -> None:
    """Sets up structlog for the process.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        json: one JSON object a line instead of text for people.

    Raises:
        ValueError: an unknown level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level: expected debug, info, warning or error, found {level!r}")
    renderer: Any
    if json:
        renderer = structlog.processors.JSONRenderer()
    else:
        # Plain: the pretty formatter prints local variables, tokens among them.
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if json else _keep,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def _keep(_logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return event

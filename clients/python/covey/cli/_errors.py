"""Failures as people (and with `--json` programs) read them: what, where, what next. Always on stderr."""

import json
import os
import sys
import traceback
from typing import Any

from covey_kit.errors import CoveyError

__all__ = ["FAILED", "INTERRUPTED", "WRONG_USAGE", "report", "report_usage"]

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130

DEBUG_VARIABLE = "COVEY_DEBUG"


def report(error: BaseException, *, as_json: bool) -> int:
    """Reports why a command failed and returns its exit code."""
    error = _cause(error)
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    if isinstance(error, CoveyError):
        _covey_error(error, as_json=as_json)
    elif isinstance(error, ModuleNotFoundError):
        text = f"{error.name} isn't installed, and this command needs it; install covey[all]"
        _print("NOT_INSTALLED", text, as_json=as_json)
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        _print("OS_ERROR", f"{where}{error.strerror or error}", as_json=as_json)
    else:
        text = (
            f"unexpected {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        )
        _print("INTERNAL", f"{text}; run with {DEBUG_VARIABLE}=1 for details", as_json=as_json)
    return FAILED


def report_usage(error: Any, *, as_json: bool) -> int:
    """Reports what is wrong with the arguments and returns the exit code."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(context.get_help() if context else error, file=sys.stderr)
        return WRONG_USAGE
    command = context.command_path if context is not None else "covey"
    _print("USAGE", f"{error.format_message()}\nsee: {command} --help", as_json=as_json)
    return WRONG_USAGE


def _cause(error: BaseException) -> BaseException:
    """Returns the first error of a group of concurrent ones."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _covey_error(error: CoveyError, *, as_json: bool) -> None:
    if as_json:
        details = {
            "code": error.code,
            "reason": error.reason.value,
            "message": error.message,
            "violations": [{"field": v.field, "description": v.description} for v in error.violations],
            "metadata": error.metadata,
        }
        print(json.dumps({"error": details}, ensure_ascii=False), file=sys.stderr)
        return
    lines = [f"{v.field}: {v.description}" if v.field else v.description for v in error.violations]
    print(f"error: {_head(error.message, lines)}", file=sys.stderr)
    for line in lines:
        print(f"  {line}", file=sys.stderr)


def _head(message: str, lines: list[str]) -> str:
    """Returns the message up to its first violation: a server's sentence may tell the first ones too."""
    place = message.find(lines[0]) if lines else -1
    return message[:place].rstrip(": ") or message if place > 0 else message


def _print(reason: str, message: str, *, as_json: bool) -> None:
    if as_json:
        details = {"code": "UNKNOWN", "reason": reason, "message": message, "violations": [], "metadata": {}}
        print(json.dumps({"error": details}, ensure_ascii=False), file=sys.stderr)
    else:
        print(f"error: {message}", file=sys.stderr)

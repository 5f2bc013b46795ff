"""A job's settings from a file and from the command line.

A file is the proto3 JSON of `JobSettings`, or TOML with the same names:

    epochs = 3
    learningRate = 0.05
    silenceTimeout = "20s"

    [aggregation]
    strategy = "FED_ADAM"

    [hyperparameters]
    momentum = 0.9

`rounds`, the legacy name of `epochs`, is still read. Enums may be written without their prefix.
"""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.packages._rules import broken_rules
from covey.packages._strict import decode, fill, join
from covey.v1 import job_pb2
from covey_kit.errors import InvalidArgument, Reason, Violation

__all__ = ["parse_settings", "read_settings"]

LEGACY_EPOCHS = "rounds"

_ENUMS = {
    ("chunkOrder",): "CHUNK_ORDER_",
    ("chunk_order",): "CHUNK_ORDER_",
    ("aggregation", "strategy"): "AGGREGATION_STRATEGY_",
}


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the JSON value of a settings file: TOML when its name ends with `.toml`, else JSON.

    Raises:
        InvalidArgument: SETTINGS_MISMATCH: it can't be read, or isn't an object.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise _invalid([Violation("", f"can't be read: {error.strerror}")], path) from error
    value: Any
    if path.suffix == ".toml":
        try:
            value = tomllib.loads(text.decode("utf-8"))
        except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
            raise _invalid([Violation("", f"isn't valid TOML: {error}")], path) from error
    else:
        value, violations = decode(text, path.name)
        if violations:
            raise _invalid(violations, path)
    if not isinstance(value, dict):
        raise _invalid([Violation("", "expected an object with settings")], path)
    return value


def parse_settings(value: dict[str, Any], assignments: Sequence[str] = ()) -> job_pb2.JobSettings:
    """Returns the settings of a JSON value, changed by assignments such as `aggregation.momentum=0.8`.

    Args:
        value: as `read_settings` returned it.
        assignments: each `path=value`; the value is JSON, or else taken as text. The last one wins.

    Raises:
        InvalidArgument: SETTINGS_MISMATCH with every violation.
    """
    value = json.loads(json.dumps(value, default=str))  # a copy; TOML dates become text
    violations = [problem for item in assignments if (problem := _assign(value, item)) is not None]
    if LEGACY_EPOCHS in value:
        if "epochs" in value:
            violations.append(Violation(LEGACY_EPOCHS, "is the legacy name of epochs; give one of them"))
        value["epochs"] = value.pop(LEGACY_EPOCHS)
    for path, prefix in _ENUMS.items():
        _complete(value, path, prefix)
    settings = job_pb2.JobSettings()
    violations += fill(settings, value, names="any", what="the settings")
    named = {violation.field for violation in violations}
    violations += [broken for broken in broken_rules(settings) if broken.field not in named]
    if violations:
        raise _invalid(violations)
    return settings


def _assign(value: dict[str, Any], item: str) -> Violation | None:
    """Carries out one `path=value`."""
    path, separator, text = item.partition("=")
    names = path.split(".")
    if not separator or not all(names):
        return Violation(item, "expected key=value, such as learningRate=0.05")
    target = value
    walked = ""
    for name in names[:-1]:
        walked = join(walked, name)
        target = target.setdefault(name, {})
        if not isinstance(target, dict):
            return Violation(item, f"{walked} is a value, it has no parts")
    try:
        target[names[-1]] = json.loads(text)
    except ValueError:
        target[names[-1]] = text
    return None


def _complete(value: Any, path: tuple[str, ...], prefix: str) -> None:
    """Lets `FED_ADAM` and `fed_adam` stand for the enum's full name."""
    for name in path[:-1]:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, dict) and isinstance(text := value.get(path[-1]), str):
        upper = text.upper()
        value[path[-1]] = upper if upper.startswith(prefix) else prefix + upper


def _invalid(violations: Sequence[Violation], file: Path | None = None) -> InvalidArgument:
    where = f"the settings in {file}" if file is not None else "the settings"
    return InvalidArgument(Reason.SETTINGS_MISMATCH, f"{where} aren't valid", violations=violations)

"""The owner's settings against the package: bounds, contradictions, defaults."""

from covey_coordinator.domain.aggregation import Aggregation, Strategy
from covey_coordinator.domain.spec import (
    ChunkOrder,
    HyperparameterSpec,
    PackageSpec,
    Settings,
    SettingsRequest,
)
from covey_kit.errors import InvalidArgument, Violation

__all__ = ["MAX_UNITS", "OWN_FIELDS", "UNITS_PER_ASSIGNMENT", "own_hyperparameters", "resolve_settings"]

OWN_FIELDS = {"batchSize": "batch_size", "learningRate": "learning_rate", "localEpochs": "local_epochs"}
"""Hyperparameters that have a settings field of their own."""

_FALLBACKS = {"batchSize": 32.0, "learningRate": 0.01, "localEpochs": 1.0}
"""Used when neither the settings nor the package say anything."""

_WHOLE = ("batchSize", "localEpochs")

UNITS_PER_ASSIGNMENT = 32
"""Units of an experience job's assignment when the settings don't say, or the package's bound next to it."""

MAX_UNITS = (1 << 31) - 1
"""Most units of one assignment: modules count them in 32 bits, signed."""


def own_hyperparameters(package: PackageSpec) -> list[HyperparameterSpec]:
    """Returns the model's own hyperparameters in manifest order: all but those with a field of their own."""
    return [h for h in package.hyperparameters if h.name not in OWN_FIELDS]


def _bounds(spec: HyperparameterSpec, value: float, field: str) -> list[Violation]:
    if spec.minimum <= value <= spec.maximum:
        return []
    found = f"expected {spec.minimum:g} to {spec.maximum:g} (the package's {spec.name}), found {value:g}"
    return [Violation(field, found)]


def _step(package: PackageSpec, request: SettingsRequest, name: str) -> tuple[float, list[Violation]]:
    """Returns the value of a hyperparameter with a field of its own, and what is wrong with it."""
    given = getattr(request, OWN_FIELDS[name])
    declared = next((h for h in package.hyperparameters if h.name == name), None)
    if given is not None:
        wrong = _bounds(declared, given, f"settings.{OWN_FIELDS[name]}") if declared is not None else []
        return float(given), wrong
    return (declared.default if declared is not None else _FALLBACKS[name]), []


def _own(package: PackageSpec, request: SettingsRequest) -> tuple[dict[str, float], list[Violation]]:
    specs = {h.name: h for h in own_hyperparameters(package)}
    wrong = []
    values = {name: spec.default for name, spec in specs.items()}
    for name, value in request.hyperparameters:
        field = f"settings.hyperparameters[{name!r}]"
        if name in OWN_FIELDS:
            wrong.append(Violation(field, f"has a field of its own: use settings.{OWN_FIELDS[name]}"))
        elif name not in specs:
            known = ", ".join(specs) or "none"
            wrong.append(Violation(field, f"the package has no such hyperparameter (it has {known})"))
        else:
            wrong += _bounds(specs[name], value, field)
            values[name] = value
    return values, wrong


def _aggregation(request: SettingsRequest) -> tuple[Aggregation, list[Violation]]:
    strategy = Strategy(request.strategy or Strategy.FED_AVG)
    try:
        resolved = Aggregation.resolve(
            strategy,
            server_learning_rate=request.server_learning_rate,
            momentum=request.momentum,
            beta1=request.beta1,
            beta2=request.beta2,
            tau=request.tau,
            path="settings.aggregation",
        )
    except InvalidArgument as error:
        return Aggregation.resolve(strategy), list(error.violations)
    return resolved, []


def _contradictions(package: PackageSpec, request: SettingsRequest, settings: Settings) -> list[Violation]:
    wrong = []
    if request.experience and not package.experience:
        wrong.append(
            Violation("settings.experience", "expected nothing: the package's work is chunks of a dataset")
        )
    if package.experience and request.chunk_order is not None:
        wrong.append(
            Violation("settings.chunk_order", f"expected nothing: the package makes its own {package.unit}s")
        )
    if settings.validation_interval > 0 and not package.can_validate:
        there = "no evaluation_units" if package.experience else "no held-out file"
        lacks = there if package.evaluation else "no evaluation among its capabilities"
        wrong.append(
            Violation(
                "settings.validation_interval",
                f"expected 0, because the package has {lacks}; found {settings.validation_interval}",
            )
        )
    if settings.silence_timeout > settings.assignment_timeout:
        wrong.append(
            Violation(
                "settings.silence_timeout",
                f"expected at most assignment_timeout, which is {settings.assignment_timeout:g} s, "
                f"found {settings.silence_timeout:g} s",
            )
        )
    return wrong


def _units(package: PackageSpec, request: SettingsRequest) -> tuple[int | None, list[Violation]]:
    """Returns the units of an assignment (None: a dataset job), and what is wrong with them."""
    if not package.experience:
        return None, []
    least = max(package.min_units or 1, 1)
    most = MAX_UNITS if package.max_units is None else min(package.max_units, MAX_UNITS)
    given = request.units_per_assignment
    if given is None:
        return min(max(UNITS_PER_ASSIGNMENT, least), most), []
    if least <= given <= most:
        return given, []
    found = f"expected {least} to {most} (the package's min_units and max_units), found {given}"
    return given, [Violation("settings.experience.units_per_assignment", found)]


def resolve_settings(package: PackageSpec, request: SettingsRequest) -> tuple[Settings, list[Violation]]:
    """Fills in defaults and returns the settings in force with everything that is wrong with them.

    The settings are worth something only when nothing is wrong.
    """
    steps: dict[str, float] = {}
    wrong: list[Violation] = []
    for name in OWN_FIELDS:
        steps[name], found = _step(package, request, name)
        wrong += found
    own, found = _own(package, request)
    wrong += found
    aggregation, found = _aggregation(request)
    wrong += found
    units_per_assignment, found = _units(package, request)
    wrong += found
    assignment_timeout = 600.0 if request.assignment_timeout is None else request.assignment_timeout
    silence_timeout = request.silence_timeout
    if silence_timeout is None:  # a short assignment_timeout alone is no contradiction
        silence_timeout = min(15.0, assignment_timeout)
    settings = Settings(
        epochs=None if request.target_round is not None else (request.epochs or 1),
        target_round=request.target_round,
        assignments_per_round=request.assignments_per_round or 8,
        seed=request.seed or 0,
        batch_size=int(steps["batchSize"]),
        learning_rate=steps["learningRate"],
        local_epochs=int(steps["localEpochs"]),
        hyperparameters=tuple(own.items()),
        chunk_order=request.chunk_order or ChunkOrder.SEEDED,
        aggregation=aggregation,
        min_participants=request.min_participants or 1,
        validation_interval=request.validation_interval or 0,
        silence_timeout=silence_timeout,
        assignment_timeout=assignment_timeout,
        units_per_assignment=units_per_assignment,
    )
    return settings, wrong + _contradictions(package, request, settings)

"""Is this a plan that can run here? Everything that is wrong with it at once, with its place in the plan."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from covey.v1 import shader_plan_pb2
from covey_participant.domain.values import Adapter

from .archive import PLAN, ShaderArchive
from .assess_pipelines import PipelineCheck
from .expressions import ExpressionError, Names, evaluate
from .facts import PackageFacts
from .plan import (
    MOST_SLOTS,
    Assessment,
    Buffer,
    Kind,
    Phase,
    Pipeline,
    Plan,
    PlanViolation,
    Role,
    memory_bytes,
)

HOST_VALUES = ("batchUnits", "stepIndex")
"""What a uniform may hold besides hyperparameters."""

MOST_INTEGER = {"I32": (1 << 31) - 1, "U32": (1 << 32) - 1}
_ELEMENTS = {value: name for name, value in shader_plan_pb2.ShaderBuffer.Element.items()}


def assess(
    archive: ShaderArchive, package: PackageFacts, adapter: Adapter, budget_bytes: int | None = None
) -> Assessment:
    """Checks a plan against its package, an adapter and a memory budget. Pure; nothing reaches a driver.

    Args:
        budget_bytes: most GPU memory; None: no bound of ours.
    """
    return _Check(archive, package, adapter, budget_bytes).run()


class _Check:
    def __init__(
        self, archive: ShaderArchive, package: PackageFacts, adapter: Adapter, budget_bytes: int | None
    ) -> None:
        self._archive = archive
        self._plan = archive.plan
        self._package = package
        self._adapter = adapter
        self._budget = budget_bytes
        self._names = Names(package.batch_size, package.parameters)
        self._wrong: list[PlanViolation] = []

    def run(self) -> Assessment:
        buffers = self._buffers()
        self._coverage()
        known = {buffer.name: buffer for buffer in buffers}
        declared = {buffer.name for buffer in self._plan.buffers}
        check = PipelineCheck(self._archive, self._names, self._adapter, known, declared)
        pipelines = check.run()
        self._wrong += check.wrong
        self._idle(buffers, pipelines.values())
        phases = self._phases(pipelines)
        if len(buffers) < len(self._plan.buffers):
            return Assessment(tuple(self._wrong))
        least = memory_bytes(buffers, 1)
        slots = self._slots(buffers, least)
        if self._wrong:
            return Assessment(tuple(self._wrong), least)
        plan = Plan(
            buffers=buffers,
            pipelines=tuple(pipelines.values()),
            phases=phases,
            modules={
                pipeline.module: self._archive.modules[pipeline.module] for pipeline in pipelines.values()
            },
            parameters=tuple(self._package.parameters),
            metrics=self._package.metrics,
            batch_size=self._package.batch_size,
            slots=slots,
            memory_bytes=memory_bytes(buffers, slots),
        )
        return Assessment((), least, plan)

    def _add(self, place: str, description: str, kind: Kind = Kind.PLAN) -> None:
        self._wrong.append(PlanViolation(kind, f"{PLAN}:{place}", description))

    # --- buffers ------------------------------------------------------------------------------

    def _buffers(self) -> tuple[Buffer, ...]:
        """Returns the buffers whose size is known."""
        self._repeated("buffers", (buffer.name for buffer in self._plan.buffers))
        found = []
        for index, declared in enumerate(self._plan.buffers):
            place = f"buffers[{index}]"
            try:
                count = evaluate(declared.count, self._names)
            except ExpressionError as error:
                self._add(f"{place}.count", f"buffer {declared.name!r}: {error}")
                continue
            buffer = self._bound(declared, count)
            self._check_buffer(place, buffer)
            found.append(buffer)
        return tuple(found)

    def _bound(self, declared: shader_plan_pb2.ShaderBuffer, count: int) -> Buffer:
        """Returns the buffer with what it is bound to; an absent binding makes it scratch."""
        role = Role(declared.WhichOneof("binding") or "scratch")
        return Buffer(
            name=declared.name,
            element=_ELEMENTS[declared.element],
            count=count,
            role=role,
            parameter=declared.parameter,
            tensor=declared.tensor,
            uniform=tuple(declared.uniform.fields),
        )

    def _check_buffer(self, place: str, buffer: Buffer) -> None:
        most = self._adapter.limits.get("max-buffer-size", 0)
        if buffer.stride > most:
            self._add(
                f"{place}.count",
                f"buffer {buffer.name!r} takes {buffer.stride} bytes, max-buffer-size here is {most}",
                Kind.LIMITS,
            )
        if buffer.role is Role.PARAMETER:
            self._check_parameter(place, buffer)
        elif buffer.role is Role.UNIFORM:
            self._check_uniform(place, buffer)
        elif buffer.role is Role.METRICS:
            self._check_metrics(place, buffer)

    def _check_parameter(self, place: str, buffer: Buffer) -> None:
        if buffer.element != "F32":
            self._add(f"{place}.element", f"weights are F32, found {buffer.element}")
        wanted = self._package.parameters.get(buffer.parameter)
        if wanted is None:
            self._add(f"{place}.parameter", f"the manifest has no parameter {buffer.parameter!r}")
        elif wanted != buffer.count:
            self._add(
                f"{place}.count",
                f"parameter {buffer.parameter!r} has {wanted} elements, {buffer.name!r} has {buffer.count}",
            )

    def _check_uniform(self, place: str, buffer: Buffer) -> None:
        if buffer.count < len(buffer.uniform):
            self._add(
                f"{place}.count",
                f"buffer {buffer.name!r} has {buffer.count} elements for {len(buffer.uniform)} fields",
            )
        values = self._package.hyperparameters
        for index, name in enumerate(buffer.uniform):
            where = f"{place}.uniform.fields[{index}]"
            if name in HOST_VALUES:
                continue
            if name not in values:
                there = ", ".join(sorted({*values, *HOST_VALUES}))
                self._add(where, f"unknown hyperparameter {name!r}; there are {there}")
            elif buffer.element != "F32" and not _fits(values[name], buffer.element):
                self._add(where, f"{name} is {values[name]:g}, which isn't a whole {buffer.element}")

    def _check_metrics(self, place: str, buffer: Buffer) -> None:
        most = self._package.metrics
        if buffer.element != "F32":
            self._add(f"{place}.element", f"metrics are F32, found {buffer.element}")
        if buffer.count not in (most, 2 * most):
            self._add(
                f"{place}.count",
                f"the manifest has {most} metrics: expected {most} elements (sums over the units) or "
                f"{2 * most} (a sum and a count for each), found {buffer.count}",
            )

    def _coverage(self) -> None:
        """Every parameter has exactly one buffer; tensors and metrics have at most one."""
        bound = [(buffer.WhichOneof("binding"), buffer) for buffer in self._plan.buffers]
        weights = Counter(buffer.parameter for role, buffer in bound if role == "parameter")
        for name in self._package.parameters:
            if weights[name] != 1:
                self._add(
                    "buffers", f"parameter {name!r} must have exactly one buffer, found {weights[name]}"
                )
        tensors = Counter(buffer.tensor for role, buffer in bound if role == "tensor")
        for tensor, times in sorted(tensors.items()):
            if times > 1:
                self._add("buffers", f"tensor {tensor} has {times} buffers, expected one")
        wanted = "one metrics buffer" if self._package.metrics else "no metrics buffer"
        metrics = [buffer for role, buffer in bound if role == "metrics"]
        if any(not buffer.metrics for buffer in metrics):
            self._add("buffers", "a metrics buffer says `metrics: true`; leave the field out of all others")
        if len(metrics) != (1 if self._package.metrics else 0):
            self._add(
                "buffers",
                f"the manifest has {self._package.metrics} metrics: expected {wanted}, found {len(metrics)}",
            )

    def _idle(self, buffers: Iterable[Buffer], pipelines: Iterable[Pipeline]) -> None:
        """Memory that nothing uses isn't taken."""
        bound = {binding.buffer.name for pipeline in pipelines for binding in pipeline.bindings}
        for buffer in buffers:
            if buffer.role is Role.SCRATCH and buffer.name not in bound:
                self._add("buffers", f"no pipeline binds buffer {buffer.name!r}")

    # --- steps --------------------------------------------------------------------------------

    def _phases(self, pipelines: dict[str, Pipeline]) -> dict[Phase, tuple[Pipeline, ...]]:
        declared = {pipeline.name for pipeline in self._plan.pipelines}
        phases = {}
        for phase in Phase:
            steps = list(getattr(self._plan, phase.value))
            for index, step in enumerate(steps):
                if step.pipeline not in declared:
                    self._add(f"{phase.value}[{index}].pipeline", f"there is no pipeline {step.pipeline!r}")
            phases[phase] = tuple(pipelines[step.pipeline] for step in steps if step.pipeline in pipelines)
        package = self._package
        if package.training and not package.experience and not self._plan.train:
            self._add("train", "the package trains, but there are no steps")
        if package.training and package.experience and not self._plan.update:
            self._add("update", "the package updates from experience, but there are no steps")
        if package.evaluation and not package.experience and not self._plan.evaluate:
            self._add("evaluate", "the package evaluates, but there are no steps")
        return phases

    # --- memory -------------------------------------------------------------------------------

    def _slots(self, buffers: tuple[Buffer, ...], least: int) -> int:
        """Returns how many minibatches one submission may hold; adds a violation when not even one fits."""
        if self._budget is not None and least > self._budget:
            largest = sorted(buffers, key=lambda buffer: -buffer.size)[:3]
            names = ", ".join(f"{buffer.name!r} {buffer.size}" for buffer in largest)
            self._add(
                "buffers",
                f"the plan takes {least} bytes of GPU memory, the budget is {self._budget} ({names}, …)",
                Kind.BUDGET,
            )
            return 0
        most = self._adapter.limits.get("max-buffer-size", 0)
        slots = MOST_SLOTS
        while slots > 1 and (
            (self._budget is not None and memory_bytes(buffers, slots) > self._budget)
            or any(buffer.total(slots) > most for buffer in buffers)
        ):
            slots -= 1
        return slots

    def _repeated(self, place: str, names: Iterable[str]) -> None:
        for name, times in Counter(names).items():
            if times > 1:
                self._add(place, f"{name!r} is there {times} times")


def _fits(value: float, element: str) -> bool:
    least = -(1 << 31) if element == "I32" else 0
    return value == int(value) and least <= value <= MOST_INTEGER[element]


def with_slots(plan: Plan, slots: int) -> Plan:
    """Returns the same plan with another number of minibatches a submission (for measurements)."""
    return replace(plan, slots=slots, memory_bytes=memory_bytes(plan.buffers, slots))

"""The pipelines' part of checking a plan: names, bindings, sizes, workgroups."""

from collections import Counter
from collections.abc import Collection, Mapping

from covey.v1 import shader_plan_pb2
from covey_participant.domain.values import Adapter

from .archive import PLAN, ShaderArchive
from .expressions import ExpressionError, Names, evaluate
from .plan import Access, Binding, Buffer, Kind, Pipeline, PlanViolation, Role
from .wgsl import EntryPoint, entry_points
from .wgsl_types import WgslError

_ACCESS = {
    shader_plan_pb2.ShaderBinding.READ: Access.READ,
    shader_plan_pb2.ShaderBinding.READ_WRITE: Access.READ_WRITE,
    shader_plan_pb2.ShaderBinding.UNIFORM: Access.UNIFORM,
}
_READ_ONLY = (Role.TENSOR, Role.UNIFORM)
_AXES = "xyz"


class PipelineCheck:
    """Works out pipelines.

    Args:
        known: buffers whose size is known, by name.
        declared: names of all buffers: one that isn't known already has a violation of its own.
    """

    def __init__(
        self,
        archive: ShaderArchive,
        names: Names,
        adapter: Adapter,
        known: Mapping[str, Buffer],
        declared: Collection[str],
    ) -> None:
        self._archive = archive
        self._names = names
        self._adapter = adapter
        self._known = known
        self._declared = declared
        self._modules: dict[str, Mapping[str, EntryPoint | WgslError] | WgslError] = {}
        self.wrong: list[PlanViolation] = []

    def run(self) -> dict[str, Pipeline]:
        """Returns the pipelines by name, as far as they could be worked out; `wrong` says what is wrong."""
        found = {}
        counts = Counter(pipeline.name for pipeline in self._archive.plan.pipelines)
        for name, times in counts.items():
            if times > 1:
                self._add("pipelines", f"{name!r} is there {times} times")
        for index, declared in enumerate(self._archive.plan.pipelines):
            place = f"pipelines[{index}]"
            bindings = self._bindings(place, declared)
            workgroups = self._workgroups(place, declared)
            self._entry_point(place, declared)
            found[declared.name] = Pipeline(
                declared.name, declared.module, declared.entry_point, bindings, workgroups
            )
        return found

    def _add(self, place: str, description: str, kind: Kind = Kind.PLAN) -> None:
        self.wrong.append(PlanViolation(kind, f"{PLAN}:{place}", description))

    def _limit(self, name: str) -> int:
        return self._adapter.limits.get(name, 0)

    def _under(self, place: str, what: str, value: int, limit: str) -> None:
        if value > self._limit(limit):
            self._add(
                place, f"{what} is {value}, this adapter's {limit} is {self._limit(limit)}", Kind.LIMITS
            )

    # --- bindings -----------------------------------------------------------------------------

    def _bindings(self, place: str, declared: shader_plan_pb2.ShaderPipeline) -> tuple[Binding, ...]:
        for number, times in Counter(binding.binding for binding in declared.bindings).items():
            if times > 1:
                self._add(f"{place}.bindings", f"binding {number} is there {times} times")
        found = []
        for index, binding in enumerate(declared.bindings):
            where = f"{place}.bindings[{index}]"
            buffer = self._known.get(binding.buffer)
            if buffer is None:
                if binding.buffer not in self._declared:
                    self._add(f"{where}.buffer", f"there is no buffer {binding.buffer!r}")
                continue
            bound = Binding(binding.binding, buffer, _ACCESS[binding.access])
            self._check_binding(where, bound)
            found.append(bound)
        self._aliases(place, found)
        uniforms = sum(bound.access is Access.UNIFORM for bound in found)
        self._under(
            f"{place}.bindings",
            "the number of storage buffers",
            len(found) - uniforms,
            "max-storage-buffers-per-shader-stage",
        )
        self._under(
            f"{place}.bindings",
            "the number of uniform buffers",
            uniforms,
            "max-uniform-buffers-per-shader-stage",
        )
        return tuple(found)

    def _check_binding(self, where: str, bound: Binding) -> None:
        buffer = bound.buffer
        if bound.access is Access.READ_WRITE and buffer.role in _READ_ONLY:
            self._add(
                f"{where}.access",
                f"buffer {buffer.name!r} ({buffer.role.value}) is filled by the host: only READ",
            )
        limit = (
            "max-uniform-buffer-binding-size"
            if bound.access is Access.UNIFORM
            else "max-storage-buffer-binding-size"
        )
        self._under(where, f"the size of buffer {buffer.name!r} in bytes", buffer.size, limit)

    def _aliases(self, place: str, found: list[Binding]) -> None:
        """A buffer bound twice may be read twice; written, it must stand alone."""
        for name, times in Counter(bound.buffer.name for bound in found).items():
            access = [bound.access for bound in found if bound.buffer.name == name]
            if times > 1 and Access.READ_WRITE in access:
                self._add(
                    f"{place}.bindings",
                    f"buffer {name!r} is bound {times} times, and READ_WRITE among them: it would alias",
                )

    # --- workgroups ---------------------------------------------------------------------------

    def _workgroups(self, place: str, declared: shader_plan_pb2.ShaderPipeline) -> tuple[int, int, int]:
        numbers = [1, 1, 1]
        for index, text in enumerate(declared.workgroups):
            where = f"{place}.workgroups[{index}]"
            try:
                numbers[index] = evaluate(text, self._names)
            except ExpressionError as error:
                self._add(where, str(error))
                continue
            self._under(
                where,
                f"the number of workgroups in {_AXES[index]}",
                numbers[index],
                "max-compute-workgroups-per-dimension",
            )
        return numbers[0], numbers[1], numbers[2]

    def _entry_point(self, place: str, declared: shader_plan_pb2.ShaderPipeline) -> None:
        if declared.module not in self._archive.modules:
            there = ", ".join(sorted(self._archive.modules)) or "none"
            self._add(f"{place}.module", f"the archive has no {declared.module!r} (there are: {there})")
            return
        module = self._module(declared.module)
        if isinstance(module, WgslError):
            self._add(f"{place}.module", f"{declared.module}: {module}")
            return
        found = module.get(declared.entry_point)
        where = f"{place}.entryPoint"
        if found is None:
            there = ", ".join(sorted(module)) or "none"
            self._add(
                where,
                f"{declared.module} has no @compute function {declared.entry_point!r} (there are: {there})",
            )
        elif isinstance(found, WgslError):
            self._add(where, f"{declared.module}: {declared.entry_point}: {found}")
        else:
            self._check_workgroup(where, found)

    def _check_workgroup(self, where: str, found: EntryPoint) -> None:
        x, y, z = found.size
        for axis, value in zip(_AXES, found.size, strict=True):
            self._under(where, f"the workgroup's size in {axis}", value, f"max-compute-workgroup-size-{axis}")
        self._under(where, "the workgroup's size", x * y * z, "max-compute-invocations-per-workgroup")
        self._under(
            where, "the workgroup's memory in bytes", found.storage, "max-compute-workgroup-storage-size"
        )

    def _module(self, name: str) -> Mapping[str, EntryPoint | WgslError] | WgslError:
        if name not in self._modules:
            try:
                self._modules[name] = entry_points(self._archive.modules[name])
            except WgslError as error:
                self._modules[name] = error
        return self._modules[name]

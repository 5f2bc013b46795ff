"""Runs assignments on the backend that was chosen: the domain's `Runner` over both pools."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from covey_kit.errors import Reason
from covey_participant.domain.backend import MIB, Choice, Fallback
from covey_participant.domain.ports import Inputs
from covey_participant.domain.values import Assignment, Backend, DeviceSettings, Kind, Result
from covey_participant.runtime.cpu import (
    CpuRunner,
    DeviceLimits,
    OnReport,
    _log_line,
    _report,
    time_limits,
)
from covey_participant.runtime.pool import WorkerPool
from covey_participant.runtime.protocol import Job, Outcome, Task

from .facts import package_facts
from .failure import GpuFailure
from .protocol import GpuJob, GpuSpec
from .sizes import PlanSizes
from .supervisor import GpuPool


class BackendRunner(CpuRunner):
    """Runs packages with wasmtime, or with wgpu where that was chosen.

    Args:
        pool, scratch, compiled, limits, workers: see `CpuRunner`.
        gpu: the GPU's worker.
        settings: returns those in force now; their memory budget is what counts here.
        sizes: what plans take, to refuse one that is over the budget before a GPU is asked; None: the worker
            finds out.
    """

    def __init__(
        self,
        pool: WorkerPool,
        scratch: Path,
        compiled: Path,
        limits: DeviceLimits,
        workers: Callable[[], int] = lambda: 1,
        *,
        gpu: GpuPool,
        settings: Callable[[], DeviceSettings],
        sizes: PlanSizes | None = None,
    ) -> None:
        super().__init__(pool, scratch, compiled, limits, workers)
        self._given = (pool, scratch, compiled, limits, workers)
        self._gpu = gpu
        self._settings = settings
        self._sizes = sizes

    async def run(
        self, assignment: Assignment, inputs: Inputs, choice: Choice, on_report: OnReport
    ) -> Result:
        """Does an assignment in a worker process. Cancelling it stops it within a second.

        Raises:
            GpuFailure: the GPU couldn't; the CPU may.
            WorkFailure: with the reason.
        """
        package, cpu = assignment.package, replace(choice, backend=Backend.CPU_WASM)
        # Experience is evaluated by playing, and initial weights are made by the module.
        modules_own = assignment.kind is Kind.INITIALIZE or (
            package.experience and assignment.kind is Kind.EVALUATE
        )
        if choice.backend is Backend.CPU_WASM or modules_own:
            return await super().run(assignment, inputs, cpu, on_report)
        spec = self._spec(assignment, inputs, choice)
        await self._check_budget(assignment, spec)
        runner = _GpuRunner(*self._given, gpu=self._gpu, spec=spec)
        return replace(await runner.run(assignment, inputs, cpu, on_report), backend=choice.backend)

    async def _check_budget(self, assignment: Assignment, spec: GpuSpec) -> None:
        if self._sizes is None or spec.budget_bytes is None:
            return
        least = await self._sizes.find(assignment.package, assignment.config)
        if least is not None and least > spec.budget_bytes:
            raise GpuFailure(
                Reason.LIMIT_EXCEEDED,
                f"the plan takes {least} bytes of GPU memory, the budget is {spec.budget_bytes}",
                package_fault=False,
                fallback=Fallback.BUDGET,
            )

    def _spec(self, assignment: Assignment, inputs: Inputs, choice: Choice) -> GpuSpec:
        package, adapter, budget = assignment.package, choice.adapter, self._settings().gpu_memory_budget_mib
        if package.gpu is None or package.shader_archive is None or adapter is None:
            raise GpuFailure(Reason.DEVICE, f"{package.name} was to run on a GPU that it can't run on")
        if inputs.shader_archive is None:
            raise GpuFailure(Reason.DEVICE, "the shader archive isn't there")
        return GpuSpec(
            archive=str(inputs.shader_archive),
            archive_sha256=package.shader_archive.sha256,
            facts=package_facts(package, assignment.config),
            adapter=adapter.name,
            api=adapter.api,
            features=list(package.gpu.features),
            budget_bytes=None if budget is None else budget * MIB,
        )


class _GpuRunner(CpuRunner):
    """One assignment: what trains or evaluates goes to the GPU, what plays to the CPU's workers."""

    def __init__(
        self,
        pool: WorkerPool,
        scratch: Path,
        compiled: Path,
        limits: DeviceLimits,
        workers: Callable[[], int],
        *,
        gpu: GpuPool,
        spec: GpuSpec,
    ) -> None:
        super().__init__(pool, scratch, compiled, limits, workers)
        self._gpu = gpu
        self._spec = spec

    async def _run(self, assignment: Assignment, job: Job, on_report: OnReport) -> Outcome:
        if job.task is Task.PLAY:
            return await super()._run(assignment, job, on_report)
        package = assignment.package
        return await self._gpu.run(
            GpuJob(**vars(job), gpu=self._spec),
            time_limits(package, self._limits),
            lambda progress: on_report(_report(assignment, progress)),
            lambda level, text: _log_line(package, level, text),
        )

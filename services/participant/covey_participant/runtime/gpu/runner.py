"""Runs assignments on the backend that was chosen: the domain's `Runner` over both pools."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from covey_kit.errors import Reason
from covey_participant.domain.backend import MIB, Choice
from covey_participant.domain.ports import Inputs, RunnerReport
from covey_participant.domain.values import Assignment, Backend, DeviceSettings, Kind, Result
from covey_participant.runtime.cpu import CpuRunner, DeviceLimits, _log_line, _report, _result, time_limits
from covey_participant.runtime.pool import WorkerPool

from .facts import package_facts
from .failure import GpuFailure
from .protocol import GpuJob, GpuSpec
from .supervisor import GpuPool


class BackendRunner(CpuRunner):
    """Runs packages with wasmtime, or with wgpu where that was chosen.

    Args:
        pool, scratch, compiled, limits: see `CpuRunner`.
        gpu: the GPU's worker.
        settings: those in force now; their memory budget is.
    """

    def __init__(
        self,
        pool: WorkerPool,
        scratch: Path,
        compiled: Path,
        limits: DeviceLimits,
        *,
        gpu: GpuPool,
        settings: Callable[[], DeviceSettings],
    ) -> None:
        super().__init__(pool, scratch, compiled, limits)
        self._gpu = gpu
        self._settings = settings

    async def run(
        self,
        assignment: Assignment,
        inputs: Inputs,
        choice: Choice,
        on_report: Callable[[RunnerReport], None],
    ) -> Result:
        """Does an assignment in a worker process. Cancelling it stops it within a second.

        Raises:
            GpuFailure: the GPU couldn't; the CPU may.
            WorkFailure: with the reason.
        """
        if choice.backend is Backend.CPU_WASM or assignment.kind is Kind.INITIALIZE:
            cpu = replace(choice, backend=Backend.CPU_WASM)
            return await super().run(assignment, inputs, cpu, on_report)
        output = self._scratch / f"{assignment.assignment_id}-{assignment.attempt}.delta"
        job = self._job(assignment, inputs, output)
        package = assignment.package
        try:
            outcome = await self._gpu.run(
                GpuJob(**vars(job), gpu=self._spec(assignment, inputs, choice)),
                time_limits(package, self._limits),
                lambda progress: on_report(_report(assignment, progress)),
                lambda level, text: _log_line(package, level, text),
            )
        except BaseException:
            output.unlink(missing_ok=True)
            raise
        result = _result(assignment, outcome, "" if assignment.kind is Kind.EVALUATE else str(output))
        played = package.experience and assignment.kind is Kind.EVALUATE  # which is the module's own
        return result if played else replace(result, backend=choice.backend)

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

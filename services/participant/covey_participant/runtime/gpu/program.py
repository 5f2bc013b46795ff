"""What a GPU worker does with a job: as on the CPU, with an instance whose arithmetic is the plan's."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import wasmtime

from covey_kit.errors import InvalidArgument, Reason
from covey_participant.domain.backend import Fallback
from covey_participant.domain.failure import Cancelled, WorkFailure
from covey_participant.runtime import abi
from covey_participant.runtime.instance import Instance
from covey_participant.runtime.program import Log, Program, Report, _config
from covey_participant.runtime.protocol import Job, Outcome, Progress, Step, Task

from .adapters import memory_bound
from .archive import read_archive
from .assess import assess
from .device import Device
from .executor import Executor
from .failure import GpuFailure
from .instance import TENSOR, GpuInstance
from .plan import Assessment, Plan
from .protocol import GpuJob, GpuSpec


class GpuProgram(Program):
    """Runs jobs one after the other; a job without a GPU half runs as on the CPU.

    The device stays open, and the last plan's pipelines and buffers stay made: assignments of one job follow
    each other, and compiling takes longer than a small one's work. Nothing of what a job computed is seen by
    the next: weights and inputs are written over, scratch buffers and metrics are cleared.
    """

    def __init__(self, report: Report, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(report, log, clock)
        abi.OPTIONAL.update(TENSOR)  # in this process alone: modules are checked for it, and may be asked
        self._device: Device | None = None
        self._executor: Executor | None = None
        self._spec: GpuSpec | None = None

    def run(self, job: Job) -> Outcome:
        """Does a job.

        Raises:
            GpuFailure: what failed is the GPU's half.
            WorkFailure: anything else.
            Cancelled: when `report` raised it.
        """
        self._spec = job.gpu if isinstance(job, GpuJob) and _on_the_gpu(job) else None
        try:
            return super().run(job)
        except Cancelled:
            raise
        except WorkFailure as failure:
            self._forget()
            if self._spec is not None and failure.reason is Reason.RESULT_NOT_FINITE:
                raise GpuFailure(failure.reason, failure.message) from failure
            raise
        except BaseException:
            self._forget()
            raise

    @contextlib.contextmanager
    def _instance(self, job: Job, module: wasmtime.Module) -> Iterator[Instance]:
        spec = self._spec
        if spec is None:
            with super()._instance(job, module) as plain:
                yield plain
            return
        executor = self._prepare(spec)
        self._report(Progress(Step.LOAD))
        instance = GpuInstance(
            self._engine,
            module,
            memory_bytes=job.module.memory_bytes,
            log=self._log,
            executor=executor,
            hyperparameters=spec.facts.hyperparameters,
            epochs=job.config.local_epochs,
        )
        try:
            instance.check_abi()
            instance.configure(_config(job.config))
            self._report(Progress(Step.LOAD))
            yield instance
        finally:
            instance.close()

    def _prepare(self, spec: GpuSpec) -> Executor:
        """Returns the executor of a job's plan: the one of the job before, when it has the same plan."""
        self._report(Progress(Step.COMPILE))
        device = self._open(spec)
        plan = _plan(spec, device)
        if self._executor is None or self._executor.plan != plan:
            self._forget_executor()
            self._executor = Executor(device, plan, lambda _name: self._report(Progress(Step.COMPILE)))
        return self._executor

    def _open(self, spec: GpuSpec) -> Device:
        device, wanted = self._device, (spec.adapter, spec.api, frozenset(spec.features))
        if device is None or (device.facts.name, device.facts.api, device.features) != wanted:
            self._forget()
            device = self._device = Device.open(*wanted)
        return device

    def _forget_executor(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()

    def _forget(self) -> None:
        """Drops what may have been left half-done; the device goes when nothing refers to it."""
        self._forget_executor()
        self._device = None


def _on_the_gpu(job: Job) -> bool:
    """Whether the plan has a part in it. Experience is evaluated by playing, which is the module's own."""
    return job.task is Task.TRAIN or (job.task is Task.EVALUATE and not job.module.experience)


def _plan(spec: GpuSpec, device: Device) -> Plan:
    """Reads the archive and checks its plan on the adapter that is open."""
    try:
        content = Path(spec.archive).read_bytes()
    except OSError as error:
        raise GpuFailure(Reason.DEVICE, f"the shader archive can't be read: {error.strerror}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != spec.archive_sha256:
        raise GpuFailure(
            Reason.DEVICE, f"the shader archive's file has SHA-256 {found}, expected {spec.archive_sha256}"
        )
    try:
        assessment = assess(
            read_archive(content), spec.facts, device.facts, memory_bound(device.facts, spec.budget_bytes)
        )
    except InvalidArgument as error:
        raise GpuFailure(Reason.SHADER_INVALID, error.message) from error
    if assessment.plan is None:
        raise _refused(assessment)
    return assessment.plan


def _refused(assessment: Assessment) -> GpuFailure:
    """Returns what is wrong with a plan: with the package, or else with this device for it."""
    message, fallback = assessment.error().message, assessment.fallback
    if fallback is Fallback.DEVICE_ERROR:
        return GpuFailure(Reason.SHADER_INVALID, message)
    return GpuFailure(Reason.LIMIT_EXCEEDED, message, package_fault=False, fallback=fallback)

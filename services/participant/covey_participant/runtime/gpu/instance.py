"""A module whose training and evaluation happen on the GPU.

To the program that drives it, it is an instance like any other: begin, step until done, metrics, weights.
Behind that, the module only decodes: it hands out minibatches in the order in which it would train on them
itself (the batch stream, see README.md), and the plan does the arithmetic.
"""

from collections.abc import Iterator, Mapping
from enum import IntEnum

import numpy as np
import wasmtime

from covey_kit.errors import Reason
from covey_participant.domain.failure import WorkFailure
from covey_participant.runtime import abi
from covey_participant.runtime.instance import F32Array, Instance, Log

from .executor import Executor
from .failure import GpuFailure
from .inputs import Minibatch, Words
from .plan import Phase, Role
from .run import Run

MOST_WORK = (1 << 31) - 1
"""`covey_step` returns what is left as an i32."""

TENSOR: dict[str, abi.Signature] = {"covey_tensor": (("i32",), ("i32",))}
"""What a module must export besides, to feed a GPU."""


class StreamPhase(IntEnum):
    """What `covey_begin` starts, beyond ABI 1's four: a batch stream."""

    TRAIN = 5
    EVALUATE = 6
    UPDATE = 7


_PHASES = {
    abi.Phase.TRAIN: (Phase.TRAIN, StreamPhase.TRAIN),
    abi.Phase.EVALUATE: (Phase.EVALUATE, StreamPhase.EVALUATE),
    abi.Phase.UPDATE: (Phase.UPDATE, StreamPhase.UPDATE),
}


class GpuInstance(Instance):
    """A fresh instance with a plan to do its arithmetic.

    Args:
        executor: the plan on its device; what it holds is written over.
        hyperparameters: values of the uniforms' fields.
        epochs: how often TRAIN and UPDATE go through their units.

    What fails in the GPU's half raises GpuFailure; loading, playing and the like raise what `Instance`
    raises.
    """

    def __init__(
        self,
        engine: wasmtime.Engine,
        module: wasmtime.Module,
        *,
        memory_bytes: int,
        log: Log,
        executor: Executor,
        hyperparameters: Mapping[str, float],
        epochs: int,
    ) -> None:
        super().__init__(engine, module, memory_bytes=memory_bytes, log=log)
        self._executor = executor
        self._hyperparameters = hyperparameters
        self._epochs = epochs
        self._run: Run | None = None
        self._work = 0
        self._there = False

    def begin(self, phase: abi.Phase, first: int, units: int) -> None:
        """Starts work on the units [first, first + units); PLAY is the module's own."""
        self._run = None
        if phase is abi.Phase.PLAY:
            super().begin(phase, first, units)
            return
        ours, theirs = _PHASES[phase]
        if not self._there:
            weights = self._executor.weights
            weights.write(super().weights(weights.count))
            self._there = True
        self._work = units * (1 if phase is abi.Phase.EVALUATE else self._epochs)
        if self._work > MOST_WORK:
            raise GpuFailure(
                Reason.SHADER_INVALID, f"{self._work} units of work are more than a batch stream can count"
            )
        self._stream_begins(theirs, first, units)
        self._run = Run(self._executor, ours, self._minibatches(ours), self._hyperparameters)

    def step(self) -> int:
        """Does a submission's worth of work and returns the units left; 0: done."""
        if self._run is None:
            return super().step()
        self._run.advance()
        return self._work - self._run.totals.units

    def metrics(self, count: int) -> list[tuple[float, float]]:
        """Returns (sum, count) of each metric: the plan's, after work of the plan."""
        if self._run is None:
            return super().metrics(count)
        return [(float(total), float(weight)) for total, weight in self._run.totals.metrics]

    def weights(self, count: int) -> F32Array:
        """Returns the weights: in place before the first work of the plan, a copy of the GPU's after it."""
        return self._executor.weights.read() if self._there else super().weights(count)

    # --- the batch stream ---------------------------------------------------------------------

    def _stream_begins(self, phase: StreamPhase, first: int, units: int) -> None:
        if "covey_tensor" not in self._functions:
            raise GpuFailure(
                Reason.MODULE_EXPORT_MISSING, "the module doesn't export covey_tensor, which feeds the GPU"
            )
        try:
            self._status("covey_begin", int(phase), first, units)
        except WorkFailure as failure:
            raise _of_the_stream(failure) from failure

    def _minibatches(self, phase: Phase) -> Iterator[Minibatch]:
        """Yields what the module hands out, one minibatch a step."""
        plan = self._executor.plan
        used = plan.used(phase)
        tensors = [b.tensor for b in plan.buffers if b.role is Role.TENSOR and b.name in used]
        left = self._work
        while left:
            try:
                now = super().step()
                if not 0 <= now < left:
                    raise WorkFailure(
                        Reason.MODULE_INVALID,
                        f"a step went from {left} units left to {now}: each must hand out a minibatch",
                    )
                batch = Minibatch(left - now, {index: self._tensor(index) for index in tensors})
            except WorkFailure as failure:
                raise _of_the_stream(failure) from failure
            yield batch
            left = now

    def _tensor(self, index: int) -> Words:
        """Returns a decoded input in place: 32-bit words, valid until the next call."""
        name = f"covey_tensor({index})"
        span = self._call("covey_tensor", index) & 0xFFFFFFFF
        if span == 0:
            raise WorkFailure(Reason.MODULE_INVALID, f"{name} is null: the module has no such tensor")
        pointer, elements = np.frombuffer(bytes(self._view(name, span, 8)), "<u4").tolist()
        if pointer % 4:
            raise WorkFailure(Reason.MODULE_INVALID, f"{name} lies at {pointer}, which isn't a multiple of 4")
        return np.frombuffer(self._view(name, pointer, 4 * elements), np.uint32)


def _of_the_stream(failure: WorkFailure) -> GpuFailure:
    return GpuFailure(
        failure.reason, f"the batch stream: {failure.message}", package_fault=failure.package_fault
    )

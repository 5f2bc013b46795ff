"""What the host fills for each minibatch: decoded inputs and uniforms, laid out for one write a buffer."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey_kit.errors import Reason

from .failure import GpuFailure
from .plan import Buffer, Phase, Plan, Role

Words = np.ndarray[Any, np.dtype[np.uint32]]

_DTYPES: dict[str, Any] = {"F32": np.float32, "I32": np.int32, "U32": np.uint32}


@dataclass(frozen=True)
class Minibatch:
    """One minibatch as the module decoded it.

    Attributes:
        units: 1 to the batch size.
        tensors: 32-bit words by tensor index; they need to live until the next minibatch is asked for.
    """

    units: int
    tensors: Mapping[int, Words]


class Inputs:
    """Staging for one phase: for each buffer that it uses, a row of words a minibatch."""

    def __init__(self, plan: Plan, phase: Phase, hyperparameters: Mapping[str, float]) -> None:
        used = [buffer for buffer in plan.buffers if buffer.name in plan.used(phase)]
        self._slots = plan.slots
        self._batch_size = plan.batch_size
        self._tensors = [(b, self._rows(b)) for b in used if b.role is Role.TENSOR]
        self._uniforms = [(b, self._uniform(b, hyperparameters)) for b in used if b.role is Role.UNIFORM]
        self._filled = [[0] * plan.slots for _ in self._tensors]
        # What changes with each minibatch: (column of all rows, whether it is the units or the step).
        self._changing = [
            (rows.view(_DTYPES[buffer.element])[:, column], name == "batchUnits")
            for buffer, rows in self._uniforms
            for column, name in enumerate(buffer.uniform)
            if name in ("batchUnits", "stepIndex")
        ]
        self._step = 0

    def _rows(self, buffer: Buffer) -> Words:
        return np.zeros((self._slots, buffer.stride // 4), np.uint32)

    def _uniform(self, buffer: Buffer, values: Mapping[str, float]) -> Words:
        rows = self._rows(buffer)
        typed = rows.view(_DTYPES[buffer.element])
        for column, name in enumerate(buffer.uniform):
            typed[:, column] = values.get(name, 0)
        return rows

    def fill(self, stream: Iterator[Minibatch], most: int) -> list[int]:
        """Takes up to `most` minibatches and returns the units of each; empty at the end of the stream.

        Raises:
            GpuFailure: `SHADER_INVALID`: a tensor is missing or larger than the plan's buffer.
        """
        units: list[int] = []
        while len(units) < most and (batch := next(stream, None)) is not None:
            if not 1 <= batch.units <= self._batch_size:
                raise GpuFailure(
                    Reason.SHADER_INVALID,
                    f"the module made a minibatch of {batch.units} units, expected 1 to {self._batch_size}",
                )
            self._put(len(units), batch)
            units.append(batch.units)
        return units

    def _put(self, slot: int, batch: Minibatch) -> None:
        for (buffer, rows), filled in zip(self._tensors, self._filled, strict=True):
            words = batch.tensors.get(buffer.tensor)
            if words is None or words.size > buffer.count:
                found = "none" if words is None else f"{words.size} elements"
                raise GpuFailure(
                    Reason.SHADER_INVALID,
                    f"covey_tensor({buffer.tensor}) handed out {found}, buffer {buffer.name!r} takes at most "
                    f"{buffer.count}",
                )
            row = rows[slot]
            row[: words.size] = words
            if words.size < filled[slot]:
                row[words.size : filled[slot]] = 0
            filled[slot] = words.size
        for column, is_units in self._changing:
            column[slot] = batch.units if is_units else self._step
        self._step += 1

    def contents(self, count: int) -> Iterable[tuple[str, Words]]:
        """Yields (buffer name, words) for the first `count` minibatches."""
        for buffer, rows in (*self._tensors, *self._uniforms):
            yield buffer.name, rows[:count]

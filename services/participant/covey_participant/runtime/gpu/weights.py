"""The weights' way to the GPU and back, in manifest order and in pieces of 16 MiB."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import wgpu

from .device import Device, gpu_errors
from .plan import PIECE_BYTES

F32Array = np.ndarray[Any, np.dtype[np.float32]]


class Weights:
    """The weights of a plan on a device.

    Args:
        parameters: (buffer, bytes) in manifest order.
        make: makes a buffer that somebody else destroys.
    """

    def __init__(
        self, device: Device, parameters: list[tuple[Any, int]], make: Callable[[str, int, int], Any]
    ) -> None:
        self._device = device
        self._parameters = parameters
        self.count = sum(size for _, size in parameters) // 4
        usage = int(wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.MAP_READ)
        self._back = make("weights' way back", min(PIECE_BYTES, max(4, 4 * self.count)), usage)

    def write(self, values: F32Array) -> None:
        """Sets all weights.

        Raises:
            GpuFailure: `DEVICE`.
        """
        queue = self._device.gpu.queue
        with gpu_errors("writing the weights"):
            for piece in self._pieces():
                for buffer, offset, start, size in piece:
                    queue.write_buffer(buffer, offset, values[start // 4 : (start + size) // 4])
                queue.submit([])  # lets the memory in between go

    def read(self) -> F32Array:
        """Returns all weights.

        Raises:
            GpuFailure: `DEVICE`.
        """
        values = np.empty(self.count, np.float32)
        gpu = self._device.gpu
        with gpu_errors("reading the weights"):
            for piece in self._pieces():
                encoder = gpu.create_command_encoder()
                first = piece[0][2]
                for buffer, offset, start, size in piece:
                    encoder.copy_buffer_to_buffer(buffer, offset, self._back, start - first, size)
                gpu.queue.submit([encoder.finish()])
                self._back.map_sync("READ_NOSYNC")
                last = piece[-1][2] + piece[-1][3]
                found = np.frombuffer(self._back.read_mapped(copy=False), np.float32)
                values[first // 4 : last // 4] = found[: (last - first) // 4]
                self._back.unmap()
        return values

    def _pieces(self) -> Iterator[list[tuple[Any, int, int, int]]]:
        """Yields pieces of at most 16 MiB: lists of (buffer, offset in it, first byte of all, bytes)."""
        piece: list[tuple[Any, int, int, int]] = []
        room, start = PIECE_BYTES, 0
        for buffer, size in self._parameters:
            offset = 0
            while offset < size:
                part = min(room, size - offset)
                piece.append((buffer, offset, start, part))
                offset, start, room = offset + part, start + part, room - part
                if room == 0:
                    yield piece
                    piece, room = [], PIECE_BYTES
        if piece:
            yield piece

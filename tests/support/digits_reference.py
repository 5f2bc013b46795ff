"""The network of `models/digits` in NumPy, its chunk format in plain Python: what the module is held to.

Written from the description of the network, with matrix products instead of the module's loops, so that both
agree only if both are right.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

PIXELS, HIDDEN, CLASSES = 784, 128, 10
SHAPES = ((PIXELS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
WEIGHTS = PIXELS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
STREAM_SHUFFLE, STREAM_SHIFT = 16, 17


def decode_chunk(data: bytes) -> tuple[Array, Array]:
    """Images u8 [count, 784] and labels [count] of a digits-v1 chunk.

    Anything invalid raises AssertionError, IndexError or struct.error.
    """
    magic, version, rows, columns, count = struct.unpack("<4s4I", data[:20])
    assert (magic, version, rows, columns) == (b"DIGS", 1, 28, 28)
    images, labels, at = [], [], 20
    for _ in range(count):
        labels.append(data[at])
        assert labels[-1] < CLASSES
        at += 1
        pixels = bytearray()
        while len(pixels) < PIXELS:
            code = data[at]
            at += 1
            if code < 128:
                pixels += bytes(code + 1)
            else:
                pixels += data[at : at + code - 127]
                at += code - 127
        assert len(pixels) == PIXELS
        images.append(bytes(pixels))
    assert at == len(data)
    return np.frombuffer(b"".join(images), np.uint8).reshape(count, PIXELS), np.array(labels, np.int64)


def scaled(images: Array) -> Array:
    """Pixels as the network sees them: f32 in 0..1."""
    return images.astype(np.float32) * (np.float32(1) / np.float32(255))


def mix64(z: int) -> int:
    """SplitMix64's mixing function."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def random_key(seed: int, stream: int) -> int:
    """The key of one use of a seed."""
    return mix64(mix64((seed + GAMMA) & MASK) ^ ((stream * GAMMA) & MASK))


def random_bits(key: int, index: int) -> int:
    """SplitMix64's index-th output from `key`."""
    return mix64((key + (index + 1) * GAMMA) & MASK)


def random_below(key: int, index: int, bound: int) -> int:
    """Uniform in [0, bound)."""
    return ((random_bits(key, index) >> 32) * bound) >> 32


def initial_weights(seed: int) -> Array:
    """Round-0 weights: He's uniform initialisation, biases 0."""
    parts = []
    for stream, (inputs, outputs) in ((1, SHAPES[0]), (2, SHAPES[2])):
        key, bound = random_key(seed, stream), np.sqrt(np.float32(6) / np.float32(inputs))
        bits = [random_bits(key, i) >> 40 for i in range(inputs * outputs)]
        uniform = np.array(bits, np.float32) * np.float32(2.0**-24)
        parts += [(np.float32(2) * uniform - np.float32(1)) * bound, np.zeros(outputs, np.float32)]
    return np.concatenate(parts)


def epoch_order(seed: int, epoch: int, first: int, units: int) -> list[int]:
    """The order in which TRAIN sees the units in one local epoch."""
    order = list(range(first, first + units))
    key = random_key(seed, STREAM_SHUFFLE + 2 * epoch)
    for i in range(units, 1, -1):
        j = random_below(key, i, i)
        order[i - 1], order[j] = order[j], order[i - 1]
    return order


def shifted(image: Array, unit: int, seed: int, epoch: int, shift: int) -> Array:
    """The image [784] as TRAIN sees it in one local epoch: moved by up to `shift` pixels each way."""
    key = random_key(seed, STREAM_SHIFT + 2 * epoch)
    down = random_below(key, 2 * unit, 2 * shift + 1) - shift
    right = random_below(key, 2 * unit + 1, 2 * shift + 1) - shift
    padded = np.pad(image.reshape(28, 28), shift)
    top, left = shift - down, shift - right
    return padded[top : top + 28, left : left + 28].reshape(PIXELS)


@dataclass
class Reference:
    """Arithmetic in the dtype of the weights: float32 to compare with the module, float64 for derivatives."""

    weights: Array
    rate: float
    momentum: float

    def __post_init__(self) -> None:
        """Starts at rest."""
        self.velocity = np.zeros_like(self.weights)

    def split(self, flat: Array) -> list[Array]:
        """The four tensors as views of a flat array."""
        parts, at = [], 0
        for shape in SHAPES:
            size = int(np.prod(shape))
            parts.append(flat[at : at + size].reshape(shape))
            at += size
        return parts

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Hidden activations and logits of inputs [n, 784] in 0..1."""
        w1, b1, w2, b2 = self.split(self.weights)
        hidden = np.maximum(x @ w1 + b1, 0)
        return hidden, hidden @ w2 + b2

    def probabilities(self, x: Array) -> Array:
        """Softmax of the logits."""
        _, scores = self.forward(x)
        exps = np.exp(scores - scores.max(axis=1, keepdims=True))
        result: Array = exps / exps.sum(axis=1, keepdims=True)
        return result

    def losses(self, x: Array, y: Array) -> Array:
        """Cross entropy of each example."""
        _, scores = self.forward(x)
        top = scores.max(axis=1, keepdims=True)
        normaliser = top[:, 0] + np.log(np.exp(scores - top).sum(axis=1))
        result: Array = normaliser - scores[np.arange(len(y)), y]
        return result

    def step(self, x: Array, y: Array) -> float:
        """One optimizer step; returns the batch's mean loss before it."""
        rows, w2 = np.arange(len(y)), self.split(self.weights)[2]
        hidden, scores = self.forward(x)
        top = scores.max(axis=1, keepdims=True)
        exps = np.exp(scores - top)
        total = exps.sum(axis=1, keepdims=True)
        loss = (top[:, 0] + np.log(total[:, 0]) - scores[rows, y]).mean()
        error = exps / total
        error[rows, y] -= 1
        error /= len(y)
        back = (error @ w2.T) * (hidden > 0)
        gradient = np.empty_like(self.weights)
        g1, c1, g2, c2 = self.split(gradient)
        np.matmul(x.T, back, out=g1)
        np.matmul(hidden.T, error, out=g2)
        c1[:], c2[:] = back.sum(axis=0), error.sum(axis=0)
        self.velocity *= self.momentum
        self.velocity += gradient
        self.weights -= self.rate * self.velocity
        return float(loss)

"""The network of `models/digits-cnn` in NumPy: what the module and the shader plan are held to.

Written from the description of the network, with windows and matrix products instead of the module's loops.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .digits_reference import random_bits, random_key

Array = np.ndarray[Any, Any]

TAPS, FIRST, SECOND, INPUTS, CLASSES = 5, 8, 16, 256, 10
SHAPES = (
    (TAPS, TAPS, 1, FIRST),
    (FIRST,),
    (TAPS, TAPS, FIRST, SECOND),
    (SECOND,),
    (INPUTS, CLASSES),
    (CLASSES,),
)
FAN_IN = {0: TAPS * TAPS, 2: TAPS * TAPS * FIRST, 4: INPUTS}
WEIGHTS = sum(int(np.prod(shape)) for shape in SHAPES)


def initial_weights(seed: int) -> Array:
    """Round-0 weights: He's uniform initialisation, biases 0."""
    parts = []
    for index, shape in enumerate(SHAPES):
        size = int(np.prod(shape))
        if index not in FAN_IN:
            parts.append(np.zeros(size, np.float32))
            continue
        key, bound = random_key(seed, index // 2 + 1), np.sqrt(np.float32(6) / np.float32(FAN_IN[index]))
        bits = [random_bits(key, i) >> 40 for i in range(size)]
        uniform = np.array(bits, np.float32) * np.float32(2.0**-24)
        parts.append((np.float32(2) * uniform - np.float32(1)) * bound)
    return np.concatenate(parts)


def windows(x: Array) -> Array:
    """All 5 x 5 windows of [n, h, w, c]: [n, h-4, w-4, 25 c], taps outermost."""
    seen = sliding_window_view(x, (TAPS, TAPS), axis=(1, 2))  # [n, h-4, w-4, c, 5, 5]
    moved = seen.transpose(0, 1, 2, 4, 5, 3)
    return moved.reshape(*moved.shape[:3], -1)


def squares(sums: Array) -> Array:
    """The 2 x 2 squares of [n, 2h, 2w, c]: [n, h, w, c, 4]."""
    n, h, w, c = sums.shape
    parts = sums.reshape(n, h // 2, 2, w // 2, 2, c)
    return parts.transpose(0, 1, 3, 5, 2, 4).reshape(n, h // 2, w // 2, c, 4)


def unsquare(parts: Array) -> Array:
    """The inverse of `squares`."""
    n, h, w, c, _ = parts.shape
    split = parts.reshape(n, h, w, c, 2, 2).transpose(0, 1, 4, 2, 5, 3)
    return split.reshape(n, 2 * h, 2 * w, c)


@dataclass
class Layer:
    """What a convolution with its maximum and ReLU leaves for the way back."""

    seen: Array
    which: Array
    out: Array

    @classmethod
    def forward(cls, x: Array, weight: Array, bias: Array) -> "Layer":
        """From inputs [n, h, w, c]."""
        seen = windows(x)
        parts = squares(seen @ weight.reshape(-1, weight.shape[-1]) + bias)
        which = parts.argmax(axis=-1, keepdims=True)
        out = np.maximum(np.take_along_axis(parts, which, -1)[..., 0], 0)
        return cls(seen, which, out)

    def sums_error(self, error: Array) -> Array:
        """The gradient of the convolution's sums, given that of `out`."""
        parts = np.zeros((*error.shape, 4), error.dtype)
        np.put_along_axis(parts, self.which, (error * (self.out > 0))[..., None], -1)
        return unsquare(parts)

    def weight_error(self, sums_error: Array, shape: tuple[int, ...]) -> Array:
        """The gradient of the kernel."""
        channels = sums_error.shape[-1]
        flat = self.seen.reshape(-1, self.seen.shape[-1]).T @ sums_error.reshape(-1, channels)
        result: Array = flat.reshape(shape)
        return result


def passed_back(sums_error: Array, weight: Array) -> Array:
    """The gradient of a convolution's inputs: the full convolution with the turned kernel."""
    padded = np.pad(sums_error, ((0, 0), (4, 4), (4, 4), (0, 0)))
    turned = weight[::-1, ::-1].transpose(0, 1, 3, 2)
    result: Array = windows(padded) @ turned.reshape(-1, turned.shape[-1])
    return result


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
        """The six tensors as views of a flat array."""
        parts, at = [], 0
        for shape in SHAPES:
            size = int(np.prod(shape))
            parts.append(flat[at : at + size].reshape(shape))
            at += size
        return parts

    def forward(self, x: Array) -> tuple[Layer, Layer, Array]:
        """Both layers and the logits of images [n, 784] in 0..1."""
        w1, b1, w2, b2, w3, b3 = self.split(self.weights)
        first = Layer.forward(x.reshape(-1, 28, 28, 1).astype(self.weights.dtype), w1, b1)
        second = Layer.forward(first.out, w2, b2)
        return first, second, second.out.reshape(len(x), INPUTS) @ w3 + b3

    def probabilities(self, x: Array) -> Array:
        """Softmax of the logits."""
        scores = self.forward(x)[2]
        exps = np.exp(scores - scores.max(axis=1, keepdims=True))
        result: Array = exps / exps.sum(axis=1, keepdims=True)
        return result

    def losses(self, x: Array, y: Array) -> Array:
        """Cross entropy of each example."""
        scores = self.forward(x)[2]
        top = scores.max(axis=1, keepdims=True)
        normaliser = top[:, 0] + np.log(np.exp(scores - top).sum(axis=1))
        result: Array = normaliser - scores[np.arange(len(y)), y]
        return result

    def gradient(self, x: Array, y: Array) -> Array:
        """Of the mean loss, flat, in manifest order."""
        w2, w3 = (self.split(self.weights)[i] for i in (2, 4))
        first, second, scores = self.forward(x)
        exps = np.exp(scores - scores.max(axis=1, keepdims=True))
        error = exps / exps.sum(axis=1, keepdims=True)
        error[np.arange(len(y)), y] -= 1
        error /= len(y)
        flat = np.empty_like(self.weights)
        g1, c1, g2, c2, g3, c3 = self.split(flat)
        g3[:], c3[:] = second.out.reshape(len(y), INPUTS).T @ error, error.sum(axis=0)
        sums = second.sums_error((error @ w3.T).reshape(second.out.shape))
        g2[:], c2[:] = second.weight_error(sums, g2.shape), sums.sum(axis=(0, 1, 2))
        sums = first.sums_error(passed_back(sums, w2))
        g1[:], c1[:] = first.weight_error(sums, g1.shape), sums.sum(axis=(0, 1, 2))
        return flat

    def step(self, x: Array, y: Array) -> float:
        """One optimizer step; returns the batch's mean loss before it."""
        loss = float(self.losses(x, y).mean())
        self.velocity *= self.momentum
        self.velocity += self.gradient(x, y)
        self.weights -= self.rate * self.velocity
        return loss


def off_the_kink(seed: int) -> Array:
    """Round-0 weights with biases that aren't 0, where a derivative exists."""
    weights = initial_weights(seed)
    for part in Reference(weights, 0, 0).split(weights)[1::2]:
        part[:] = np.random.default_rng(seed).uniform(0.02, 0.1, part.size)
    return weights


def picked(seed: int, most: int) -> list[int]:
    """Indices of up to `most` weights of each tensor."""
    chooser, chosen, at = np.random.default_rng(seed), [], 0
    for shape in SHAPES:
        size = int(np.prod(shape))
        chosen += [at + int(pick) for pick in chooser.permutation(size)[:most]]
        at += size
    return chosen


def finite_differences(weights: Array, x: Array, y: Array, chosen: list[int]) -> Array:
    """Derivatives of the mean loss by the chosen weights: central differences, in the weights' dtype."""
    found = []
    for index in chosen:
        sides = []
        for step in (1e-6, -1e-6):
            moved = weights.copy()
            moved[index] += step
            sides.append(Reference(moved, 0, 0).losses(x, y).mean())
        found.append((sides[0] - sides[1]) / 2e-6)
    return np.array(found)

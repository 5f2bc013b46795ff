"""A linear model as a shader archive, small enough to be checked by hand, and its twin in NumPy f64.

y = x·w + b with eight inputs; the loss is the mean of (y − t)²; training is plain SGD. Tensor 0 holds x
(batch × 8, f32), tensor 1 holds t (batch, f32). Rows beyond `batchUnits` are zero and must not count.
"""

import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from covey_participant.domain.values import Adapter
from covey_participant.runtime.gpu.archive import ShaderArchive, read_archive
from covey_participant.runtime.gpu.facts import PackageFacts
from covey_participant.runtime.gpu.inputs import Minibatch

INPUTS = 8
BATCH = 16
RATE = 0.05

F64 = np.ndarray[Any, np.dtype[np.float64]]
F32 = np.ndarray[Any, np.dtype[np.float32]]

LINEAR = """
const INPUTS = 8u;
const GROUP = 16u;
struct Settings { rate: f32, units: f32, step: f32, unused: f32 }

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> target_values: array<f32>;
@group(0) @binding(2) var<storage, read_write> weight: array<f32>;
@group(0) @binding(3) var<storage, read_write> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> difference: array<f32>;
@group(0) @binding(5) var<uniform> settings: Settings;
@group(0) @binding(6) var<storage, read_write> metrics: array<f32>;

var<workgroup> squares: array<f32, GROUP>;

fn predicted(row: u32) -> f32 {
    var sum = bias[0];
    for (var j = 0u; j < INPUTS; j++) { sum += x[row * INPUTS + j] * weight[j]; }
    return sum;
}

// One workgroup of GROUP rows; the batch size is GROUP.
@compute @workgroup_size(GROUP)
fn forward(@builtin(local_invocation_id) id: vec3<u32>) {
    var d = 0.0;
    if (f32(id.x) < settings.units) { d = predicted(id.x) - target_values[id.x]; }
    difference[id.x] = d;
    squares[id.x] = d * d;
    workgroupBarrier();
    if (id.x == 0u) {
        var sum = 0.0;
        for (var i = 0u; i < GROUP; i++) { sum += squares[i]; }
        metrics[0] += sum;
    }
}

@compute @workgroup_size(16)
fn descend(@builtin(local_invocation_id) id: vec3<u32>) {
    let scale = 2.0 * settings.rate / settings.units;
    if (id.x < INPUTS) {
        var sum = 0.0;
        for (var i = 0u; i < GROUP; i++) { sum += difference[i] * x[i * INPUTS + id.x]; }
        weight[id.x] -= scale * sum;
    }
    if (id.x == INPUTS) {
        var sum = 0.0;
        for (var i = 0u; i < GROUP; i++) { sum += difference[i]; }
        bias[0] -= scale * sum;
    }
}
"""


def linear_plan() -> dict[str, Any]:
    """The plan as JSON, to be changed at will."""
    bindings = [
        {"binding": 0, "buffer": "x", "access": "READ"},
        {"binding": 1, "buffer": "t", "access": "READ"},
        {"binding": 2, "buffer": "weight", "access": "READ_WRITE"},
        {"binding": 3, "buffer": "bias", "access": "READ_WRITE"},
        {"binding": 4, "buffer": "difference", "access": "READ_WRITE"},
        {"binding": 5, "buffer": "settings", "access": "UNIFORM"},
        {"binding": 6, "buffer": "sums", "access": "READ_WRITE"},
    ]
    pipeline = {"module": "linear.wgsl", "bindings": bindings, "workgroups": ["ceil(batchSize, 16)"]}
    return {
        "formatVersion": 1,
        "buffers": [
            {"name": "weight", "element": "F32", "count": 'size("weight")', "parameter": "weight"},
            {"name": "bias", "element": "F32", "count": "1", "parameter": "bias"},
            {"name": "x", "element": "F32", "count": 'batchSize * size("weight")', "tensor": 0},
            {"name": "t", "element": "F32", "count": "batchSize", "tensor": 1},
            {"name": "difference", "element": "F32", "count": "batchSize"},
            {
                "name": "settings",
                "element": "F32",
                "count": "4",
                "uniform": {"fields": ["learningRate", "batchUnits", "stepIndex"]},
            },
            {"name": "sums", "element": "F32", "count": "1", "metrics": True},
        ],
        "pipelines": [
            {"name": "forward", "entryPoint": "forward", **pipeline},
            {"name": "descend", "entryPoint": "descend", **pipeline},
        ],
        "train": [{"pipeline": "forward"}, {"pipeline": "descend"}],
        "evaluate": [{"pipeline": "forward"}],
    }


def archive_bytes(plan: Mapping[str, Any], modules: Mapping[str, str] | None = None) -> bytes:
    """A zip of a plan and modules (the linear model's, unless others are given)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("plan.json", json.dumps(plan))
        for name, source in (modules if modules is not None else {"linear.wgsl": LINEAR}).items():
            archive.writestr(name, source)
    return buffer.getvalue()


def linear_archive(
    plan: Mapping[str, Any] | None = None, modules: Mapping[str, str] | None = None
) -> ShaderArchive:
    """The archive, read."""
    return read_archive(archive_bytes(plan or linear_plan(), modules))


def linear_facts(batch: int = BATCH, rate: float = RATE, epochs: int = 1) -> PackageFacts:
    """The package's facts."""
    values = {"batchSize": float(batch), "learningRate": rate, "localEpochs": float(epochs)}
    return PackageFacts({"weight": INPUTS, "bias": 1}, values, metrics=1)


def adapter_facts(**limits: int) -> Adapter:
    """An adapter with the limits that every WebGPU device has, and those given (with underscores)."""
    least = {
        "max-buffer-size": 256 << 20,
        "max-storage-buffer-binding-size": 128 << 20,
        "max-uniform-buffer-binding-size": 64 << 10,
        "max-storage-buffers-per-shader-stage": 8,
        "max-uniform-buffers-per-shader-stage": 12,
        "max-compute-workgroups-per-dimension": 65535,
        "max-compute-workgroup-size-x": 256,
        "max-compute-workgroup-size-y": 256,
        "max-compute-workgroup-size-z": 64,
        "max-compute-invocations-per-workgroup": 256,
        "max-compute-workgroup-storage-size": 16384,
    }
    given = {name.replace("_", "-"): value for name, value in limits.items()}
    return Adapter("test", "CPU", "Vulkan", limits={**least, **given})


def minibatches(count: int, seed: int, last_units: int = BATCH) -> list[tuple[F32, F32]]:
    """Random (x, t) of a true linear function with noise; the last minibatch may be smaller."""
    random = np.random.default_rng(seed)
    truth = random.normal(size=INPUTS)
    batches = []
    for index in range(count):
        units = last_units if index == count - 1 else BATCH
        x = random.normal(size=(units, INPUTS)).astype(np.float32)
        t = (x @ truth + 0.5 + 0.1 * random.normal(size=units)).astype(np.float32)
        batches.append((x, t))
    return batches


def stream(batches: list[tuple[F32, F32]]) -> Iterator[Minibatch]:
    """The minibatches as a module would hand them out."""
    for x, t in batches:
        yield Minibatch(len(t), {0: x.reshape(-1).view(np.uint32), 1: t.view(np.uint32)})


def reference(batches: list[tuple[F32, F32]], weights: F32, rate: float = RATE) -> tuple[F64, float]:
    """(weights after training, sum of squared differences on the way) in f64."""
    values = weights.astype(np.float64)
    total = 0.0
    for x, t in batches:
        difference = x.astype(np.float64) @ values[:-1] + values[-1] - t
        total += float(np.sum(difference**2))
        scale = 2 * rate / len(t)
        values[:-1] -= scale * (difference @ x.astype(np.float64))
        values[-1] -= scale * difference.sum()
    return values, total

"""The plan that docs/gpu.md shows is one that runs."""

import json
import re

from covey_participant.runtime.gpu.archive import read_archive
from covey_participant.runtime.gpu.assess import assess
from covey_participant.runtime.gpu.facts import PackageFacts
from support.gpu_plans import adapter_facts, archive_bytes
from support.packages import ROOT

LINE = """
struct Settings { rate: f32, units: f32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> t: array<f32>;
@group(0) @binding(2) var<storage, read_write> weight: array<f32>;
@group(0) @binding(3) var<storage, read_write> difference: array<f32>;
@group(0) @binding(4) var<uniform> settings: Settings;
@group(0) @binding(5) var<storage, read_write> sums: array<f32>;
@compute @workgroup_size(64) fn forward() {}
@compute @workgroup_size(64) fn descend() {}
"""


def test_the_plan_of_the_documentation_is_valid() -> None:
    """It passes every check for a package with one parameter, on the least adapter that WebGPU allows."""
    found = re.search(r"```json\n(.*?)```", (ROOT / "docs" / "gpu.md").read_text("utf-8"), re.DOTALL)
    assert found is not None
    archive = read_archive(archive_bytes(json.loads(found.group(1)), {"line.wgsl": LINE}))
    values = {"batchSize": 16.0, "learningRate": 0.1, "localEpochs": 1.0}

    assessment = assess(archive, PackageFacts({"weight": 8}, values, metrics=1), adapter_facts())

    assert [violation.description for violation in assessment.violations] == []
    assert assessment.plan is not None

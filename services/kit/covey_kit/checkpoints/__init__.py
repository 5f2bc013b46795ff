"""Checkpoint files: safetensors with a `CheckpointHeader` in `__metadata__`.

The weights lie contiguous in manifest order, so that they are one byte range of the file; the optimizer's
tensors follow. Equal training gives equal bytes: headers are canonical JSON, and nothing in a file
depends on when, where or by whom it was written. Any safetensors library opens them.
"""

from covey_kit.checkpoints.canonical import canonical_json
from covey_kit.checkpoints.finite import first_not_finite
from covey_kit.checkpoints.problems import CheckpointError
from covey_kit.checkpoints.reader import CheckpointReader
from covey_kit.checkpoints.verify import Examination, examine, verify
from covey_kit.checkpoints.writer import CheckpointWriter

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriter",
    "Examination",
    "canonical_json",
    "examine",
    "first_not_finite",
    "verify",
]

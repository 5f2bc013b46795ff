"""Build hook: puts the demo's model package into the wheel, so that `covey demo` works without a checkout."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHIPPED = ("manifest.json", "model.wasm", "validation.bin", "shaders.zip", "data", "samples")
"""What a user of the package needs; its C sources and build scripts stay in the repository."""


class ModelPackageHook(BuildHookInterface[Any]):
    """Maps `models/digits` to `covey/_models/digits`. An editable install finds it by its path instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds every shipped file that is there to the wheel's forced files."""
        if version == "editable":
            return
        package = Path(self.root) / "models" / "digits"
        for name in SHIPPED:
            source = package / name
            if source.exists():
                build_data["force_include"][str(source)] = f"covey/_models/digits/{name}"

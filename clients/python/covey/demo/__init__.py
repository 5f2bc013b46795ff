"""A whole mesh on this machine, trained to the end: what `covey demo` runs."""

from covey.demo._mesh import DemoMesh
from covey.demo._run import DemoOptions, DemoResult, demo_model, run_demo
from covey.demo._view import View

__all__ = ["DemoMesh", "DemoOptions", "DemoResult", "View", "demo_model", "run_demo"]

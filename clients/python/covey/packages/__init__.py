"""Model packages and datasets as files: load them, check them, say everything that is wrong at once.

package = load("models/digits")
dataset = load_dataset("models/digits/data/dataset.json", package)
"""

from covey.packages._dataset import Dataset, describe_dataset, load_dataset
from covey.packages._module import PackageReport, check_package, count_examples, run_inference
from covey.packages._package import Package, load

__all__ = [
    "Dataset",
    "Package",
    "PackageReport",
    "check_package",
    "count_examples",
    "describe_dataset",
    "load",
    "load_dataset",
    "run_inference",
]

"""ABI 1 between the host and a package's module: names, types, constants, the layout of a configuration."""

import struct
from collections.abc import Sequence
from enum import IntEnum

VERSION = 1
PAGE = 65536
MOST_PAGES = 65536
ALIGNMENT = 16

Signature = tuple[tuple[str, ...], tuple[str, ...]]
"""(parameter types, result types), as WebAssembly names them."""

IMPORTS: dict[tuple[str, str], Signature] = {("covey", "log"): (("i32", "i32", "i32"), ())}
"""Everything that a module may import."""

CORE: dict[str, Signature] = {
    "covey_abi": ((), ("i32",)),
    "covey_alloc": (("i32",), ("i32",)),
    "covey_free": (("i32", "i32"), ()),
    "covey_configure": (("i32", "i32"), ("i32",)),
    "covey_weights": ((), ("i32",)),
    "covey_initialize": (("i64",), ("i32",)),
    "covey_error": ((), ("i32",)),
}
LOADING: dict[str, Signature] = {"covey_load": (("i32", "i32"), ("i32",))}
WORKING: dict[str, Signature] = {
    "covey_begin": (("i32", "i64", "i32"), ("i32",)),
    "covey_step": ((), ("i32",)),
    "covey_metrics": ((), ("i32",)),
}
INFERENCE: dict[str, Signature] = {"covey_predict": (("i32", "i32", "i32", "i32"), ("i32",))}
EXPERIENCE: dict[str, Signature] = {
    "covey_experience": (("i32",), ("i32",)),
    "covey_load_experience": (("i32", "i32"), ("i32",)),
}
OPTIONAL: dict[str, Signature] = {**LOADING, **WORKING, **INFERENCE, **EXPERIENCE}


class Phase(IntEnum):
    """What `covey_begin` starts."""

    TRAIN = 1
    EVALUATE = 2
    PLAY = 3
    UPDATE = 4


NO_MEMORY = -4
"""The status by which a module says, by convention, that the memory limit doesn't let it go on."""

LOG_LEVELS = ("debug", "info", "warning", "error")

_CONFIG = struct.Struct("<IIqdII")


def required_exports(*, dataset: bool, work: bool, inference: bool, experience: bool) -> dict[str, Signature]:
    """Returns the functions that a module must export.

    Args:
        dataset: it reads chunks.
        work: it trains or evaluates.
        inference: it predicts.
        experience: its work comes from units that it plays itself.
    """
    return {
        **CORE,
        **(LOADING if dataset else {}),
        **(WORKING if work else {}),
        **(INFERENCE if inference else {}),
        **(EXPERIENCE if experience else {}),
    }


def encode_config(
    *,
    seed: int,
    batch_size: int,
    learning_rate: float,
    local_epochs: int,
    hyperparameters: Sequence[float],
) -> bytes:
    """Returns what `covey_configure` reads: a struct of 32 bytes, then the hyperparameters as f64."""
    head = _CONFIG.pack(VERSION, batch_size, seed, learning_rate, local_epochs, len(hyperparameters))
    return head + struct.pack(f"<{len(hyperparameters)}d", *hyperparameters)

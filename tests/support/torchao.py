"""torchao's low-bit optimizers as an oracle, where torchao is installed."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import torch


def eager_adam() -> ModuleType:
    """`torchao.optim.adam` without torch.compile: one small compilation for each shape would take minutes.

    Raises:
        ImportError: torchao is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adam = importlib.import_module("torchao.optim.adam")
    eager = ModuleType("eager")
    vars(eager).update({**vars(torch), "compile": lambda fn, **_: fn})
    vars(adam)["torch"] = eager
    return adam

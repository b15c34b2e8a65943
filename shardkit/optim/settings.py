"""What the settings of a parameter group must be: of which kind first, then in which range.

The kind of a setting is the same for every algorithm that has it, and is asked before anything computes with
it; so what stands in a configuration file as text is told by its name. Ranges that all algorithms share are
here too, and each algorithm's `check_group` knows its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

from shardkit.optim.algorithm import Algorithm, Group


class Kind(NamedTuple):
    """What a setting can be, in words and as a question."""

    words: str
    holds: Callable[[object], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _are(of_each: Callable[[object], bool], count: int | None = None) -> Callable[[object], bool]:
    """Whether a value is several of a kind, `count` of them or any number."""

    def holds(value: object) -> bool:
        if not isinstance(value, Sequence) or isinstance(value, str):
            return False
        return count in (None, len(value)) and all(of_each(each) for each in value)

    return holds


def _or_none(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or None", lambda value: value is None or kind.holds(value))


_NUMBER = Kind("a number", _is_number)
_WHOLE = Kind("a whole number", _is_whole)
_SWITCH = Kind("True or False", lambda value: isinstance(value, bool))
_NAME = Kind("a name", lambda value: isinstance(value, str))
_REAL_DTYPE = Kind(
    "a torch.dtype of real numbers",
    lambda value: isinstance(value, torch.dtype) and value.is_floating_point,
)

KINDS: Mapping[str, Kind] = {
    "lr": Kind(
        "a number, or a tensor of one",
        lambda value: _is_number(value) or (isinstance(value, Tensor) and value.numel() == 1),
    ),
    "betas": Kind("two numbers", _are(_is_number, 2)),
    **dict.fromkeys(("momentum", "eps", "weight_decay", "graft_eps", "min_numel"), _NUMBER),
    "row_norm_beta2": _or_none(_NUMBER),
    **dict.fromkeys(("block", "bits", "update_every", "seed"), _WHOLE),
    **dict.fromkeys(("start", "heads"), _or_none(_WHOLE)),
    "split_rows": _or_none(Kind("whole numbers", _are(_is_whole))),
    "tile": _or_none(Kind("two whole numbers", _are(_is_whole, 2))),
    **dict.fromkeys(("nesterov", "maximize", "amsgrad", "stochastic_rounding"), _SWITCH),
    **dict.fromkeys(("fused", "flatten"), _or_none(_SWITCH)),  # fused is None in what torch saves
    "ns_dtype": _REAL_DTYPE,
    "comm_dtype": _or_none(_REAL_DTYPE),
    **dict.fromkeys(("format", "root"), _NAME),
    **dict.fromkeys(("second_moment", "graft"), _or_none(_NAME)),
    "adjust_lr": Kind(
        "a name or a function (rows, cols) -> float", lambda value: isinstance(value, str) or callable(value)
    ),
    "coefficients": Kind(
        "the name of a table, or (a, b, c) for each step",
        lambda value: isinstance(value, str) or _are(_are(_is_number, 3))(value),
    ),
}
NOT_NEGATIVE = ("eps", "weight_decay", "graft_eps")


def check_settings(group: Group, algorithm: Algorithm) -> None:
    """Check the settings of a group that `algorithm` reads.

    Raises:
        TypeError: one is of another kind than it must be.
        ValueError: one is out of range.
    """
    for name in algorithm.defaults:
        value, kind = group[name], KINDS[name]
        if not kind.holds(value):
            raise TypeError(f"{name}: expected {kind.words}, got {value!r}.")
        if name in NOT_NEGATIVE and not value >= 0:
            raise ValueError(f"{name}: expected a number >= 0, got {value}.")
    algorithm.check_group(group)

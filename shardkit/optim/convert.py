"""Momentum of other Muons, in the form this one keeps. Pure: a state dict in, a state dict out.

torch.optim.Muon keeps M <- mu M + (1 - mu) G under `momentum_buffer`, as `shardkit.optim.Muon` does; only its
groups have other settings. Jordan's own, Dion's and Moonlight's keep the sum M <- mu M + G, which is
1 / (1 - mu) times as large.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def from_torch_muon(state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """torch.optim.Muon's `state_dict()` as one of `shardkit.optim.Muon`.

    Args:
        state_dict: of torch.optim.Muon, over the same parameters in the same order.
        own: `state_dict()` of the optimizer to load into, for its groups.

    Raises:
        ValueError: the two have different numbers of parameters.
    """
    return {"state": dict(state_dict["state"]), "param_groups": _groups(state_dict, own)}


def from_sum_form(
    state_dict: Mapping[str, Any], own: Mapping[str, Any], *, key: str = "momentum_buffer"
) -> dict[str, Any]:
    """A sum-form Muon's `state_dict()`, as Jordan's, Dion's or Moonlight's, as one of `shardkit.optim.Muon`.

    Args:
        state_dict: over the same parameters in the same order; its groups say `momentum` or `mu`.
        own: `state_dict()` of the optimizer to load into, for its groups.
        key: of the momentum in each parameter's state: "momentum" in Dion.

    Raises:
        ValueError: the two have different numbers of parameters, or a group does not say its momentum.
    """
    state: dict[Any, Any] = {}
    for group in state_dict["param_groups"]:
        momentum = group.get("momentum", group.get("mu"))
        if momentum is None:
            raise ValueError("from_sum_form: a group says neither 'momentum' nor 'mu'. Add it to the group.")
        for param in group["params"]:
            if param in state_dict["state"]:
                buffer: Tensor = state_dict["state"][param][key]
                state[param] = {"momentum_buffer": buffer * (1 - float(momentum))}
    return {"state": state, "param_groups": _groups(state_dict, own)}


def _groups(state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> list[dict[str, Any]]:
    theirs, ours = (
        [param for group in source["param_groups"] for param in group["params"]]
        for source in (state_dict, own)
    )
    if len(theirs) != len(ours):
        raise ValueError(
            f"state dict: expected {len(ours)} parameters, got {len(theirs)}. Build the optimizer over the "
            "same parameters in the same order."
        )
    return [dict(group) for group in own["param_groups"]]

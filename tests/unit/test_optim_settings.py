"""Settings of optimizers that are of the wrong kind: told by name, with what was expected and what came."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor.placement_types import Shard

from shardkit.boxes import Layout
from shardkit.optim import SOAP, AdamW, AdamW8bit, Muon, Shampoo, muon_plan
from shardkit.optim.optimizer import ShardedOptimizer
from shardkit.optim.settings import KINDS

Make = Callable[..., ShardedOptimizer]
EVERY = (AdamW, AdamW8bit, Muon, Shampoo, SOAP)
WITH_BETAS = (AdamW, AdamW8bit, Shampoo, SOAP)

ODD: list[tuple[tuple[Make, ...], str, object, str]] = [
    (EVERY, "lr", "x", "a number, or a tensor of one"),
    (EVERY, "lr", torch.ones(2), "a number, or a tensor of one"),
    (EVERY, "weight_decay", "0.1", "a number"),
    (EVERY, "eps", None, "a number"),
    (EVERY, "maximize", "yes", "True or False"),
    (WITH_BETAS, "betas", (0.9,), "two numbers"),
    (WITH_BETAS, "betas", 0.9, "two numbers"),
    (WITH_BETAS, "betas", (0.9, "0.95"), "two numbers"),
    ((AdamW,), "amsgrad", 1, "True or False"),
    ((AdamW,), "fused", "yes", "True or False, or None"),
    ((Muon,), "momentum", True, "a number"),
    ((Muon,), "nesterov", "no", "True or False"),
    ((Muon,), "ns_dtype", "bfloat16", "a torch.dtype of real numbers"),
    ((Muon,), "ns_dtype", torch.int8, "a torch.dtype of real numbers"),
    ((Muon,), "comm_dtype", "bfloat16", "a torch.dtype of real numbers, or None"),
    ((Muon,), "row_norm_beta2", "0.95", "a number, or None"),
    ((Muon,), "adjust_lr", 0.2, r"a name or a function \(rows, cols\) -> float"),
    ((Muon,), "coefficients", 5, r"the name of a table, or \(a, b, c\) for each step"),
    ((Muon,), "coefficients", ((1.0, 2.0),), r"the name of a table, or \(a, b, c\) for each step"),
    ((AdamW8bit, Shampoo, SOAP), "block", 2.5, "a whole number"),
    ((AdamW8bit,), "bits", 8.0, "a whole number"),
    ((AdamW8bit,), "tile", 128, "two whole numbers, or None"),
    ((AdamW8bit,), "tile", (128,), "two whole numbers, or None"),
    ((AdamW8bit,), "format", ["dynamic"], "a name"),
    ((AdamW8bit,), "second_moment", 2, "a name, or None"),
    ((AdamW8bit,), "min_numel", "4096", "a number"),
    ((AdamW8bit,), "seed", 0.5, "a whole number"),
    ((Shampoo, SOAP), "update_every", 1.5, "a whole number"),
    ((Shampoo,), "start", "1", "a whole number, or None"),
    ((Shampoo,), "root", ["eigh"], "a name"),
    ((Shampoo,), "graft", ["adam"], "a name, or None"),
    ((Shampoo,), "graft_eps", "0", "a number"),
]
CASES = [(make, name, value, words) for makes, name, value, words in ODD for make in makes]


@pytest.mark.parametrize(("make", "name", "value", "words"), CASES)
def test_a_setting_of_another_kind_is_told_by_name(make: Make, name: str, value: object, words: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: expected {words}, got ") as caught:
        make([torch.zeros(4, 4)], **{name: value})
    assert str(caught.value).endswith(f", got {value!r}.")


@pytest.mark.parametrize("name", ["heads", "split_rows", "flatten"])
def test_a_setting_of_a_group_is_told_too_and_its_group_left_out(name: str) -> None:
    optimizer = Muon([torch.zeros(4, 4)])
    with pytest.raises(TypeError, match=f"^{name}: expected .*, got '2'"):
        optimizer.add_param_group({"params": [torch.zeros(4, 4)], name: "2"})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize("name", ["eps", "weight_decay"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_eps_and_weight_decay_are_not_negative(make: Make, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected a number >= 0, got {value}"):
        make([torch.zeros(4, 4)], **{name: value})


def test_what_belongs_to_no_group_is_told_by_name() -> None:
    with pytest.raises(TypeError, match=r"^orthogonalize: expected a function, or None, got 'polar'"):
        Muon([torch.zeros(4, 4)], orthogonalize="polar")
    with pytest.raises(ValueError, match=r"^bucket_bytes: expected a whole number of at least 1, got '1'"):
        Muon([torch.zeros(4, 4)], bucket_bytes="1")


def test_a_loaded_setting_of_another_kind_changes_nothing() -> None:
    optimizer = AdamW([torch.zeros(4, 4)], betas=(0.8, 0.9))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["betas"] = 0.9
    with pytest.raises(TypeError, match=r"^betas: expected two numbers, got 0\.9"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_a_plan_takes_the_settings_that_an_optimizer_takes() -> None:
    with pytest.raises(TypeError, match=r"^heads: expected a whole number, or None, got 2\.0"):
        muon_plan({"w": Layout((8, 4), (2,), (Shard(0),))}, heads=2.0)


def test_every_setting_has_a_kind_and_no_kind_is_of_no_setting() -> None:
    optimizer = Muon([torch.zeros(4, 4)])
    settings = {name for algorithm in optimizer.algorithms.values() for name in algorithm.defaults}
    assert settings == KINDS.keys()


FIXED: list[tuple[Make, str, object]] = [
    (AdamW, "amsgrad", True),
    (AdamW8bit, "bits", 4),
    (AdamW8bit, "min_numel", 1),
    (Muon, "row_norm_beta2", 0.95),
    (Muon, "heads", 2),
    (Muon, "split_rows", (2, 2)),
    (Muon, "ns_dtype", torch.float32),
    (Muon, "algorithm", "adamw"),
    (Shampoo, "root", "qr"),
    (Shampoo, "graft", "sgd"),
    (SOAP, "block", 2),
]


@pytest.mark.parametrize(("make", "name", "value"), FIXED)
def test_a_setting_that_state_or_plan_cannot_follow_is_told_of_by_all_that_use_them(
    make: Make, name: str, value: object
) -> None:
    param = torch.zeros(4, 4)
    optimizer = make([param])
    saved, before = optimizer.state_dict(), optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    param.grad = torch.ones(4, 4)
    words = f"group 0: {name} was {before!r} when its state and plan were made, .* to {value!r}"
    uses = (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(saved))
    for use in (*uses, lambda: copy.deepcopy(optimizer)):
        with pytest.raises(ValueError, match=re.escape(words).replace(r"\.\*", ".*")):
            use()
    assert not param.any()
    optimizer.param_groups[0][name] = before
    optimizer.step()


def test_a_setting_that_is_edited_in_place_is_told_of() -> None:
    param = torch.zeros(4, 4)
    optimizer = Muon([{"params": [param], "split_rows": [2, 2]}])
    optimizer.param_groups[0]["split_rows"][:] = [1, 3]
    with pytest.raises(ValueError, match=r"split_rows was \[2, 2\] .* to \[1, 3\]"):
        optimizer.step()


def test_settings_that_a_step_reads_may_be_edited() -> None:
    """As schedules do; a loaded setting of the plan is followed, and then is the one that must stay."""
    optimizer = Muon([torch.zeros(4, 4)])
    optimizer.param_groups[0].update(lr=0.1, momentum=0.9, coefficients="polar_express", nesterov=False)
    optimizer.step()
    saved = Muon([{"params": [torch.zeros(4, 4)], "heads": 2}]).state_dict()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert [step.assignments[0].piece.rows for step in optimizer.plan().steps] == [2]

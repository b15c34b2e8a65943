"""Which modules `wrap_policy` turns into units, and what it refuses, on a fake process group of 4."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardkit import FSDPModule, fully_shard, model_plan, wrap_policy
from tests.support.models import MLP, Block, Transformer


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def sharded_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def test_by_class_makes_the_units_of_a_loop_over_the_blocks(mesh: DeviceMesh) -> None:
    by_hand, by_class = Transformer(), Transformer()
    for module in (*by_hand.blocks, by_hand):
        fully_shard(module, mesh, reshard_after_forward=False)
    assert wrap_policy(by_class, mesh, classes={Block}, reshard_after_forward=False) is by_class
    assert sharded_names(by_class) == ["", "blocks.0", "blocks.1"]
    assert str(model_plan(by_class)) == str(model_plan(by_hand))


def test_units_inside_units_are_sharded_innermost_first(mesh: DeviceMesh) -> None:
    model = wrap_policy(Transformer(), mesh, classes=(Block, nn.Linear))
    units = [unit.name for unit in model_plan(model).units]
    assert units[:5] == ["blocks.0.qkv", "blocks.0.out", "blocks.0.up", "blocks.0.down", "blocks.0"]
    assert units[-2:] == ["head", "Transformer"]


def test_by_size_counts_what_no_unit_has_yet(mesh: DeviceMesh) -> None:
    """Layers of 8 * 8 + 8 = 72; a pair of them, whose members are too small, is 144."""

    def pair() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def units(min_numel: int) -> list[str]:
        return sharded_names(wrap_policy(nn.Sequential(pair(), pair()), mesh, min_numel=min_numel))

    assert units(72) == ["", "0.0", "0.1", "1.0", "1.1"]
    assert units(73) == ["", "0", "1"]
    assert units(144) == ["", "0", "1"]
    assert units(145) == [""]


def test_by_size_passes_over_a_list_and_shards_its_modules(mesh: DeviceMesh) -> None:
    model = wrap_policy(MLP(8, 8, 8), mesh, min_numel=72)
    assert sharded_names(model) == ["", "layers.0", "layers.1"]
    assert sharded_names(wrap_policy(MLP(8, 8, 8), mesh, min_numel=100)) == [""]


def test_a_shared_module_is_one_unit(mesh: DeviceMesh) -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(nn.Sequential(shared, nn.Linear(8, 8)), nn.Sequential(shared))
    wrap_policy(model, mesh, classes={nn.Linear})
    assert [unit.name for unit in model_plan(model).units] == ["0.0", "0.1", "Sequential"]


def test_what_is_sharded_already_is_left_as_it_is(mesh: DeviceMesh) -> None:
    model = Transformer()
    fully_shard(model.blocks[0], mesh, reshard_after_forward=False)
    wrap_policy(model, mesh, classes={Block, nn.Linear})
    plan = {unit.name: unit.reshard_after_forward for unit in model_plan(model).units}
    assert plan["blocks.0"] is False
    assert plan["blocks.1"] is True
    assert "blocks.0.qkv" not in plan
    assert "blocks.1.qkv" in plan


def test_children_that_attention_reads_without_calling_stay_with_it(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    wrap_policy(model, mesh, classes={nn.Linear}, min_numel=10_000)
    assert sharded_names(model) == ["", "1"]


def test_ignored_parameters_count_for_no_size_and_reach_every_unit(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    wrap_policy(model, mesh, min_numel=72, ignored_params=(p for p in [model[0].bias, model[1].bias]))
    assert sharded_names(model) == [""]
    assert not hasattr(model[0].bias, "placements")
    assert hasattr(model[0].weight, "placements")


def test_weights_tied_across_units_are_refused_by_name(mesh: DeviceMesh) -> None:
    model = Transformer(tied=True)
    tied = r"param 'head\.weight': it is tied to 'embed\.weight', and the rule puts them into two units"
    with pytest.raises(ValueError, match=tied):
        wrap_policy(model, mesh, classes={nn.Linear})
    assert sharded_names(model) == []
    assert sharded_names(wrap_policy(model, mesh, classes={Block})) == ["", "blocks.0", "blocks.1"]


def test_weights_tied_inside_a_unit_are_one_parameter(mesh: DeviceMesh) -> None:
    model = wrap_policy(Transformer(tied=True), mesh, classes={Block})
    assert model.head.weight is model.embed.weight


def test_nothing_runs_before_a_rule_is_right(mesh: DeviceMesh) -> None:
    model = MLP(8, 8, 8)
    refused: list[tuple[dict[str, object], type[Exception], str]] = [
        ({}, ValueError, "neither classes nor min_numel"),
        ({"min_numel": 0}, ValueError, "min_numel=0: expected a positive number"),
        ({"classes": {Block}}, ValueError, "no module of this MLP that could be a unit is a Block"),
        (
            {"classes": {nn.ModuleList}},
            ValueError,
            "no module of this MLP that could be a unit is a ModuleList",
        ),
        ({"classes": nn.Linear}, TypeError, r"expected several, got .*Linear.*Pass {Linear}"),
        ({"classes": [Tensor]}, TypeError, "expected module classes, got .*Tensor"),
        ({"classes": ["Linear"]}, TypeError, "expected module classes, got 'Linear'"),
    ]
    for rule, error, message in refused:
        with pytest.raises(error, match=message):
            wrap_policy(model, mesh, **rule)
    assert sharded_names(model) == []


def test_meta_models_are_wrapped_too(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = Transformer()
    wrap_policy(model, mesh, min_numel=1000)
    assert sharded_names(model) == ["", "blocks.0", "blocks.1"]

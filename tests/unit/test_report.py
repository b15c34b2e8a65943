"""What `model_plan` shows, on a fake process group of 8: two replicas of four shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardkit import Blocks, MixedPrecisionPolicy, fully_shard, model_plan, predicted_peak_bytes
from shardkit.report import format_bytes
from tests.support.models import LoRALinear, Transformer
from tests.support.ranks import run_ranks

MIXED = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)


@contextmanager
def fake_mesh() -> Iterator[DeviceMesh]:
    """2 replicas of 4 shards, none of which exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as mesh:
        yield mesh


def sharded(mesh: DeviceMesh) -> Transformer:
    model = Transformer(vocab=300, dim=48)
    fully_shard(model.blocks[0], mesh, mp_policy=MIXED)
    fully_shard(
        model.blocks[1],
        mesh,
        reshard_after_forward=2,
        shard_placement_fn=lambda param: Blocks(3, required=False),
    )
    return fully_shard(model, mesh)


def test_the_plan_draws_units_buckets_bytes_and_padding(mesh: DeviceMesh) -> None:
    assert_expected_inline(
        str(model_plan(sharded(mesh))),
        """\
unit         params  layout        dtypes             shard  unsharded     padding    gather   reduce  reshard
blocks.0         10  Shard(0) 2x4  fp32>fp32>bf16  27.4 KiB    110 KiB   64 B 0.1%   165 KiB   55 KiB  yes
blocks.1         10  ragged 2x4    fp32            27.6 KiB    110 KiB  576 B 0.5%   138 KiB  111 KiB  to 1/2
Transformer       3  Shard(0) 2x4  fp32            28.2 KiB    113 KiB   64 B 0.1%  84.6 KiB  113 KiB  no
3 units          23                                83.2 KiB    333 KiB  704 B 0.2%   387 KiB  279 KiB
predicted peak of parameters and gradients: 749 KiB a rank""",
    )


def test_settings_that_were_changed_are_read_back(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[1].set_gradient_divide_factor(3.0)
    model.set_requires_gradient_sync(False, recurse=False)
    first, second, root = model_plan(model).units
    assert first.settings == ("forward_prefetch=[blocks.1]",)
    assert second.settings == ("divide_factor=3.0",)
    assert root.settings == ("gradient_sync=False",)
    assert root.buckets[0].reduce_bytes == 0
    assert "Transformer: gradient_sync=False" in str(model_plan(model))


def test_reshard_after_forward_is_what_the_setting_comes_to(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    assert [unit.reshard_after_forward for unit in model_plan(model).units] == [True, 2, False]
    model.set_reshard_after_forward(True)
    resharding = model_plan(model).units
    assert [unit.reshard_after_forward for unit in resharding] == [True, True, True]
    model.set_reshard_after_forward(False)
    for unit, kept in zip(resharding, model_plan(model).units, strict=True):
        assert unit.buckets[0].gather_bytes == 2 * kept.buckets[0].gather_bytes


def test_frozen_parameters_are_gathered_and_not_reduced(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Sequential(LoRALinear(64, 64)), mesh["shard"])
    (unit,) = model_plan(model).units
    (bucket,) = unit.buckets
    row_numel = 64 + 2 * 64 // 4 + 16  # of 4 ranks: one row of (2, 64), 16 of (64, 2), a tail of flags
    assert bucket.reduce_bytes == 3 * row_numel * 4
    model.requires_grad_(False)
    assert model_plan(model).units[0].buckets[0].reduce_bytes == 0


def test_the_plan_is_the_same_on_meta_and_after_training() -> None:
    def fn(rank: int, world_size: int) -> None:  # a backward in this process would break forks after it
        dist.destroy_process_group()
        with fake_mesh() as mesh:
            with torch.device("meta"):
                on_meta = str(model_plan(sharded(mesh)))
            model = sharded(mesh)
            before = model_plan(model)
            model(torch.tensor([[1, 2]])).sum().backward()
            assert on_meta == str(before) == str(model_plan(model))

    run_ranks(fn, 1)


def test_a_part_of_a_model_has_its_own_units(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    assert [unit.name for unit in model_plan(model.blocks).units] == ["blocks.0", "blocks.1"]


def test_peak_adds_up_what_a_single_unit_holds(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Linear(512, 512, bias=False), mesh["shard"])
    param_bytes, tail_bytes = 512 * 512 * 4, 16 * 4
    gradient_bytes = param_bytes  # on its way into the rows, which have a tail of flags each
    expected = param_bytes // 4 + param_bytes + gradient_bytes + param_bytes + 4 * tail_bytes
    assert model_plan(model).peak_bytes == predicted_peak_bytes(model) == expected


def test_a_model_that_is_not_sharded_is_refused(mesh: DeviceMesh) -> None:
    for ask in (model_plan, predicted_peak_bytes):
        with pytest.raises(ValueError, match=r"no module of this Linear is sharded. Call fully_shard"):
            ask(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (1536, "1.5 KiB"), (1000 * 2**10, "0.977 MiB")],
)
def test_byte_sizes_have_three_digits(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_byte_sizes_end_at_tebibytes() -> None:
    assert format_bytes(2**60) == "1.05e+06 TiB"

"""Weights that travel in eight bits, on 2 to 4 gloo ranks, against the same rounding on one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardkit import Blocks, fully_shard
from shardkit.collectives import count_traffic
from shardkit.quantized import BlockQuantizer, gather_quantized
from tests.support.models import Experts, normal_batch
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import errors_on_all_ranks, run_ranks

TILES, GROUPS = BlockQuantizer((128, 128)), BlockQuantizer((1, 32), torch.int8)


def two_layers() -> nn.Sequential:
    """Six blocks of 128 rows each, the last one short: they divide over 2 and over 3 ranks."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 760), nn.Tanh(), nn.Linear(760, 760))


def rounded(model: nn.Module, quantizer: BlockQuantizer) -> nn.Module:
    """Every whole matrix through the quantizer and back, in place."""
    for param in model.parameters():
        if param.ndim > 1:
            codes, scales = quantizer.quantize(param.data.flatten(0, -2))
            param.data = quantizer.dequantize(codes, scales, param.dtype).view(param.shape)
    return model


def loss_of(model: nn.Module, rank: int) -> Tensor:
    return model(normal_batch(rank, 4, 40)).square().mean()


def blocks_of(rows: int) -> dict[str, object]:
    return {"shard_placement_fn": lambda param: Blocks(rows) if param.ndim > 1 else None}


@pytest.mark.parametrize("quantizer", [TILES, GROUPS], ids=["tiles", "groups"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_gathered_is_to_the_bit_what_one_process_makes_of_the_matrix(
    world_size: int, quantizer: BlockQuantizer
) -> None:
    def check(rank: int, world_size: int) -> None:
        model = two_layers()
        for layer in (model[0], model[2], model):
            fully_shard(layer, **blocks_of(quantizer.block[0]))
        assert gather_quantized(model, quantizer) == ["0.weight", "2.weight"]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            whole = two_layers()
            whole.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
            rounded(whole, quantizer)
            for index in (0, 2):
                model[index].unshard()
                assert torch.equal(model[index].weight, whole[index].weight)
                model[index].reshard()
            loss_of(model, rank).backward()
            assert_grads_equal(model, oracle_grads(whole, loss_of, world_size), world_size)
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(check, world_size)


def test_a_gather_sends_a_fourth_of_the_bytes_and_quantising_sends_nothing() -> None:
    def check(rank: int, world_size: int) -> None:
        sent = []
        for is_quantized in (False, True):
            model = fully_shard(nn.Sequential(nn.Linear(256, 512, bias=False)), **blocks_of(128))
            if is_quantized:
                gather_quantized(model, TILES)
            for _ in range(2):  # the first time ranks also tell one another what they send
                with count_traffic() as traffic:
                    model.unshard()
                gathered = model[0].weight
                model.reshard()
                assert gathered.untyped_storage().nbytes() == 0
            assert traffic.num_calls == {"all_gather": 1}
            sent.append(traffic.sent_bytes["all_gather"])
        assert sent == [256 * 256 * 4, 256 * 256 + 16]  # four scales

    run_ranks(check, 2)


def test_restored_weights_have_the_dtype_of_compute() -> None:
    def check(rank: int, world_size: int) -> None:
        model = two_layers()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model, mp_policy=policy, **blocks_of(128))
        gather_quantized(model)
        model.unshard()
        assert torch.equal(model[0].weight, rounded(two_layers(), TILES)[0].weight.bfloat16())

    run_ranks(check, 2)


@pytest.mark.parametrize("wish", [Shard(0), Blocks(5)])
def test_stacks_of_matrices_are_rows(wish: Shard | Blocks) -> None:
    def check(rank: int, world_size: int) -> None:
        quantizer = BlockQuantizer((5, 2), torch.int8)
        torch.manual_seed(1)
        model, whole = Experts(num_experts=4), Experts(num_experts=4)
        whole.load_state_dict(model.state_dict())
        fully_shard(model, shard_placement_fn=lambda param: wish if param.ndim == 3 else None)
        gather_quantized(model, quantizer, params=[model.weight])
        model.unshard()
        assert torch.equal(model.weight, rounded(whole, quantizer).weight)

    run_ranks(check, 2)


def test_a_layout_that_cuts_blocks_is_refused_on_all_ranks() -> None:
    def check(rank: int, world_size: int) -> None:
        model = nn.Sequential(nn.Linear(40, 300))
        gather_quantized(fully_shard(model, **blocks_of(1)), TILES)

    errors_on_all_ranks(check, 2, ValueError, "0.weight'", "blocks of 128 rows", "Blocks(128)")


def test_a_stack_whose_matrices_cut_blocks_is_refused() -> None:
    def check(rank: int, world_size: int) -> None:
        model = fully_shard(Experts(num_experts=4))
        gather_quantized(model, BlockQuantizer((2, 2)), params=[model.weight])

    errors_on_all_ranks(check, 2, ValueError, "'weight'", "two matrices of a stack")


def test_a_matrix_cut_by_tensor_parallelism_is_refused() -> None:
    def check(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(two_layers(), mesh["tp"], {"2": ColwiseParallel()})
        gather_quantized(fully_shard(model, mesh["dp"], **blocks_of(128)), TILES)

    errors_on_all_ranks(check, 4, NotImplementedError, "'2.weight'", "only one mesh axis", "`params`")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("block", [(128, 128), (1, 32), (3, 7)])
def test_every_block_is_rounded_by_its_own_largest_magnitude(
    block: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(130, 70) * torch.logspace(-6, 6, 130)[:, None]
    matrix[3:6, 7:14] = 0.0
    quantizer = BlockQuantizer(block, dtype)
    codes, scales = quantizer.quantize(matrix)
    assert (codes.dtype, codes.shape) == (dtype, matrix.shape)
    step = 0.51 * 2.0 ** -{torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}.get(dtype, 7)
    restored = quantizer.dequantize(codes, scales, torch.float32)
    for at in range(0, 130, block[0]):
        for start in range(0, 70, block[1]):
            part = (slice(at, at + block[0]), slice(start, start + block[1]))
            largest = float(matrix[part].abs().max())
            assert float((restored[part] - matrix[part]).abs().max()) <= step * largest
            assert float(restored[part].abs().max()) == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize(
    ("block", "dtype"), [((0, 4), torch.int8), ((4, 4), torch.uint8), ((4, 4), torch.half)]
)
def test_other_codes_are_refused(block: tuple[int, int], dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="expected a block of at least one row and column"):
        BlockQuantizer(block, dtype)

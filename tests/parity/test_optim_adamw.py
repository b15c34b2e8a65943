"""AdamW on local tensors against torch.optim.AdamW, and optimizers of several algorithms in files."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from shardkit import Blocks, fully_shard
from shardkit.optim import AdamW, Muon, split_params
from tests.parity.test_muon import give_grads, matrices, placements_of, sharded
from tests.support.ranks import run_ranks

SHAPES = [(48, 32), (24, 80), (33,), (3, 40), (300, 300)]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 3) -> None:
    for step in range(steps):
        give_grads(params, matrices(step + 1, [tuple(p.shape) for p in params]))
        if step == 1:
            params[0].grad = None
        optimizer.step()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("maximize", "amsgrad"), [(False, False), (True, False), (False, True)])
def test_parameters_and_state_equal_those_of_torch(
    world_size: int, maximize: bool, amsgrad: bool, foreach: bool
) -> None:
    settings = {"lr": 0.01, "weight_decay": 0.1, "maximize": maximize, "amsgrad": amsgrad}
    whole = [nn.Parameter(v) for v in matrices(0, SHAPES)]
    reference = torch.optim.AdamW(whole, foreach=foreach, **settings)
    train(reference, whole)

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        params = sharded(
            matrices(0, SHAPES), mesh, lambda i, shape: placements_of(i % 2 * 4, shape, world_size)
        )
        optimizer = AdamW(params, foreach=foreach, **settings)
        train(optimizer, params)
        for p, q in zip(params, whole, strict=True):
            assert torch.equal(p.full_tensor(), q)
            assert optimizer.state[p]["step"] == reference.state[q]["step"]
            assert optimizer.state[p].keys() == reference.state[q].keys()
            for key in optimizer.state[p].keys() - {"step"}:
                assert torch.equal(optimizer.state[p][key].full_tensor(), reference.state[q][key])

    run_ranks(run, world_size)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_fused_kernel_agrees(amsgrad: bool) -> None:
    params, whole = ([nn.Parameter(v) for v in matrices(0, SHAPES)] for _ in range(2))
    train(AdamW(params, fused=True, amsgrad=amsgrad), params)
    train(torch.optim.AdamW(whole, fused=True, amsgrad=amsgrad), whole)
    for p, q in zip(params, whole, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "words"), [({"betas": (0.9, 1.0)}, "betas: expected"), ({"eps": -1.0}, "eps: expected")]
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdamW([torch.zeros(2)], **settings)


def test_the_call_is_torchs() -> None:
    """Every argument of torch.optim.AdamW, in its order; what is not supported is refused by name."""
    own, stock = (inspect.signature(cls.__init__).parameters for cls in (AdamW, torch.optim.AdamW))
    assert list(own) == list(stock)
    for name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "fused"):
        assert (own[name].default, own[name].kind) == (stock[name].default, stock[name].kind)
    for name in ("capturable", "differentiable"):
        with pytest.raises(NotImplementedError, match=f"AdamW: .*{name}=True"):
            AdamW([torch.zeros(2)], **{name: True})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.head = nn.Linear(12, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.up(self.embed(tokens)))))


def build(world_size: int, wish: Blocks | None) -> tuple[nn.Module, Muon]:
    torch.manual_seed(0)
    model = Net()
    if world_size:
        for layer in (model.up, model.down):
            fully_shard(layer, shard_placement_fn=lambda param: wish)
        fully_shard(model, shard_placement_fn=lambda param: wish)
    return model, Muon(split_params(model), lr=0.01, row_norm_beta2=0.95)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        values = matrices(step, [tuple(p.shape) for p in model.parameters()])
        give_grads(list(model.parameters()), values)
        optimizer.step()


def full(model: nn.Module) -> dict[str, Tensor]:
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("flatten", [False, True])
def test_a_checkpoint_goes_to_other_world_sizes_and_layouts(tmp_path: Path, flatten: bool) -> None:
    """Saved by 2 ranks, loaded and saved by 4, 3, and one process; every step as if never interrupted."""
    model, optimizer = build(0, None)
    steps(model, optimizer, 0, 5)
    expected = full(model)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def state_of(model: nn.Module, optimizer: Muon) -> dict[str, object]:
        return {
            "model": model.state_dict(),
            "optim": get_optimizer_state_dict(model, optimizer, options=options),
        }

    def run(rank: int, world_size: int, stage: int) -> None:
        wish = [Blocks(), None, Blocks.elements(), Blocks(4)][stage]
        model, optimizer = build(world_size, wish)
        if stage:
            state = state_of(model, optimizer)
            dcp.load(state, checkpoint_id=tmp_path / str(stage - 1))
            model.load_state_dict(state["model"])
            set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
        steps(model, optimizer, stage, stage + 1)
        dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / str(stage))

    for stage, world_size in enumerate((2, 4, 3, 1)):
        run_ranks(run, world_size, stage)

    model, optimizer = build(0, None)
    state = state_of(model, optimizer)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=tmp_path / "3", no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
    steps(model, optimizer, 4, 5)
    for name, param in full(model).items():
        assert torch.equal(param, expected[name]), name


def test_torchs_own_state_dict_of_muon_loads() -> None:
    params, whole = ([nn.Parameter(v) for v in matrices(0)] for _ in range(2))
    optimizer, reference = (
        Muon(params, lr=0.02),
        torch.optim.Muon(whole, lr=0.02, adjust_lr_fn="match_rms_adamw"),
    )
    give_grads(whole, matrices(1))
    reference.step()
    state = copy.deepcopy(reference.state_dict()["state"])
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    with torch.no_grad():
        torch._foreach_copy_(params, whole)
    for own in (params, whole):
        give_grads(own, matrices(2))
    optimizer.step()
    reference.step()
    for p, q in zip(params, whole, strict=True):
        assert torch.equal(p, q)

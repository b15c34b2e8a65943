"""Around the optimizers: routing of parameters, QK-clip, state of other Muons."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardkit.boxes import Layout
from shardkit.optim import (
    Muon,
    Projection,
    Shampoo,
    from_sum_form,
    from_torch_muon,
    muon_plan,
    qk_clip_,
    route_params,
    split_params,
)
from shardkit.placement import RaggedShard
from shardkit.ragged import distribute_tensor
from tests.parity.test_muon import give_grads, matrices
from tests.support.models import ConvNet, Experts, Transformer
from tests.support.ranks import run_ranks


def algorithms(model: nn.Module, **kwargs: object) -> dict[str, str]:
    return {name: route.algorithm for name, route in route_params(model, **kwargs).items()}


def test_embeddings_heads_and_vectors_are_not_sent_to_muon() -> None:
    routed = route_params(Transformer())
    assert routed["embed.weight"] == ("adamw", "an embedding")
    assert routed["head.weight"].algorithm == "adamw"
    assert routed["blocks.0.qkv.weight"] == ("muon", "a matrix")
    assert routed["blocks.0.up.bias"].algorithm == routed["norm.weight"].algorithm == "adamw"
    tied = algorithms(Transformer(tied=True))
    assert tied["embed.weight"] == "adamw" and "head.weight" not in tied
    assert algorithms(Experts())["weight"] == algorithms(ConvNet())["conv.weight"] == "muon"


class Renamed(nn.Module):
    """An embedding of 40 rows, layers of `shapes`, and nothing called a head."""

    def __init__(self, *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.positions = nn.Embedding(16, 16)
        self.words = nn.Embedding(40, 16)
        self.layers = nn.Sequential(*(nn.Linear(cols, rows, bias=False) for rows, cols in shapes))


def test_an_output_head_is_known_by_its_shape_where_only_it_has_that_of_the_embedding() -> None:
    routed = route_params(Renamed((16, 16), (40, 16)))
    assert routed["layers.0.weight"] == ("muon", "a matrix")
    assert routed["layers.1.weight"] == (
        "adamw",
        "an output head: the only layer shaped as the embedding",
    )
    assert algorithms(Renamed((40, 16), (40, 16)))["layers.1.weight"] == "muon"


class Bare(nn.Module):
    """Tables and weights that no layer keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, 8))
        self.class_embedding = nn.Parameter(torch.zeros(10, 8))
        self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 4))
        self.rel_pos_2d = nn.Parameter(torch.zeros(1, 8, 4, 4))
        self.only_expert = nn.Parameter(torch.zeros(1, 16, 8))
        self.composition = nn.Parameter(torch.zeros(8, 8))
        self.patch_embed = nn.Linear(12, 8, bias=False)


def test_an_embedding_that_is_a_bare_parameter_is_known_by_its_name() -> None:
    routed = route_params(Bare())
    tables = ("pos_embed", "class_embedding", "relative_position_bias_table", "rel_pos_2d")
    assert {routed[name] for name in tables} == {("adamw", "an embedding, by its name")}
    assert routed["only_expert"] == ("muon", "a stack of matrices, taken one by one")
    assert routed["composition"] == routed["patch_embed.weight"] == ("muon", "a matrix")


def test_groups_go_into_one_optimizer_with_reasons() -> None:
    groups = split_params(Transformer(), overrides={"blocks.0": "adamw"})
    assert [group["algorithm"] for group in groups] == ["muon", "adamw"]
    (matrices, _) = split_params(Transformer(), algorithm="adamw8bit")
    assert matrices["algorithm"] == "adamw8bit"
    assert all(len(group["params"]) == len(group["reasons"]) for group in groups)
    optimizer = Muon(groups, lr=0.01)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
    assert "parameters elementwise, where they lie: nothing travels" in str(optimizer.plan())
    alone = Muon([{"params": [torch.zeros(3)], "algorithm": "adamw"}])
    assert str(alone.plan()) == "1 parameter elementwise, where it lies: nothing travels"
    assert not any("blocks.0" in name for name in optimizer.param_groups[0]["param_names"])


def test_a_one_dimensional_convolution_is_one_matrix() -> None:
    model = nn.Sequential(nn.Conv1d(16, 32, 5, bias=False), nn.Conv2d(3, 8, 5, bias=False))
    for algorithm, kind in (("muon", Muon), ("shampoo", Shampoo)):
        groups = split_params(model, algorithm=algorithm)
        assert [group.get("flatten") for group in groups] == [None, True]
        plan = str(kind(groups).plan())
        assert "0.weight          32 x 80" in plan, plan
        assert "1.weight           8 x 75" in plan, plan
        chosen = split_params(model, overrides={"0": algorithm}, algorithm=algorithm)
        assert [group.get("flatten") for group in chosen] == [None, True]


def test_a_parameter_that_lost_its_order_of_elements_is_refused_at_the_step() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3))
    optimizer = Muon(split_params(model))
    model.to(memory_format=torch.channels_last)
    model(torch.ones(1, 4, 5, 5)).sum().backward()
    with pytest.raises(ValueError, match=r"param '0.weight' is not contiguous"):
        optimizer.step()


def test_a_parameter_without_a_rule_and_an_override_without_a_parameter_raise() -> None:
    model = nn.Module()
    model.odd = nn.Parameter(torch.zeros(2, 3, 4, 5))
    with pytest.raises(ValueError, match=r"param 'odd': no rule fits.*overrides=\{'odd': 'adamw'\}"):
        split_params(model)
    assert algorithms(model, overrides={"odd": "adamw"}) == {"odd": "adamw"}
    with pytest.raises(ValueError, match=r"overrides: \['even'\] name no trainable parameter"):
        split_params(model, overrides={"odd": "adamw", "even": "muon"})


def test_an_unknown_algorithm_is_refused() -> None:
    for use in (
        lambda: split_params(Transformer(), algorithm="shampo"),
        lambda: split_params(Transformer(), overrides={"head": "sgd"}),
    ):
        with pytest.raises(ValueError, match=r"algorithm: expected one of .* got 's"):
            use()
    for setting in ("placement", "missing_grads", "replicas"):
        with pytest.raises(ValueError, match=f"{setting}: expected one of .*got 'agre'"):
            Muon([torch.zeros(2, 2)], **{setting: "agre"})
    for lr in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"lr: expected a number >= 0, got {lr}"):
            Muon([torch.zeros(2, 2)], lr=lr)
    with pytest.raises(ValueError, match="bucket_bytes: expected a whole number of at least 1, got 0"):
        Muon([torch.zeros(2, 2)], bucket_bytes=0)
    with pytest.raises(ValueError, match="placement: expected 'auto' or 'local', got 'owner'"):
        Shampoo([torch.zeros(2, 2)], placement="owner")
    with pytest.raises(ValueError, match=r"settings: expected some of .*'heads'.* got \['hedas'\]"):
        muon_plan({"w": Layout((8, 4), (2,), (Shard(0),))}, hedas=3)
    with pytest.raises(
        ValueError,
        match=r"algorithm: expected one of \['adamw', 'adamw8bit', 'muon', 'shampoo', 'soap'\], got 'lion'",
    ):
        Muon([{"params": [torch.zeros(2, 2)], "algorithm": "lion"}])


def test_qk_clip_shrinks_the_heads_above_the_bound_on_every_rank() -> None:
    """A loop over heads says how; grouped keys, a negative maximum, nan and inf, a head that one rank saw."""
    nan = float("nan")
    logits = [torch.tensor([50.0, 400.0, -3.0, nan]), torch.tensor([20.0, 10.0, math.inf, 150.0])]
    query, key = matrices(0, [(12, 5), (6, 5)])
    gamma = torch.tensor([1.0, 100 / 400, 1.0, 100 / 150])
    expected_query = query * gamma.sqrt().repeat_interleave(3)[:, None]
    expected_key = key * torch.tensor([100 / 400, 100 / 150]).sqrt().repeat_interleave(3)[:, None]

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        q = distribute_tensor(query, mesh, [RaggedShard((0, 1), (23, 37))])
        k = distribute_tensor(key, mesh, [Shard(1)])
        maxima = qk_clip_([Projection("q", q, logits[rank], 4), Projection("k", k, logits[rank], 2)])
        assert maxima[:4].tolist() == [50.0, 400.0, -3.0, 150.0]
        torch.testing.assert_close(q.full_tensor(), expected_query, rtol=1e-6, atol=0)
        torch.testing.assert_close(k.full_tensor(), expected_key, rtol=1e-6, atol=0)

    run_ranks(run, 2)
    with pytest.raises(ValueError, match="param 'q': num_heads=5 do not divide its 12 rows"):
        qk_clip_([Projection("q", query, logits[0], 5)])
    with pytest.raises(ValueError, match="param 'q': expected a contiguous tensor"):
        qk_clip_([Projection("q", query.T.contiguous().T, logits[0], 4)])
    with pytest.raises(ValueError, match="expected tau > 0"):
        qk_clip_([], tau=0.0)


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_qk_clip_asks_for_all_maxima_of_all_layers_at_once(power: float) -> None:
    """One all-reduce, whatever the layers; a loop over heads says what each becomes; nothing becomes nan."""
    nan, tau = float("nan"), 90.0
    weights = matrices(0, [(12, 5), (8, 6), (6, 5)])
    num_heads = [4, 2, 3]
    logits = [
        [[100.0, 0.0, -1.0, nan], [nan, nan], [1e4, -1e4, 3.0]],
        [[99.0, nan, -5.0, 91.0], [nan, 0.0], [1.0, nan, 4.0]],
    ]
    expected = [weight.clone() for weight in weights]
    for layer, weight in enumerate(expected):
        for head in range(num_heads[layer]):
            seen = [of_rank[layer][head] for of_rank in logits if not math.isnan(of_rank[layer][head])]
            largest = max(seen, default=-math.inf)
            factor = min(1.0, tau / largest) ** power if largest > 0 else 1.0
            rows = weight.shape[0] // num_heads[layer]
            for row in range(head * rows, (head + 1) * rows):
                weight[row] = weight[row] * factor

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        of_tp = [(RaggedShard((0, 1), (7, 23)), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Shard(1))]
        placements = [
            (RaggedShard((0, 1), (23, 37)), Replicate()),
            (Shard(0), Replicate()),
            (Shard(1), Replicate()),
        ]
        for placed in (placements, of_tp):
            laid = [distribute_tensor(w, mesh, list(p)) for w, p in zip(weights, placed, strict=True)]
            projections = [
                Projection(f"layers.{i}.q", laid[i], torch.tensor(logits[rank % 2][i]), num_heads[i], power)
                for i in range(3)
            ]
            with CommDebugMode() as seen:
                qk_clip_(projections, tau=tau)
            assert seen.get_total_counts() == 1, seen.get_comm_counts()
            for got, whole in zip(laid, expected, strict=True):
                assert got.full_tensor().isfinite().all()
                torch.testing.assert_close(got.full_tensor(), whole, rtol=1e-6, atol=0)

    run_ranks(run, 4)


def test_momentum_of_other_muons_goes_on_here() -> None:
    shapes = [(8, 6), (6, 9)]
    params = [nn.Parameter(v) for v in matrices(0, shapes)]
    optimizer = Muon(params, lr=0.02)
    give_grads(params, matrices(1, shapes))
    optimizer.step()
    own = optimizer.state_dict()
    group = {"params": [0, 1], "mu": 0.95}
    sums = {i: {"momentum": s["momentum_buffer"] / (1 - 0.95)} for i, s in own["state"].items()}
    fresh = Muon([p.detach().clone().requires_grad_() for p in params], lr=0.02)
    for converted in (
        from_sum_form({"state": sums, "param_groups": [group]}, fresh.state_dict(), key="momentum"),
        from_torch_muon({"state": own["state"], "param_groups": [group]}, fresh.state_dict()),
    ):
        fresh.load_state_dict(converted)
        for i, (state, p) in enumerate(zip(fresh.state.values(), params, strict=True)):
            expected = optimizer.state[p]["momentum_buffer"]
            torch.testing.assert_close(state["momentum_buffer"], expected, rtol=1e-6, atol=0, msg=str(i))
    with pytest.raises(ValueError, match="expected 2 parameters, got 1"):
        from_torch_muon({"state": {}, "param_groups": [{"params": [0]}]}, own)
    with pytest.raises(ValueError, match="neither 'momentum' nor 'mu'"):
        from_sum_form({"state": {}, "param_groups": [{"params": [0, 1]}]}, own)

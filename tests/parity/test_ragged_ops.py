"""Every operator of the list, at every layout, against the full tensor: the right answer or a named error."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardkit.placement import RaggedShard
from shardkit.ragged import distribute_tensor
from tests.parity.ragged_layouts import CASES, Case, assert_same, full, mesh_of, values
from tests.support.ranks import run_ranks

Op = Callable[..., object]


def _edited(op: Op) -> Op:
    """An in-place operator: the result is what it leaves in a copy."""

    def run(a: torch.Tensor, *rest: object) -> object:
        a = a.clone()
        op(a, *rest)
        return a

    return run


# a, b: ragged tensors in one layout. Operators that need no more than these must be right everywhere.
EVERYWHERE: dict[str, Op] = {
    "add": lambda a, b: a + b,
    "sub_alpha": lambda a, b: torch.sub(a, b, alpha=3),
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "rsub": lambda a, b: 3 - a,
    "pow": lambda a, b: a**2,
    "neg_abs": lambda a, b: (-a).abs(),
    "sqrt": lambda a, b: a.abs().sqrt(),
    "exp_log": lambda a, b: (a * 0).exp().log(),
    "sign": lambda a, b: a.sign(),
    "clamp": lambda a, b: a.clamp(-2, 3),
    "maximum": lambda a, b: torch.maximum(a, b),
    "where": lambda a, b: torch.where(a > b, a, b),
    "where_scalar": lambda a, b: torch.where(a > 0, a, 0.0),
    "lerp": lambda a, b: a.lerp(b, 0.25),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=2.0),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b, value=2.0),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, -1.0),
    "comparisons": lambda a, b: (a < b, a <= b, a == b, a != b, a >= b, a > 2),
    "logical": lambda a, b: ((a > 0) & (b > 0), (a > 0).logical_not()),
    "isfinite": lambda a, b: (a / 0).isfinite(),
    "frexp": lambda a, b: torch.frexp(a),
    "plain_scalar_tensor": lambda a, b: a * torch.tensor(3.0, dtype=torch.float64),
    "add_": _edited(lambda a, b: a.add_(b, alpha=2)),
    "mul_": _edited(lambda a, b: a.mul_(2)),
    "addcdiv_": _edited(lambda a, b: a.addcdiv_(b, b, value=-0.5)),
    "lerp_": _edited(lambda a, b: a.lerp_(b, 0.5)),
    "copy_": _edited(lambda a, b: a.copy_(b)),
    "zero_": _edited(lambda a, b: a.zero_()),
    "fill_": _edited(lambda a, b: a.fill_(4.0)),
    "masked_fill_": _edited(lambda a, b: a.masked_fill_(b > 0, 9.0)),
    "masked_write": _edited(lambda a, b: a.__setitem__(b > 0, 9.0)),
    "clamp_": _edited(lambda a, b: a.clamp_(min=0)),
    "out": lambda a, b: torch.add(a, b, out=torch.empty_like(a)),
    "clone": lambda a, b: a.clone(),
    "detach": lambda a, b: a.detach(),
    "to_dtype": lambda a, b: (a.to(torch.float32), a.int(), a.to("cpu"), a.to(torch.float64)),
    "zeros_like": lambda a, b: (torch.zeros_like(a), torch.ones_like(a, dtype=torch.int32)),
    "full_like": lambda a, b: torch.full_like(a, 2.5),
    "new_zeros": lambda a, b: (a.new_zeros(a.shape), a.new_ones(2, 7), a.new_full(a.shape, 3.0)),
    "foreach_add": lambda a, b: torch._foreach_add([a, b], [b, a], alpha=2),
    "foreach_mul_scalars": lambda a, b: torch._foreach_mul([a, b], [2.0, 3.0]),
    "foreach_div_tensor": lambda a, b: torch._foreach_div([a, b], torch.tensor(4.0, dtype=torch.float64)),
    "foreach_sqrt": lambda a, b: torch._foreach_sqrt([a.abs(), b.abs()]),
    "foreach_lerp": lambda a, b: torch._foreach_lerp([a, b], [b, a], 0.5),
    "foreach_addcmul": lambda a, b: torch._foreach_addcmul([a], [b], [b], 0.5),
    "foreach_add_": _edited(lambda a, b: torch._foreach_add_([a], [b])),
    "foreach_mul_": _edited(lambda a, b: torch._foreach_mul_([a], 3.0)),
    "foreach_addcdiv_": _edited(lambda a, b: torch._foreach_addcdiv_([a], [b], [b], [0.5])),
    "foreach_copy_": _edited(lambda a, b: torch._foreach_copy_([a], [b])),
    "foreach_zero_": _edited(lambda a, b: torch._foreach_zero_([a])),
    "foreach_max": lambda a, b: torch._foreach_max([a, b]),
    "sum": lambda a, b: (a.sum(), a.sum(dtype=torch.float32), a.int().sum(), (a > 0).sum()),
    "prod": lambda a, b: a.sign().prod(),
    "mean": lambda a, b: a.mean(),
    "max_min": lambda a, b: (a.max(), b.min(), a.amax(), b.amin(), a.int().max()),
    "nan_max": lambda a, b: ((a - a.max()) / (a - a.max())).max(),
    "any_all": lambda a, b: ((a > 7).any(), (a > -9).all(), (a > 0).all(), a.any()),
    "equal": lambda a, b: (torch.equal(a, b), torch.equal(a, a.clone()), torch.equal(a, a.sum())),
    "allclose": lambda a, b: (torch.allclose(a, b), torch.allclose(a, a + 1e-12)),
    "item": lambda a, b: (a.sum().item(), bool((a > 7).any())),
    "norms": lambda a, b: (a.norm(1), a.norm(math.inf), a.norm(-math.inf), torch.linalg.vector_norm(a, 0)),
    "squared_norm": lambda a, b: a.norm().square().round(),
    "foreach_norm": lambda a, b: [n.square().round() for n in torch._foreach_norm([a, b])],
    "foreach_norm_inf": lambda a, b: torch._foreach_norm([a, b], math.inf),
    "bfloat16_sum": lambda a, b: a.to(torch.bfloat16).sum(),
}

# along one dim of a matrix or stack
ALONG_DIMS: dict[str, Op] = {
    f"{name}_{dim}": (lambda a, b, op=op, dim=dim: (op(a, dim, False), op(a, dim, True)))
    for dim in (0, 1, -1)
    for name, op in {
        "sum": lambda a, dim, keep: a.sum(dim, keep),
        "mean": lambda a, dim, keep: (a * 60).mean(dim, keep),
        "amax": lambda a, dim, keep: a.amax(dim, keep),
        "amin": lambda a, dim, keep: a.amin(dim, keep),
        "any": lambda a, dim, keep: (a > 5).any(dim, keep),
        "all": lambda a, dim, keep: (a > -5).all(dim, keep),
        "prod": lambda a, dim, keep: a.prod(dim, keep),
        "norm1": lambda a, dim, keep: a.norm(1, dim, keep),
        "norminf": lambda a, dim, keep: torch.linalg.vector_norm(a, math.inf, dim, keep),
        "norm0": lambda a, dim, keep: torch.linalg.vector_norm(a, 0, dim, keep),
    }.items()
} | {
    "sum_all_dims": lambda a, b: (a.sum((0, 1)), a.sum((-1, 0), keepdim=True), a.mean((0, 1), keepdim=True)),
}

# close, not exact: the full tensor's own rounding differs
CLOSE: dict[str, Op] = {
    "var": lambda a, b: (a.var(), a.var(correction=0), a.var(0), a.var(-1, keepdim=True)),
    "std": lambda a, b: (a.std(), a.std(dim=-1)),
    "var_mean": lambda a, b: torch.var_mean(a, dim=0),
    "norm2_dim": lambda a, b: (a.norm(dim=0), a.norm(dim=-1, keepdim=True), a.norm(3)),
    "row_normalised": lambda a, b: a / a.norm(dim=-1, keepdim=True),
    "col_normalised": lambda a, b: a / a.norm(dim=0, keepdim=True),
}

# right where the layout has whole rows there, else refused
WHERE_IT_CAN: dict[str, Op] = {
    "slice": lambda a, b: (a[1:3], a[:2], a[4:], a[:], a[3:1]),
    "select": lambda a, b: (a[0], a[-1]),
    "unbind": lambda a, b: a.unbind(0),
    "split": lambda a, b: (a.split(2), a.chunk(2), a.split([1, a.shape[0] - 1])),
    "view": lambda a, b: (a.view(-1), a.reshape(-1, 1), a.flatten(), a.unsqueeze(-1), a.unsqueeze(0)),
    "edit_through_view": _edited(lambda a, b: (a[1:3].zero_(), a.view(-1)[-1:].fill_(5.0))),
    "softmax_rows": lambda a, b: (a * 0).softmax(-1),
    "cumsum_rows": lambda a, b: a.cumsum(-1),
    "max_dim": lambda a, b: a.max(-1),
    "argmax_dim": lambda a, b: a.argmax(-1),
    "sort_rows": lambda a, b: a.sort(-1),
    "columns": lambda a, b: a[:, 1:],
    "step": lambda a, b: a[::2],
    "transpose": lambda a, b: a.t(),
    "matmul": lambda a, b: a @ a.mT,
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "argmax": lambda a, b: a.argmax(),
    "index": lambda a, b: a[torch.tensor([0, 1])],
    "flip": lambda a, b: a.flip(0),
    "roll": lambda a, b: a.roll(1, 0),
    "median": lambda a, b: a.median(),
    "cumsum_0": lambda a, b: a.cumsum(0),
    "triu": lambda a, b: a.triu(),
    "diag": lambda a, b: a.diagonal(),
    "nonzero": lambda a, b: a.nonzero(),
    "tile": lambda a, b: a.repeat(2, 1),
    "dropout": lambda a, b: torch.dropout(a, 1.0, True),
    "bernoulli": lambda a, b: torch.bernoulli(a * 0),
    "topk": lambda a, b: a.topk(2, -1),
    "linear": lambda a, b: torch.nn.functional.linear(a, a),
    "view_dtype": lambda a, b: a.view(torch.int64),
}


def _walk(case: Case) -> None:
    mesh = mesh_of(case)
    a, b = values(case.shape, 1), values(case.shape, 2)
    ragged = [distribute_tensor(t, mesh, case.placements) for t in (a, b)]
    for name, op in EVERYWHERE.items():
        if not case.shape and name in ("equal", "masked_write"):
            continue  # the operands are not what they are meant to be without dims
        assert_same(full(op(*ragged)), op(a, b), f"{name} at {case}")
    if len(case.shape) < 2:
        return
    for name, op in ALONG_DIMS.items():
        assert_same(full(op(*ragged)), op(a, b), f"{name} at {case}")
    for name, op in CLOSE.items():
        torch.testing.assert_close(
            full(op(*ragged)), full(op(a, b)), msg=lambda m, n=name: f"{n} at {case}: {m}"
        )
    for name, op in WHERE_IT_CAN.items():
        try:
            expected = op(a, b)
        except (RuntimeError, IndexError):
            continue  # not defined for this shape
        try:
            got = op(*ragged)
        except NotImplementedError as error:
            assert str(error).startswith("aten."), f"{name} at {case}: {error}"
        else:
            assert_same(
                full(got), list(expected) if isinstance(expected, tuple) else expected, f"{name} at {case}"
            )


def _walk_all(rank: int, world_size: int) -> None:
    for case in CASES[world_size]:
        _walk(case)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_operator_answers_as_the_full_tensor_or_refuses_by_name(world_size):
    run_ranks(_walk_all, world_size)


# calls that torch refuses too, with its type of error: on a full tensor and, by name, on a ragged one
REFUSED: dict[str, tuple[type[Exception], Op]] = {
    "sum past the last dim": (IndexError, lambda a, none: a.sum(2)),
    "sum before the first dim": (IndexError, lambda a, none: a.sum(-3)),
    "sum along a dim twice": (RuntimeError, lambda a, none: a.sum((0, -2))),
    "mean past the last dim": (IndexError, lambda a, none: a.mean((0, 5))),
    "norm along a dim twice": (RuntimeError, lambda a, none: torch.linalg.vector_norm(a, 2, (1, 1))),
    "var past the last dim": (IndexError, lambda a, none: a.var(3)),
    "max past the last dim": (IndexError, lambda a, none: a.max(2)),
    "select past the last dim": (IndexError, lambda a, none: a.select(2, 0)),
    "unbind past the last dim": (IndexError, lambda a, none: a.unbind(2)),
    "split past the last dim": (IndexError, lambda a, none: a.split(1, 2)),
    "mean of integers": (RuntimeError, lambda a, none: a.int().mean()),
    "std of integers": (RuntimeError, lambda a, none: a.int().std(0)),
    "norm of integers": (RuntimeError, lambda a, none: torch.linalg.vector_norm(a.int())),
    "largest of none": (RuntimeError, lambda a, none: none.max()),
    "smallest of none": (RuntimeError, lambda a, none: none.amin()),
    "largest of none along a dim": (IndexError, lambda a, none: none.amax(0)),
    "infinity norm of none": (RuntimeError, lambda a, none: torch.linalg.vector_norm(none, math.inf)),
}


def _refused(rank: int, world_size: int) -> None:
    for case in CASES[world_size]:
        if case.shape != (5, 3):
            continue
        mesh = mesh_of(case)
        plain = values(case.shape), values((0, 3))
        nothing = [p if isinstance(p, Replicate) else RaggedShard((0,), (0,) * world_size) for p in case[2]]
        ragged = [distribute_tensor(t, mesh, p) for t, p in zip(plain, (case[2], nothing), strict=True)]
        for what, (error, call) in REFUSED.items():
            with pytest.raises(error):
                call(*plain)
            with pytest.raises(error, match=r"^aten\.\w+.*expected"):
                pytest.fail(f"{what} at {case}: {call(*ragged)}")
        assert_same(full(ragged[1].amax(1)), plain[1].amax(1), "of the rows that there are not")


def test_what_torch_refuses_is_refused_by_name():
    run_ranks(_refused, 3)


def _channels_last(rank: int, world_size: int) -> None:
    mesh, whole = mesh_of(CASES[3][0]), values((4, 2, 2, 3))
    for cut in (RaggedShard((0,), (1, 0, 3)), RaggedShard((0, 1), (3, 0, 5))):
        ragged = distribute_tensor(whole, mesh, [cut])
        for made in (
            ragged.clone(memory_format=torch.channels_last),
            ragged.to(memory_format=torch.channels_last),
            torch.zeros_like(ragged, memory_format=torch.channels_last) + ragged,
        ):
            assert made.to_local().is_contiguous()
            assert_same(full(made.view(-1)), whole.view(-1), f"{cut}")


def test_a_tensor_in_channels_last_keeps_the_order_of_its_units():
    run_ranks(_channels_last, 3)


def _of_no_dims(rank: int, world_size: int) -> None:
    mesh = mesh_of(CASES[3][0])
    one, other = (distribute_tensor(values((), seed), mesh, [RaggedShard((), (0, 1, 0))]) for seed in (1, 2))
    value = torch.tensor(2.5, dtype=torch.float32)
    for filled in (
        one.clone().fill_(value),
        one.masked_fill(other != 0, value),
        one.clone().fill_(DTensor.from_local(value, mesh, [Replicate()])),
    ):
        assert_same(full(filled), torch.tensor(2.5, dtype=torch.float64), "filled")


def test_a_tensor_of_no_dims_is_filled_with_another():
    run_ranks(_of_no_dims, 3)


def _of_no_elements(rank: int, world_size: int) -> None:
    mesh = mesh_of(CASES[3][0])
    none = distribute_tensor(torch.empty(3, 0), mesh, [RaggedShard((0, 1), (0, 0, 0))])
    assert_same(full((none > 0).any(1)), torch.zeros(3, dtype=torch.bool), "any of no elements")


def test_rows_of_no_elements_are_reduced_to_what_changes_nothing():
    run_ranks(_of_no_elements, 3)


def _broadcasting(rank: int, world_size: int) -> None:
    for case in CASES[world_size]:
        if len(case.shape) != 2:
            continue
        mesh = mesh_of(case)
        a = values(case.shape)
        ragged = distribute_tensor(a, mesh, case.placements)
        replicate = [Replicate()] * mesh.ndim
        for shape in ((), (case.shape[1],), (1, case.shape[1]), (case.shape[0], 1), case.shape, (1, 1), (1,)):
            other = values(shape, 5)
            replicated = DTensor.from_local(other, mesh, replicate)
            pending = DTensor.from_local(other / mesh.size(), mesh, [Partial()] * mesh.ndim)
            for operand in (replicated, pending):
                what = f"{shape} against {case}"
                assert_same(full(ragged + operand), a + other, what)
                assert_same(full(operand * ragged), other * a, what)
                assert_same(full(ragged.clone().mul_(operand)), a * other, what)
        for bad in ((2, *case.shape), (3, 1, 1)):
            with pytest.raises(NotImplementedError, match="no ragged operand to hold a result of shape"):
                ragged + DTensor.from_local(values(bad), mesh, replicate)
        with pytest.raises(RuntimeError):
            ragged + DTensor.from_local(values((case.shape[0] + 1, case.shape[1])), mesh, replicate)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_replicated_operands_broadcast_by_their_global_shapes(world_size):
    run_ranks(_broadcasting, world_size)


def _mismatches(rank: int, world_size: int) -> None:
    mesh = mesh_of(CASES[3][0])
    a = distribute_tensor(values((5, 3)), mesh, [RaggedShard((0,), (1, 4, 0))])
    other = distribute_tensor(values((5, 3)), mesh, [RaggedShard((0,), (2, 2, 1))])
    one_row = distribute_tensor(values((1, 3)), mesh, [RaggedShard((0,), (1, 0, 0))])
    with pytest.raises(NotImplementedError, match=r"aten.add.Tensor: operands lie differently.*redistribute"):
        a + other
    with pytest.raises(NotImplementedError, match="operands lie differently"):
        a + DTensor.from_local(a.to_local()[:1], mesh, [Shard(0)], shape=a.shape, stride=a.stride())
    with pytest.raises(NotImplementedError, match="operands lie differently"):
        a * one_row  # on rank 0 both have one row; their global shapes broadcast, their rows do not
    with pytest.raises(NotImplementedError, match=r"a plain tensor of shape \(5, 3\) next to a RaggedTensor"):
        a + values((5, 3))
    with pytest.raises(NotImplementedError, match=r"aten.add_.Tensor: writes a tensor that is not ragged"):
        DTensor.from_local(values((5, 3)), mesh, [Replicate()]).add_(a)
    with pytest.raises(NotImplementedError, match=r"aten.mm.default: no exact rule on a RaggedTensor"):
        a @ a.new_ones(3, 2)
    with pytest.raises(NotImplementedError, match="operands lie differently"):
        torch._foreach_add_([a], [other])
    flat = a.view(-1).view(5, 3)  # the same elements, which a copy may stand in for unless it is written
    with pytest.raises(NotImplementedError, match="writes exp_avgs that lie otherwise"):
        step = [torch.tensor(1.0)]
        in_elements = distribute_tensor(values((5, 3)), mesh, [RaggedShard((0, 1), (3, 12, 0))])
        torch._fused_adamw_(
            [a], [a.clone()], [in_elements], [a.clone()], [], step, lr=0.1, beta1=0.9, beta2=0.9,
            weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
    with pytest.raises(NotImplementedError, match="another dtype"):
        a.view(torch.int64)
    assert_same(full(a + flat), 2 * values((5, 3)), "a view counted in other units")


def test_operands_that_lie_differently_are_refused_on_every_rank():
    run_ranks(_mismatches, 3)


def _mixed_lists(rank: int, world_size: int) -> None:
    mesh = mesh_of(CASES[3][0])
    a, b = values((5, 3), 1), values((6, 2), 2)

    def lists() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        ragged = distribute_tensor(a, mesh, [RaggedShard((0,), (1, 4, 0))])
        return [distribute_tensor(b, mesh, [Shard(0)]), ragged], [b.clone(), a.clone()]

    mixed, plain = lists()
    assert_same(full(torch._foreach_mul(mixed, [2.0, 3.0])), torch._foreach_mul(plain, [2.0, 3.0]), "scalars")
    torch._foreach_addcmul_(mixed, mixed, mixed, 0.5)
    torch._foreach_addcmul_(plain, plain, plain, 0.5)
    assert_same(full(mixed), plain, "in place")
    scale = DTensor.from_local(torch.tensor(3.0, dtype=torch.float64), mesh, [Replicate()])
    assert_same(full(torch._foreach_mul(mixed, scale)), [t * 3 for t in plain], "a DTensor for all")
    norms = [n.full_tensor().square().round() for n in torch._foreach_norm(mixed)]
    assert_same(norms, [n.square().round() for n in torch._foreach_norm(plain)], "norms")
    assert_same(
        full(torch._foreach_norm(mixed, math.inf)), list(torch._foreach_norm(plain, math.inf)), "inf norms"
    )


def test_lists_may_mix_ragged_tensors_with_stock_shards():
    run_ranks(_mixed_lists, 3)


FILLS: dict[str, Op] = {
    "uniform_": lambda t: t.uniform_(-1, 1),
    "normal_": lambda t: t.normal_(1, 2),
    "exponential_": lambda t: t.exponential_(),
    "random_": lambda t: t.random_(0, 100),
    "bernoulli_": lambda t: t.bernoulli_(0.5),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda t: torch.randint_like(t, 5, 50),
    "kaiming": torch.nn.init.kaiming_uniform_,
    "trunc_normal_": torch.nn.init.trunc_normal_,
}


def _random_fills(rank: int, world_size: int) -> None:
    for name, fill in FILLS.items():
        drawn = []
        for case in CASES[world_size]:
            if name == "kaiming" and len(case.shape) < 2:
                continue
            mesh = mesh_of(case)
            replicated = case.mesh_shape[0] > 1 and isinstance(case.placements[0], Replicate)
            torch.manual_seed(rank if replicated else 7)  # replicas agree whatever their generators say
            ragged = fill(distribute_tensor(torch.zeros(case.shape), mesh, case.placements))
            whole = ragged.full_tensor()
            everyone = [torch.empty_like(whole) for _ in range(world_size)]
            dist.all_gather(everyone, whole)
            assert all(torch.equal(whole, other) for other in everyone), f"{name} at {case}"
            assert whole.numel() < 4 or len(whole.unique()) > 1, f"{name} at {case}"
            if case.shape == (5, 3):
                drawn.append(whole)
        assert all(torch.equal(drawn[0], other) for other in drawn[1:]), f"{name}: the cut changes the draw"


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_random_fills_agree_on_replicas_and_do_not_depend_on_the_cut(world_size):
    run_ranks(_random_fills, world_size)


def _long_fill(rank: int, world_size: int) -> None:
    mesh = mesh_of(CASES[3][0])
    shape, thousand = (1000, 1000), 1000

    def drawn(units: tuple[int, ...]) -> torch.Tensor:
        torch.manual_seed(3)
        return distribute_tensor(torch.zeros(shape), mesh, [RaggedShard((0,), units)]).normal_().full_tensor()

    whole = drawn((thousand, 0, 0))
    assert torch.equal(whole, drawn((300, 1, 699)))
    assert abs(whole.mean()) < 0.01
    assert abs(whole.std() - 1) < 0.01
    assert len(whole[:5].unique()) > 4990  # no block repeats another


def test_a_fill_of_many_blocks_is_one_draw_whatever_the_cut():
    run_ranks(_long_fill, 3)

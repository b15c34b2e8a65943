"""What users call on parameters, at random layouts: the full tensor's answer, or an error that names the op.

`test_ragged_ops.py` walks the operators that have a rule at fixed layouts. Here are those that programs call
besides, each with its gradient where it has one: most have no rule, and none may answer wrongly.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardkit.placement import RaggedShard
from shardkit.ragged import RaggedTensor, distribute_tensor
from tests.parity.ragged_layouts import full, values
from tests.support.ranks import run_ranks

Tensor = torch.Tensor
Call = Callable[[Tensor, Tensor], object]


def beside(a: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` on all ranks of the mesh of `a`."""
    if not isinstance(a, DTensor):
        return tensor
    return DTensor.from_local(tensor, a.device_mesh, [Replicate()] * a.device_mesh.ndim)


def rows(a: Tensor) -> Tensor:
    return beside(a, torch.tensor([1, 0]))


def edited(call: Call) -> Call:
    """What an in-place call leaves in a copy."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        a = a.clone()
        call(a, b)
        return a

    return run


# a, b: tensors in one layout. Results that depend on chance or memory are not here.
CALLS: dict[str, Call] = {
    "linalg.inv": lambda a, b: torch.linalg.inv(a.mT @ a),
    "linalg.svdvals": lambda a, b: torch.linalg.svdvals(a),
    "linalg.qr": lambda a, b: torch.linalg.qr(a)[1].abs(),
    "linalg.pinv": lambda a, b: torch.linalg.pinv(a),
    "linalg.matrix_norm": lambda a, b: torch.linalg.matrix_norm(a),
    "linalg.matrix_norm nuc": lambda a, b: torch.linalg.matrix_norm(a, "nuc"),
    "linalg.norm": lambda a, b: torch.linalg.norm(a),
    "linalg.vecdot": lambda a, b: torch.linalg.vecdot(a, b),
    "trace": lambda a, b: a.trace(),
    "dot": lambda a, b: torch.dot(a.flatten(), b.flatten()),
    "outer": lambda a, b: torch.outer(a.flatten(), b.flatten()),
    "matmul": lambda a, b: a @ b.mT,
    "mv": lambda a, b: torch.mv(a, b[0]),
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "einsum rows": lambda a, b: torch.einsum("ij,ij->i", a, b),
    "einsum all": lambda a, b: torch.einsum("ij,ij->", a, b),
    "linear": lambda a, b: F.linear(beside(a, values((2, a.shape[-1]))), b),
    "embedding": lambda a, b: F.embedding(rows(a), a),
    "layer_norm": lambda a, b: F.layer_norm(a, a.shape[-1:]),
    "rms_norm": lambda a, b: F.rms_norm(a, a.shape[-1:]),
    "normalize rows": lambda a, b: F.normalize(a, dim=-1),
    "normalize columns": lambda a, b: F.normalize(a, dim=0),
    "cosine_similarity": lambda a, b: F.cosine_similarity(a, b, dim=-1),
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "smooth_l1_loss": lambda a, b: F.smooth_l1_loss(a, b),
    "cross_entropy": lambda a, b: F.cross_entropy(a, b),
    "gelu": lambda a, b: F.gelu(a),
    "softplus": lambda a, b: F.softplus(a),
    "hardtanh": lambda a, b: F.hardtanh(a),
    "glu": lambda a, b: F.glu(torch.cat([a, b], -1)),
    "softmax 0": lambda a, b: a.softmax(0),
    "log_softmax": lambda a, b: a.log_softmax(-1),
    "dropout off": lambda a, b: F.dropout(a, 0.5, False),
    "dropout all": lambda a, b: F.dropout(a, 1.0, True),
    "cumsum 0": lambda a, b: a.cumsum(0),
    "cumsum": lambda a, b: a.cumsum(-1),
    "cummax": lambda a, b: a.cummax(-1),
    "diff": lambda a, b: a.diff(),
    "sort 0": lambda a, b: a.sort(0)[0],
    "argsort": lambda a, b: a.argsort(-1, stable=True),
    "topk": lambda a, b: a.topk(1, -1)[0],
    "kthvalue": lambda a, b: a.kthvalue(1, -1)[0],
    "median": lambda a, b: a.median(),
    "quantile": lambda a, b: a.quantile(0.5),
    "argmax": lambda a, b: a.argmax(),
    "argmin 0": lambda a, b: a.argmin(0),
    "aminmax": lambda a, b: torch.aminmax(a),
    "max 0": lambda a, b: a.max(0),
    "min keepdim": lambda a, b: a.min(-1, True)[0],
    "logsumexp": lambda a, b: a.logsumexp(-1),
    "count_nonzero": lambda a, b: (a > 0).count_nonzero(),
    "nansum": lambda a, b: (a / (a - a)).nansum(),
    "renorm": lambda a, b: a.renorm(2, 0, 1.0),
    "dist": lambda a, b: torch.dist(a, b),
    "unique": lambda a, b: a.unique(),
    "histc": lambda a, b: a.histc(5, -9, 9),
    "bincount": lambda a, b: a.abs().long().flatten().bincount(),
    "nonzero": lambda a, b: a.nonzero(),
    "isin": lambda a, b: torch.isin(a, b),
    "bucketize": lambda a, b: torch.bucketize(a, beside(a, torch.tensor([-2.0, 0.0, 3.0]).double())),
    "t": lambda a, b: a.t(),
    "T": lambda a, b: a.T,
    "transpose": lambda a, b: a.transpose(0, -1),
    "permute": lambda a, b: a.permute(*reversed(range(a.ndim))),
    "expand": lambda a, b: a.expand(2, *a.shape),
    "expand to itself": lambda a, b: a.expand(a.shape),
    "expand a row sum": lambda a, b: a.sum(-1, keepdim=True).expand(a.shape),
    "expand_as": lambda a, b: a[:1].expand_as(b),
    "repeat": lambda a, b: a.repeat(2, 1),
    "repeat_interleave": lambda a, b: a.repeat_interleave(2, -1),
    "reshape": lambda a, b: a.reshape(-1, a.shape[-1]),
    "unflatten": lambda a, b: a.flatten().unflatten(0, a.shape),
    "squeeze": lambda a, b: a.unsqueeze(1).squeeze(1),
    "as_strided": lambda a, b: a.as_strided((2,), (1,)),
    "unfold": lambda a, b: a.unfold(0, 2, 1),
    "diagonal": lambda a, b: a.diagonal(),
    "tril": lambda a, b: a.tril(),
    "flip": lambda a, b: a.flip(-1),
    "roll": lambda a, b: a.roll(1, -1),
    "chunk columns": lambda a, b: a.chunk(2, -1),
    "tensor_split": lambda a, b: a.tensor_split([1]),
    "unbind columns": lambda a, b: a.unbind(-1),
    "narrow": lambda a, b: a.narrow(0, 1, 1),
    "one element": lambda a, b: a[1, 1],
    "last rows": lambda a, b: a[-2:],
    "boolean index": lambda a, b: a[a > 0],
    "rows by index": lambda a, b: a[rows(a)],
    "cat": lambda a, b: torch.cat([a, b]),
    "cat columns": lambda a, b: torch.cat([a, b], -1),
    "stack": lambda a, b: torch.stack([a, b]),
    "pad": lambda a, b: F.pad(a, (1, 1)),
    "index_select": lambda a, b: a.index_select(0, rows(a)),
    "take": lambda a, b: a.take(rows(a)),
    "gather": lambda a, b: a.gather(-1, (a * 0).long()),
    "masked_select": lambda a, b: a.masked_select(b > 0),
    "scatter": lambda a, b: a.scatter(0, (a * 0).long(), 2.0),
    "scatter_add": lambda a, b: a.scatter_add(0, (a * 0).long(), b),
    "index_add": lambda a, b: a.index_add(0, rows(a), b[:2]),
    "select_scatter": lambda a, b: a.select_scatter(b[0], 0, 1),
    "where, one argument": lambda a, b: torch.where(a > 0),
    "where": lambda a, b: torch.where(a > 0, 1.0, b),
    "clamp by tensors": lambda a, b: a.clamp(b, b + 1),
    "float_power": lambda a, b: a.abs().float_power(1.5),
    "remainder": lambda a, b: a % 3,
    "floor_divide": lambda a, b: a // b,
    "atan2": lambda a, b: a.atan2(b),
    "logaddexp": lambda a, b: a.logaddexp(b),
    "complex": lambda a, b: torch.complex(a, b).abs(),
    "type": lambda a, b: a.type(torch.float32),
    "mixed dtypes": lambda a, b: a.float() + b,
    "iteration": lambda a, b: [row.sum() for row in a],
    "contains": lambda a, b: 3.0 in a,
    "size": lambda a, b: (a.size(), a.numel(), a.dim(), a.stride(), a.is_contiguous(), a.nbytes, len(a)),
    "data": lambda a, b: a.data,
    "deepcopy": lambda a, b: copy.deepcopy(a.detach()),
    "pickle": lambda a, b: pickle.loads(pickle.dumps(a.detach())),
    "get_total_norm": lambda a, b: torch.nn.utils.get_total_norm([a, b]),
    "parameters_to_vector": lambda a, b: torch.nn.utils.parameters_to_vector([a, b]),
    "vmap": lambda a, b: torch.vmap(lambda row: row.sum())(a),
    "a[0] = number": edited(lambda a, b: a.__setitem__(0, 5.0)),
    "a[:] = b": edited(lambda a, b: a.__setitem__(slice(None), b)),
    "a[...] = number": edited(lambda a, b: a.__setitem__(..., 2.0)),
    "a[1:3] = b[1:3]": edited(lambda a, b: a.__setitem__(slice(1, 3), b[1:3])),
    "a[0:2] = b[1:3]": edited(lambda a, b: a.__setitem__(slice(0, 2), b[1:3])),
    "a[:, 0] = number": edited(lambda a, b: a.__setitem__((slice(None), 0), 5.0)),
    "a[mask] = b[mask]": edited(lambda a, b: a.__setitem__(a > 0, b[a > 0])),
    "a[0] = replicated": edited(lambda a, b: a.__setitem__(0, beside(a, values(tuple(a.shape[1:]), 8)))),
    "a[0] = plain": edited(lambda a, b: a.__setitem__(0, values(tuple(a.shape[1:]), 8))),
    "copy_ plain": edited(lambda a, b: a.copy_(values(tuple(a.shape), 9))),
    "copy_ replicated": edited(lambda a, b: a.copy_(beside(a, values(tuple(a.shape), 9)))),
    "copy_ of another dtype": edited(lambda a, b: a.copy_(b.float())),
    "cumsum_": edited(lambda a, b: a.cumsum_(-1)),
    "tril_": edited(lambda a, b: a.tril_()),
    "fill_diagonal_": edited(lambda a, b: a.fill_diagonal_(1.0)),
    "index_fill_": edited(lambda a, b: a.index_fill_(0, rows(a), 2.0)),
    "index_copy_": edited(lambda a, b: a.index_copy_(0, rows(a), b[:2])),
    "scatter_": edited(lambda a, b: a.scatter_(0, (a * 0).long(), 1.0)),
    "unsqueeze_": edited(lambda a, b: a.unsqueeze_(0)),
    "add out": lambda a, b: torch.add(a, b, out=torch.empty_like(a)),
    "sum out": lambda a, b: torch.sum(a, 0, out=a.new_zeros(a.shape[1:])),
    "amax out": lambda a, b: torch.amax(a, (0,), out=a.new_zeros(a.shape[1:])),
    "norm out": lambda a, b: torch.linalg.vector_norm(a, out=a.new_zeros(())),
    "var out": lambda a, b: torch.var(a, -1, out=a.new_zeros(a.shape[:-1])),
    "cumsum out": lambda a, b: torch.cumsum(a, -1, out=torch.zeros_like(a)),
    "eye_": edited(lambda a, b: torch.nn.init.eye_(a)),
}
SHAPES = [(5, 3), (6, 4), (8, 8), (2, 2), (1, 3), (4, 1), (7,), (2, 3, 4), (3, 2, 2), ()]


def random_cut(rng: random.Random, num_units: int, num_ranks: int) -> tuple[int, ...]:
    edges = [0, *sorted(rng.randint(0, num_units) for _ in range(num_ranks - 1)), num_units]
    return tuple(stop - start for start, stop in pairwise(edges))


def random_placements(rng: random.Random, shape: tuple[int, ...], mesh: DeviceMesh) -> list[Placement]:
    """One ragged axis at any place; on a second axis copies, or a Shard that divides evenly."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    axis, dim = rng.randrange(mesh.ndim), rng.randrange(max(1, len(shape)))
    local = list(shape)
    if mesh.ndim == 2 and shape and shape[dim] % 2 == 0 and rng.random() < 0.6:
        axis, placements[1], local[dim] = 0, Shard(dim), shape[dim] // 2
    prefix = rng.randint(min(1, len(shape)), len(shape))
    units = random_cut(rng, math.prod(local[:prefix]), mesh.size(axis))
    placements[axis] = RaggedShard(tuple(range(prefix)), units)
    return placements


def leaves(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for item in result:
            yield from leaves(item)


def grads(result: object, *inputs: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of `inputs` from a loss of all that was made of them."""
    made = [tensor for tensor in leaves(result) if tensor.requires_grad]
    sum((tensor * tensor.detach().cos()).sum() for tensor in made).backward()
    return tuple(None if tensor.grad is None else full(tensor.grad) for tensor in inputs)


def assert_close(got: object, expected: object, what: str) -> None:
    if not isinstance(expected, Tensor | tuple | list):
        assert got == expected, f"{what}: got {got}, expected {expected}"
        return
    got_leaves, expected_leaves = list(leaves(got)), list(leaves(expected))
    assert len(got_leaves) == len(expected_leaves), f"{what}: got {got}, expected {expected}"
    for a, b in zip(got_leaves, expected_leaves, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, msg=lambda message: f"{what}: {message}")


def _calls(rank: int, world_size: int, mesh_shape: tuple[int, ...], seed: int) -> Counter[str]:
    mesh, rng, outcomes = init_device_mesh("cpu", mesh_shape), random.Random(seed), Counter[str]()
    names = list(CALLS) * 2
    rng.shuffle(names)
    for name in names:
        call, shape, with_grad = CALLS[name], rng.choice(SHAPES), rng.random() < 0.5
        placements = random_placements(rng, shape, mesh)
        what = f"{name} of {shape} at {placements}"
        plain = [values(shape, seed).requires_grad_(with_grad) for seed in (1, 2)]
        try:
            expected = call(*plain)
            expected_grads = None
            if with_grad and any(tensor.requires_grad for tensor in leaves(expected)):
                expected_grads = grads(expected, *plain)
        except (RuntimeError, IndexError, TypeError, ValueError):
            continue  # not defined for this shape, or with a gradient
        ragged = [distribute_tensor(t.detach(), mesh, placements).requires_grad_(with_grad) for t in plain]
        try:
            got = call(*ragged)
            assert_close([*map(full, leaves(got))] or got, [*leaves(expected)] or expected, what)
            if expected_grads is not None:
                assert_close(grads(got, *ragged), expected_grads, f"gradient of {what}")
        except (NotImplementedError, RuntimeError) as error:
            assert "aten." in str(error), f"{what}: {error}"
            outcomes["refused"] += 1
        else:
            outcomes["right"] += 1
            assert all(type(tensor) is RaggedTensor for tensor in ragged)
    return outcomes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (2, 2)])
def test_no_call_answers_wrongly(mesh_shape: tuple[int, ...]) -> None:
    outcomes = run_ranks(_calls, math.prod(mesh_shape), mesh_shape, 5)
    assert all(other == outcomes[0] for other in outcomes)
    assert outcomes[0]["right"] > 60 and outcomes[0]["refused"] > 60, outcomes[0]


def _expanded(rank: int, world_size: int) -> None:
    """A dim that another axis cuts is as long here as it was, not as it is globally."""
    whole = values((6, 2))
    tensor = distribute_tensor(whole, init_device_mesh("cpu", (2, 2)), [RaggedShard((0,), (6, 0)), Shard(1)])
    expanded = tensor.expand(6, 2)
    assert expanded.to_local().shape == tensor.to_local().shape
    assert torch.equal(expanded.full_tensor(), whole)


def test_expand_leaves_what_another_axis_cuts_as_it_is() -> None:
    run_ranks(_expanded, 4)

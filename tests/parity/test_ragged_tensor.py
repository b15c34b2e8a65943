"""Construction, copies, files, compiled graphs and module surgery of a RaggedTensor."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardkit import Blocks, fully_shard
from shardkit.placement import RaggedShard
from shardkit.ragged import RaggedTensor, distribute_tensor, ragged_spec, redistribute
from tests.parity.ragged_layouts import CASES, mesh_of, values
from tests.support.ranks import run_ranks

SHAPE, UNITS = (5, 3), (1, 4, 0)


def _ragged(seed: int = 0) -> RaggedTensor:
    mesh = init_device_mesh("cpu", (3,))
    made = distribute_tensor(values(SHAPE, seed), mesh, [RaggedShard((0,), UNITS)])
    assert isinstance(made, RaggedTensor)
    return made


def _construction(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    ragged = [RaggedShard((0,), UNITS)]
    local = torch.zeros(UNITS[rank], 3)
    tensor = RaggedTensor.from_local(local, mesh, ragged)
    assert tensor.shape == SHAPE
    assert tensor.stride() == (3, 1)
    assert tensor.to_local() is local
    assert RaggedTensor.from_local(local, mesh, ragged, shape=SHAPE, stride=(3, 1)).shape == SHAPE
    assert f"{ragged[0]}" in repr(tensor)
    for bad, message in (
        (torch.zeros(UNITS[rank] + 1, 3), "give this rank a contiguous tensor of shape"),
        (torch.zeros(3, UNITS[rank] + 2).t(), "give this rank a contiguous tensor of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            RaggedTensor.from_local(bad, mesh, ragged, shape=SHAPE)
    with pytest.raises(ValueError, match=r"leave the global shape open. Pass shape="):
        RaggedTensor.from_local(torch.zeros(5 * (rank == 0)), mesh, [RaggedShard((0, 1), (5, 0, 0))])
    with pytest.raises(ValueError, match="expected stride"):
        RaggedTensor.from_local(local, mesh, ragged, shape=SHAPE, stride=(1, 5))
    spec = ragged_spec(mesh, tuple(ragged), torch.Size(SHAPE), torch.float32)
    assert spec.placements == tuple(ragged)


def _older_torch(rank: int, world_size: int) -> None:
    """torch 2.11 runs DTensor's own rules on its subclasses; stands in for it: DTensor's own dispatch."""
    RaggedTensor.__torch_dispatch__ = classmethod(DTensor.__torch_dispatch__.__func__)
    words = r"need a torch that lets a DTensor subclass dispatch"
    with pytest.raises(NotImplementedError, match=words):
        _ragged()
    with pytest.raises(NotImplementedError, match=words):
        fully_shard(nn.Linear(3, 5), shard_placement_fn=lambda param: Blocks())


def test_a_torch_that_never_asks_the_subclass_is_refused_by_name():
    run_ranks(_older_torch, 3)


def _records(rank: int, world_size: int) -> None:
    """Equal layouts share one record; a mesh rebuilt after its groups were destroyed gets its own."""
    a, b = _ragged(1), _ragged(2)
    assert RaggedTensor.from_local(a.to_local(), a.device_mesh, a.placements, shape=a.shape)._spec is a._spec
    assert a._spec is not b._spec  # two meshes, if equal ones
    assert torch.equal(a + b, _ragged(1) + _ragged(2))
    assert (a > 0)._spec is (a < 0)._spec


def test_equal_layouts_on_one_mesh_share_their_record():
    run_ranks(_records, 3)


def _replicas_checked(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.full((2, 3), float(rank))
    tensor = RaggedTensor.from_local(local, mesh, [Replicate(), RaggedShard((0,), (2, 2))], run_check=True)
    assert torch.equal(tensor.to_local(), torch.full((2, 3), float(rank % 2)))


def test_from_local_checks_what_it_is_given():
    run_ranks(_construction, 3)


def test_run_check_copies_the_first_replica_over_the_others():
    run_ranks(_replicas_checked, 4)


def _from_source(rank: int, world_size: int) -> None:
    mesh, ragged = init_device_mesh("cpu", (3,)), [RaggedShard((0,), UNITS)]
    mine = values(SHAPE, seed=rank)
    assert torch.equal(distribute_tensor(mine, mesh, ragged).full_tensor(), values(SHAPE, 0))
    assert torch.equal(distribute_tensor(mine, mesh, ragged, src_data_rank=2).full_tensor(), values(SHAPE, 2))
    own = distribute_tensor(mine, mesh, ragged, src_data_rank=None).to_local()
    assert torch.equal(own, mine[sum(UNITS[:rank]) : sum(UNITS[: rank + 1])])
    stock = distribute_tensor(mine, mesh, [Shard(0)])
    assert type(stock) is DTensor
    parameter = distribute_tensor(torch.nn.Parameter(mine), mesh, ragged)
    assert parameter.requires_grad
    assert parameter.is_leaf
    with pytest.raises(ValueError, match="expected a plain leaf tensor"):
        distribute_tensor(torch.nn.Parameter(mine) * 2, mesh, ragged)


def _every_case(rank: int, world_size: int) -> None:
    for case in CASES[world_size]:
        mesh = mesh_of(case)
        made = distribute_tensor(values(case.shape, seed=rank), mesh, case.placements)
        assert torch.equal(made.full_tensor(), values(case.shape, 0)), f"{case}"
        on_meta = distribute_tensor(values(case.shape).to("meta"), mesh, case.placements)
        assert on_meta.is_meta
        assert on_meta.to_local().shape == made.to_local().shape


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_distribute_tensor_lays_out_the_first_ranks_values(world_size):
    run_ranks(_every_case, world_size)


def test_distribute_tensor_takes_another_source_or_none():
    run_ranks(_from_source, 3)


def _copies(rank: int, world_size: int) -> None:
    tensor = _ragged()
    for parameter in (tensor, torch.nn.Parameter(tensor), tensor.clone().requires_grad_()):
        twin = copy.deepcopy(parameter)
        assert type(twin) is RaggedTensor
        assert twin.requires_grad == parameter.requires_grad
        assert isinstance(twin, torch.nn.Parameter) == isinstance(parameter, torch.nn.Parameter)
        assert torch.equal(twin.detach(), tensor)
        twin.detach().zero_()
        assert not torch.equal(twin.detach(), tensor)
    again = pickle.loads(pickle.dumps(tensor))
    assert type(again) is RaggedTensor
    assert again.placements == tensor.placements
    assert torch.equal(again, tensor)
    file = io.BytesIO()
    torch.save({"weight": tensor, "parameter": torch.nn.Parameter(tensor)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["weight"], tensor)
    assert type(loaded["weight"]) is RaggedTensor
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    assert torch.equal(loaded["parameter"].detach(), tensor)


def test_copies_and_files_keep_values_layout_and_type():
    run_ranks(_copies, 3)


def _in_inference_mode(rank: int, world_size: int) -> None:
    ragged = _ragged()
    with torch.inference_mode():
        data = ragged.data
        assert data.to_local().data_ptr() == ragged.to_local().data_ptr()
        average = data * 2
    assert torch.equal(average.full_tensor(), ragged.full_tensor() * 2)


def test_data_can_be_read_in_inference_mode():
    run_ranks(_in_inference_mode, 3)


def _surgery(rank: int, world_size: int) -> None:
    """What frameworks do to modules: to, to_empty, load_state_dict (also assign), swap_tensors, zero_grad."""
    tensor = _ragged()
    module = torch.nn.Linear(3, 5, bias=False)
    module.weight = torch.nn.Parameter(tensor)
    module.to(torch.float32)
    assert type(module.weight) is RaggedTensor
    assert module.weight.dtype == module.weight.to_local().dtype == torch.float32
    state = {"weight": _ragged(4).to(torch.float32)}
    module.load_state_dict(state)
    assert torch.equal(module.weight.detach(), state["weight"])
    module.load_state_dict(state, assign=True)
    assert torch.equal(module.weight.to_local(), state["weight"].to_local())
    module.to("meta")
    assert module.weight.is_meta
    module.to_empty(device="cpu")
    assert module.weight.to_local().shape == (UNITS[rank], 3)
    module.load_state_dict(state)
    a, b = torch.nn.Parameter(_ragged(1)), torch.nn.Parameter(_ragged(2))
    torch.utils.swap_tensors(a, b)
    assert torch.equal(a.full_tensor(), values(SHAPE, 2))
    a.grad = _ragged(3)
    optimizer = torch.optim.SGD([a], lr=1.0)
    optimizer.zero_grad(set_to_none=False)
    assert not a.grad.any()
    local = torch.ones(UNITS[rank], 3, dtype=torch.float64)
    a._local_tensor = local
    assert a.to_local().data_ptr() == local.data_ptr()
    a.data = _ragged(5)
    assert torch.equal(a.full_tensor(), values(SHAPE, 5))
    a.data = a.data.to(torch.float32)
    assert a.dtype == a.to_local().dtype == torch.float32
    assert not a.is_pinned()
    a.data.zero_()
    assert not a.detach().any()
    with pytest.raises(TypeError, match="expected a RaggedTensor, got Tensor"):
        a.data = values(SHAPE)


def test_modules_move_load_and_swap_ragged_parameters():
    run_ranks(_surgery, 3)


def _stock_code(rank: int, world_size: int) -> None:
    """Code of torch that would mislabel or misread a ragged layout fails, and says so."""
    mesh = init_device_mesh("cpu", (3,))
    stock = DTensor.from_local(values(SHAPE), mesh, [Replicate()])
    ragged = [RaggedShard((0,), UNITS)]
    mislabelled = DTensor.from_local(
        torch.zeros(UNITS[rank], 3), mesh, ragged, shape=torch.Size(SHAPE), stride=(3, 1)
    )
    for act in (
        lambda: mislabelled + 1,
        lambda: mislabelled.full_tensor(),
        lambda: torch.nn.utils.get_total_norm([mislabelled]),
        lambda: stock.redistribute(mesh, ragged),
        lambda: DTensor.from_local(values(SHAPE)[: UNITS[rank]], mesh, ragged),
        lambda: torch.distributed.tensor.distribute_tensor(values(SHAPE), mesh, ragged),
    ):
        with pytest.raises((NotImplementedError, RuntimeError), match="Ragged"):
            act()


def test_stock_code_that_would_mislabel_a_ragged_layout_fails_by_name():
    run_ranks(_stock_code, 3)


def compiled(function):  # type: ignore[no-untyped-def]
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def _compiled(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    a, b, ragged = values(SHAPE, 1), values(SHAPE, 2), [RaggedShard((0,), (1, 4))]
    p = torch.nn.Parameter(distribute_tensor(a, mesh, ragged))
    q = distribute_tensor(b, mesh, ragged)
    made = compiled(lambda x, y: x * 2 + y)(p, q)
    assert type(made) is RaggedTensor
    assert torch.equal(made.full_tensor(), a * 2 + b)
    total, norm = compiled(lambda x: (x.sum(), x.norm()))(p)
    assert total.full_tensor() == a.sum()
    torch.testing.assert_close(norm.full_tensor(), a.norm())
    compiled(lambda x, y: (x * y).to_local().sum())(p, q).backward()
    assert type(p.grad) is RaggedTensor
    assert torch.equal(p.grad.full_tensor(), b)
    doubled = q.clone()
    compiled(lambda x: x.mul_(2))(doubled)
    assert torch.equal(doubled.full_tensor(), b * 2)
    assert p._stable_hash_for_caching() != p._stable_hash_for_caching()  # no rank takes another's graph


@pytest.mark.filterwarnings("ignore")
def test_compute_on_ragged_tensors_compiles_in_one_graph():
    run_ranks(_compiled, 2, timeout=90)


def _compiled_moves(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    a, b, ragged = values(SHAPE, 1), values(SHAPE, 2), [RaggedShard((0,), (1, 4))]
    elements, one_rank = RaggedShard((0, 1), (9, 6)), RaggedShard((0,), (0, 5))
    targets = [elements], [one_rank], [Shard(0)], [Shard(1)], [Replicate()]
    p = torch.nn.Parameter(distribute_tensor(a, mesh, ragged))
    for target in targets:
        weight = distribute_tensor(b, mesh, target)
        for move in (redistribute, RaggedTensor.redistribute):
            p.grad = None
            torch._dynamo.reset()  # one lambda has a limit of eight graphs
            moved = compiled(lambda x, t=target, m=move: m(x * 2, placements=t) * 3)(p)
            assert moved.placements == tuple(target)
            assert torch.equal(moved.full_tensor(), a * 6), target
            (moved * weight).sum().backward()
            assert p.grad.placements == tuple(ragged), target
            assert torch.equal(p.grad.full_tensor(), b * 6), target
    p.grad = None
    q = torch.nn.Parameter(distribute_tensor(b, mesh, [RaggedShard((0, 1), (7, 8))]))
    whole = compiled(lambda x, y: x.full_tensor() @ y.redistribute(placements=ragged).full_tensor().t())
    for _ in range(2):  # traced, then run again
        p.grad = q.grad = None
        product = whole(p, q)
        assert torch.equal(product, a @ b.t())
        product.sum().backward()
        assert torch.equal(p.grad.full_tensor(), b.sum(0).expand(SHAPE))
        assert torch.equal(q.grad.full_tensor(), a.sum(0).expand(SHAPE))


@pytest.mark.filterwarnings("ignore")
def test_redistributions_compile_in_one_graph_with_their_gradients():
    run_ranks(_compiled_moves, 2, timeout=110)


def _compiled_beside_tp(rank: int, world_size: int) -> None:
    """Where each coordinate of TP has units of its own, these are asked for when the graph runs."""
    mesh, whole = init_device_mesh("cpu", (2, 2)), values((5, 4))
    units = (1, 2) if mesh.get_coordinate()[1] == 0 else (2, 0)
    p = torch.nn.Parameter(distribute_tensor(whole, mesh, [RaggedShard((0,), units), Shard(0)]))
    gathered = compiled(lambda x: x.full_tensor())(p)
    assert torch.equal(gathered, whole)
    (gathered * whole).sum().backward()
    assert torch.equal(p.grad.full_tensor(), whole)
    assert p.grad.placements == p.placements


@pytest.mark.filterwarnings("ignore")
def test_a_gather_beside_tensor_parallelism_compiles():
    run_ranks(_compiled_beside_tp, 4, timeout=110)


def _not_compiled(rank: int, world_size: int) -> None:
    mesh, ragged = init_device_mesh("cpu", (2,)), [RaggedShard((0,), (1, 4))]
    stock, tensor = (distribute_tensor(values(SHAPE), mesh, layout) for layout in ([Shard(0)], ragged))
    for act, argument, message in (
        (lambda x: redistribute(x, ragged), stock, "RaggedTensor can be redistributed there"),
        (lambda x: RaggedTensor.from_local(x, mesh, ragged), tensor.to_local(), "Call from_local outside"),
        (lambda x: redistribute(x, [Shard(0)], async_op=True), tensor, "Leave it out"),
    ):
        with pytest.raises(Exception, match=message):
            compiled(act)(argument)


@pytest.mark.filterwarnings("ignore")
def test_what_does_not_compile_says_what_to_do():
    run_ranks(_not_compiled, 2, timeout=90)

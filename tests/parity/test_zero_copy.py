"""Every byte that a step writes beside what the unsharded model writes, on a fake group of 8.

No operator is known by name: what counts is which storage it writes to, and what that storage is for. The
collectives' own writes are not copies. For psi bytes of parameters on F ranks, two gathers a step:

    bytes written                  Shard(0), FSDP2's too   ragged
    into what a gather sends       2 psi / F if cast       2 psi / F if cast
    out of what a gather brought   2 psi                   0
    into what a reduction sends    psi                     psi
    to what a reduction brought    0, the group's mean     0; psi / F where a sum is divided by F
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardkit import Blocks, MixedPrecisionPolicy, fully_shard
from tests.bench.host import WORLD_SIZE, fake_mesh
from tests.support.ranks import run_ranks

NUM_UNITS, DIM, HIDDEN = 3, 64, 128
PSI = NUM_UNITS * 2 * DIM * HIDDEN  # elements; every shard is full, so nothing is padded
SMALL = NUM_UNITS * WORLD_SIZE * 16 * 8  # bytes: flags behind the rows of a reduction, and what makes them

FP32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

Purpose = Literal["gather_input", "gathered", "reduce_input", "reduced", "other"]
WRITES_NOTHING = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "set_", "resize_")


class Writes(TorchDispatchMode):
    """Adds up the bytes that operators write, by what the storage that they write to is for.

    What was written to a storage before a collective sends it is its input; what is written to gathered
    parameters otherwise is copied out of a gather.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[Purpose] = Counter()
        self.gathered: set[int] = set()  # storages of gathered parameters
        self._reduced: set[int] = set()
        self._unassigned: Counter[int] = Counter()  # by storage
        self._storages: list[torch.UntypedStorage] = []  # alive, so that no id is used twice

    @property
    def total(self) -> int:
        """Bytes written in all."""
        return sum(self.num_bytes.values())

    def finish(self) -> None:
        """Assign what no collective has sent."""
        for storage, num_bytes in self._unassigned.items():
            self.num_bytes["gathered" if storage in self.gathered else "other"] += num_bytes
        self._unassigned.clear()

    def watch(self, model: nn.Module) -> None:
        """Note where the parameters are that each layer computes with."""

        def note(layer: nn.Module, args: object) -> None:
            self.gathered |= {self._key(param) for param in layer.parameters()}

        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(note)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # it calls again with its local tensors
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            self._collective(func.overloadpacket.__name__, args)
        elif func.overloadpacket.__name__ not in WRITES_NOTHING:
            for tensor in written(func, args, kwargs, result):
                key = self._key(tensor)
                if key in self._reduced:
                    self.num_bytes["reduced"] += tensor.nbytes
                else:
                    self._unassigned[key] += tensor.nbytes
        return result

    def _collective(self, name: str, args: tuple[object, ...]) -> None:
        output, sent, *_ = args
        assert isinstance(output, Tensor)
        assert isinstance(sent, Tensor)
        if name == "_allgather_base_":
            self._assign("gather_input", sent)
        elif name == "_reduce_scatter_base_":
            self._assign("reduce_input", sent)
            self._reduced.add(self._key(output))
        else:
            raise AssertionError(f"unexpected collective {name}")

    def _assign(self, purpose: Purpose, tensor: Tensor) -> None:
        self.num_bytes[purpose] += self._unassigned.pop(self._key(tensor), 0)

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._storages.append(storage)
        return storage._cdata


def written(
    func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object], result: object
) -> Iterator[Tensor]:
    """The tensors that an operator writes: mutated arguments, and results that are no views of arguments."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(given.get(argument.name))
    before = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
    for tensor in tensors_in(result):
        if tensor.untyped_storage()._cdata not in before:
            yield tensor


def tensors_in(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.device.type != "meta"]


Wrap = Callable[[nn.Module, DeviceMesh, MixedPrecisionPolicy], None]


def bare(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Computed in the same dtype: a cast in advance is no copy of this step."""
    module.to(policy.param_dtype)


def fsdp2(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    fsdp.fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def interleaved(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def ragged(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=True,
        shard_placement_fn=lambda param: Blocks(),
    )


def ragged_summed(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """As on gloo, which has no mean; the fake group promises one, as NCCL."""
    ragged(module, mesh, policy)
    module.set_force_sum_reduction_for_comms(True)


def writes_of_a_step(wrap: Wrap, policy: MixedPrecisionPolicy) -> Writes:
    """What forward and backward of the third step write; the earlier ones make buffers."""
    mesh = fake_mesh()
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False))
            for _ in range(NUM_UNITS)
        )
    )
    for module in (*model, model):
        wrap(module, mesh, policy)
    x = torch.ones(1, DIM, dtype=policy.param_dtype)
    writes = Writes()
    writes.watch(model)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    with writes:
        model(x).sum().backward()
    writes.finish()
    return writes


def compared(wrap: Wrap, policy: MixedPrecisionPolicy) -> tuple[Counter[Purpose], int]:
    """Bytes by purpose, and how many bytes in all are written beside what compute writes."""

    def measure(rank: int, world_size: int) -> tuple[Counter[Purpose], int]:
        writes, compute = writes_of_a_step(wrap, policy), writes_of_a_step(bare, policy)
        return writes.num_bytes, writes.total - compute.total

    return run_ranks(measure, 1)[0]


@pytest.mark.parametrize(("wrap", "num_divided"), [(ragged, 0), (ragged_summed, PSI // WORLD_SIZE)])
@pytest.mark.parametrize(
    ("policy", "compute_bytes", "reduce_bytes"), [(FP32, 4, 4), (BF16, 2, 4), (ALL_BF16, 2, 2)]
)
def test_a_ragged_step_copies_nothing_out_and_writes_gradients_once(
    policy: MixedPrecisionPolicy, compute_bytes: int, reduce_bytes: int, wrap: Wrap, num_divided: int
) -> None:
    num_bytes, added = compared(wrap, policy)
    casts = policy.param_dtype is not None
    sent = 2 * PSI // WORLD_SIZE * compute_bytes if casts else 0  # this rank's row of two gathers, cast
    assert num_bytes["gathered"] == 0
    assert num_bytes["gather_input"] == sent
    assert 0 <= num_bytes["reduce_input"] - PSI * reduce_bytes <= SMALL
    row_writes = num_divided * reduce_bytes
    row_casts = PSI // WORLD_SIZE * 4 if reduce_bytes != 4 else 0
    assert row_writes <= num_bytes["reduced"] <= row_writes + SMALL
    assert added <= sent + PSI * reduce_bytes + row_writes + row_casts + 3 * SMALL


@pytest.mark.parametrize("wrap", [fsdp2, interleaved])
def test_shard_0_copies_every_parameter_out_of_both_gathers(wrap: Wrap) -> None:
    num_bytes, added = compared(wrap, FP32)
    assert num_bytes["gathered"] == 2 * PSI * 4
    assert num_bytes["gather_input"] <= 2 * PSI // WORLD_SIZE * 4
    assert 0 <= num_bytes["reduce_input"] - PSI * 4 <= SMALL
    assert added >= 3 * PSI * 4

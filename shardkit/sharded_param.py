"""One parameter in its two forms: the sharded DTensor that optimizers see, the gathered tensor that compute
sees.

Level 7 of the data flow: holds. Exactly one of the two is registered on the owning modules at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from shardkit._torch import has_grad_hooks, local_of, param_dict, replace_parts, spec_of
from shardkit.buffer import FlatBuffer
from shardkit.extension import EXTENSION_NAMES, has_extension
from shardkit.layout import Slot
from shardkit.params import Owner, ParamSpec, remember_original
from shardkit.plan import BucketPlan
from shardkit.sharding import Sharding

gathered_names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # gathered parameter -> its name


GradHook = Callable[[Tensor], None]


class ShardedParam:
    """The two forms of one parameter, and the attributes that hold it."""

    __slots__ = (
        "axes",
        "is_extended",
        "local",
        "name",
        "owners",
        "places",
        "plan",
        "plan_name",
        "shape",
        "shard_dim",
        "sharded",
        "sharding",
        "unsharded",
    )

    def __init__(
        self, spec: ParamSpec, sharding: Sharding, local: Tensor, plan: BucketPlan | None = None
    ) -> None:
        self.name = spec.name  # dotted, from the root once there is one
        self.plan, self.plan_name = plan, spec.name  # the ragged plan that placed it, and its name there
        self.shard_dim = spec.wish.dim if isinstance(spec.wish, Shard) else 0
        self.owners: tuple[Owner, ...] = spec.owners
        self.axes, self.sharding = spec.axes, sharding
        self.shape = tuple(spec.local.shape)  # unsharded, on this tensor-parallel rank
        self.places = [(param_dict(owner.module), owner.name) for owner in spec.owners]
        # The shell would take the offset of `local` in the whole, and torch copies and pickles none with one.
        shell = sharding.wrap_sharded(torch.empty(0, dtype=local.dtype, device=local.device))
        self.sharded = nn.Parameter(shell, requires_grad=spec.param.requires_grad)
        self.local = local.detach()  # this rank's part: soon a piece of the bucket's shard buffer
        replace_parts(self.sharded, self.local, spec_of(self.sharded))
        self.is_extended = has_extension(self.name, self.local)  # as its bucket has it; see `is_adopted`
        self.unsharded: nn.Parameter | None = None
        remember_original(spec.param, self.name)

    @property
    def registered(self) -> nn.Parameter | None:
        """What the module holds now."""
        places, name = self.places[0]
        return places.get(name)

    @property
    def is_adopted(self) -> bool:
        """Whether the registered sharded parameter is ours, in our bytes, and extended as it was: users
        replace the first two and set functions on them.
        """
        places, name = self.places[0]
        param = places.get(name)
        if param is self.unsharded:
            return True
        same = param is self.sharded and local_of(param) is self.local
        return same and has_extension(self.name, self.local) is self.is_extended

    def place_in(self, shard: FlatBuffer, slot: Slot) -> None:
        """Move this rank's part into `shard`."""
        local = shard.alias(slot.shard_offset, slot.local_shape)
        if not local.is_meta:
            local.copy_(self.local)
        self.hold(local)

    def hold(self, local: Tensor) -> None:
        """Let `local` be this rank's part; the parameter object stays the one that optimizers hold."""
        self.local, self.unsharded = local, None
        replace_parts(self.sharded, local, spec_of(self.sharded))
        self.register(self.sharded)

    def take_replacement(self) -> None:
        """Accept what the user registered in this parameter's place, or put into it.

        Raises:
            ValueError: it is no DTensor with this parameter's mesh, placements and shape.
        """
        param: Any = self.registered
        held = self.sharding.sharded
        if not isinstance(param, DTensor) or param.placements != held.placements or param.shape != held.shape:
            raise ValueError(
                f"param {self.name!r}: expected a DTensor of shape {tuple(held.shape)} placed "
                f"{held.placements} in its place, got {_describe(param)}. Assign one of this layout "
                "(distribute_tensor(full, param.device_mesh, param.placements)), or change the values in "
                "place."
            )
        if param is not self.sharded:
            self.sharded = cast(nn.Parameter, param)
            self.register(self.sharded)
        self.local = local_of(param)
        self.is_extended = has_extension(self.name, self.local)
        self.sharding = self.sharding.cast(self.local.dtype)

    def make_unsharded(self, local: Tensor) -> nn.Parameter:
        """Build the gathered form, once, around what this tensor-parallel rank has of it."""
        with torch.inference_mode(False):
            tensor = self.sharding.wrap_unsharded(local)
            self.unsharded = nn.Parameter(tensor, requires_grad=self.sharded.requires_grad)
        gathered_names[self.unsharded] = self.name
        return self.unsharded

    def register(self, param: nn.Parameter) -> None:
        """Let every owner hold `param`."""
        for places, name in self.places:
            places[name] = param

    def follow_requires_grad(self, make_hook: Callable[[], GradHook | None]) -> None:
        """Let the gathered form require a gradient as the sharded one does, which users toggle."""
        unsharded = self.unsharded
        assert unsharded is not None
        if unsharded.requires_grad != self.sharded.requires_grad:
            unsharded.requires_grad_(self.sharded.requires_grad)
        if unsharded.requires_grad and not has_grad_hooks(unsharded) and (hook := make_hook()) is not None:
            unsharded.register_post_accumulate_grad_hook(hook)


class Held:
    """What modules and parameters held at one time; asks of many at once what `is_adopted` asks of one."""

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._places = [param.places[0] for param in params]
        self._sharded = [param.sharded for param in params]
        self._locals = [param.local for param in params]
        self._functions = self._extensions()
        self._has_attributes = any(map(vars, self._locals))

    def is_unchanged(self) -> bool:
        """Whether every module holds the same sharded parameter, over the same bytes, extended as it was."""
        registered = [places.get(name) for places, name in self._places]
        return (
            all(map(is_, registered, self._sharded))
            and all(map(is_, map(local_of, self._sharded), self._locals))
            and (not self._may_differ() or self._extensions() == self._functions)
        )

    def _may_differ(self) -> bool:
        """Whether users have set anything on the local tensors, now or then; a class stays what it is."""
        return self._has_attributes or any(map(vars, self._locals))

    def _extensions(self) -> list[bool]:
        return [hasattr(local, name) for local in self._locals for name in EXTENSION_NAMES]


def _describe(param: Tensor | None) -> str:
    if param is None:
        return "nothing (a module that is reparametrized has to be so before fully_shard)"
    placed = f" placed {param.placements}" if isinstance(param, DTensor) else ""
    return f"a {type(param).__name__} of shape {tuple(param.shape)}{placed}"

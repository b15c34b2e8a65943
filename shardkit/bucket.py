"""Bucket: the parameters of a unit that travel in one collective, and which of their two forms is registered.

Level 11 of the data flow. Where it stands is read from facts: which tensor a module holds, whether a gather
is under way, what the version counters of the shards say. *When* to gather is decided elsewhere
(`schedule.py`, `hooks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn

from shardkit._torch import without_torch_function
from shardkit.collectives import Route
from shardkit.errors import GatheredParamError
from shardkit.gather import RowGather
from shardkit.grads import GradBuffer
from shardkit.layout import BucketSpec
from shardkit.sharded_param import GradHook, ShardedParam
from shardkit.streams import Streams

_version_of = attrgetter("_version")
_wants_grad = attrgetter("requires_grad")
_shard_wants_grad = attrgetter("sharded.requires_grad")


# what a module holds: (its parameters by attribute, the attribute, the parameter to be there)
Entries = list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]]


class Bucket:
    """Unshards and reshards the parameters of one collective; its `grads` take their gradients."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        spec: BucketSpec,
        gather: RowGather,
        replicate_route: Route | None,
    ) -> None:
        self.params, self.spec, self.label = tuple(params), spec, ""
        self.gather = gather
        self.replicate_route = replicate_route
        self.grads = GradBuffer(self.params, spec, gather.route)
        self._ready: torch.Event | None = None  # where gathers run ahead
        self._num_replaced = 0
        self._seen = self._gathering = (-1, -1)  # the values that were gathered, and are being gathered
        self._versions: list[int] = []  # of the gathered parameters, when these values were registered
        self._wants_grad: list[bool] = []
        self._written = self._tensors_at_rest()
        self._at_rest = _entries(self.params, [param.sharded for param in self.params])
        self._gathered: Entries = []
        self._gathered_of: list[nn.Parameter] = []  # the tensors that `_gathered` was made of

    @property
    def is_unsharded(self) -> bool:
        """Whether the modules hold the gathered parameters."""
        first = self.params[0]
        places, name = first.places[0]
        return first.unsharded is not None and places.get(name) is first.unsharded

    def start_unshard(self, streams: Streams, *, in_backward: bool = False) -> None:
        """Start to gather, unless what is gathered, or on its way, is what the shards are now.

        Collective over the shard axis (over `gather.small_group` after `reshard_to`).

        Args:
            in_backward: shards that are gathered, or on their way, cannot have changed since.
        """
        if in_backward and (self.gather.pending is not None or self.is_unsharded):
            return
        values = self._values()
        if self.gather.pending is not None:
            if self._gathering == values:
                return
            self.gather.drop()  # the shards were changed since it was started
        if self.is_unsharded:
            self._follow_gathered()
            if self._seen == values:
                return
        if streams.runs_ahead:
            is_retired = self.gather.unsharded is not None and streams.is_retired(self.gather.unsharded)
            streams.reclaim(keep=0 if is_retired else 1)
        if self._seen != values:
            self.gather.drop_piece()
        self._gathering = values
        with streams.on(streams.all_gather):
            self.gather.start(self.label)
            if streams.runs_ahead:
                self.gather.complete()
                self._ready = streams.mark()

    def finish_unshard(self, streams: Streams, hook_for: Callable[[Bucket, int], GradHook | None]) -> None:
        """Wait for the gather and register the gathered parameters."""
        if self.gather.pending is None:
            return
        if streams.runs_ahead:
            streams.wait(self._ready)
        else:
            self.gather.complete()
        self.gather.finish()
        tensors = self.gather.tensors
        if self._seen != self._gathering:
            self._seen = self._gathering
            torch.autograd.graph.increment_version(
                tensors
            )  # what older graphs saved is gone; let them say so
            self._versions = list(map(_version_of, tensors))
        with without_torch_function():
            wants_grad = list(map(_shard_wants_grad, self.params))
        if self._wants_grad != wants_grad:
            self._wants_grad = wants_grad
            for index, param in enumerate(self.params):
                param.follow_requires_grad(partial(hook_for, self, index))
        if self._gathered_of is not tensors:
            self._gathered, self._gathered_of = _entries(self.params, tensors), tensors
        _register(self._gathered)

    def reshard(self, streams: Streams, keep_for: int = 0) -> None:
        """Register the sharded parameters and free the gathered ones; nothing where that is so already.

        Args:
            keep_for: ranks, neighbours, among which each keeps a piece of the rows to gather again.

        Raises:
            GatheredParamError: a gathered parameter was written to.
        """
        if self.gather.pending is not None:
            self.gather.drop()
        if not self.is_unsharded:
            return
        self._follow_gathered()
        _register(self._at_rest)
        if keep_for:
            self.gather.keep_piece(streams, keep_for)
        else:
            self.gather.free(streams)
        self._check_not_written()

    def take_in(self, replaced: Sequence[ShardedParam]) -> None:
        """Accept parameters that the user replaced."""
        self.gather.take_in(replaced)
        self._num_replaced += 1
        self._written = self._tensors_at_rest()
        self._at_rest = _entries(self.params, [param.sharded for param in self.params])

    def _follow_gathered(self) -> None:
        """Let the shards require gradients as the gathered parameters, where the user toggled those."""
        wants_grad = list(map(_wants_grad, self.gather.tensors))
        if wants_grad != self._wants_grad:
            for param, wants in zip(self.params, wants_grad, strict=True):
                param.sharded.requires_grad_(wants)
            self._wants_grad = wants_grad

    def _check_not_written(self) -> None:
        """Refuse to throw away what the user wrote to a gathered parameter."""
        versions = list(map(_version_of, self.gather.tensors))
        if versions == self._versions:
            return
        pairs = zip(self.params, versions, self._versions, strict=True)
        names = [param.name for param, now, before in pairs if now != before]
        self._versions = versions
        raise GatheredParamError(
            f"param {names[0]!r}: it was changed in place while gathered ({names}), and the change would be "
            "lost now that it is resharded. Call reshard() on its module first, then change the shards; what "
            "a module changes in its own forward, as Embedding(max_norm=...), has to be done outside of it."
        )

    def _tensors_at_rest(self) -> list[Tensor]:
        """What a write to the shards may leave its mark on: the DTensors and their local tensors."""
        return [tensor for param in self.params for tensor in (param.sharded, param.local)]

    def _values(self) -> tuple[int, int]:
        """What differs when the shards have been written to or replaced."""
        with without_torch_function():
            return self._num_replaced, sum(map(_version_of, self._written))


def _entries(params: Sequence[ShardedParam], held: Sequence[nn.Parameter]) -> Entries:
    """Every attribute of the parameters, each with what it is to hold."""
    return [(*place, tensor) for param, tensor in zip(params, held, strict=True) for place in param.places]


def _register(entries: Entries) -> None:
    for places, name, param in entries:
        places[name] = param

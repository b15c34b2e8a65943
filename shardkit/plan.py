"""Where every tensor of a bucket lies, decided from sizes and a number of ranks alone.

Level 3, pure: TensorSpecs in, BucketPlans out; no torch, no process group. The search is `packing.py`'s; here
are the names, the padding budget, and a plan that checks, prints and hashes itself.

    plan_bucket([TensorSpec("u", 4), TensorSpec("v", 9, block_numel=3)], num_ranks=2, unit_numel=4)

    rank 0  aaaa.bbb    Shards are equal. Each tensor is one interval of the buffer that they make together,
    rank 1  bbbbbb..    so the gathered buffer is the parameters. v starts at 5, for 8 may not cut a block.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, cycle
from math import isqrt, lcm
from string import ascii_letters
from typing import NamedTuple

from shardkit.errors import PaddingError
from shardkit.packing import NEGLIGIBLE_NUMEL, Item, Packing, Shards, item_of, least_shard_numel, pack

DEFAULT_MAX_PADDING = 0.10


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to place and where it may be cut; all sizes in elements.

    Args:
        name: unique in the bucket.
        numel: may be 0.
        block_numel: blocks of this many elements stay on one rank; the last may be short. 1 cuts anywhere.
        period_numel: the numel of one matrix of a stack, where blocks restart. None: blocks run to the end.
        row_numel: what a block that falls is still a multiple of.
        required: if False the planner may take a divisor of the block to meet the padding budget.
    """

    name: str
    numel: int
    block_numel: int = 1
    period_numel: int | None = None
    row_numel: int = 1
    required: bool = True
    item: Item = field(init=False, repr=False, compare=False)  # what the search sees of it

    def __post_init__(self) -> None:
        period_numel = self.numel if self.period_numel is None else self.period_numel
        if self.numel < 0 or min(self.block_numel, self.row_numel, period_numel) < (self.numel > 0):
            raise ValueError(f"tensor {self.name!r}: expected numels of 1 or more, got {self}.")
        if self.numel and self.numel % period_numel:
            raise ValueError(
                f"tensor {self.name!r}: expected whole matrices of period_numel={period_numel} elements, "
                f"got numel={self.numel}. Pass the numel of one matrix of the stack."
            )
        if self.numel and self.block_numel % self.row_numel:
            raise ValueError(
                f"tensor {self.name!r}: expected blocks of whole rows of row_numel={self.row_numel} "
                f"elements, got block_numel={self.block_numel}. Pass a multiple of the row."
            )
        object.__setattr__(self, "item", item_of(self.numel, self.block_numel, period_numel))

    @property
    def num_block_rows(self) -> int:
        """How many rows a block has; not more than the matrix."""
        return max(1, min(self.block_numel, self.period_numel or self.numel) // self.row_numel)

    def fallen(self, factor: int) -> TensorSpec:
        """The spec with its largest block of whole rows that is a divisor and at most 1/factor of its own."""
        fitting = [rows for rows in _divisors(self.num_block_rows) if rows * factor <= self.num_block_rows]
        return replace(self, block_numel=max(fitting, default=1) * self.row_numel)


class LocalRange(NamedTuple):
    """The piece of a tensor that a rank holds, in elements; the starts stay in range where it holds none."""

    start_in_shard: int
    start_in_tensor: int
    numel: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Where every tensor of one collective lies in a buffer of `num_ranks` shards of `shard_numel` elements.

    Args:
        tensors: by name in definition order, with the blocks that were granted.
        starts: by name, in elements of the whole buffer.
        shard_numel: what each rank holds; a multiple of `unit_numel` and `align_numel`.
        num_ranks: the size of the shard axis.
        unit_numel: what the collective wants a shard to be a multiple of.
        align_numel: what every start is a multiple of.
        lower_bound_numel: no order of these tensors has a smaller shard.
        order: the order that was packed.
        notes: what the planner did with a wish that it could choose about.
    """

    tensors: Mapping[str, TensorSpec]
    starts: Mapping[str, int]
    shard_numel: int
    num_ranks: int
    unit_numel: int
    align_numel: int
    lower_bound_numel: int
    order: str
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.shard_numel % lcm(self.unit_numel, self.align_numel):
            raise ValueError(
                f"shard_numel: expected a multiple of {self.unit_numel} and {self.align_numel}, "
                f"got {self.shard_numel}."
            )
        if self.starts.keys() != self.tensors.keys():
            raise ValueError("starts: expected one for every tensor, got other names.")
        end = 0
        for name in sorted(self.starts, key=lambda name: (self.starts[name], self.tensors[name].numel)):
            start, item = self.starts[name], self.tensors[name].item
            if start < end or start % self.align_numel:
                raise ValueError(
                    f"tensor {name!r}: expected to start at a multiple of {self.align_numel} from {end} on, "
                    f"got {start}."
                )
            end = start + item.numel
            for cut in _cuts(start, self.shard_numel, item):
                if cut % item.period_numel % item.block_numel:
                    raise ValueError(
                        f"tensor {name!r}: expected whole blocks, got one cut after {cut} elements."
                    )
        if end > self.num_ranks * self.shard_numel:
            raise ValueError(f"buffer: expected {self.num_ranks * self.shard_numel} elements, got {end}.")

    @property
    def numel(self) -> int:
        """The elements of all tensors, without padding."""
        return sum(tensor.numel for tensor in self.tensors.values())

    @property
    def padding(self) -> float:
        """What the buffer has over its tensors, as a ratio; 0.1 is 10 %."""
        return self.num_ranks * self.shard_numel / max(self.numel, 1) - 1

    @property
    def gap(self) -> float:
        """How far the shard is above its lower bound, as a ratio; 0.0 proves the plan optimal."""
        return self.shard_numel / self.lower_bound_numel - 1

    @property
    def blocks(self) -> dict[str, int]:
        """The block that each tensor was granted, in elements."""
        return {name: tensor.block_numel for name, tensor in self.tensors.items()}

    @property
    def digest(self) -> str:
        """A sha256 of the layout, the same in every process: ranks compare it before the first collective."""
        layout = [(name, *tensor.item, self.starts[name]) for name, tensor in self.tensors.items()]
        fields = (self.num_ranks, self.shard_numel, self.unit_numel, self.align_numel, layout)
        return hashlib.sha256(repr(fields).encode()).hexdigest()

    def numel_of(self, name: str) -> int:
        return self.tensors[name].numel

    def local_range(self, name: str, rank: int) -> LocalRange:
        """Returns the piece of tensor `name` that `rank` holds."""
        start, numel = self.starts[name], self.tensors[name].numel
        offset = rank * self.shard_numel - start  # of the shard in the tensor
        first = min(max(offset, 0), numel)
        last = min(max(offset + self.shard_numel, 0), numel)
        return LocalRange(min(max(first - offset, 0), self.shard_numel), first, last - first)

    def local_numels(self, name: str) -> list[int]:
        """Returns how many elements of tensor `name` each rank holds."""
        start, end = self.starts[name], self.starts[name] + self.tensors[name].numel
        numels = [0] * self.num_ranks
        for rank in range(start // self.shard_numel, -(-end // self.shard_numel)):
            shard_start = rank * self.shard_numel
            numels[rank] = min(end, shard_start + self.shard_numel) - max(start, shard_start)
        return numels

    def pieces(self, rank: int) -> dict[str, LocalRange]:
        """Returns what `rank` holds, by name, in the order it lies in the shard."""
        ranges = (
            (name, self.local_range(name, rank)) for name in sorted(self.starts, key=self.starts.__getitem__)
        )
        return {name: local_range for name, local_range in ranges if local_range.numel}

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def __str__(self) -> str:
        return "\n".join(chain(_certificate(self), _drawing(self), _legend(self)))


def plan_bucket(
    tensors: Sequence[TensorSpec],
    num_ranks: int,
    *,
    unit_numel: int = 1,
    align_numel: int = 1,
    max_padding: float | None = None,
) -> BucketPlan:
    """Returns the plan with the least equal shards in which no block is cut.

    Args:
        tensors: in definition order, which wins where another order is no better.
        num_ranks: the size of the shard axis.
        unit_numel: what the shard must be a multiple of.
        align_numel: what every start, and with it the shard, must be a multiple of.
        max_padding: what the blocks may add to the shards, as a ratio to the same tensors cut anywhere. None
            is 10 %, and no limit where they add less than 65,536 elements over all ranks.

    Raises:
        PaddingError: if the blocks add more; it names the tensors to blame and the ways out, with numbers.
    """
    (plan,) = plan_buckets(
        tensors,
        num_ranks,
        unit_numel=unit_numel,
        align_numel=align_numel,
        max_padding=max_padding,
        max_buckets=1,
    )
    return plan


def plan_buckets(
    tensors: Sequence[TensorSpec],
    num_ranks: int,
    *,
    unit_numel: int = 1,
    align_numel: int = 1,
    max_padding: float | None = None,
    max_buckets: int = 2,
) -> tuple[BucketPlan, ...]:
    """Returns one plan, or two for two collectives, if that saves 0.5 % and 65,536 elements over all ranks.

    Takes and raises what `plan_bucket` does. The budget is for all buckets together.
    """
    if min(num_ranks, unit_numel, align_numel) < 1 or max_buckets not in (1, 2):
        raise ValueError(
            f"expected num_ranks, unit_numel and align_numel of 1 or more and max_buckets of 1 or 2, "
            f"got {num_ranks}, {unit_numel}, {align_numel} and {max_buckets}."
        )
    if max_padding is not None and max_padding < 0:
        raise ValueError(f"max_padding: expected a ratio of 0 or more, got {max_padding}. 0.1 is 10 %.")
    repeated = [name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1]
    if repeated:
        raise ValueError(f"tensor {repeated[0]!r}: expected unique names, got it twice. Pass it once.")
    shards = Shards(num_ranks, lcm(unit_numel, align_numel), align_numel)
    budget = _Budget(shards, max_padding, max_buckets)
    granted = budget.grant(tensors)

    def plan_of(packing: Packing) -> BucketPlan:
        members = [granted[i] for i in packing.members]
        return BucketPlan(
            tensors={tensor.name: tensor for tensor in members},
            starts=dict(zip((tensor.name for tensor in members), packing.starts, strict=True)),
            shard_numel=packing.shard_numel,
            num_ranks=num_ranks,
            unit_numel=unit_numel,
            align_numel=align_numel,
            lower_bound_numel=packing.lower_bound_numel,
            order=packing.order,
            notes=_fall_notes([tensors[i] for i in packing.members], members, budget.ratio),
        )

    packings = pack(tuple([tensor.item for tensor in granted]), shards, max_buckets)
    return tuple(plan_of(packing) for packing in packings)


@dataclass(frozen=True, slots=True)
class _Budget:
    """How much blocks may add to the shards, and what becomes of wishes that add more."""

    shards: Shards
    max_padding: float | None
    max_buckets: int

    def shard_numels(self, tensors: Sequence[TensorSpec]) -> tuple[int, int]:
        """The shards of all buckets together, and what they would be if the tensors could be cut anywhere."""
        items = tuple([tensor.item for tensor in tensors])
        packings = pack(items, self.shards, self.max_buckets)
        return sum(packing.shard_numel for packing in packings), least_shard_numel(items, self.shards)

    def excess(self, tensors: Sequence[TensorSpec]) -> float:
        shard_numel, least_numel = self.shard_numels(tensors)
        return shard_numel / least_numel - 1

    def allows(self, tensors: Sequence[TensorSpec]) -> bool:
        shard_numel, least_numel = self.shard_numels(tensors)
        added_numel = (shard_numel - least_numel) * self.shards.num_ranks
        is_negligible = self.max_padding is None and added_numel < NEGLIGIBLE_NUMEL
        return is_negligible or shard_numel <= least_numel * (1 + self.ratio)

    @property
    def ratio(self) -> float:
        return DEFAULT_MAX_PADDING if self.max_padding is None else self.max_padding

    def grant(self, wishes: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        """The tensors with their wishes or, where those are only preferred, the largest divisors that fit."""
        if self.allows(wishes):
            return wishes
        fallen = wishes
        for factor in _factors(tensor for tensor in wishes if not tensor.required):
            fallen = [tensor if tensor.required else tensor.fallen(factor) for tensor in wishes]
            if self.allows(fallen):
                return self._restored(wishes, fallen)
        raise PaddingError(_refusal(self, fallen))

    def _restored(self, wishes: Sequence[TensorSpec], fallen: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        """Gives each kind of tensor its wish back if the budget bears it: only those to blame stay fallen."""
        for kind in _kinds(wish for wish in wishes if not wish.required):
            candidate = [w if w.item == kind else f for w, f in zip(wishes, fallen, strict=True)]
            fallen = candidate if self.allows(candidate) else fallen
        return fallen


def _fall_notes(
    wishes: Sequence[TensorSpec], granted: Sequence[TensorSpec], max_padding: float
) -> tuple[str, ...]:
    fell: dict[tuple[int, int], list[TensorSpec]] = {}
    for wish, grant in zip(wishes, granted, strict=True):
        if wish.block_numel != grant.block_numel:
            fell.setdefault((wish.item.block_numel, grant.block_numel), []).append(wish)
    return tuple(
        f"{_names(tensors)}: blocks of {wish:,} fell to {grant:,} to pad at most {_percent(max_padding)}"
        for (wish, grant), tensors in fell.items()
    )


def _refusal(budget: _Budget, tensors: Sequence[TensorSpec]) -> str:
    """Why the blocks of these tensors do not fit, whose they are, and each way out with what it costs."""
    kinds = _kinds(tensors)
    blamed: list[Item] = []
    while not budget.allows(_cut_anywhere(tensors, blamed)):
        rest = [kind for kind in kinds if kind not in blamed]
        blamed.append(min(rest, key=lambda kind: budget.excess(_cut_anywhere(tensors, [*blamed, kind]))))
    at_fault = [tensor for tensor in tensors if tensor.item in blamed]
    blocks = ", ".join(sorted({f"{kind.block_numel:,}" for kind in blamed}))
    shard_numel, least_numel = budget.shard_numels(tensors)
    remedies = "".join(f"\n  - {remedy}" for remedy in _remedies(budget, tensors, at_fault))
    return (
        f"{_names(at_fault)}: expected blocks that add at most {_percent(budget.ratio)} to the shards of "
        f"{budget.shards.num_ranks} ranks, got {_percent(budget.excess(tensors))}.\n"
        f"Blocks of {blocks} elements make shards of {shard_numel:,}; cut anywhere they would be "
        f"{least_numel:,}. Do one of:{remedies}"
    )


def _remedies(
    budget: _Budget, tensors: Sequence[TensorSpec], at_fault: Sequence[TensorSpec]
) -> Iterator[str]:
    """The ways out, each of them tried."""
    blamed = set(at_fault)

    def cut_by(factor: int) -> list[TensorSpec]:
        return [tensor.fallen(factor) if tensor in blamed else tensor for tensor in tensors]

    factors = _factors(at_fault)
    fitting = [factor for factor in factors if budget.allows(cut_by(factor))][:1]
    tried = [f"1/{factor} adds {_percent(budget.excess(cut_by(factor)))}" for factor in sorted({2, *fitting})]
    if factors:
        yield f"smaller blocks: {', '.join(tried)}"
    if fitting:
        yield "required=False: the planner then takes the largest divisor that fits, and says so"
    else:
        yield "Blocks.elements(): cut anywhere, they add nothing"
    for num_layers in (2, 4, 8):
        if budget.allows([*tensors] * num_layers):
            excess = _percent(budget.excess([*tensors] * num_layers))
            yield f"a larger unit: {num_layers} like this in one add {excess}"
            break
    for num_ranks in reversed(_divisors(budget.shards.num_ranks)[1:-1]):
        hybrid = replace(budget, shards=budget.shards._replace(num_ranks=num_ranks))
        if hybrid.allows(tensors):
            excess = _percent(hybrid.excess(tensors))
            yield f"hybrid sharding: a shard axis of {num_ranks} ranks adds {excess}"
            break
    yield f"the padding as it is: max_padding={budget.excess(tensors) + 0.001:.3f}"


def _cut_anywhere(tensors: Sequence[TensorSpec], kinds: Sequence[Item]) -> list[TensorSpec]:
    return [TensorSpec(tensor.name, tensor.numel) if tensor.item in kinds else tensor for tensor in tensors]


def _kinds(tensors: Iterable[TensorSpec]) -> list[Item]:
    """The distinct blocked tensors, the largest block first."""
    kinds = dict.fromkeys(tensor.item for tensor in tensors if tensor.item.block_numel > 1)
    return sorted(kinds, key=lambda item: -item.block_numel)


def _factors(tensors: Iterable[TensorSpec]) -> list[int]:
    """By how much the blocks of these tensors can fall, least first."""
    nums_rows = {tensor.num_block_rows for tensor in tensors}
    return sorted({factor for num_rows in nums_rows for factor in _divisors(num_rows)[1:]})


@lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def _cuts(start: int, shard_numel: int, item: Item) -> range:
    """After how many of its elements shards cut an item; without a period two cuts speak for the rest."""
    cuts = range(shard_numel - start % shard_numel, item.numel, shard_numel)
    return cuts if item.is_periodic else cuts[:2]


def _certificate(plan: BucketPlan) -> Iterator[str]:
    yield (
        f"{len(plan.tensors)} tensors of {plan.numel:,} elements on {plan.num_ranks} ranks: "
        f"shards of {plan.shard_numel:,}, padding {_percent(plan.padding)}"
    )
    yield (
        f"order: {plan.order}; bound on any order: {plan.lower_bound_numel:,}, gap {_percent(plan.gap)}; "
        f"unit {plan.unit_numel}, alignment {plan.align_numel}"
    )
    yield from (f"note: {note}" for note in plan.notes)


def _drawing(plan: BucketPlan) -> Iterator[str]:
    """One line a rank and at most one character an element; of many ranks the first and the last ones."""
    held = sorted((start, name) for name, start in plan.starts.items() if plan.numel_of(name))
    letters = dict(zip(plan.tensors, cycle(ascii_letters), strict=False))
    num_columns = min(64, plan.shard_numel)

    def letter_at(offset: int) -> str:
        index = bisect_right(held, offset, key=lambda pair: pair[0]) - 1
        is_padding = index < 0 or offset >= held[index][0] + plan.numel_of(held[index][1])
        return "." if is_padding else letters[held[index][1]]

    ranks = range(plan.num_ranks)
    for rank in sorted({*ranks[:8], *ranks[-8:]}):
        if rank == plan.num_ranks - 8 > 8:
            yield "  ..."
        middles = ((2 * column + 1) * plan.shard_numel // (2 * num_columns) for column in range(num_columns))
        yield f"  rank {rank:<6} {''.join(letter_at(rank * plan.shard_numel + middle) for middle in middles)}"


def _legend(plan: BucketPlan) -> Iterator[str]:
    shown = list(zip(plan.tensors.values(), ascii_letters[:16], strict=False))
    for tensor, letter in shown:
        blocks = f" in blocks of {tensor.block_numel:,}" if tensor.block_numel > 1 else ""
        yield f"  {letter} {tensor.name}: {tensor.numel:,}{blocks}"
    if len(plan.tensors) > len(shown):
        yield f"  ... {len(plan.tensors) - len(shown)} more"


def _names(tensors: Sequence[TensorSpec]) -> str:
    names = ", ".join(repr(tensor.name) for tensor in tensors[:3])
    return names if len(tensors) <= 3 else f"{names} and {len(tensors) - 3} more"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2f} %"

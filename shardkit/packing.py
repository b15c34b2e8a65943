"""The exact search behind the planner: integers in, the least equal shard out.

Level 1, pure. `pack` takes items (tensors without names) and the shards to fill; for each of a few orders it
finds the least shard there is, and it bounds what any order can reach. Names and budgets are `plan.py`'s.

An item may be cut at its block edges only, and a cut falls where a shard ends. Two items, b in blocks of 3:

    rank 0  aaaa.bbb    b may not start at 4, for the end of the shard would cut its second block;
    rank 1  bbbbbb..    it starts where that end lies a whole number of blocks ahead
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from math import lcm
from typing import NamedTuple

NEGLIGIBLE_NUMEL = 1 << 16  # 128 KiB in bfloat16: moving it takes less time than starting a collective
WORTH_A_BUCKET = 0.005  # of the bytes: a second collective has to save this much


class Item(NamedTuple):
    """A tensor as the search sees it: a cut after j elements needs `j % period_numel % block_numel == 0`."""

    numel: int
    block_numel: int
    period_numel: int  # of one matrix of a stack, where blocks restart; `numel` where that changes nothing

    @property
    def is_periodic(self) -> bool:
        return self.period_numel < self.numel

    @property
    def granule(self) -> int:
        """What must divide the shard before the item may cover a whole one."""
        return self.period_numel if self.is_periodic else self.block_numel


class Shards(NamedTuple):
    """What there is to fill: equal shards, one a rank."""

    num_ranks: int
    unit_numel: int  # a shard is a multiple of this; itself a multiple of `align_numel`
    align_numel: int  # every start is a multiple of this


class Packing(NamedTuple):
    """One bucket: which items it holds, in definition order, and where each starts in the whole buffer."""

    members: tuple[int, ...]
    starts: tuple[int, ...]
    shard_numel: int
    lower_bound_numel: int
    order: str


class Lattice(NamedTuple):
    """The shards that are multiples of `numel`; no packing on it has a shard below `least_numel`."""

    least_numel: int
    numel: int


ORDERS: dict[str, Callable[[Item], int]] = {
    "definition": lambda item: 0,
    "block descending": lambda item: -item.block_numel,
    "size descending": lambda item: -item.numel,
    "size ascending": lambda item: item.numel,
}


@lru_cache(maxsize=4096)
def item_of(numel: int, block_numel: int, period_numel: int) -> Item:
    """Returns the item in the one form that all with the same cuts share, so that they are packed alike."""
    if numel == 0:
        return Item(0, 1, 1)
    block_numel = min(block_numel, period_numel)
    return Item(numel, block_numel, period_numel if period_numel % block_numel else numel)


@lru_cache(maxsize=256)
def pack(items: tuple[Item, ...], shards: Shards, max_buckets: int) -> tuple[Packing, ...]:
    """Returns the packing with the least shards, in one bucket or, where that is worth it, in two.

    Two must save `WORTH_A_BUCKET` of the one, and `NEGLIGIBLE_NUMEL` over all ranks. The cache is the shape
    cache: items have no names, so equal layers are packed once.
    """
    stock = _stock_of(items)
    one = _pack_bucket(stock, frozenset(stock.kind_of), shards)
    assert one is not None, "everything on one rank is always a packing"
    if max_buckets == 1:
        return (one,)
    saved_numel = max(int(one.shard_numel * WORTH_A_BUCKET), NEGLIGIBLE_NUMEL // shards.num_ranks)
    return _pack_two_buckets(stock, shards, one.shard_numel - saved_numel) or (one,)


def least_shard_numel(items: Sequence[Item], shards: Shards) -> int:
    """Returns the shard of the same items cut anywhere; what blocks add is measured from there."""
    return _least_shard_numel(Counter(items), shards)


class _Stock(NamedTuple):
    """The items, sorted once. A bucket is a set of kinds: the numbers of its distinct items in `kinds`."""

    kinds: tuple[Item, ...]
    kind_of: list[int]  # of each item
    orders: dict[str, list[int]]  # the items by number

    def members(self, bucket: frozenset[int], order: Sequence[int]) -> list[int]:
        return [i for i in order if self.kind_of[i] in bucket]

    def counts(self, bucket: frozenset[int]) -> Counter[Item]:
        counts = Counter(self.kind_of)
        return Counter({self.kinds[kind]: counts[kind] for kind in sorted(bucket)})


def _stock_of(items: Sequence[Item]) -> _Stock:
    kinds = tuple(dict.fromkeys(items))
    number_of = {item: number for number, item in enumerate(kinds)}
    kind_of = [number_of[item] for item in items]
    orders = {}
    for name, key in ORDERS.items():
        keys = [key(item) for item in kinds]
        orders[name] = sorted(range(len(items)), key=[keys[kind] for kind in kind_of].__getitem__)
    return _Stock(kinds, kind_of, orders)


def _pack_two_buckets(stock: _Stock, shards: Shards, below: int) -> tuple[Packing, ...]:
    """The best way to part the items by block or size; empty if no two shards add up to less than `below`."""
    candidates = []
    for few, many in _partings(stock):
        bounds = [lattices_of(stock.counts(part), shards)[0].least_numel for part in (few, many)]
        candidates.append((sum(bounds), bounds[1], stock.members(few, range(len(stock.kind_of))), few, many))
    best: tuple[Packing, ...] = ()
    for bound, bound_of_many, _, few, many in sorted(candidates):
        if bound >= below:
            break
        first = _pack_bucket(stock, few, shards, below - bound_of_many)
        second = _pack_bucket(stock, many, shards, below - first.shard_numel) if first else None
        if first and second:
            best = tuple(sorted((first, second)))
            below = first.shard_numel + second.shard_numel
    return best


def _partings(stock: _Stock) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """The kinds from a block or size on and the others, the fewer items first: it is quick to pack them."""
    everything = frozenset(stock.kind_of)
    seen = set()
    for weight in ([item.block_numel for item in stock.kinds], [item.numel for item in stock.kinds]):
        for least in sorted(set(weight))[1:]:
            heavy = frozenset(kind for kind in everything if weight[kind] >= least)
            if heavy not in seen:
                seen.add(heavy)
                light = everything - heavy
                num_heavy, num_light = (sum(stock.counts(part).values()) for part in (heavy, light))
                yield (heavy, light) if num_heavy < num_light else (light, heavy)


def _pack_bucket(
    stock: _Stock, bucket: frozenset[int], shards: Shards, below: int | None = None
) -> Packing | None:
    """The least shard (under `below`) over all `ORDERS`; ties go to the earlier order."""
    lattices = lattices_of(stock.counts(bucket), shards)
    bound = lattices[0].least_numel
    best = None
    tried: list[list[int]] = []
    for name, numbers in stock.orders.items():
        order = stock.members(bucket, numbers)
        kinds = [stock.kind_of[i] for i in order]
        if kinds in tried:
            continue
        tried.append(kinds)
        found = pack_in_order(stock.kinds, kinds, shards, lattices, below)
        if found:
            below, starts = found
            start_of = dict(zip(order, starts, strict=True))
            members = tuple(sorted(order))
            best = Packing(members, tuple([start_of[i] for i in members]), below, bound, name)
            if below == bound:
                break
    return best


def lattices_of(counts: Counter[Item], shards: Shards) -> list[Lattice]:
    """Every lattice that can hold the least shard, the one that could hold the smallest first.

    [Note: lattices] An item that covers a whole shard is cut at both ends of it, so its block divides the
    shard. For a given set of items that may cover, feasibility is monotone over the multiples of their common
    multiple: in a larger shard each rank keeps what it holds, heads flush right, tails flush left. So one
    bisection for each common multiple is exact. An item that may not cover crosses one boundary at most: the
    shard is at least half of it, which bounds every order at once. A stack with a short last block in each
    matrix may cover only shards of whole matrices: always valid, and all there is for a stack so long that
    its cuts meet every phase of a matrix.
    """
    floor = max([_least_shard_numel(counts, shards), *(item.block_numel for item in counts)])
    most = _least_shard_numel(counts, shards._replace(num_ranks=1))
    largest: dict[int, int] = {}  # granule -> numel of its largest item that could cover a shard
    for item in counts:
        if item.numel > floor:
            largest[item.granule] = max(largest.get(item.granule, 0), 0 if item.is_periodic else item.numel)
    numels = {shards.unit_numel}
    for granule in largest:
        numels |= {joint for numel in numels if (joint := lcm(numel, granule)) <= most}
    lattices = []
    for numel in numels:
        uncovered = max((size for granule, size in largest.items() if numel % granule), default=0)
        lattices.append(Lattice(_round_up(max(floor, -(-uncovered // 2)), numel), numel))
    return sorted(lattices)


def pack_in_order(
    kinds: Sequence[Item],
    order: Sequence[int],
    shards: Shards,
    lattices: Sequence[Lattice],
    below: int | None = None,
) -> tuple[int, list[int]] | None:
    """Returns the least shard and the starts, or None if there is none under `below`.

    The items are `kinds[number]` for each number of `order`.
    """
    counts = Counter(order)
    total = max(1, sum(n * _round_up(kinds[k].numel, shards.align_numel) for k, n in counts.items()))
    found = None
    for least, lattice in lattices:
        high = _round_up(total, lattice) if below is None else (below - 1) // lattice * lattice
        if least > high:
            continue
        cuts = [_cut(item, shards.align_numel, lattice) for item in kinds]
        gaps_at = partial(_gaps, [cuts[number] for number in order], shards.num_ranks, total)
        packed = _least_feasible(gaps_at, lattice, least, high)
        if packed:
            found, below = packed, packed[0]
    if found is None:
        return None
    shard_numel, gaps = found
    numels = [_round_up(kind.numel, shards.align_numel) for kind in kinds]
    starts, end = [], 0
    for gap, number in zip(gaps, order, strict=True):
        starts.append(end + gap)
        end += gap + numels[number]
    return shard_numel, starts


def _least_feasible(
    gaps_at: Callable[[int], list[int] | None], lattice: int, low: int, high: int
) -> tuple[int, list[int]] | None:
    """The least shard in [low, high] with gaps. Steps double before they halve: it is mostly near `low`."""
    best = gaps_at(high)
    if best is None:
        return None
    step = 0
    while low < high:
        middle = min(low + step, (low + high) // 2 // lattice * lattice)
        gaps = gaps_at(middle)
        if gaps is None:
            low, step = middle + lattice, step * 2 + lattice
        else:
            high, best = middle, gaps
    return high, best


class _Cut(NamedTuple):
    """What the inner loop asks of an item. Its head is the part that lies before a boundary."""

    numel: int  # rounded up to the start alignment, as boundaries are
    reach_numel: int  # how much has to lie in two shards: all of it, or nothing if it may cover a shard
    step_numel: int  # heads are multiples of this; 0 for a stack, which has to look for its last edge
    last_edge: Callable[[int], int]


def _cut(item: Item, align_numel: int, lattice: int) -> _Cut:
    numel = _round_up(item.numel, align_numel)
    reach_numel = numel if lattice % item.granule else 0
    step_numel = 0 if item.is_periodic else lcm(item.block_numel, align_numel)
    return _Cut(numel, reach_numel, step_numel, partial(_last_edge, item, align_numel))


def _gaps(cuts: Sequence[_Cut], num_ranks: int, total_numel: int, shard_numel: int) -> list[int] | None:
    """The least gap before each item, or None if they do not fit. Least is best: so is then the end.

    Offsets count from the next boundary: Python adds them at twice the speed of offsets in the buffer.
    """
    gaps = []
    slack = num_ranks * shard_numel - total_numel
    room = shard_numel  # up to the next boundary
    for numel, reach, step, last_edge in cuts:
        if numel <= room:
            room -= numel
            gaps.append(0)
            continue
        head = room - room % step if step else last_edge(room)
        gap = room - head
        if not head or head + shard_numel < reach:
            head, gap = 0, room
            if numel > shard_numel:
                head = shard_numel - shard_numel % step if step else last_edge(shard_numel)
                gap = room + shard_numel - head
                if not head or head + shard_numel < reach:
                    return None
        slack -= gap
        if slack < 0:
            return None
        room = (head - numel) % shard_numel
        gaps.append(gap)
    return gaps


def _last_edge(item: Item, align_numel: int, room: int) -> int:
    """The last block edge of a stack that is aligned and lies within the room; edge 0 always does."""
    edge = room - room % item.period_numel % item.block_numel
    while edge % align_numel:
        edge -= 1
        edge -= edge % item.period_numel % item.block_numel
    return edge


def _least_shard_numel(counts: Counter[Item], shards: Shards) -> int:
    total = sum(count * _round_up(item.numel, shards.align_numel) for item, count in counts.items())
    return _round_up(max(1, -(-total // shards.num_ranks)), shards.unit_numel)


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple

"""The search against trying every shard and every start."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from shardkit.packing import Item, Shards, item_of, lattices_of, pack, pack_in_order


def exhaustive_shard_numel(items: Sequence[Item], shards: Shards) -> int:
    """The least shard for this order, by trying every shard and every start."""
    num_ranks, unit_numel, align_numel = shards

    def is_whole(item: Item, start: int, shard_numel: int) -> bool:
        boundaries = range(0, num_ranks * shard_numel, shard_numel)
        cuts = [boundary - start for boundary in boundaries if 0 < boundary - start < item.numel]
        return all(cut % item.period_numel % item.block_numel == 0 for cut in cuts)

    def fits(shard_numel: int) -> bool:
        @cache
        def fits_from(index: int, cursor: int) -> bool:
            if index == len(items):
                return True
            starts = range(cursor, num_ranks * shard_numel - items[index].numel + 1)
            return any(
                start % align_numel == 0
                and is_whole(items[index], start, shard_numel)
                and fits_from(index + 1, start + items[index].numel)
                for start in starts
            )

        return fits_from(0, 0)

    shard_numel = unit_numel
    while not fits(shard_numel):
        shard_numel += unit_numel
    return shard_numel


def random_instance(
    rng: random.Random, num_items: int, with_stacks: bool = False
) -> tuple[list[Item], Shards]:
    align_numel = rng.choice([1, 1, 2, 3, 4])
    shards = Shards(rng.randint(1, 5), align_numel * rng.choice([1, 1, 2]), align_numel)
    items = []
    for _ in range(rng.randint(1, num_items)):
        block_numel = rng.randint(1, 6)
        numel = period_numel = rng.randint(0, 14)
        if with_stacks and rng.random() < 0.5:
            period_numel = rng.randint(1, 6)
            numel = period_numel * rng.randint(0, 3)
        items.append(item_of(numel, block_numel, period_numel))
    return items, shards


def test_fixed_order_is_exact_against_exhaustive_search() -> None:
    rng = random.Random(0)
    for _ in range(10_000):
        items, shards = random_instance(rng, num_items=4)
        found = pack_in_order(items, range(len(items)), shards, lattices_of(Counter(items), shards))
        assert found is not None
        assert found[0] == exhaustive_shard_numel(items, shards), (items, shards)


def test_stacks_with_short_blocks_are_exact_where_they_cover_no_shard() -> None:
    rng = random.Random(1)
    num_exact = 0
    for _ in range(5_000):
        items, shards = random_instance(rng, num_items=4, with_stacks=True)
        found = pack_in_order(items, range(len(items)), shards, lattices_of(Counter(items), shards))
        assert found is not None
        least_numel = exhaustive_shard_numel(items, shards)
        assert found[0] >= least_numel
        if all(item.numel <= least_numel for item in items if item.is_periodic):
            assert found[0] == least_numel, (items, shards)
            num_exact += 1
    assert num_exact > 2_500


def test_lower_bound_holds_for_every_order() -> None:
    rng = random.Random(2)
    num_tight = 0
    for _ in range(2_000):
        items, shards = random_instance(rng, num_items=3, with_stacks=True)
        (packing,) = pack(tuple(items), shards, max_buckets=1)
        least_numel = min(exhaustive_shard_numel(order, shards) for order in permutations(items))
        assert packing.lower_bound_numel <= least_numel <= packing.shard_numel, (items, shards)
        num_tight += packing.lower_bound_numel == packing.shard_numel
    assert num_tight > 1_000


def test_a_search_under_a_bound_finds_less_than_it_or_nothing() -> None:
    """So a tie goes to the earlier order."""
    rng = random.Random(4)
    for _ in range(2_000):
        items, shards = random_instance(rng, num_items=4)
        lattices = lattices_of(Counter(items), shards)
        least_numel = exhaustive_shard_numel(items, shards)
        assert pack_in_order(items, range(len(items)), shards, lattices, below=least_numel) is None
        found = pack_in_order(items, range(len(items)), shards, lattices, below=least_numel + 1)
        assert found is not None and found[0] == least_numel, (items, shards)


def test_a_tensor_that_may_not_cover_a_shard_bounds_it_by_half() -> None:
    """30 elements in blocks of 7 on 4 ranks: shards of 8 would do, were it not for the blocks."""
    shards = Shards(4, 1, 1)
    (packing,) = pack((item_of(30, 7, 30),), shards, max_buckets=1)
    assert (packing.shard_numel, packing.lower_bound_numel) == (14, 14)


small_items = st.builds(
    lambda numel, block_numel: item_of(numel, block_numel, numel), st.integers(0, 14), st.integers(1, 6)
)


@given(st.lists(small_items, min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 2))
def test_fixed_order_is_exact_and_failures_shrink(
    items: list[Item], num_ranks: int, align_numel: int, num_aligned: int
) -> None:
    shards = Shards(num_ranks, align_numel * num_aligned, align_numel)
    found = pack_in_order(items, range(len(items)), shards, lattices_of(Counter(items), shards))
    assert found is not None
    assert found[0] == exhaustive_shard_numel(items, shards)


def test_two_buckets_are_the_best_parting_if_they_save_enough() -> None:
    rng = random.Random(3)
    outcomes: Counter[str] = Counter()
    for _ in range(1_000):
        scale = rng.choice([1, 1000])
        blocks = [scale * rng.choice([1, 24, 30, 35, 64, 77]) for _ in range(rng.randint(1, 6))]
        items = tuple(item_of(block * (n := rng.randint(1, 300)), block, block * n) for block in blocks)
        shards = Shards(rng.choice([16, 100, 300]), 8, 8)
        one = pack(items, shards, max_buckets=1)[0].shard_numel
        totals = [sum(pack(part, shards, 1)[0].shard_numel for part in parts) for parts in partings(items)]
        best = min(totals, default=one)
        packings = pack(items, shards, max_buckets=2)
        if best < one * 0.995 - 1 and (one - best) * shards.num_ranks > 2**16 + shards.num_ranks:
            outcomes["two"] += 1
            assert sum(packing.shard_numel for packing in packings) == best
            assert sorted(i for packing in packings for i in packing.members) == list(range(len(items)))
        elif best > one * 0.995 + 1 or (one - best) * shards.num_ranks < 2**16 - shards.num_ranks:
            outcomes["one, for two save too little" if best < one else "one"] += 1
            assert len(packings) == 1
    assert len(outcomes) == 3 and min(outcomes.values()) > 50


def partings(items: Sequence[Item]) -> Iterator[tuple[tuple[Item, ...], tuple[Item, ...]]]:
    """The items from a block or a size on, and the others."""
    for weight in ("block_numel", "numel"):
        for least in sorted({getattr(item, weight) for item in items})[1:]:
            heavy = tuple(item for item in items if getattr(item, weight) >= least)
            yield heavy, tuple(item for item in items if getattr(item, weight) < least)

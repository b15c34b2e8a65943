"""What ranks ask one another: whether they planned the same, before the first collective; or a number.

Level 6 of the data flow. Ranks that disagree would send rows of one parameter into the place of another, or
wait for each other for ever. That question goes over the rendezvous store and not over the group: a store has
a timeout of its own and can say who has not answered.

    every rank          sets    its digest
    the group's first   reads   all, and sets the verdict: agreed, who is missing, or who differs
    who differs         sets    one short hash a parameter; the first says where the first difference is
    every rank          reads   the verdict, and raises the same error
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardkit._torch import Store, default_store
from shardkit.collectives import Route, all_gather, all_reduce_now, has_peers
from shardkit.errors import PlanMismatchError
from shardkit.layout import digest
from shardkit.mesh import DataAxes

TIMEOUT = timedelta(seconds=60)

_num_questions: Counter[str] = Counter()


def check_agreement(
    lines: Sequence[str], group: dist.ProcessGroup, what: str, timeout: timedelta = TIMEOUT
) -> None:
    """Compare one description a rank. Collective over `group`: all ranks must call, in the same order.

    Args:
        lines: one line a parameter, the same on every rank where the plans agree.
        what: the model, for errors.
    Raises:
        PlanMismatchError: a rank planned something else, or did not answer in time; on all ranks that
            answered.
    """
    ranks = dist.get_process_group_ranks(group)
    question = f"shardkit/{group.group_name}/{_num_questions[group.group_name]}"
    _num_questions[group.group_name] += 1
    store, rank = default_store(), dist.get_rank()
    store.set(f"{question}/{rank}", digest(lines))
    if rank == ranks[0]:
        store.set(f"{question}/verdict", json.dumps(_judge(store, question, ranks, timeout)))
    silent = f"rank {ranks[0]} did not compare the plans of ranks {ranks}"

    def answer(key: str, fact: str) -> Any:
        try:
            store.wait([f"{question}/{key}"], 2 * timeout)
        except RuntimeError as error:
            raise PlanMismatchError(
                f"{what}: {fact} within {2 * timeout}. It died or did not run this model; every rank must "
                "run the same units."
            ) from error
        return json.loads(store.get(f"{question}/{key}"))

    verdict = answer("verdict", silent)
    if verdict["missing"]:
        raise PlanMismatchError(
            f"{what}: ranks {verdict['missing']} of {ranks} did not bring a plan within {timeout}. They died "
            "or did not run this model; every rank must run the same units."
        )
    if (other := verdict["other"]) is not None:
        hashes = [digest([line])[:8] for line in lines]
        if rank == other:
            store.set(f"{question}/hashes", json.dumps(hashes))
        if rank == ranks[0]:
            theirs = answer("hashes", f"rank {other} did not say what it planned otherwise")
            store.set(f"{question}/index", json.dumps(_first_difference(hashes, theirs)))
        index = answer("index", silent)
        mine = lines[index] if index < len(lines) else "nothing more"
        raise PlanMismatchError(
            f"{what}: rank {other} planned other shards than rank {ranks[0]}. First difference, "
            f"as rank {rank} has it: {mine}. Build the same model, with the same fully_shard calls, on every "
            "rank."
        )


def exchange_texts(text: str, route: Route, device: torch.device, label: str) -> list[str]:
    """Every rank's text, in rank order. Collective over `route.group`: all ranks must call.

    Two collectives, of the lengths and of the texts, however many ranks: for what differs by rank and all
    must know, once, where `check_agreement` says only that nothing differs.
    """
    size = route.group.size()
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    lengths = torch.empty(size, dtype=torch.int64, device=device)
    all_gather(lengths, torch.tensor([own.numel()], device=device), route, label).wait()
    longest = int(lengths.max())
    rows = torch.zeros(size * longest, dtype=torch.uint8, device=device)
    row = torch.nn.functional.pad(own, (0, longest - own.numel()))
    all_gather(rows, row, route, label).wait()
    pairs = zip(rows.view(size, longest).tolist(), lengths.tolist(), strict=True)
    return [bytes(row[:length]).decode() for row, length in pairs]


def largest_of_ranks(
    number: int, groups: Sequence[dist.ProcessGroup], device: torch.device, what: str
) -> int:
    """The largest of the ranks' numbers. Collective over each of `groups`: all ranks must call.

    Waits for the device. Where the groups are the axes of a mesh, it is the largest of all its ranks.

    Args:
        what: is decided by it, for errors.
    """
    largest = torch.tensor([number], device=device)
    for group in groups:
        all_reduce_now(largest, group, what, dist.ReduceOp.MAX)
    return int(largest.item())


def groups_with_peers(
    groups: Iterable[dist.ProcessGroup | None], device: torch.device
) -> list[dist.ProcessGroup]:
    """The groups over which anything is sent, each once, in the order that all ranks share."""
    return [g for g in dict.fromkeys(groups) if g is not None and g.size() > 1 and has_peers(g, device)]


def groups_of(axes: Iterable[DataAxes], device: torch.device) -> list[dist.ProcessGroup]:
    """The same of buckets that are cut and copied over `axes`."""
    return groups_with_peers([group for of in axes for group in (of.shard_group, of.replicate_group)], device)


def _judge(store: Store, question: str, ranks: list[int], timeout: timedelta) -> dict[str, object]:
    """{missing: ranks, other: a rank that differs from the first, or None}."""
    missing: list[int] = []
    digests: dict[int, bytes] = {}
    for rank in ranks:
        key = f"{question}/{rank}"
        try:
            store.wait([key], timeout if not missing else timedelta(milliseconds=10))
            digests[rank] = store.get(key)
        except RuntimeError:
            missing.append(rank)
    other = next((rank for rank, found in digests.items() if found != digests[ranks[0]]), None)
    return {"missing": missing, "other": other}


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> int:
    pairs = zip(mine, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(theirs)))

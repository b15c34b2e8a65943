"""Ranks on this machine for scripts that start without torchrun, and what they say in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_on_ranks(main: Callable[[], None], world_size: int) -> None:
    """Call `main()` on `world_size` gloo ranks, each a process of its own; raise what one of them raises."""
    with tempfile.TemporaryDirectory() as folder:
        args = (main, world_size, f"file://{folder}/store")
        mp.start_processes(_run_rank, args, nprocs=world_size, start_method="fork")


def say_each(text: str) -> None:
    """Print what every rank has to say, in rank order. Collective: all ranks must call."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    if dist.get_rank() == 0:
        for rank, said in enumerate(texts):
            print(f"rank {rank}: {said}", flush=True)


def _run_rank(rank: int, main: Callable[[], None], world_size: int, init_method: str) -> None:
    torch.set_num_threads(1)  # ranks share this machine's cores
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    torch.manual_seed(0)  # all ranks build the same model
    main()
    dist.barrier()
    dist.destroy_process_group()

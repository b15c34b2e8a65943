"""What may not change while a sum over the replicas is deferred."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

from shardkit import fully_shard
from tests.support.models import MLP, normal_batch
from tests.support.ranks import errors_on_all_ranks


def test_switching_requires_grad_between_deferred_micro_batches_is_refused_by_name() -> None:
    """The partial sum has places for what was trainable; another parameter of that size would get them."""

    def switch(rank: int, world_size: int) -> None:
        model = MLP(5, 5, 5)
        model.layers[0].weight.requires_grad_(False)
        fully_shard(model, init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
        model.set_requires_all_reduce(False)
        model(normal_batch(rank, 2, 5)).mean().backward()
        for layer in model.layers:
            layer.weight.requires_grad_(not layer.weight.requires_grad)
        model.set_requires_all_reduce(True)
        model(normal_batch(rank, 2, 5)).mean().backward()

    names = ("'layers.0.weight'", "'layers.1.weight'")
    errors_on_all_ranks(switch, 2, RuntimeError, *names, "deferred", "set_requires_all_reduce(True)")

"""The order of streams, with collectives and layers that are slow where a missing wait would show.

A fake group of two moves nothing, so its collectives are replaced by ones that keep their stream busy and
then write what two equal ranks would have sent. Wrong order is then a wrong number:

    slow collectives    a computation that did not wait reads what was in the bytes before
    slow layers         a gather that did not wait overwrites bytes that are still read
                        ([Note: freeing gathered parameters] in shardkit/streams.py)
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardkit import fully_shard
from tests.gpu.one_gpu import Spinner, needs_gpu, replace_collectives, run_on_gpu

pytestmark = needs_gpu

DIM, NUM_LAYERS, NUM_STEPS = 256, 6, 3  # one matrix a unit, so that its rows are the matrix itself


class Layer(nn.Linear):
    """A matrix that notes where it lay, and may be slow before it is used."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__(DIM, DIM, bias=False)
        self.before, self.address = before, 0

    def forward(self, x: Tensor) -> Tensor:
        self.address = self.weight.data_ptr()
        self.before()
        return super().forward(x)


def nothing() -> None:
    """What is before a layer or a collective that is not slow."""


def build(before: Callable[[], None] = nothing) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Layer(before) for _ in range(NUM_LAYERS))).cuda()


def shard(model: nn.Sequential, twin: nn.Sequential, before: Callable[[], None]) -> nn.Sequential:
    """Shard over a fake group of two whose gathers write the weights that `twin` has at that time."""
    full = {f"unit '{name}'": layer.weight.detach() for name, layer in twin.named_children()}
    replace_collectives(full, before)
    mesh = init_device_mesh("cuda", (2,))
    for module in (*model, model):
        fully_shard(module, mesh)
    return model


def train_beside_twin(before_layers: Callable[[], None], before_collectives: Callable[[], None]) -> nn.Module:
    """Some steps with changing weights; outputs and gradients are the twin's, which is not sharded."""
    twin = build()
    model = shard(build(before_layers), twin, before_collectives)
    for step in range(NUM_STEPS):
        x = torch.randn(32, DIM, generator=torch.Generator().manual_seed(step)).cuda()
        torch.cuda.synchronize()
        output = model(x)
        assert not torch.cuda.current_stream().query(), "the host waited, so the streams' order was not tried"
        output.square().sum().backward()
        grads = [layer.weight.grad.to_local().clone() for layer in model]
        expected = twin(x)
        expected.square().sum().backward()
        torch.testing.assert_close(output, expected)
        for grad, layer in zip(grads, twin, strict=True):
            torch.testing.assert_close(grad, layer.weight.grad[: DIM // 2])
        with torch.no_grad():
            for param in (*model.parameters(), *twin.parameters()):
                param.mul_(1.1)
        model.zero_grad()
        twin.zero_grad()
    return model


def test_layers_and_gradients_wait_for_slow_collectives() -> None:
    run_on_gpu(lambda: train_beside_twin(nothing, Spinner()) and None, fake_ranks=2)


def test_gathers_do_not_overwrite_what_slow_layers_still_read() -> None:
    def body() -> None:
        model = train_beside_twin(Spinner(), nothing)
        num_places = len({layer.address for layer in model})  # in the last forward
        assert num_places < NUM_LAYERS, "no bytes were used twice, so nothing was tried"

    run_on_gpu(body, fake_ranks=2)


@pytest.mark.parametrize("given", [True, False])
def test_gathers_wait_for_the_post_optim_event_alone_where_one_is_given(given: bool) -> None:
    def body() -> bool:
        def note() -> None:
            notes.append(torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True)))

        notes: list[
            torch.cuda.Event
        ] = []  # before, after what has nothing to do with the weights, first gather
        model, spin, x = shard(build(), build(), note), Spinner(), torch.ones(1, DIM, device="cuda")
        with torch.no_grad():
            model(x)
            notes.clear()
            note()
            if given:
                model.set_post_optim_event(torch.cuda.current_stream().record_event())
            spin()
            note()
            model(x)
        torch.cuda.synchronize()
        return notes[0].elapsed_time(notes[2]) < notes[0].elapsed_time(notes[1])

    assert run_on_gpu(body, fake_ranks=2) is given

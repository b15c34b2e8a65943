"""What the simulation of streams calls a race, op by op."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from tests.support.stream_order import Simulation, simulated_streams


def races_of(simulation: Simulation) -> str:
    return "\n".join(simulation.races)


@pytest.mark.parametrize("waits", [True, False])
def test_a_read_on_another_stream_has_to_wait_for_the_write(waits: bool) -> None:
    with simulated_streams() as simulation:
        device, tensor = simulation.device, torch.empty(4)
        side = device.Stream()
        side.wait_stream(device.current_stream())
        tensor.fill_(1.0)
        written = device.current_stream().record_event()
        with device.stream(side):
            if waits:
                side.wait_event(written)
            tensor.add(1.0)
    assert (races_of(simulation) == "") is waits


@pytest.mark.parametrize("waits", [True, False])
def test_a_write_has_to_wait_for_reads(waits: bool) -> None:
    with simulated_streams() as simulation:
        device, tensor = simulation.device, torch.zeros(4)
        side = device.Stream()
        side.wait_stream(device.current_stream())
        with device.stream(side):
            tensor.add(1.0)
        if waits:
            device.current_stream().wait_stream(side)
        tensor.fill_(1.0)
    assert (races_of(simulation) == "") is waits


def test_two_reads_and_writes_to_two_halves_need_no_order() -> None:
    with simulated_streams() as simulation:
        device, tensor = simulation.device, torch.zeros(4)
        side = device.Stream()
        side.wait_stream(device.current_stream())
        tensor[:2].fill_(1.0)
        with device.stream(side):
            tensor[2:].fill_(1.0)
        other = torch.zeros(4)
        side.wait_stream(device.current_stream())
        other.add(1.0)
        with device.stream(side):
            other.add(1.0)
    assert not simulation.races


@pytest.mark.parametrize("how", ["dies", "resized"])
@pytest.mark.parametrize("waits", [True, False])
def test_freed_bytes_are_used_again_on_the_stream_that_allocated_them(how: str, waits: bool) -> None:
    with simulated_streams() as simulation:
        device, tensor = simulation.device, torch.zeros(4)
        side = device.Stream()
        side.wait_stream(device.current_stream())
        with device.stream(side):
            tensor.add(1.0)
        if how == "dies":
            del tensor
        else:
            tensor.untyped_storage().resize_(0)
        if waits:
            device.current_stream().wait_stream(side)
        torch.zeros(4)
    assert (races_of(simulation) == "") is waits
    assert waits or "in bytes since freed" in races_of(simulation)


def test_new_bytes_are_not_another_streams_before_it_waits_for_their_own() -> None:
    with simulated_streams() as simulation:
        side = simulation.device.Stream()
        tensor = torch.zeros(4).add(1.0)
        fresh = torch.empty_like(tensor)
        with simulation.device.stream(side):
            fresh.fill_(1.0)
    assert "was given before" in races_of(simulation)


def test_what_the_host_does_after_an_event_comes_after_it() -> None:
    with simulated_streams() as simulation:
        device, tensor = simulation.device, torch.zeros(4)
        side = device.Stream()
        device.current_stream().record_event().synchronize()
        with device.stream(side):
            tensor.add(1.0)
    assert not simulation.races


def test_an_alias_from_elsewhere_is_the_same_bytes() -> None:
    with simulated_streams() as simulation:
        device, tensor = simulation.device, torch.zeros(4)
        alias = torch.utils.dlpack.from_dlpack(tensor)
        side = device.Stream()
        side.wait_stream(device.current_stream())
        alias[2:].fill_(1.0)
        with device.stream(side):
            tensor.add(1.0)
    assert "aten::fill_" in races_of(simulation)


def test_another_thread_may_drop_the_last_reference_to_bytes() -> None:
    """As one of gloo does when a collective is done."""
    dropped: list[torch.Tensor] = []
    is_over = threading.Event()

    def drop() -> None:
        while not is_over.is_set():
            if dropped:
                dropped.pop()

    thread, interval = threading.Thread(target=drop), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        with simulated_streams() as simulation:
            kept = [torch.zeros(4) for _ in range(100)]
            for _ in range(500):
                dropped.append(torch.zeros(4))
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert len(kept) == 100 and not simulation.races

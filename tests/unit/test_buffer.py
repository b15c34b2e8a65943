"""FlatBuffer: what a large one asks of the kernel."""

from pathlib import Path

import pytest
import torch

from shardkit.buffer import FlatBuffer

SMAPS = Path("/proc/self/smaps")


def _is_huge(address: int) -> bool:
    """Whether the kernel was asked for huge pages at `address`: the flag `hg` of its mapping."""
    is_inside = False
    for line in SMAPS.read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            is_inside = start <= address < end
        elif is_inside and head == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError(f"no mapping at {address:#x}")


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux tells what was asked for")
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages"
)
def test_large_buffers_ask_for_huge_pages_each_time_they_are_allocated() -> None:
    buffer = FlatBuffer(16 << 20, torch.float32, torch.device("cpu"))  # 64 MiB: mapped anew each time
    middle = buffer.flat.data_ptr() + buffer.nbytes // 2
    assert _is_huge(middle)
    buffer.free()
    buffer.allocate()
    assert _is_huge(buffer.flat.data_ptr() + buffer.nbytes // 2)


def test_freed_bytes_come_back_under_the_same_tensors() -> None:
    buffer = FlatBuffer(6, torch.float32, torch.device("cpu"))
    weight = buffer.tensor(2, (2, 2))
    buffer.free()
    assert buffer.flat.untyped_storage().nbytes() == 0
    buffer.allocate()
    buffer.flat.copy_(torch.arange(6.0))
    assert weight.tolist() == [[2.0, 3.0], [4.0, 5.0]]

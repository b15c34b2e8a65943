"""FlatBuffer: the bytes of one bucket, and typed views into them.

Level 4 of the data flow: holds. Its storage comes and goes; the tensors made from it stay. Autograd saves
parameters, and views of them, for backward: because the storage is resized in place, what it saved is valid
again as soon as the bytes are back. It decides nothing and sends nothing.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from shardkit.placement import contiguous_stride


class FlatBuffer:
    """`numel` elements of one dtype on one device, allocated and freed as a whole."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, *, pin: bool = False) -> None:
        with torch.inference_mode(False):  # an inference tensor could never be written by training again
            self.flat = empty_flat(numel, dtype, device, pin=pin)  # (numel,)
        self._storage = self.flat.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._is_huge = _is_huge(self._nbytes, device) and not pin

    @property
    def nbytes(self) -> int:
        """Bytes when allocated."""
        return self._nbytes

    def allocate(self) -> None:
        """Bring the bytes back, with unspecified content; nothing where they are there."""
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)
            if self._is_huge:
                _ask_for_huge_pages(self._storage)

    def free(self) -> None:
        """Give the bytes up; every tensor made from this buffer keeps its identity and shape."""
        if self._storage.nbytes() != 0:
            self._storage.resize_(0)

    def tensor(self, offset: int, shape: Sequence[int]) -> Tensor:
        """A contiguous tensor at `offset` with a version counter of its own.

        Views of one tensor share a counter: an in-place edit of one bias would then void what autograd saved
        of every parameter in the bucket.
        """
        with torch.inference_mode(False), torch.no_grad():
            stride = contiguous_stride(shape)
            empty = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
            return empty.set_(self._storage, offset, tuple(shape), stride)

    def alias(self, offset: int, shape: Sequence[int]) -> Tensor:
        """The same, with a storage object of its own over these bytes; only for a buffer that is never freed.

        torch.save writes whole storages, so a saved parameter would bring its bucket along; and torch cannot
        pickle a DTensor whose local tensor starts inside its storage.
        """
        if self.flat.is_meta:
            return self.tensor(offset, shape)
        with torch.inference_mode(False), torch.no_grad():
            flat = self.flat[offset : offset + math.prod(shape)]
            own = from_dlpack(flat.view(torch.uint8)) if flat.numel() else flat.new_empty(0)
            return own.view(flat.dtype).view(tuple(shape))


def empty_flat(numel: int, dtype: torch.dtype, device: torch.device, *, pin: bool = False) -> Tensor:
    """(numel,) with unspecified content, for a collective."""
    flat = torch.empty(numel, dtype=dtype, device=device, pin_memory=pin)
    if not pin and _is_huge(numel * dtype.itemsize, device):
        _ask_for_huge_pages(flat.untyped_storage())
    return flat


def _is_huge(nbytes: int, device: torch.device) -> bool:
    return nbytes >= _HUGE_BYTES and device.type == "cpu"


_HUGE_BYTES = 4 << 20  # NumPy asks for them from this size on too
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux


def _ask_for_huge_pages(storage: torch.UntypedStorage) -> None:
    """Let the first write to fresh memory cost a page fault per 2 MiB instead of per 4 KiB.

    Large host buffers come and go every step, and glibc maps those from 32 MiB on anew each time: faulting
    33 MB in by small pages takes 9 ms, by huge ones 3. A kernel that has none to give ignores the wish.
    """
    if _libc is not None:
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = storage.data_ptr() + storage.nbytes() - start
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)


_libc = None if _MADV_HUGEPAGE is None else ctypes.CDLL(None)

"""Memory straight from the system: pages that come when they are written, and files in memory that many can look at.

A SharedFile is mapped shared by the one who writes it and privately by the others: the system gives those a page of their own when they
write one. Its descriptor is the only one in use, however many mappings there are (Python's mmap would keep one each). Huge pages are
declined everywhere: one of them holds thousands of tokens of a single head.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_PUNCH_HOLE = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written."""
    pages = mmap.mmap(-1, _bytes(shape, dtype), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def can_share() -> bool:
    return hasattr(os, "memfd_create")


class SharedFile:
    """A file in memory of one tensor's size, zero where nothing was written. Lives while it is open or mapped. Raises OSError."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape, self._dtype = shape, dtype
        self._fd = os.memfd_create("specdec-kv")
        self._closed = weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, _bytes(shape, dtype))

    def shared(self) -> Tensor:
        """The file itself: what is written here, every mapping sees, but for pages that it has made its own."""
        return self._mapped(mmap.MAP_SHARED)

    def private(self) -> Tensor:
        """The file as it is, page by page until the first write to it, which no one else sees."""
        return self._mapped(mmap.MAP_PRIVATE)

    def give_back(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Byte ranges (start, end): their whole pages read as zero from here on and take no memory."""
        for start, end in ranges:
            first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
            if first < last and _libc().fallocate(self._fd, _PUNCH_HOLE, first, last - first):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """No more mappings; those that exist stay."""
        self._closed()

    def _mapped(self, flags: int) -> Tensor:
        size, libc = _bytes(self._shape, self._dtype), _libc()
        address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._fd, 0)
        if address == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        libc.madvise(address, size, mmap.MADV_NOHUGEPAGE)
        pages = (ctypes.c_char * size).from_address(address)
        weakref.finalize(pages, libc.munmap, address, size).atexit = False  # a tensor may outlive the interpreter's last line
        return torch.frombuffer(pages, dtype=self._dtype).view(self._shape)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for side in shape:
        count *= side
    return count


_loaded: list[ctypes.CDLL] = []


def _libc() -> ctypes.CDLL:
    if not _loaded:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        _loaded.append(libc)
    return _loaded[0]

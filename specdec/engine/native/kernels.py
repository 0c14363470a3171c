"""The compiled library as Python sees it: structures as in src/kernels.cpp, and what may be called. ctypes releases the GIL in a call."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdec.native.build import KERNELS, BuildFailed

log = logging.getLogger(__name__)


class LinearStruct(ctypes.Structure):
    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_int64),
        ("in_", ctypes.c_int64),
        ("coded", ctypes.c_int64),
    ]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        ("before_attention", ctypes.c_void_p),
        ("qkv", LinearStruct),
        ("qk_norm", ctypes.c_void_p),
        ("out", LinearStruct),
        ("before_mlp", ctypes.c_void_p),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
    ]


class ModelStruct(ctypes.Structure):
    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in ("layer_count", "hidden", "heads", "kv_heads", "dim", "inner", "window", "most_rows", "threads")
        ],
        ("eps", ctypes.c_float),
        ("embedding", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("layers", ctypes.POINTER(LayerStruct)),
        ("norm", ctypes.c_void_p),
        ("head", LinearStruct),
    ]


class Kernels:
    """A loaded library. `source`: hash of what it was compiled from; equal ones compute equal bits, on any CPU. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._library = library = ctypes.CDLL(str(path))
        try:
            library.specdec_source.restype = ctypes.c_char_p
            self.source: str = library.specdec_source().decode()
            pointer, number = ctypes.c_void_p, ctypes.c_int64
            library.specdec_pack.argtypes = [pointer, number, number, pointer, pointer]
            library.specdec_pack.restype = None
            library.specdec_pack_coded.argtypes = [pointer, number, number, pointer, pointer]
            library.specdec_pack_coded.restype = None
            library.specdec_open.argtypes = [ctypes.POINTER(ModelStruct)]
            library.specdec_open.restype = pointer
            library.specdec_close.argtypes = [pointer]
            library.specdec_close.restype = None
            library.specdec_run.argtypes = [pointer, pointer, pointer, number]
            library.specdec_product.argtypes = [ctypes.POINTER(LinearStruct), pointer, number, number, pointer]
            library.specdec_product.restype = None
            library.specdec_attend.argtypes = [pointer, number, number, number, pointer, pointer]
            library.specdec_attend.restype = None
        except AttributeError as error:
            raise OSError(f"{path} is another library: {error}") from error

    def pack(self, weight: Tensor, packed: Tensor, scales: Tensor) -> None:
        """weight [out, in] float32, contiguous, `in` a multiple of 16 → packed uint8, scales float32, `out` rounded up to 64 in both."""
        out, width = weight.shape
        assert weight.is_contiguous() and width % 16 == 0
        self._library.specdec_pack(weight.data_ptr(), out, width, packed.data_ptr(), scales.data_ptr())

    def pack_coded(self, weight: Tensor, importance: Tensor, packed: Tensor) -> None:
        """weight [out, in] float32, contiguous, `in` a multiple of 32, importance [in] float32 → packed uint8: 18 bytes for 32 weights,
        `out` rounded up to 64."""
        out, width = weight.shape
        assert weight.is_contiguous() and width % 32 == 0 and importance.shape == (width,)
        self._library.specdec_pack_coded(weight.data_ptr(), out, width, importance.data_ptr(), packed.data_ptr())

    def open(self, model: ModelStruct) -> int:
        """Raises MemoryError. What the model points to must outlive it."""
        handle: int | None = self._library.specdec_open(ctypes.byref(model))
        if not handle:
            raise MemoryError("no memory for a step of the model")
        return handle

    def close(self, handle: int) -> None:
        self._library.specdec_close(handle)

    def run(self, handle: int, numbers: int, logits: int, columns: int) -> None:
        """Addresses of the numbers and of the logits, as src/kernels.cpp has them."""
        if self._library.specdec_run(handle, numbers, logits, columns):
            raise MemoryError("no memory for a step of the model")

    def product(self, linear: LinearStruct, rows: Tensor, paced: bool = False) -> Tensor:
        """rows [n, in] float32, contiguous → [n, out]. `paced`: as for weights that no cache holds."""
        out = torch.empty(len(rows), -(-linear.out // 64) * 64)
        self._library.specdec_product(ctypes.byref(linear), rows.data_ptr(), len(rows), paced, out.data_ptr())
        return out[:, : linear.out]

    def attend(self, segment: Sequence[int], kv_heads: int, queries: Tensor) -> Tensor:
        """`segment`: seven numbers, as Descriptors has them. queries [rows, heads, dim] float32, contiguous → the same shape."""
        out, numbers = torch.empty_like(queries), torch.tensor(segment)
        heads, dim = queries.shape[1:]
        self._library.specdec_attend(numbers.data_ptr(), heads, kv_heads, dim, queries.data_ptr(), out.data_ptr())
        return out


@functools.cache
def load_kernels() -> Kernels | None:
    """This CPU's, once per process; None, and one line in the log, where they cannot be had."""
    try:
        return Kernels(KERNELS.ready())
    except (BuildFailed, OSError) as error:
        log.warning("int8 is computed by torch, which takes about twice as long, for want of compiled kernels: %s", error)
        return None

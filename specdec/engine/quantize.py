"""Matrix products whose rows do not know of each other.

*int8*, on the generic path and where there are no compiled kernels: torch's fast dynamic kernel takes one scale for the whole activation
matrix: a row with an outlier coarsens all others, and answers depend on the batch. Here every row is divided by its own largest magnitude,
two constant columns of +1 and -1 (with zero weights) pin the matrix's range, and the magnitude is multiplied back: one scale per row
through the same kernel. Sums of integers are exact, so a row has the same bits in any batch.

*float32, float64*: a row's bits depend on how many rows the product has, and not on the row's place. So all products have SLAB_ROWS rows,
the last one padded. On an accelerator that would read the weights once per slab, so there a product has as many rows as the batch.
"""

from __future__ import annotations

import logging
import warnings
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.engine.api import QUANTISED

PINS = 8  # columns for the two pins, padded so that rows stay aligned
SLAB_ROWS = 8
_PACKED_ROW = 12  # bytes that torch packs beside each row: scale, zero point and sum
_TINY = 1e-12  # a row of zeros is divided by this
log = logging.getLogger(__name__)


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] → [rows, out]"""

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + self(x), [rows, out]"""


class Linears:
    """Makes the products of one model; those of equal width share the rows they quantise into. One thread only.

    `kept`: tensors that its products read; `packed_bytes`: weights that torch keeps packed, where no tensor shows them.
    """

    def __init__(self, dtype: str, max_rows: int, device: torch.device | None = None) -> None:
        self.dtype, self._max_rows, self._device = dtype, max_rows, device  # None: this machine's CPU
        self.guard = Guard()
        self._rows: dict[int, QuantRows] = {}
        self.kept: list[Tensor] = []
        self.packed_bytes = 0

    def make(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """weight [out, in], of any float dtype."""
        if self.dtype == "int8" and self._device is None:
            return self._quantised(weight, None if bias is None else bias.float())
        kind = getattr(torch, self.dtype)
        weight, bias = weight.to(self._device, kind), None if bias is None else bias.to(self._device, kind)
        self.kept += [weight] if bias is None else [weight, bias]
        return SlabLinear(weight, bias) if self._device is None else WholeLinear(weight, bias)

    def _quantised(self, weight: Tensor, bias: Tensor | None) -> Linear:
        out, width = weight.shape
        if width not in self._rows:
            self._rows[width] = QuantRows(width, self._max_rows, self.guard)
        self.kept += [] if bias is None else [bias]
        self.packed_bytes += out * (width + PINS + _PACKED_ROW)
        return Int8Linear(weight, bias, self._rows[width])


class Guard:
    """Raised while a batch with a non-finite row is computed: a NaN among the rows would spoil the range that all of them share."""

    def __init__(self) -> None:
        self.up = False


class QuantRows:
    """[max_rows, width + PINS] float32, where rows are put for the kernel to quantise. Columns past `width`: +1, -1, then 0."""

    def __init__(self, width: int, max_rows: int, guard: Guard) -> None:
        self._rows = torch.zeros(max_rows, width + PINS)
        self._rows[:, width], self._rows[:, width + 1] = 1.0, -1.0
        self._width, self.guard = width, guard
        self._views: dict[int, tuple[Tensor, Tensor]] = {}

    def fill(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, width] → (rows / largest magnitude of each [n, width + PINS], those magnitudes [n, 1]). Valid until the next call."""
        n = x.shape[0]
        if n not in self._views:
            self._views[n] = self._rows[:n], self._rows[:n, : self._width]
        whole, body = self._views[n]
        top = x.abs().amax(-1, keepdim=True).clamp_(min=_TINY)
        torch.div(x, top, out=body)
        if self.guard.up:
            body.nan_to_num_(0.0, 0.0, 0.0)
        return whole, top


class Int8Linear:
    """Weights in one symmetric 8-bit scale per output row. `bias` float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: QuantRows) -> None:
        scale = (weight.float().abs().amax(1) / 127).clamp(min=1e-8)
        whole = F.pad((weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8), (0, PINS))
        zero = torch.zeros(len(scale), dtype=torch.int64)
        with warnings.catch_warnings():
            # torch 2.13 announces that quantised tensors go; packing takes nothing else.
            warnings.simplefilter("ignore", UserWarning)
            quantised = torch._make_per_channel_quantized_tensor(whole, scale.double(), zero, 0)
        self._packed = torch.ops.quantized.linear_prepack(quantised, None)
        self._bias = bias
        self._rows = rows
        self._reduce_range = not has_vnni()

    def __call__(self, x: Tensor) -> Tensor:
        whole, top = self._rows.fill(x)
        y: Tensor = torch.ops.quantized.linear_dynamic(whole, self._packed, self._reduce_range)
        y.mul_(top)
        return y if self._bias is None else y.add_(self._bias)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        if self._bias is not None:
            return self(x).add_(residual)
        whole, top = self._rows.fill(x)
        return torch.addcmul(residual, torch.ops.quantized.linear_dynamic(whole, self._packed, self._reduce_range), top)


class SlabLinear:
    """Any float dtype, SLAB_ROWS rows at a time."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -n % SLAB_ROWS)) if n % SLAB_ROWS else x
        slabs = [F.linear(slab, self._weight, self._bias) for slab in torch.split(padded, SLAB_ROWS)]
        return (slabs[0] if len(slabs) == 1 else torch.cat(slabs))[:n]

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self(x)


class WholeLinear:
    """Any float dtype, all rows at once: a row's bits may depend on how many there are."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._transposed = weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return torch.addmm(residual, x, self._transposed) if self._bias is None else residual + self(x)


def has_vnni() -> bool:
    """Without these instructions the kernel's 16-bit sums would saturate, so activations get 7 bits."""
    return bool(torch.cpu._is_vnni_supported())


def supported(dtype: str) -> str:
    """`dtype` as torch computes it: int8 in place of int4, and float32 where this machine has no int8 kernels that sum exactly."""
    if dtype not in QUANTISED:
        return dtype
    if dtype == "int4":
        log.info("weights of 4 bits are for the compiled kernels: using int8")
    for engine in ("x86", "fbgemm"):
        if engine in torch.backends.quantized.supported_engines:
            torch.backends.quantized.engine = engine
            return "int8"
    log.warning("no int8 kernels on this machine (torch has %s): using float32", torch.backends.quantized.supported_engines)
    return "float32"

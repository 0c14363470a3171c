"""The lean path's model and memory as the compiled code reads them. Knows names of weights and where they go, and no arithmetic."""

from __future__ import annotations

import math
import mmap
import weakref
from array import array
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.engine.batch import Layout
from specdec.engine.kv import KvStore
from specdec.engine.native.kernels import Kernels, LayerStruct, LinearStruct, ModelStruct
from specdec.engine.shape import LlamaShape
from specdec.engine.weights import held_bytes, stacked

PANEL = 64  # as in src/product.h
GROUP = 32  # weights of 4 bits that share a scale, as in src/product4.h
_GROUP_BYTES = 18
_SAMPLE = 64  # tokens by which the head's inputs are weighed
_GATED = 32  # rows of gate, then as many of up
_MOST_INPUTS = 65536  # so that a sum of products of 8 bits stays within 32


def why_not(shape: LlamaShape, inner: int) -> str | None:
    """What the compiled code cannot compute of a model; None = nothing. `inner` = width of the MLP."""
    if shape.hidden % 16 or shape.dim % 16:
        return f"hidden size {shape.hidden} and head size {shape.dim} must be multiples of 16"
    if inner % _GATED:
        return f"intermediate size {inner} must be a multiple of {_GATED}"
    widest = max(shape.hidden, inner, shape.heads * shape.dim)
    return f"{widest} inputs are more than {_MOST_INPUTS}" if widest > _MOST_INPUTS else None


class Descriptors:
    """Where each segment's keys and values are, as numbers: the part of attention that is planned here."""

    def plan(self, layout: Layout, store: KvStore) -> list[int]:
        """Of each segment own and parent memory (addresses), the tokens these hold, base, start, rows."""
        numbers: list[int] = []
        for segment in layout.segments:
            slot = store.slot(segment.slot)
            memory, parent = slot.memory, slot.parent
            above = (0, 0) if parent is None else (parent.memory.data_ptr(), parent.memory.shape[2])
            own, room = memory.data_ptr(), memory.shape[2]
            numbers += (own, above[0], room, above[1], slot.base, segment.start, len(segment.tokens))
        return numbers


class NativeModel:
    """`head_ids`: score only these rows of the head. `coded`: weights of 4 bits where a product has a multiple of GROUP inputs. Float
    tensors and packed weights live as long as the model."""

    def __init__(
        self,
        kernels: Kernels,
        shape: LlamaShape,
        weights: Mapping[str, Tensor],
        *,
        window: int,
        max_rows: int,
        threads: int,
        head_ids: Tensor | None = None,
        coded: bool = False,
    ) -> None:
        embedding = weights["model.embed_tokens.weight"]
        head = embedding if shape.tied else weights["lm_head.weight"]
        head = head if head_ids is None else head[head_ids]
        self._kernels, self._columns = kernels, len(head)
        self._packer = _Packer(kernels, _bytes_of(shape, weights, len(head), coded), coded)
        layers = [_layer(shape, weights, self._packer, i) for i in range(shape.layers)]
        cosines, sines = turns(shape, window)
        model = ModelStruct(
            layer_count=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            dim=shape.dim,
            inner=inner_size(weights),
            window=window,
            most_rows=max_rows,
            threads=threads,
            eps=shape.eps,
            embedding=self._packer.floats(embedding),
            cosines=self._packer.floats(cosines),
            sines=self._packer.floats(sines),
            layers=(LayerStruct * len(layers))(*layers),
            norm=self._packer.floats(weights["model.norm.weight"]),
        )
        model.head = self._packer.linear(head, importance=_importance(kernels, model, shape.vocab) if coded else None)
        self.weight_bytes = self._packer.held_bytes
        self._handle = kernels.open(model)
        weakref.finalize(self, kernels.close, self._handle)

    def run(self, layout: Layout, plan: list[int]) -> Tensor:
        """Logits of the scored rows, [scored, columns]. Keys and values of all rows are written, finite ones."""
        scored = layout.scored
        head = (layout.rows, len(layout.segments), len(scored))
        numbers = array("q", (*head, *layout.tokens, *scored, *plan))
        logits = torch.empty(len(scored), self._columns)
        self._kernels.run(self._handle, numbers.buffer_info()[0], logits.data_ptr(), self._columns)
        return logits


def turns(shape: LlamaShape, window: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [window, dim / 2] float32 each. Angles in float32, as models are trained and as transformers computes them."""
    angles = (torch.arange(window, dtype=torch.float32)[:, None] * shape.frequencies).double()
    return (angles.cos() * shape.rope_scale).float(), (angles.sin() * shape.rope_scale).float()


def inner_size(weights: Mapping[str, Tensor]) -> int:
    return len(weights["model.layers.0.mlp.gate_proj.weight"])


def _padded(rows: int) -> int:
    return -(-rows // PANEL) * PANEL


def _bytes_of(shape: LlamaShape, weights: Mapping[str, Tensor], columns: int, coded: bool) -> int:
    """All packed matrices together."""
    inner, mixed = inner_size(weights), shape.heads * shape.dim
    rows = (shape.heads + 2 * shape.kv_heads) * shape.dim
    layer = ((rows, shape.hidden), (shape.hidden, mixed), (2 * inner, shape.hidden), (shape.hidden, inner))
    return shape.layers * sum(_packed_bytes(*sizes, coded) for sizes in layer) + _packed_bytes(columns, shape.hidden, coded)


def _packed_bytes(out: int, width: int, coded: bool) -> int:
    return _padded(out) * (width // GROUP * _GROUP_BYTES if coded and width % GROUP == 0 else width)


def _importance(kernels: Kernels, model: ModelStruct, vocab: int) -> Tensor:
    """Mean square of each input of the head, [hidden], over a pass of some text. A few are a thousand times the others, whatever is read,
    and the weights that meet these had better be right. `model` is complete but for its head, and has a wrong one afterwards."""
    count, hidden = min(_SAMPLE, model.most_rows, model.window), model.hidden
    packer = _Packer(kernels, _padded(hidden) * hidden)
    model.head = packer.linear(torch.eye(hidden))  # so that logits are the head's inputs
    memory = torch.zeros(model.layer_count, 2 * model.kv_heads, count, model.dim)
    tokens = [i * 7919 % vocab for i in range(1, count + 1)]
    numbers = array("q", (count, 1, count, *tokens, *range(count), memory.data_ptr(), 0, count, 0, 0, 0, count))
    inputs, handle = torch.empty(count, hidden), kernels.open(model)
    try:
        kernels.run(handle, numbers.buffer_info()[0], inputs.data_ptr(), hidden)
    finally:
        kernels.close(handle)
    # Exact sums: torch's order is not the same on every CPU, and the bits of the weights depend on it.
    squares = [math.fsum(column) / count for column in inputs.double().square().T.tolist()]
    importance = torch.tensor(squares, dtype=torch.float32)
    return importance if bool(importance.isfinite().all()) else torch.ones(hidden)


class _Packer:
    """Keeps what the compiled code points to. Packed weights lie in the order of use in huge pages: reading them is what a step takes."""

    def __init__(self, kernels: Kernels, size: int, coded: bool = False) -> None:
        self._kernels, self._coded, self._kept, self._used = kernels, coded, list[Any](), 0
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(pages, dtype=torch.uint8)

    @property
    def held_bytes(self) -> int:
        return held_bytes([self._memory, *self._kept])

    def floats(self, tensor: Tensor, length: int | None = None) -> int:
        """Address of a float32 copy, with zeros behind it up to `length` numbers."""
        flat = tensor.detach().to(torch.float32, copy=True).contiguous().flatten()
        if length is not None:
            flat = torch.nn.functional.pad(flat, (0, length - len(flat)))
        self._kept.append(flat)
        return flat.data_ptr()

    def linear(self, weight: Tensor, bias: Tensor | None = None, importance: Tensor | None = None) -> LinearStruct:
        """weight [out, in], of any float dtype. `importance` [in] of errors, where weights have 4 bits; None = all alike."""
        out, width = weight.shape
        packed = self._memory[self._used : self._used + _packed_bytes(out, width, self._coded)]
        self._used += len(packed)
        address = None if bias is None else self.floats(bias, _padded(out))
        whole = weight.detach().float().contiguous()
        if self._coded and width % GROUP == 0:
            self._kernels.pack_coded(whole, torch.ones(width) if importance is None else importance, packed)
            return LinearStruct(packed.data_ptr(), None, address, out, width, 1)
        scales = torch.empty(_padded(out))
        self._kept.append(scales)
        self._kernels.pack(whole, packed, scales)
        return LinearStruct(packed.data_ptr(), scales.data_ptr(), address, out, width, 0)


def _layer(shape: LlamaShape, weights: Mapping[str, Tensor], packer: _Packer, i: int) -> LayerStruct:
    prefix = f"model.layers.{i}."

    def linear(*names: str) -> LinearStruct:
        weight, bias = (stacked(weights, [f"{prefix}{name}.{kind}" for name in names]) for kind in ("weight", "bias"))
        assert weight is not None
        return packer.linear(weight, bias)

    gate, up = (weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up"))
    return LayerStruct(
        packer.floats(weights[f"{prefix}input_layernorm.weight"]),
        linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        _head_norm(shape, weights, packer, prefix),
        linear("self_attn.o_proj"),
        packer.floats(weights[f"{prefix}post_attention_layernorm.weight"]),
        packer.linear(torch.stack([gate.view(-1, _GATED, shape.hidden), up.view(-1, _GATED, shape.hidden)], 1).flatten(0, 2)),
        linear("mlp.down_proj"),
    )


def _head_norm(shape: LlamaShape, weights: Mapping[str, Tensor], packer: _Packer, prefix: str) -> int | None:
    """Qwen3's norm of each query and key head, weights [heads + kv, dim]."""
    if not shape.qk_norm:
        return None
    q, k = (weights[f"{prefix}self_attn.{name}_norm.weight"] for name in ("q", "k"))
    return packer.floats(torch.cat([q.expand(shape.heads, -1), k.expand(shape.kv_heads, -1)]))

"""Our own forward of the Llama shape: Llama, SmolLM2, Mistral without a window, Qwen2, Qwen3. Query, key and value are one product, and so
are gate and up.

Under int8 on a CPU native.NativeModel computes the same, and this is what is left where it cannot be compiled.

Rotary embedding is a complex product: dimensions i and i + dim/2 of a head turn together, so the rows of the query and key weights are put
in that order once, at load, and each pair is a complex number (Su et al. 2021, arXiv 2104.09864, eq. 34). Scores do not notice, since
queries and keys are permuted alike. Values ride along, multiplied by 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.engine.attention import Inputs, Plan
from specdec.engine.batch import Layout
from specdec.engine.padded import HostPlan, Shape, to_host
from specdec.engine.quantize import Linear, Linears
from specdec.engine.replay import Replayer
from specdec.engine.shape import LlamaShape
from specdec.engine.weights import held_bytes, stacked

Weights = Mapping[str, Tensor]
REPLAYED_ROWS = 256  # longer steps are prefills: of many shapes, and worth their launches


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] → the same"""


class RmsNorm:
    """x * weight / sqrt(mean(x^2) + eps), as one vector norm: the root of H and of H * eps go into the constants. bfloat16 in float32."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        size = weight.shape[-1]
        exact = torch.float32 if dtype == torch.bfloat16 else dtype
        self._weight = weight.to(exact) * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), dtype=exact, device=weight.device)
        self._exact, self.kept = exact, (self._weight,)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] → the same"""
        y = x if x.dtype == self._exact else x.to(self._exact)
        y = (y * self._weight).div_(torch.hypot(torch.linalg.vector_norm(y, dim=-1, keepdim=True), self._floor))
        return y if x.dtype == self._exact else y.to(x.dtype)


class FusedRmsNorm:
    """The same, in one kernel of an accelerator."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight, self._eps = weight.to(dtype), eps
        self.kept = (self._weight,)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)


class Layer(NamedTuple):
    before_attention: Norm
    qkv: Linear
    qk_norm: Norm | None
    out: Linear
    before_mlp: Norm
    gate_up: Linear
    down: Linear


class LeanModel:
    """`head_ids`: score only these rows of the head. `device`: an accelerator, whose steps it `replays` where it may; None: this machine's
    CPU. `attention`: attention.Attention here, padded.PaddedAttention there."""

    def __init__(
        self,
        shape: LlamaShape,
        weights: Weights,
        linears: Linears,
        attention: Any,
        window: int,
        head_ids: Tensor | None = None,
        device: torch.device | None = None,
        replays: bool = False,
    ) -> None:
        self._shape, self._attention, self._guard, self._device = shape, attention, linears.guard, device
        self._dtype = torch.float32 if linears.dtype == "int8" else getattr(torch, linears.dtype)
        embedding = weights["model.embed_tokens.weight"]
        self._embedding = embedding.to(device, self._dtype, copy=True)
        norms = _Norms(shape.eps, self._dtype, device)
        self._layers = [_layer(shape, weights, linears, norms, i) for i in range(shape.layers)]
        self._norm = norms.make(weights["model.norm.weight"])
        head = embedding if shape.tied else weights["lm_head.weight"]
        head = head if head_ids is None else head[head_ids]
        self._head, self._columns = linears.make(head), len(head)
        self._turns = _turns(shape, window, torch.complex128 if self._dtype == torch.float64 else torch.complex64).to(device)
        self.weight_bytes = held_bytes([self._embedding, self._turns, *norms.kept, *linears.kept]) + linears.packed_bytes
        self._replayer = Replayer(self._logits_and_sums, device) if replays and device is not None else None

    def run(self, layout: Layout, plan: Any) -> Tensor:
        """Logits of the scored rows, [scored, columns], on the host. Keys and values of all rows are written.

        A non-finite number in any row shows in the sums at the end, or makes the quantising kernel refuse; then the same pass is made
        again, guarded. Guarding always would cost every step for what hardly ever happens.
        """
        answer = self._unguarded(plan) if self._device is None else self._unguarded_there(plan)
        if answer is not None:
            return answer
        placed = plan.placed()
        self._guard.up = True
        try:
            return to_host(self._score(placed.inputs, self._pass(placed.inputs, placed)))[0]
        finally:
            self._guard.up = False

    def _unguarded(self, plan: Plan) -> Tensor | None:
        """Logits, or None when something was not finite."""
        try:
            hidden = self._pass(plan.inputs, plan)
        except RuntimeError:  # the range of a matrix with a NaN; anything else comes again in the guarded pass
            return None
        sums = (hidden.sum(), *self._attention.sums(plan))
        return self._score(plan.inputs, hidden) if all(math.isfinite(float(s)) for s in sums) else None

    def _unguarded_there(self, plan: HostPlan) -> Tensor | None:
        """The same on an accelerator: logits and sums are waited for once, together."""
        if self._replayer is not None and plan.shape.counts[0] <= REPLAYED_ROWS:
            answers = self._replayer(plan.shape, plan.numbers)
        else:
            answers = self._logits_and_sums(plan.shape, self._attention.moved(plan.numbers))
        logits, sums = to_host(*answers)
        return logits if bool(sums.isfinite().all()) else None

    def _logits_and_sums(self, shape: Shape, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """[scored, columns]; a few sums that are finite when everything is."""
        plan = self._attention.placed(shape, numbers)
        hidden = self._pass(plan.inputs, plan)
        return self._score(plan.inputs, hidden), torch.stack([hidden.sum(), *self._attention.sums(plan)])

    def _score(self, inputs: Inputs, hidden: Tensor) -> Tensor:
        if not len(inputs.scored):
            return hidden.new_empty(0, self._columns)
        if len(inputs.scored) < len(inputs.tokens):
            hidden = hidden[inputs.scored]
        return self._head(self._norm(hidden))

    def _pass(self, inputs: Inputs, plan: Any) -> Tensor:
        """Hidden states of all rows after the last layer, [rows, hidden]."""
        shape, attention = self._shape, self._attention
        n, per_row = len(inputs.tokens), shape.heads + 2 * shape.kv_heads
        x = F.embedding(inputs.tokens, self._embedding)
        turn = torch.ones(n, per_row, shape.dim // 2, dtype=self._turns.dtype, device=self._device)
        turn[:, : shape.heads + shape.kv_heads] = self._turns[inputs.positions][:, None]
        broken = torch.zeros(n, 1, dtype=torch.bool, device=self._device) if self._guard.up else None
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.before_attention(x)).view(n, per_row, shape.dim)
            if layer.qk_norm is not None:
                qk = qkv[:, : shape.heads + shape.kv_heads]
                qk.copy_(layer.qk_norm(qk))
            qkv = _turned(qkv, turn)
            if broken is not None:
                broken |= ~qkv.flatten(1).isfinite().all(-1, keepdim=True)
                qkv.nan_to_num_(0.0, 0.0, 0.0)
            attention.write(plan, i, qkv[:, shape.heads :])
            x = layer.out.add_to(attention.attend(plan, i, qkv), x)
            gate, up = layer.gate_up(layer.before_mlp(x)).chunk(2, -1)
            x = layer.down.add_to(F.silu(gate).mul_(up), x)
        return x if broken is None else x.masked_fill(broken, float("nan"))


def _turned(heads: Tensor, turn: Tensor) -> Tensor:
    """heads [rows, heads, dim], turn [rows, heads, dim / 2] complex → [rows, heads, dim]"""
    exact = heads if heads.dtype != torch.bfloat16 else heads.float()
    product = torch.view_as_real(torch.view_as_complex(exact.view(*heads.shape[:-1], -1, 2)) * turn)
    return product.flatten(-2).to(heads.dtype)


def _turns(shape: LlamaShape, window: int, dtype: torch.dtype) -> Tensor:
    """e^(i * position * frequency), [window, dim / 2]. Angles in float32, as models are trained and as transformers computes them."""
    angles = torch.arange(window, dtype=torch.float32)[:, None] * shape.frequencies
    return torch.complex(angles.cos() * shape.rope_scale, angles.sin() * shape.rope_scale).to(dtype)


class _Norms:
    """Makes the norms of one model. `kept`: the tensors that they read."""

    def __init__(self, eps: float, dtype: torch.dtype, device: torch.device | None) -> None:
        self._eps, self._dtype, self._device = eps, dtype, device
        self.kept: list[Tensor] = []

    def make(self, weight: Tensor) -> Norm:
        """weight [H], or [heads, H] with one norm per head."""
        kind = RmsNorm if self._device is None or weight.dim() > 1 else FusedRmsNorm
        norm = kind(weight.to(self._device), self._eps, self._dtype)
        self.kept += norm.kept
        return norm


def _layer(shape: LlamaShape, weights: Weights, linears: Linears, norms: _Norms, i: int) -> Layer:
    prefix = f"model.layers.{i}."

    def norm(name: str) -> Norm:
        return norms.make(weights[f"{prefix}{name}.weight"])

    def linear(*names: str, order: Tensor | None = None) -> Linear:
        weight, bias = (stacked(weights, [f"{prefix}{name}.{kind}" for name in names]) for kind in ("weight", "bias"))
        assert weight is not None
        if order is not None:
            weight, bias = weight[order], bias if bias is None else bias[order]
        return linears.make(weight, bias)

    return Layer(
        norm("input_layernorm"),
        linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", order=_pair_order(shape)),
        _head_norm(shape, weights, prefix, norms) if shape.qk_norm else None,
        linear("self_attn.o_proj"),
        norm("post_attention_layernorm"),
        linear("mlp.gate_proj", "mlp.up_proj"),
        linear("mlp.down_proj"),
    )


def _pairs(dim: int) -> Tensor:
    """0, dim/2, 1, dim/2 + 1, …: the order in which dimensions that turn together are neighbours."""
    return torch.arange(dim).view(2, -1).T.flatten()


def _pair_order(shape: LlamaShape) -> Tensor:
    """Rows of the stacked query, key and value weights: pairs side by side in query and key heads, values as they are."""
    turned, all_heads = shape.heads + shape.kv_heads, shape.heads + 2 * shape.kv_heads
    rows = torch.arange(all_heads * shape.dim).view(all_heads, shape.dim)
    rows[:turned] = rows[:turned][:, _pairs(shape.dim)]
    return rows.flatten()


def _head_norm(shape: LlamaShape, weights: Weights, prefix: str, norms: _Norms) -> Norm:
    """Qwen3's norm of each query and key head, weights [heads + kv, dim]."""
    q, k = (weights[f"{prefix}self_attn.{name}_norm.weight"][_pairs(shape.dim)] for name in ("q", "k"))
    return norms.make(torch.cat([q.expand(shape.heads, -1), k.expand(shape.kv_heads, -1)]))

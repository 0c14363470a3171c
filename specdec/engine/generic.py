"""Any decoder-only model of transformers, with one registered attention function in place of its own. The oracle of the lean path.

The flattened batch goes through the modules as one row of tokens with explicit positions and no cache; only attention sees slots. What a
model does to its logits (scaling, soft caps) stays its own. float64 is float64 throughout: norms that transformers computes in float32
whatever they are given are replaced when a trial shows that they are the plain RMS norm.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.pytorch_utils import Conv1D

from specdec.engine.api import UnsupportedModel
from specdec.engine.attention import RowAttention
from specdec.engine.batch import Layout
from specdec.engine.padded import to_host
from specdec.engine.quantize import Linear, Linears
from specdec.engine.weights import held_bytes

_names = itertools.count()
_UNSERVED = ("softcap", "s_aux", "position_bias", "sinks")


class GenericModel:
    """Owns `module`: its attention function is set, its linear layers are replaced under int8."""

    def __init__(self, module: Any, linears: Linears, attention: RowAttention, layers: int) -> None:
        refuse_stateful(module)
        self._module, self._attention, self._layers = module.eval().requires_grad_(False), attention, layers
        self._plan: Any = None
        self._calls = 0
        self._broken = torch.zeros(0, dtype=torch.bool)
        linears.guard.up = True  # no cheap place to notice a NaN here
        if linears.dtype == "int8":
            quantise(module, linears)
        if linears.dtype == "float64":
            _use_exact_norms(module)
        self.weight_bytes = held_bytes([*module.parameters(), *module.buffers(), *linears.kept]) + linears.packed_bytes
        name = f"specdec_ragged_{next(_names)}"
        AttentionInterface.register(name, _bound(self))
        module.set_attn_implementation(name)
        self._keep = next((k for k in ("logits_to_keep",) if k in inspect.signature(module.forward).parameters), None)

    def run(self, layout: Layout, plan: Any) -> Tensor:
        plan = plan.placed()
        inputs, scored = plan.inputs, plan.inputs.scored
        self._plan, self._calls = plan, 0
        self._broken = torch.zeros(layout.rows, dtype=torch.bool, device=scored.device)
        some = scored if len(scored) else torch.tensor([layout.rows - 1], device=scored.device)
        keep: dict[str, Any] = {self._keep: some} if self._keep else {}
        try:
            logits: Tensor = self._module(
                input_ids=inputs.tokens[None], position_ids=inputs.positions[None], use_cache=False, **keep
            ).logits[0]
        finally:
            self._plan = None
        if self._calls != self._layers:
            kind = type(self._module).__name__
            raise UnsupportedModel(f"{kind} sent {self._calls} of its {self._layers} layers through the registered attention function")
        return to_host((logits if self._keep else logits[some])[: len(scored)])[0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float | None) -> Tensor:
        """q [1, heads, rows, dim], k and v [1, kv, rows, dim] → [1, rows, heads, dim]. A broken row stays so; zeros are written."""
        assert self._plan is not None
        self._calls += 1
        keys_values = torch.cat([k[0], v[0]]).transpose(0, 1)
        self._broken |= ~(keys_values.flatten(1).isfinite().all(-1) & q[0].transpose(0, 1).flatten(1).isfinite().all(-1))
        self._attention.write(self._plan, layer, keys_values.nan_to_num(0.0, 0.0, 0.0))
        out = self._attention.attend(self._plan, layer, q[0].transpose(0, 1).contiguous(), scale)
        return out.masked_fill(self._broken[:, None], float("nan")).view(1, q.shape[2], q.shape[1], -1)


def _bound(model: GenericModel) -> Any:
    """The registered function. It does not keep the model alive: transformers' registry lives as long as the process."""
    reference = weakref.ref(model)

    def ragged(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
        owner = reference()
        assert owner is not None
        odd = [name for name in _UNSERVED if kwargs.get(name) is not None]
        if odd:
            raise UnsupportedModel(f"{type(module).__name__} wants {', '.join(odd)} in attention, which this engine does not compute")
        layer: Any = module.layer_idx
        return owner.attend(query, key, value, layer, kwargs.get("scaling")), None

    return ragged


def refuse_stateful(module: Any) -> None:
    """Recurrent and hybrid families fold the past into a state: a refused token cannot be taken out again."""
    if getattr(module, "_is_stateful", False):
        kind = getattr(module.config, "model_type", type(module).__name__)
        raise UnsupportedModel(f"{kind} keeps a recurrent state, which cannot be rolled back; this engine serves attention-only decoders")


class RowLinear(nn.Module):
    """A module around quantize.Linear. x [..., in] → [..., out]"""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def quantise(module: Any, linears: Linears) -> None:
    """Every linear layer by its row-wise int8 product."""
    for path, child in list(module.named_modules()):
        if type(child) is nn.Linear:
            weight = child.weight
        elif type(child) is Conv1D:
            weight = child.weight.T
        else:
            continue
        module.set_submodule(path, RowLinear(linears.make(weight.detach(), child.bias)))


class ExactRmsNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) in the type of x."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self._weight, self._eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * self._weight


def _use_exact_norms(module: Any) -> None:
    for path, child in list(module.named_modules()):
        if not type(child).__name__.endswith("RMSNorm") or getattr(child, "weight", None) is None:
            continue
        exact = ExactRmsNorm(child.weight, getattr(child, "variance_epsilon", getattr(child, "eps", 1e-6)))
        sample = torch.linspace(-2.0, 3.0, 2 * child.weight.shape[-1], dtype=child.weight.dtype, device=child.weight.device).view(2, -1)
        if torch.allclose(child(sample), exact(sample), rtol=1e-5, atol=1e-6):
            module.set_submodule(path, exact)


def module_weights(module: Any) -> Mapping[str, Tensor]:
    """Named as in the files."""
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}

"""Models of real shapes with random weights, drawn where they are used: to time a step nobody needs the real ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    mlp: int
    vocab: int
    tied: bool

    def config(self) -> dict[str, Any]:
        """As config.json has it."""
        return {
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim,
            "intermediate_size": self.mlp,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "eos_token_id": 2,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for i in range(self.layers):
            at = f"model.layers.{i}."
            yield at + "input_layernorm.weight", (self.hidden,)
            yield at + "self_attn.q_proj.weight", (self.heads * self.dim, self.hidden)
            yield at + "self_attn.k_proj.weight", (self.kv_heads * self.dim, self.hidden)
            yield at + "self_attn.v_proj.weight", (self.kv_heads * self.dim, self.hidden)
            yield at + "self_attn.o_proj.weight", (self.hidden, self.heads * self.dim)
            yield at + "post_attention_layernorm.weight", (self.hidden,)
            yield at + "mlp.gate_proj.weight", (self.mlp, self.hidden)
            yield at + "mlp.up_proj.weight", (self.mlp, self.hidden)
            yield at + "mlp.down_proj.weight", (self.hidden, self.mlp)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    def step_weights(self) -> int:
        """Numbers that a step must read at least: everything but the embedding, whose rows are few; with tied weights it is the head."""
        return sum(rows * columns for name, (rows, *rest) in self.tensors() for columns in rest if self.tied or "embed" not in name)


TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, dim=16, mlp=128, vocab=320, tied=False)
LARGE = {
    "llama-8b": Shape(layers=32, hidden=4096, heads=32, kv_heads=8, dim=128, mlp=14336, vocab=128256, tied=False),
    "llama-1b": Shape(layers=16, hidden=2048, heads=32, kv_heads=8, dim=64, mlp=8192, vocab=128256, tied=True),
    "smollm2-135m": Shape(layers=30, hidden=576, heads=9, kv_heads=3, dim=64, mlp=1536, vocab=49152, tied=True),
}


class RandomWeights(Mapping[str, Tensor]):
    """Drawn when they are asked for; a function of seed and name. `spread` = standard deviation of matrices; norms are near one."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, spread: float, seed: int = 0) -> None:
        self._shapes, self._dtype, self._device, self._spread, self._seed = dict(shape.tensors()), dtype, device, spread, seed

    def __getitem__(self, name: str) -> Tensor:
        key = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest()
        draw = torch.Generator(self._device).manual_seed(int.from_bytes(key, "little"))
        weight = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        if weight.dim() == 1:
            return weight.uniform_(0.7, 1.3, generator=draw)
        return weight.normal_(0.0, self._spread, generator=draw)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

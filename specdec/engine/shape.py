"""Reads a model's config.json: is it the Llama shape, which sizes has it, may it be served at all? Works on the plain dictionary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.engine.api import UnsupportedModel

LEAN_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """`frequencies` [dim / 2] float32 of the rotary embedding, `rope_scale` on its cosines and sines."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    window: int
    eps: float
    tied: bool
    qk_norm: bool
    frequencies: Tensor
    rope_scale: float = 1.0


def llama_shape(config: Mapping[str, Any]) -> LlamaShape | str:
    """The shape, or why the lean path cannot serve it."""
    kind = config.get("model_type")
    if kind not in LEAN_TYPES:
        return f"model_type {kind!r} is not one of {', '.join(LEAN_TYPES)}"
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act {config['hidden_act']!r} is not silu"
    if config.get("mlp_bias"):
        return "mlp_bias is set"
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    dim = config.get("head_dim") or hidden // heads
    frequencies = _frequencies(config, dim)
    if isinstance(frequencies, str):
        return frequencies
    return LlamaShape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        dim=dim,
        vocab=config["vocab_size"],
        window=config["max_position_embeddings"],
        eps=config["rms_norm_eps"],
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=kind == "qwen3",
        frequencies=frequencies,
    )


def _frequencies(config: Mapping[str, Any], dim: int) -> Tensor | str:
    """[dim / 2] float32, or why not. Older files keep rope_theta and rope_scaling side by side, newer ones rope_parameters."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        return "only a part of each head is rotated"
    frequencies: Tensor = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(rope["factor"])
    if kind == "llama3":
        return _llama3(frequencies, rope)
    return f"rope type {kind!r} is not default, linear or llama3"


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    waves = 2 * math.pi / frequencies
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    keep = ((float(original) / waves - low) / (high - low)).clamp(0.0, 1.0)
    blended: Tensor = (1 - keep) * frequencies / float(rope["factor"]) + keep * frequencies
    return blended


def refuse_if_unable_to_roll_back(config: Mapping[str, Any], window: int) -> None:
    """Speculation forgets refused tokens. Caches that drop or fold in the past cannot. Raises UnsupportedModel, naming the family."""
    kind = config.get("model_type", "unknown")
    if config.get("is_encoder_decoder"):
        raise UnsupportedModel(f"{kind} is an encoder-decoder model; this engine serves decoder-only ones")
    odd = sorted({t for t in config.get("layer_types") or () if t not in ("full_attention", "sliding_attention")})
    if odd:
        raise UnsupportedModel(f"{kind} has layers of type {', '.join(odd)}, whose cache cannot be rolled back")
    sliding = _sliding_window(config)
    if sliding is not None and sliding < window:
        raise UnsupportedModel(
            f"{kind} attends over a sliding window of {sliding} tokens and is to be used with {window}: "
            f"rolling such a cache back is not possible; set window to {sliding} or less"
        )
    if config.get("cache_implementation") not in (None, "dynamic"):
        raise UnsupportedModel(f"{kind} asks for a {config['cache_implementation']} cache, which is not rewound in place")


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    """In use by some layer, or None."""
    window = config.get("sliding_window")
    types = config.get("layer_types")
    off = config.get("use_sliding_window") is False or (types is not None and "sliding_attention" not in types)
    return None if window is None or off else int(window)

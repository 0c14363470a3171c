"""Writes the draft as a GGUF file for llama.cpp: a Llama body in Q8_0 with the tokenizer of the target's file.

python draft_gguf.py --draft DIR --target-gguf FILE --out FILE
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHERS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--draft", type=Path, required=True)
    flags.add_argument("--target-gguf", type=Path, required=True)
    flags.add_argument("--out", type=Path, required=True)
    options = flags.parse_args()
    config = json.loads((options.draft / "config.json").read_text())
    unfinished = options.out.with_suffix(".part")
    writer = gguf.GGUFWriter(str(unfinished), "llama")
    add_shape(writer, config)
    add_tokenizer(writer, gguf.GGUFReader(str(options.target_gguf)))
    for name, weight in load_file(options.draft / "model.safetensors").items():
        add_weight(writer, name, weight.float().numpy(), config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(options.out)


def add_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: Any, source: Any) -> None:
    """As it is in the target's file, so that both files have one vocabulary in llama.cpp's eyes."""
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)


def add_weight(writer: Any, name: str, weight: np.ndarray[Any, Any], config: dict[str, Any]) -> None:
    match = _LAYER.fullmatch(name)
    target = OTHERS[name] if match is None else f"blk.{match[1]}.{NAMES[match[2]]}.weight"
    if name.endswith("q_proj.weight"):
        weight = interleaved(weight, config["num_attention_heads"])
    elif name.endswith("k_proj.weight"):
        weight = interleaved(weight, config["num_key_value_heads"])
    if weight.ndim == 1:
        writer.add_tensor(target, weight)
        return
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(target, gguf.quants.quantize(weight, kind), raw_dtype=kind)


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp rotates neighbouring pairs of a head's rows, a checkpoint holds the halves one after the other."""
    rows = weight.shape[0]
    return np.ascontiguousarray(weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape))


if __name__ == "__main__":
    main()

"""Random models small enough for a unit test, and a folder of one that a service can be started on.

The weights are drawn wide enough that different prefixes have different, well-separated best tokens: a mix-up of sessions, positions or
cached tokens changes what such a model says. Everything is a function of the seed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specdec.engine import Engine, EngineConfig, load_engine_from_module

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2  # <|im_end|>, as in SmolLM2
TOKENIZER_VOCAB = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_llama(seed: int = 0, *, layers: int = 2, vocab: int = 128, window: int = 1024, **overrides: Any) -> Any:
    """transformers' LlamaForCausalLM in float64: hidden 64, 4 query heads on 2 K/V heads of 16. EOS is 2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _drawn(LlamaForCausalLM, LlamaConfig(**{**_shape(layers, vocab, window), **overrides}), seed)


def tiny_qwen3(seed: int = 0, *, layers: int = 2, vocab: int = 128, window: int = 1024, **overrides: Any) -> Any:
    """As tiny_llama, with a norm on every query and key head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _drawn(Qwen3ForCausalLM, Qwen3Config(**{**_shape(layers, vocab, window), **overrides}), seed)


def tiny_mistral(seed: int = 0, *, layers: int = 2, vocab: int = 128, window: int = 1024, **overrides: Any) -> Any:
    """As tiny_llama; no sliding window unless `sliding_window` says so."""
    from transformers import MistralConfig, MistralForCausalLM

    return _drawn(MistralForCausalLM, MistralConfig(**{**_shape(layers, vocab, window), "sliding_window": None, **overrides}), seed)


def tiny_gpt2(seed: int = 0, *, layers: int = 2, vocab: int = 128, window: int = 1024, **overrides: Any) -> Any:
    """Learned positions, LayerNorm, Conv1D instead of Linear: nothing of the Llama shape."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, vocab_size=vocab, n_positions=window, n_embd=64, n_head=4, bos_token_id=1, eos_token_id=EOS_ID, **overrides
    )
    return _drawn(GPT2LMHeadModel, config, seed)


def tiny_engine(seed: int = 0, *, dtype: str = "float64", path: str = "auto", kv_tokens: int = 16384, **model: Any) -> Engine:
    """An engine on tiny_llama(seed, **model)."""
    config = EngineConfig(dtype=dtype, path=path, kv_tokens=kv_tokens, self_test=False)
    return load_engine_from_module(tiny_llama(seed, **model), config)


def save_tiny(folder: Path | str, seed: int = 0, *, layers: int = 2, vocab: int = TOKENIZER_VOCAB, window: int = 1024) -> Path:
    """Writes tiny_llama with a byte-level tokenizer and a chat template as a Hugging Face folder (float32). `vocab` >= TOKENIZER_VOCAB."""
    from transformers import PreTrainedTokenizerFast

    if vocab < TOKENIZER_VOCAB:
        raise ValueError(f"the tokenizer has {TOKENIZER_VOCAB} ids, the model only {vocab}")
    folder = Path(folder)
    tiny_llama(seed, layers=layers, vocab=vocab, window=window).float().save_pretrained(folder)
    start, end = SPECIAL[1:]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()), bos_token=start, eos_token=end, pad_token=end, unk_token=SPECIAL[0]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def tiny_tokenizer() -> Tokenizer:
    """The tokenizer that save_tiny writes: byte-level, TOKENIZER_VOCAB ids."""
    return Tokenizer.from_str(_tokenizer_json())


def _shape(layers: int, vocab: int, window: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": window,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
    }


def _drawn(kind: Any, config: Any, seed: int) -> Any:
    """The model with its matrices drawn anew, wide: standard deviation 0.3, norms near one."""
    model = kind(config).double().eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                weight.normal_(0.0, 0.3, generator=draw)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.1, generator=draw)
            else:
                weight.uniform_(0.7, 1.3, generator=draw)
    return model


@cache
def _tokenizer_json() -> str:
    """Byte-level BPE with a handful of merges: every text can be encoded, and some characters take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = "the cat sat on the mat and the hat of the user that wrote to the assistant about the weather in the north "
    tokenizer.train_from_iterator(
        [text * 4, "def add(a, b):\n    return a + b\n" * 4, '{"name": "value", "other": [1, 2, 3]}' * 4], trainer
    )
    return tokenizer.to_str()

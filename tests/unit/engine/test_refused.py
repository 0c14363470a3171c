"""Models whose past cannot be taken back are refused at load, by name (F117-F121, F124)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.engine import EngineConfig, UnsupportedModel, load_engine, load_engine_from_module
from specdec.engine.shape import refuse_if_unable_to_roll_back
from tests.tiny import tiny_llama, tiny_mistral
from tests.unit.engine.play import text, whole


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"dtype": "float64", "kv_tokens": 4096, "self_test": False, **options})


@pytest.mark.parametrize("path", ["auto", "lean", "generic"])
def test_a_sliding_window_in_use(path):
    with pytest.raises(UnsupportedModel, match=r"mistral attends over a sliding window of 8 .* set window to 8 or less"):
        load_engine_from_module(tiny_mistral(sliding_window=8), config(path=path))


def test_a_sliding_window_that_is_never_reached():
    wide = load_engine_from_module(tiny_mistral(1, sliding_window=64), config(window=64))
    none = load_engine_from_module(tiny_mistral(1), config())
    assert wide.info.window == 64
    assert torch.equal(whole(wide, text(64)), whole(none, text(64)))


def test_recurrent_families():
    from transformers import MambaConfig, MambaForCausalLM

    module = MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64, state_size=4))
    with pytest.raises(UnsupportedModel, match="mamba keeps a recurrent state"):
        load_engine_from_module(module, config())


@pytest.mark.parametrize(
    "raw, reason",
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is an encoder-decoder"),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
            "qwen3_next has layers of type linear_attention",
        ),
        (
            {"model_type": "gemma3_text", "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]},
            "gemma3_text .* 512",
        ),
        ({"model_type": "llama", "cache_implementation": "static"}, "llama asks for a static cache"),
    ],
)
def test_by_config(raw, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        refuse_if_unable_to_roll_back(raw, 1024)


@pytest.mark.parametrize("unused", [{"use_sliding_window": False}, {"layer_types": ["full_attention"]}])
def test_a_window_that_no_layer_uses(unused):
    refuse_if_unable_to_roll_back({"model_type": "qwen2", "sliding_window": 16, **unused}, 1024)


class Lopsided:
    """A module whose cache is not position-exact: it looks at how many rows a call has."""

    def __init__(self, module: Any) -> None:
        original = module.model.embed_tokens.forward
        module.model.embed_tokens.forward = lambda ids: original((ids + ids.shape[1]) % 128)
        self.module = module


def test_a_cache_that_depends_on_the_cutting_is_found_at_start():
    with pytest.raises(UnsupportedModel, match="one at a time and all at once disagree"):
        load_engine_from_module(Lopsided(tiny_llama()).module, config(path="generic", self_test=True))


def test_attention_that_goes_round_the_registered_function():
    module = tiny_llama()
    module.model.layers = module.model.layers[:1]
    with pytest.raises(UnsupportedModel, match="1 of its 2 layers"):
        load_engine_from_module(module, config(path="generic", self_test=True))


def test_lean_by_name_says_why_not():
    from tests.tiny import tiny_gpt2

    with pytest.raises(UnsupportedModel, match="the lean path cannot serve this model: model_type 'gpt2'"):
        load_engine_from_module(tiny_gpt2(), config(path="lean"))


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(UnsupportedModel, match="no config.json"):
        load_engine(EngineConfig(tmp_path))
    tiny_llama().config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"no .safetensors file"):
        load_engine(EngineConfig(tmp_path))


@pytest.mark.parametrize("bad", [{"dtype": "int3"}, {"path": "fast"}, {"device": "cuda"}, {"kv_tokens": 0}, {"threads": 0}, {"window": 0}])
def test_config_is_checked_at_once(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        EngineConfig(**bad)

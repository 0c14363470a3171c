"""Lean, generic and transformers' own forward say the same."""

from __future__ import annotations

import pytest
import torch

from specdec.engine import Engine, EngineConfig, Segment, load_engine, load_engine_from_module
from specdec.engine.shape import LlamaShape, llama_shape
from tests.tiny import save_tiny, tiny_gpt2, tiny_llama, tiny_mistral, tiny_qwen3
from tests.unit.engine.play import Turn, played, text, whole

TEXT = text(200)
FAMILIES = {"llama": tiny_llama, "qwen3": tiny_qwen3, "mistral": tiny_mistral}


def build(module: object, dtype: str = "float64", path: str = "auto") -> Engine:
    return load_engine_from_module(module, EngineConfig(dtype=dtype, path=path, kv_tokens=8192, self_test=False))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_lean_equals_generic_in_float64(family, seed):
    make = FAMILIES[family]
    lean, generic = build(make(seed), path="lean"), build(make(seed), path="generic")
    assert (lean.info.path, generic.info.path) == ("lean", "generic")
    a, b = whole(lean, TEXT), whole(generic, TEXT)
    assert (a - b).abs().max() < 1e-9
    assert torch.equal(a.argmax(-1), b.argmax(-1))


@pytest.mark.parametrize("make", [*FAMILIES.values(), tiny_gpt2])
def test_generic_ragged_batches_equal_transformers(make):
    """The library computes some norms in float32 whatever it is given, so only GPT-2 can be compared to the last digits."""
    reference = make(2)(torch.tensor([TEXT])).logits[0]
    engine = build(make(2), path="generic")
    turns = [Turn(n % 5 + 1, (3,) * (n % 3), (1 + n % 4,) * (n % 3), before=n % 2 == 0) for n in range(30)]
    rows = played(engine, TEXT, 90, turns)
    assert (rows - reference[90 : 90 + len(rows)]).abs().max() < (1e-9 if make is tiny_gpt2 else 1e-3)


@pytest.mark.parametrize(
    "variant", [{"attention_bias": True}, {"tie_word_embeddings": True}, {"num_key_value_heads": 1}, {"num_key_value_heads": 4}]
)
def test_variants_of_the_llama_shape(variant):
    lean, generic = build(tiny_llama(4, **variant), path="lean"), build(tiny_llama(4, **variant), path="generic")
    assert (whole(lean, TEXT) - whole(generic, TEXT)).abs().max() < 1e-9


ROPES = [
    {"rope_type": "default", "rope_theta": 5000.0},
    {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 50.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rotary_embeddings(rope):
    lean, generic = (build(tiny_llama(4, rope_parameters=rope), path=path) for path in ("lean", "generic"))
    assert (whole(lean, TEXT) - whole(generic, TEXT)).abs().max() < 1e-9


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
    ],
)
def test_why_the_lean_path_declines(change, reason):
    config = tiny_llama().config.to_dict()
    assert isinstance(llama_shape(config), LlamaShape)
    answer = llama_shape({**config, **change})
    assert isinstance(answer, str) and reason in answer


def test_gpt2_goes_the_generic_way_and_is_invariant_under_int8():
    engine = load_engine_from_module(tiny_gpt2(1), EngineConfig(dtype="int8", kv_tokens=4096))
    assert engine.info.path == "generic" and engine.info.batch_invariant


def test_int8_stays_close_to_float32():
    exact, coarse = build(tiny_llama(3), "float32"), build(tiny_llama(3), "int8")
    a, b = whole(exact, TEXT), whole(coarse, TEXT)
    assert (a.argmax(-1) == b.argmax(-1)).float().mean() > 0.9
    assert (a - b).abs().mean() < 0.1 * a.std()


def test_from_a_folder(tmp_path):
    folder = save_tiny(tmp_path, 7)
    engine = load_engine(EngineConfig(folder, dtype="float32", kv_tokens=4096))
    assert engine.info.vocab_size == 320 and engine.info.eos_ids == (2,) and engine.info.window == 1024
    assert engine.info.batch_invariant and engine.info.draft_ids is None
    module = load_engine_from_module(tiny_llama(7, vocab=320), EngineConfig(dtype="float32", kv_tokens=4096))
    assert torch.equal(whole(engine, TEXT), whole(module, TEXT))
    generic = load_engine(EngineConfig(folder, dtype="float64", path="generic", kv_tokens=4096))
    assert (whole(engine, TEXT) - whole(generic, TEXT)).abs().max() < 1e-2


def test_reduced_head_scores_only_the_draft_vocabulary(tmp_path):
    folder = save_tiny(tmp_path, 7)
    ids = tuple(range(1, 320, 3))
    (folder / "draft_vocab.json").write_text(str(list(ids)))
    full = load_engine(EngineConfig(folder, dtype="int8", kv_tokens=4096, self_test=False))
    reduced = load_engine(EngineConfig(folder, dtype="int8", kv_tokens=4096, self_test=False, reduced_head=True))
    assert full.info.draft_ids is None and reduced.info.draft_ids == ids
    assert torch.equal(whole(full, TEXT)[:, list(ids)], whole(reduced, TEXT))


def test_only_rows_that_were_asked_for_get_logits():
    engine = build(tiny_llama())
    one, two = engine.kv.open(), engine.kv.open()
    a, b = engine.forward([Segment(one, 0, (1, 2, 3), 3), Segment(two, 0, (1, 2, 3), 1)])
    assert a.shape == (0, 128) and b.shape == (2, 128)
    assert engine.forward([]) == []

"""The vocabulary's identity: equal exactly when every id stands for the same bytes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from specdec.errors import NotFound
from specdec.vocabulary import Vocabulary, describe, token_bytes, vocabulary
from tests.unit.orchestrator.tokenizers_here import FAMILIES

pytestmark = pytest.mark.unit
REAL = Path(__file__).parents[2] / "models" / "smollm2-135m"


def folder(path: Path, vocab: dict[str, int], decoder: object = None, special: tuple[str, ...] = (), **config: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_size_counts_the_tokenizers_ids_not_the_heads(tmp_path: Path) -> None:
    small = vocabulary(folder(tmp_path / "a", {"a": 0, "b": 1, "c": 5}, vocab_size=128))
    assert small.size == 6
    assert token_bytes(Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))) == [b" a", b" b", None, None, None, b" c"]


def test_padded_heads_of_one_tokenizer_agree_and_swapped_ids_do_not(tmp_path: Path) -> None:
    target = vocabulary(folder(tmp_path / "a", {"a": 0, "b": 1, "c": 2}, vocab_size=128))
    draft = vocabulary(folder(tmp_path / "b", {"a": 0, "b": 1, "c": 2}, vocab_size=120))
    swapped = vocabulary(folder(tmp_path / "c", {"b": 0, "a": 1, "c": 2}, vocab_size=128))
    assert target.fingerprint == draft.fingerprint
    assert target.size == swapped.size and target.fingerprint != swapped.fingerprint


def test_ids_that_name_nothing_count(tmp_path: Path) -> None:
    """A hole is not an empty token, holes have places, and what belongs to one id is never read as its neighbour's."""
    vocabs = [
        {"a": 0, "b": 2},
        {"a": 0, "": 1, "b": 2},
        {"a": 0, "b": 1},
        {"a": 1, "b": 2},
        {"ab": 0, "c": 1},
        {"a": 0, "bc": 1},
        {"a": 0},
        {},
    ]
    found = [vocabulary(folder(tmp_path / str(i), vocab)) for i, vocab in enumerate(vocabs)]
    assert len({v.fingerprint for v in found}) == len(vocabs)
    assert [v.size for v in found] == [3, 3, 2, 3, 2, 2, 1, 0]


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.text("ab▁Ġ", max_size=3), unique=True, max_size=6), seed=st.integers(0, 2**32))
def test_F49_any_two_ids_swapped_are_seen(tokens: list[str], seed: int) -> None:
    """Equal exactly when every id stands for the same bytes; sizes say nothing."""
    draw = random.Random(seed)
    ids = sorted(draw.sample(range(9), len(tokens)))
    one, other = dict(zip(tokens, ids, strict=True)), dict(zip(draw.sample(tokens, len(tokens)), ids, strict=True))
    first, second = (Tokenizer(models.BPE(vocab=vocab, merges=[])) for vocab in (one, other))
    same = token_bytes(first) == token_bytes(second)
    nowhere = Path("/nowhere")
    assert (describe(first, nowhere).fingerprint == describe(second, nowhere).fingerprint) == same == (one == other)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"strip_each"}))
def test_bytes_are_what_a_token_adds_to_a_text(family: str) -> None:
    """Each id between two others, as the library decodes them; without those whose bytes are no characters."""
    tokenizer = FAMILIES[family]()
    table, seen = token_bytes(tokenizer), 0
    beside = tokenizer.token_to_id("t") or 0
    before, after = tokenizer.decode([beside]).encode(), table[beside] or b""
    for token_id, value in enumerate(table):
        text = tokenizer.decode([beside, token_id, beside], skip_special_tokens=False)
        if value is not None and "\ufffd" not in text:
            seen += 1
            assert text.encode() == before + value + after, (token_id, tokenizer.id_to_token(token_id))
    assert seen > len(table) // 3


def test_special_and_ordinary_ids_of_equal_text_differ(tmp_path: Path) -> None:
    ordinary = vocabulary(folder(tmp_path / "a", {"a": 0, "<s>": 1}))
    special = vocabulary(folder(tmp_path / "b", {"a": 0, "<s>": 1}, special=("<s>",)))
    assert ordinary.fingerprint != special.fingerprint


def test_bytes_not_spelling_make_the_fingerprint(tmp_path: Path) -> None:
    """The same bytes spelled for two decoders; a fingerprint of the spelling would part them."""
    byte_level = vocabulary(folder(tmp_path / "a", {"Ġa": 0, "Ċ": 1, "ì": 2}, decoders.ByteLevel()))
    fallback = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    sentence_piece = vocabulary(folder(tmp_path / "b", {"▁a": 0, "<0x0A>": 1, "<0xEC>": 2}, fallback))
    assert byte_level.fingerprint == sentence_piece.fingerprint


@pytest.mark.parametrize(
    ("config", "tokenizer_config", "expected"),
    [
        ({}, {}, ()),
        ({"eos_token_id": 1}, {}, (1,)),
        ({"eos_token_id": [2, 1]}, {}, (1, 2)),
        ({"eos_token_id": None}, {"eos_token": "c"}, (2,)),
        ({"eos_token_id": 1}, {"eos_token": {"content": "c"}}, (1, 2)),
        ({"eos_token_id": 99}, {"eos_token": "unknown"}, ()),
        ({"text_config": {"eos_token_id": 1, "max_position_embeddings": 7}}, {}, (1,)),
    ],
)
def test_end_ids(tmp_path: Path, config: dict[str, object], tokenizer_config: dict[str, object], expected: tuple[int, ...]) -> None:
    path = folder(tmp_path, {"a": 0, "b": 1, "c": 2}, **config)
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    assert vocabulary(path).eos_ids == expected
    assert vocabulary(path).max_model_len == (7 if "text_config" in config else None)


def test_generation_config_is_never_read(tmp_path: Path) -> None:
    """F19."""
    path = folder(tmp_path, {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}, eos_token_id=2, max_position_embeddings=64)
    before = vocabulary(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4], "repetition_penalty": 1.3, "top_k": 5}))
    assert vocabulary(path) == before == Vocabulary(5, before.fingerprint, (2,), 64)


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="holds no tokenizer.json"):
        vocabulary(tmp_path)


@pytest.mark.pair
def test_the_real_pair_agrees() -> None:
    target = vocabulary(REAL)
    draft = vocabulary(REAL.parent / "smollm2-draft")
    assert (target.size, target.eos_ids, target.max_model_len) == (49152, (2,), 8192)
    assert target.fingerprint == draft.fingerprint


def test_no_torch_and_no_transformers_are_imported() -> None:
    code = "import sys, specdec.vocabulary; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

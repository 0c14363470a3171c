"""Streamed text against the tokenizer's own decoding of all ids: F54, F55, F57, F58, F59."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from orchestrator.detokenise import MAX_HELD_BYTES, DecoderPlan, IncrementalDecoder
from specdec.errors import Unsupported
from tests.unit.orchestrator.tokenizers_here import FAMILIES, byte_fallback, byte_fallback_no_strip, byte_level, metaspace

REAL = Path(__file__).parents[3] / "models" / "smollm2-135m" / "tokenizer.json"
EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

HANGUL = st.text(st.characters(min_codepoint=0xAC00, max_codepoint=0xD7A3), max_size=12)
EMOJI = st.lists(
    st.sampled_from(["👩\u200d👩\u200d👧", "🏳️\u200d🌈", "🎉", "👍🏽", "é", "e\u0301\u0323", "שָׁלוֹם", " ", "  ", "_", "\ufffd"])
).map("".join)
TEXTS = st.lists(st.one_of(HANGUL, EMOJI, st.text(max_size=8), st.sampled_from(["▁", " the", "_x", "</s>", "<0x41>"])), max_size=6).map(
    "".join
)


def chunked(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in zip(borders, borders[1:], strict=False)]


def streamed(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]], skip: bool, prompt: Sequence[int] = ()) -> list[str]:
    decoder = IncrementalDecoder(DecoderPlan(tokenizer), skip_special_tokens=skip, prompt=prompt)
    return [*(decoder.push(chunk) for chunk in chunks), decoder.flush()]


@pytest.mark.parametrize("family", FAMILIES)
@EXAMPLES
@given(text=TEXTS, cuts=st.lists(st.integers(0, 10_000), max_size=8), skip=st.booleans())
@example(text="👩\u200d👩\u200d👧 안녕", cuts=list(range(60)), skip=True)
def test_encoded_text_streams_as_it_decodes(family: str, text: str, cuts: list[int], skip: bool) -> None:
    """F54: any text, any cut."""
    tokenizer = FAMILIES[family]()
    ids = tokenizer.encode(text).ids
    assert "".join(streamed(tokenizer, chunked(ids, cuts), skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", FAMILIES)
@EXAMPLES
@given(data=st.data(), skip=st.booleans())
def test_any_ids_stream_as_they_decode(family: str, data: st.DataObject, skip: bool) -> None:
    """Broken bytes, ids cut from the middle of characters, special ids anywhere, ids nobody knows."""
    tokenizer = FAMILIES[family]()
    size = tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.one_of(st.integers(0, size + 3), st.integers(1, min(256, size))), max_size=MAX_HELD_BYTES))
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=5))
    assert "".join(streamed(tokenizer, chunked(ids, cuts), skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", FAMILIES)
@EXAMPLES
@given(text=TEXTS, cuts=st.lists(st.integers(0, 10_000), max_size=8))
def test_what_is_released_does_not_depend_on_the_cuts(family: str, text: str, cuts: list[int]) -> None:
    """The text after n ids is a function of these ids; a resumed answer goes on where the first stream stopped."""
    tokenizer = FAMILIES[family]()
    ids = tokenizer.encode(text).ids
    single = streamed(tokenizer, [[i] for i in ids], True)
    done = 0
    for chunk, delta in zip(chunked(ids, cuts), streamed(tokenizer, chunked(ids, cuts), True), strict=False):
        assert delta == "".join(single[done : done + len(chunk)])
        done += len(chunk)
    for border in {cut % (len(ids) + 1) for cut in cuts}:
        first, second = (IncrementalDecoder(DecoderPlan(tokenizer)) for _ in range(2))
        before = first.push(ids[:border])
        second.push(ids[:border])
        assert before + second.push(ids[border:]) + second.flush() == tokenizer.decode(ids)


@EXAMPLES
@given(text=TEXTS, cuts=st.lists(st.integers(0, 10_000), max_size=8))
@pytest.mark.pair
def test_the_real_tokenizer_streams_as_it_decodes(text: str, cuts: list[int]) -> None:
    tokenizer = _real()
    ids = tokenizer.encode(text).ids
    assert "".join(streamed(tokenizer, chunked(ids, cuts), False)) == tokenizer.decode(ids, skip_special_tokens=False)


@EXAMPLES
@given(ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(17, 300)), max_size=80))
@pytest.mark.pair
def test_the_real_tokenizer_streams_any_ids(ids: list[int]) -> None:
    assert "".join(streamed(_real(), [[i] for i in ids], True)) == _real().decode(ids)


_loaded: list[Tokenizer] = []


def _real() -> Tokenizer:
    if not _loaded:
        _loaded.append(Tokenizer.from_file(str(REAL)))
    return _loaded[0]


def test_a_window_of_recent_ids_would_fail() -> None:
    """The broken twin of F54: decoding the last few ids again and taking what is new."""
    tokenizer, text = byte_level(), "다람쥐 헌 쳇바퀴 👩\u200d👩\u200d👧"
    ids, shown = tokenizer.encode(text).ids, ""
    for i in range(len(ids)):
        before, now = tokenizer.decode(ids[max(0, i - 2) : i]), tokenizer.decode(ids[max(0, i - 2) : i + 1])
        shown += now[len(before) :]
    assert "\ufffd" in shown
    assert "".join(streamed(tokenizer, [[i] for i in ids], True)) == text


@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_an_emoji_arrives_whole(build: object) -> None:
    """F55: blocks that end after each of its ids; four sessions interleaved."""
    tokenizer = build()  # type: ignore[operator]
    ids = tokenizer.encode("🎉the").ids
    plan = DecoderPlan(tokenizer)
    sessions = [IncrementalDecoder(plan) for _ in range(4)]
    shown = [[session.push([token_id]) for session in sessions] for token_id in ids]
    for deltas in zip(*shown, strict=True):
        assert [delta for delta in deltas if "🎉" in delta] and not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("build", [byte_fallback, metaspace])
def test_spaces_between_words_stay(build: object) -> None:
    """F57; and what would be lost when each id is decoded alone."""
    tokenizer = build()  # type: ignore[operator]
    ids = [tokenizer.token_to_id(token) for token in ("▁the", "▁Khaleesi", "▁is")]
    assert streamed(tokenizer, [[i] for i in ids], True)[:3] == ["the", " Khaleesi", " is"]
    assert "".join(tokenizer.decode([i]) for i in ids) == "theKhaleesiis"


@pytest.mark.parametrize("build", [byte_fallback, byte_fallback_no_strip, metaspace])
@pytest.mark.parametrize("prompt", [["▁the"], ["</s>"], []])
def test_a_leading_space_after_a_prompt_stays(build: object, prompt: list[str]) -> None:
    """F58: the answer is what follows the prompt's text in the decoding of both."""
    tokenizer = build()  # type: ignore[operator]
    before = [tokenizer.token_to_id(token) for token in prompt]
    ids = [tokenizer.token_to_id(token) for token in ("▁_", "▁_leading", "_x")]
    expected = tokenizer.decode(before + ids)[len(tokenizer.decode(before)) :]
    assert "".join(streamed(tokenizer, [[i] for i in ids], True, before)) == expected


@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_a_character_begun_by_the_prompt_is_completed(build: object) -> None:
    tokenizer = build()  # type: ignore[operator]
    ids = tokenizer.encode("세🎉 the").ids
    cut = next(i for i in range(1, len(ids)) if "\ufffd" in tokenizer.decode(ids[:i]) and "세" in tokenizer.decode(ids[: i + 4]))
    answer = "".join(streamed(tokenizer, [ids[cut:]], True, ids[:cut]))
    assert "\ufffd" not in answer and answer.endswith("🎉 the")


def test_complete_characters_of_the_prompt_are_not_the_answers() -> None:
    """A run of byte ids that spans prompt and answer."""
    tokenizer = byte_fallback()
    prompt, answer = [[tokenizer.token_to_id(f"<0x{b:02X}>") for b in char.encode()] for char in ("你", "好")]
    assert "".join(streamed(tokenizer, [answer], True, prompt)) == "好"


@pytest.mark.parametrize("skip", [True, False])
def test_special_ids_show_only_when_asked_for(skip: bool) -> None:
    """F59."""
    tokenizer = byte_level()
    ids = [*tokenizer.encode("the dog").ids, tokenizer.token_to_id("<|im_end|>")]
    assert "".join(streamed(tokenizer, [[i] for i in ids], skip)) == ("the dog" if skip else "the dog<|im_end|>")
    decoder = IncrementalDecoder(DecoderPlan(tokenizer), skip_special_tokens=skip)
    assert decoder.step(ids[-1]) == (("", "<|im_end|>") if skip else ("<|im_end|>", ""))


def test_a_long_run_of_bytes_is_let_go_in_characters() -> None:
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in ("🎉" * 40).encode()]
    deltas = streamed(tokenizer, [[i] for i in ids], True)
    assert "".join(deltas[: len(ids)]) != "" and "".join(deltas) == "🎉" * 40
    broken = [*ids, ids[1]]  # what breaks late breaks alone
    assert "".join(streamed(tokenizer, [[i] for i in broken], True)).startswith("🎉" * 24)


def test_the_cost_of_an_id_does_not_grow() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("the lazy dog 안녕 ").ids * 400
    decoder = IncrementalDecoder(DecoderPlan(tokenizer))

    def seconds() -> float:
        started = time.process_time()
        decoder.push(ids)
        return time.process_time() - started

    first = min(seconds() for _ in range(3))
    for _ in range(20):
        decoder.push(ids)
    assert min(seconds() for _ in range(3)) < 5 * first


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}))
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(Unsupported, match="CTC"):
        DecoderPlan(tokenizer)


def test_trailing_characters_that_a_decoder_trims_wait() -> None:
    """The library trims the end of a text that has one; with less it fails, so this one is written out."""
    tokenizer = byte_fallback_no_strip()
    trimming = Tokenizer.from_str(tokenizer.to_str())
    trimming.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 2)])
    ids = [tokenizer.token_to_id(token) for token in ("▁the", "▁▁", "▁", "▁is", "▁", "▁▁")]
    assert streamed(trimming, [[i] for i in ids], True) == [" the", "", " ", "   is", "", " ", ""]
    assert trimming.decode(ids) == " the    is "

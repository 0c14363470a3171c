"""Streamed text against the tokenizer's own decoding of all ids: F54, F55, F57, F58, F59, F88."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from orchestrator.detokenise import MAX_HELD_BYTES, MAX_HELD_MARKS, REPLACEMENT, DecoderPlan, Hidden, IncrementalDecoder, visible
from specdec.errors import Unsupported
from specdec.vocabulary import special_ids, token_bytes
from tests.unit.orchestrator.tokenizers_here import (
    FAMILIES,
    byte_fallback,
    byte_fallback_no_strip,
    byte_level,
    metaspace,
    unigram_bytes,
)

REAL = Path(__file__).parents[3] / "models" / "smollm2-135m" / "tokenizer.json"


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


SCRIPTS = [
    st.text(st.characters(min_codepoint=0xAC00, max_codepoint=0xD7A3), max_size=12),  # Hangul
    st.text("שלוםעוֹלָםبيةعَرُّ\u200e\u200f\u202e\u2066", max_size=10),  # right to left, with marks and overrides
    st.text("\u200b\u200d\ufeff\u0301\u0323\ue000\U0010ffff\x00\x1b\x7f\x85a", max_size=8),  # no width, combining, private, control
    st.text(max_size=8),
    st.lists(
        st.sampled_from(["👩\u200d👩\u200d👧", "🏳️\u200d🌈", "🎉", "👍🏽", "é", "e\u0301\u0323", "שָׁלוֹם", " ", "  ", "_", "\ufffd"])
    ).map("".join),
    st.sampled_from(["▁", " the", "_x", "</s>", "<0x41>", "<s> <|im_end|>", "don't."]),
]
TEXTS = st.lists(st.one_of(SCRIPTS), max_size=6).map("".join)
CUTS = st.lists(st.integers(0, 10_000), max_size=8)


@st.composite
def id_lists(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Ids of a text; ids of no text; a text's ids with some lost and strange ones between them."""
    size = tokenizer.get_vocab_size()
    any_id = st.one_of(st.integers(0, size + 3), st.integers(1, min(256, size)), st.sampled_from([size - 1, size - 2, 2**31, 2**32 - 1]))
    if draw(st.booleans()):
        return draw(st.lists(any_id, max_size=MAX_HELD_BYTES))
    ids = list(tokenizer.encode(draw(TEXTS)).ids)
    for place in draw(st.lists(st.integers(0, 10_000), max_size=4)):
        if ids and place % 2:
            del ids[place % len(ids)]
        else:
            ids.insert(place % (len(ids) + 1), draw(any_id))
    return ids


def chunked(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in zip(borders, borders[1:], strict=False)]


def push(decoder: IncrementalDecoder, ids: Sequence[int]) -> str:
    return "".join(visible(decoder.step(i)) for i in ids)


def streamed(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]], skip: bool, prompt: Sequence[int] = ()) -> list[str]:
    decoder = IncrementalDecoder(DecoderPlan(tokenizer), skip_special_tokens=skip, prompt=prompt)
    return [*(push(decoder, chunk) for chunk in chunks), visible(decoder.flush())]


def longest_run(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Byte ids in a row; special ids and ids that name nothing do not end a run."""
    special = set(tokenizer.get_added_tokens_decoder())
    tokens = [tokenizer.id_to_token(i) for i in ids if i not in special]
    runs = "".join("b" if re.fullmatch("<0x..>", token) else " " for token in tokens if token is not None)
    return max(map(len, runs.split()), default=0)


def check_stream(family: str, ids: list[int], cuts: list[int], skip: bool) -> None:
    """Any cut gives what the library makes of all ids, and what is released after an id depends on no cut. U+FFFD thus only where the
    library has it."""
    tokenizer = FAMILIES[family]()
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    chunks = chunked(ids, cuts)
    deltas, single = streamed(tokenizer, chunks, skip), streamed(tokenizer, [[i] for i in ids], skip)
    if longest_run(tokenizer, ids) <= MAX_HELD_BYTES or REPLACEMENT not in whole:
        assert "".join(deltas) == whole
    assert REPLACEMENT not in "".join(deltas) or REPLACEMENT in whole
    done = 0
    for chunk, delta in zip(chunks, deltas, strict=False):
        assert delta == "".join(single[done : done + len(chunk)])
        done += len(chunk)


def check_resumed(family: str, ids: list[int], cut: int, skip: bool) -> None:
    """F88: what follows a prompt is what the prompt's text lacks of the whole; resumed ids go on where the stream stopped."""
    tokenizer = FAMILIES[family]()
    cut %= len(ids) + 1
    whole, before = (tokenizer.decode(part, skip_special_tokens=skip) for part in (ids, ids[:cut]))
    if REPLACEMENT not in whole + before and whole.startswith(before):  # else the prompt's own text changes behind its end
        assert "".join(streamed(tokenizer, [[i] for i in ids[cut:]], skip, ids[:cut])) == whole[len(before) :]
    first, second = (IncrementalDecoder(DecoderPlan(tokenizer), skip_special_tokens=skip) for _ in range(2))
    shown = push(first, ids[:cut])
    push(second, ids[:cut])
    assert shown + push(second, ids[cut:]) + visible(second.flush()) == "".join(streamed(tokenizer, [ids], skip))


def check_early(family: str, ids: list[int]) -> None:
    """Released after each id: exactly what every continuation leaves as it is. Looks at the end, at words, and at bytes that complete
    a character or break it."""
    tokenizer = FAMILIES[family]()
    marks = ["Ģ", "Ĳ", "ł", "¿"] if family in ("byte_level", "llama3") else ["<0x80>", "<0x90>", "<0xA0>", "<0xBF>"]
    inside = [i for i in map(tokenizer.token_to_id, marks) if i is not None]
    words = [i for i in map(tokenizer.token_to_id, ["a", "the", "▁▁", "é", "##s", "</w>", "<0x20>"]) if i is not None]
    following = [list(more) for n in (1, 2, 3) for more in itertools.product(inside, repeat=n)] + [[one] for one in words]
    following += [[one, two] for one in words for two in words]
    # Not looked at: U+FFFD as a character, which breaking leaves as it is; half a surrogate pair, whose end Python waits for.
    ids = [i for i in ids if tokenizer.id_to_token(i) not in ("½", "<0xBD>")]
    table, special, spelled = token_bytes(tokenizer), special_ids(tokenizer), b""
    decoder, shown = IncrementalDecoder(DecoderPlan(tokenizer)), ""
    for n in range(1, len(ids) + 1):
        shown += push(decoder, ids[n - 1 : n])
        spelled += table[ids[n - 1]] or b"" if ids[n - 1] < len(table) and ids[n - 1] not in special else b""
        if not re.search(rb"\xed[\xa0-\xbf]$", spelled):
            assert shown == os.path.commonprefix([tokenizer.decode(ids[:n] + more) for more in ([], *following)])


def short_and_long(check: Callable[..., None], short: int, long: int, *per_family: str, **drawn: object) -> tuple[object, object]:
    """The same property twice: with few examples, and with many for the long version."""

    def build(count: int) -> object:
        @pytest.mark.parametrize("family", per_family or FAMILIES)
        @examples(count)
        @given(data=st.data())
        def test(family: str, data: st.DataObject) -> None:
            values = {name: data.draw(kind(FAMILIES[family]()) if callable(kind) else kind, name) for name, kind in drawn.items()}
            check(family, **values)

        return test

    return build(short), pytest.mark.long(pytest.mark.timeout(600)(build(long)))


test_any_ids_stream_as_they_decode, test_any_ids_stream_long = short_and_long(
    check_stream, 20, 600, ids=id_lists, cuts=CUTS, skip=st.booleans()
)
test_resumed_anywhere, test_resumed_anywhere_long = short_and_long(
    check_resumed, 12, 300, ids=id_lists, cut=st.integers(0, 10_000), skip=st.booleans()
)
test_text_leaves_as_early_as_is_safe, test_text_leaves_early_long = short_and_long(
    check_early, 6, 60, ids=lambda tokenizer: id_lists(tokenizer).map(lambda ids: ids[:24])
)


@pytest.mark.parametrize("family", FAMILIES)
@examples(12)
@given(text=TEXTS, cuts=CUTS, skip=st.booleans())
@example(text="👩\u200d👩\u200d👧 안녕", cuts=list(range(60)), skip=True)
def test_encoded_text_streams_as_it_decodes(family: str, text: str, cuts: list[int], skip: bool) -> None:
    """F54: any text, any cut."""
    check_stream(family, FAMILIES[family]().encode(text).ids, cuts, skip)


@examples(60)
@given(text=TEXTS, cuts=CUTS)
@pytest.mark.pair
def test_the_real_tokenizer_streams_as_it_decodes(text: str, cuts: list[int]) -> None:
    tokenizer = _real()
    ids = tokenizer.encode(text).ids
    assert "".join(streamed(tokenizer, chunked(ids, cuts), False)) == tokenizer.decode(ids, skip_special_tokens=False)


@examples(60)
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
    shown = [[push(session, [token_id]) for session in sessions] for token_id in ids]
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


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


@pytest.mark.parametrize("build", [byte_fallback, unigram_bytes])
def test_a_prompt_of_bytes_alone_is_a_text_already(build: Callable[[], Tokenizer]) -> None:
    """The first space behind it is not the first of the text."""
    tokenizer = build()
    prompt, answer = byte_ids(tokenizer, "안녕"), [tokenizer.token_to_id("▁the")]
    assert "".join(streamed(tokenizer, [answer], True, prompt)) == " the"


@pytest.mark.parametrize("shift", range(4))
def test_a_long_prompt_of_bytes_may_be_cut_inside_a_character(shift: int) -> None:
    """Only its newest ids are looked at, and they may begin anywhere; what the prompt has begun goes on all the same."""
    tokenizer = byte_fallback()
    ids = byte_ids(tokenizer, "ภาษาไทย" * 30)
    border = len(ids) - 6 - shift
    answer = "".join(streamed(tokenizer, [ids[border:]], True, ids[:border]))
    assert REPLACEMENT not in answer and answer == "ภาษาไทย"[-2 - (shift + 2) // 3 :]


@pytest.mark.parametrize("skip", [True, False])
def test_ids_without_text_do_not_hide_the_prompt(skip: bool) -> None:
    """Many special ids between the prompt's text and the answer, as pictures and padding leave them."""
    tokenizer = byte_fallback()
    prompt = [tokenizer.token_to_id("▁the"), *[tokenizer.token_to_id("<|im_end|>")] * 500]
    assert "".join(streamed(tokenizer, [[tokenizer.token_to_id("▁is")]], skip, prompt)) == " is"


@pytest.mark.parametrize("skip", [True, False])
def test_special_ids_show_only_when_asked_for(skip: bool) -> None:
    """F59."""
    tokenizer = byte_level()
    ids = [*tokenizer.encode("the dog").ids, tokenizer.token_to_id("<|im_end|>")]
    assert "".join(streamed(tokenizer, [[i] for i in ids], skip)) == ("the dog" if skip else "the dog<|im_end|>")
    (piece,) = IncrementalDecoder(DecoderPlan(tokenizer), skip_special_tokens=skip).step(ids[-1])
    assert piece == "<|im_end|>" and isinstance(piece, Hidden) == skip


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_hidden_ids_behind_a_character_begun_are_held_in_a_bounded_number(family: str) -> None:
    """A prompt may end inside a character, and a request may allow special ids alone. What the client sees is as ever."""
    tokenizer = FAMILIES[family]()
    first, *rest = [tokenizer.token_to_id(name) for name in (("â", "Ĥ", "¬") if family == "byte_level" else ("<0xE2>", "<0x82>", "<0xAC>"))]
    end = tokenizer.token_to_id("<|im_end|>")
    decoder, shown = IncrementalDecoder(DecoderPlan(tokenizer), prompt=[first]), ""
    for _ in range(500):
        shown += visible(decoder.step(end))
        assert len(decoder.pending()) <= MAX_HELD_MARKS + 1
    assert shown + push(decoder, rest) + visible(decoder.flush()) == tokenizer.decode([first, *rest], skip_special_tokens=True)


def test_a_long_run_of_bytes_is_let_go_in_characters() -> None:
    tokenizer = byte_fallback()
    ids = byte_ids(tokenizer, "🎉" * 40)
    deltas = streamed(tokenizer, [[i] for i in ids], True)
    assert "".join(deltas) == "🎉" * 40
    assert deltas[:MAX_HELD_BYTES] == [""] * MAX_HELD_BYTES
    assert deltas[MAX_HELD_BYTES + 3 :: 4] == ["🎉"] * 24  # each in one piece, and none waits for another
    broken = [*ids, ids[1]]  # what breaks late breaks alone
    assert "".join(streamed(tokenizer, [[i] for i in broken], True)) == "🎉" * 40 + REPLACEMENT


@pytest.mark.parametrize("family", ["byte_level", "llama3", "metaspace", "words", "byte_fallback"])
@examples(25)
@given(data=st.data())
def test_no_complete_character_is_held_for_longer_than_named(family: str, data: st.DataObject) -> None:
    """Ids in a row after which the client lacks a character that the ids so far have: none where no later id can take it back."""
    tokenizer = FAMILIES[family]()
    ids = tokenizer.encode(data.draw(TEXTS) + data.draw(st.sampled_from(["", "다람쥐헌쳇바퀴에타고파" * 4]))).ids
    decoder, shown, whole, behind = IncrementalDecoder(DecoderPlan(tokenizer)), "", 0, 0
    for n in range(1, len(ids) + 1):
        shown += push(decoder, ids[n - 1 : n])
        whole = max(whole, len(tokenizer.decode(ids[:n]).rstrip(REPLACEMENT)))
        behind = 0 if len(shown) >= whole else behind + 1
        assert behind <= (MAX_HELD_BYTES if family == "byte_fallback" else 0)


def test_the_cost_of_an_id_does_not_grow() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("the lazy dog 안녕 ").ids * 400
    decoder = IncrementalDecoder(DecoderPlan(tokenizer))

    def seconds() -> float:
        started = time.process_time()
        push(decoder, ids)
        return time.process_time() - started

    first = min(seconds() for _ in range(3))
    for _ in range(20):
        push(decoder, ids)
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

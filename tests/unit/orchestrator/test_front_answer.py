"""One answer as the client sees it: F09, F22, F23, F25, F26, F27, F28, F35, F46, F87."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.answer import AnswerStream, Delta, Finished
from orchestrator.detokenise import DecoderPlan, IncrementalDecoder
from orchestrator.output import Ended, GenerationStats, TokensDecided
from orchestrator.stops import StopMatcher
from specdec.terms import FinishReason, Origin, TokenLogprobs
from tests.fakes_driver import decided, ended
from tests.unit.orchestrator.tokenizers_here import byte_level

TOKENIZER = byte_level()
PLAN = DecoderPlan(TOKENIZER)
LETTERS = {char: TOKENIZER.token_to_id(char) for char in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ!"}
END = TOKENIZER.token_to_id("<|im_end|>")


def ids(text: str) -> tuple[int, ...]:
    return tuple(LETTERS[char] for char in text)


def answer(*stops: str, resumed: Sequence[int] = (), min_tokens: int = 0, include: bool = False, skip: bool = True) -> AnswerStream:
    decoder = IncrementalDecoder(PLAN, skip_special_tokens=skip, prompt=TOKENIZER.encode("the").ids)
    return AnswerStream(decoder, StopMatcher(stops, include), prompt_tokens=5, resumed=resumed, min_tokens=min_tokens)


def fold(stream: AnswerStream, *events: TokensDecided | Ended) -> tuple[Delta, Finished]:
    """Everything a client received, and the last message; the generation is stopped as the front does it."""
    pieces, made = [], 0
    for event in events:
        if isinstance(event, Ended):
            rest, last = stream.finish(event)
            break
        made += len(event.tokens)
        pieces.append(stream.tokens(event))
        if stream.stopped is not None:
            rest, last = stream.finish(GenerationStats(decided=made))
            break
    else:
        raise AssertionError("no end")
    pieces.append(rest)
    return _joined(pieces), last


def _joined(pieces: Sequence[Delta]) -> Delta:
    return Delta(
        tuple(i for p in pieces for i in p.token_ids),
        "".join(p.text for p in pieces),
        tuple(entry for p in pieces for entry in p.logprobs),
        tuple(origin for p in pieces for origin in p.origins),
    )


def test_an_answer_that_ends_by_length() -> None:
    got, last = fold(answer(), decided(*ids("ab")), decided(*ids("c"), origin=Origin.ACCEPTED), ended(drafted=3, accepted=1, decided=3))
    assert (got.token_ids, got.text) == (ids("abc"), "abc")
    assert (last.reason, last.stop_reason) == (FinishReason.LENGTH, "")
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.accepted, last.usage.rejected) == (5, 3, 1, 2)


def test_an_end_id_is_named_and_not_delivered() -> None:
    """F09: also as the very first decision."""
    got, last = fold(answer(), ended(FinishReason.STOP, 2))
    assert (got, last.reason, last.stop_reason, last.usage.completion_tokens) == (Delta(), FinishReason.STOP, "2", 0)


@pytest.mark.parametrize("index", range(5))
def test_a_stop_string_completed_at_each_slot_of_a_block(index: int) -> None:
    """F22, F23: the token that completes it is delivered and billed, those behind it are neither."""
    text = "abcde"
    block = TokensDecided(ids(text), tuple(TokenLogprobs(-float(i)) for i in range(5)), (Origin.ACCEPTED,) * 4 + (Origin.BONUS,))
    got, last = fold(answer(text[index]), block, ended())
    assert got.token_ids == ids(text[: index + 1]) and got.text == text[:index]
    assert len(got.logprobs) == len(got.origins) == len(got.token_ids) == last.usage.completion_tokens
    assert (last.reason, last.stop_reason) == (FinishReason.STOP, text[index])
    assert last.usage.discarded == 4 - index and last.usage.accepted == min(index + 1, 4)


def test_tokens_that_were_decided_and_never_handed_over_are_discarded_too() -> None:
    stream = answer("b")
    stream.tokens(decided(*ids("abc")))
    assert stream.finish(GenerationStats(decided=9))[1].usage.discarded == 7


def test_a_stop_string_longer_than_a_block() -> None:
    """F27: nothing of it leaks; without its end it is text."""
    got, last = fold(answer("DEFGHIJ"), *(decided(*ids(part)) for part in ("ABC", "DEF", "G", "HI", "J")), ended())
    assert (got.text, last.stop_reason) == ("ABC", "DEFGHIJ")
    got, last = fold(answer("DEFGHIJ"), *(decided(*ids(part)) for part in ("ABC", "DEF", "G", "HI")), ended())
    assert (got.text, last.reason) == ("ABCDEFGHI", FinishReason.LENGTH)


def test_held_back_text_is_there_when_the_answer_breaks_off() -> None:
    stream = answer("DEFG")
    assert stream.tokens(decided(*ids("ABCDEF"))).text == "ABC"
    assert (stream.flush(), stream.flush()) == ("DEF", "")


def test_a_special_token_as_stop_string() -> None:
    """F28: it leaves no text, and stops all the same."""
    for include in (False, True):
        got, last = fold(answer("<|im_end|>", include=include), decided(*ids("ab"), END, *ids("c")), ended())
        assert (got.text, got.token_ids, last.stop_reason) == ("ab", (*ids("ab"), END), "<|im_end|>")
    got, _ = fold(answer("<|im_end|>", include=True, skip=False), decided(*ids("ab"), END), ended())
    assert got.text == "ab<|im_end|>"


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "ha"), (2, "ha"), (3, "hahaha"), (5, "hahaha"), (6, "hahaha"), (7, None)])
def test_stop_strings_wait_for_min_tokens(min_tokens: int, text: str | None) -> None:
    """F46."""
    stream = answer("ha", min_tokens=min_tokens, include=True)
    tokens = [decided(*ids(char)) for char in "hahaha"]
    got, last = fold(stream, *tokens, ended())
    if text is None:
        assert (got.text, last.reason) == ("hahaha", FinishReason.LENGTH)
    else:
        expected = {0: "ha", 2: "ha", 3: "haha", 5: "hahaha", 6: "hahaha"}[min_tokens]
        assert (got.text, last.stop_reason) == (expected, "ha")


def test_a_character_left_unfinished_shows_as_the_tokenizer_shows_it() -> None:
    broken = TOKENIZER.encode("🎉").ids[:-1]
    got, _ = fold(answer(), decided(*broken), ended())
    assert got.text == TOKENIZER.decode(broken) == "\ufffd"


def test_a_stop_string_in_the_last_held_text() -> None:
    broken = TOKENIZER.encode("🎉").ids[:-1]
    got, last = fold(answer("\ufffd"), decided(*broken), ended())
    assert (got.text, last.reason, last.stop_reason) == ("", FinishReason.STOP, "\ufffd")


def test_a_resumed_answer_goes_on_where_it_stopped() -> None:
    """F87: ids count once; a half-matched stop string and a half-written character carry over."""
    whole = TOKENIZER.encode("a🎉bcd🎉").ids
    for cut in range(len(whole)):
        first, second = answer("bcX", "d🎉"), answer("bcX", "d🎉", resumed=whole[:cut])
        before = first.tokens(decided(*whole[:cut]))
        got, last = fold(second, decided(*whole[cut:]), ended())
        assert before.text + got.text == "a🎉bc"
        assert last.usage.completion_tokens == len(whole)
        assert last.stop_reason == "d🎉"


def test_a_resumed_answer_that_was_over() -> None:
    stream = answer("b", resumed=ids("abc"))
    assert stream.stopped == "b"
    rest, last = stream.finish(GenerationStats())
    assert (rest, last.reason, last.usage.completion_tokens, last.usage.discarded) == (Delta(), FinishReason.STOP, 2, 0)


@settings(max_examples=120, deadline=None)
@given(
    text=st.text("abAB!", max_size=40),
    stops=st.lists(st.text("abAB!", min_size=1, max_size=3), max_size=3),
    seed=st.integers(0, 2**32),
    min_tokens=st.integers(0, 8),
    cap=st.integers(0, 40),
)
def test_counts_agree_with_what_was_delivered(text: str, stops: list[str], seed: int, min_tokens: int, cap: int) -> None:
    """F25, F26, F35: blocks of any size, any stops, any caps; ids, log-probabilities, origins and usage agree, whatever the blocks."""
    text = text[:cap]
    rng = random.Random(seed)
    kinds = [rng.choice(list(Origin)) for _ in text]
    entries = [TokenLogprobs(-rng.random()) for _ in text]
    borders = sorted({0, len(text), *(rng.randint(0, len(text)) for _ in range(5))})
    blocks = [TokensDecided(ids(text[a:b]), tuple(entries[a:b]), tuple(kinds[a:b])) for a, b in zip(borders, borders[1:], strict=False)]
    got, last = fold(answer(*stops, min_tokens=min_tokens), *blocks, ended(decided=len(text)))
    count = len(got.token_ids)
    assert got.token_ids == ids(text)[:count]
    assert count == last.usage.completion_tokens == len(got.logprobs) == len(got.origins)
    assert got.logprobs == tuple(entries[:count])
    assert last.usage.accepted == list(got.origins).count(Origin.ACCEPTED) <= count
    single, alone = fold(
        answer(*stops, min_tokens=min_tokens),
        *(TokensDecided(ids(c), (e,), (k,)) for c, e, k in zip(text, entries, kinds, strict=True)),
        ended(decided=len(text)),
    )
    assert (single, alone.reason, alone.stop_reason) == (got, last.reason, last.stop_reason)
    if last.reason is FinishReason.STOP:
        assert count >= min_tokens and text[:count] == got.text + last.stop_reason
    else:
        assert got.text == text and last.usage.discarded == 0

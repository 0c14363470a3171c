"""An answer's text, ids and counts against an oracle that decodes everything anew after each token: F22, F23, F26, F27, F28, F46."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from orchestrator import answer as answer_module
from orchestrator.answer import AnswerStream
from orchestrator.detokenise import DecoderPlan, Hidden, IncrementalDecoder, visible
from orchestrator.output import GenerationStats
from orchestrator.stops import StopMatcher
from specdec.terms import FinishReason
from specdec.vocabulary import BYTE_OF_CHAR
from tests.fakes_driver import decided, ended

WORDS = ["a", "b", "ab", "ba", "aa", "bab", "aba", "<", "><"]
SPECIAL = ["<a>", "<|end|>", "ab>"]
WIDE = ["é", "다", "🎉"]  # written in bytes
STOPS = [
    "a",
    "ab",
    "ba",
    "bab",
    "aab",
    "abab",
    "b<",
    "<a>",
    "a<a>",
    "<a>b",
    ">b",
    "<a",
    "ab>a",
    "<|end|>",
    "é",
    "다",
    "b🎉",
    "🎉<a>",
    "é다",
    "다<|end|>a",
]


@cache
def byte_level() -> Tokenizer:
    spelled = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    return _tokenizer([*WORDS, *(spelled[byte] for char in WIDE for byte in char.encode())], decoders.ByteLevel())


@cache
def byte_fallback() -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _tokenizer([*WORDS, *(f"<0x{byte:02X}>" for char in WIDE for byte in char.encode())], decoders.Sequence(steps))


def _tokenizer(tokens: Sequence[str], decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(dict.fromkeys(tokens))}, merges=[]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


BUILDS: dict[str, Callable[[], Tokenizer]] = {"byte_level": byte_level, "byte_fallback": byte_fallback}


@dataclass(frozen=True)
class Case:
    build: str
    ids: tuple[int, ...]
    stops: tuple[str, ...]
    cuts: tuple[int, ...] = ()
    resumed: int = 0
    min_tokens: int = 0
    include: bool = False
    skip: bool = True


def ids_of(build: str, parts: Sequence[str]) -> tuple[int, ...]:
    tokenizer = BUILDS[build]()
    ids: list[int] = []
    for part in parts:
        known = tokenizer.token_to_id(part)
        one = {byte: char for char, byte in BYTE_OF_CHAR.items()}.__getitem__ if build == "byte_level" else "<0x{:02X}>".format
        ids += [known] if known is not None else [tokenizer.token_to_id(one(byte)) for byte in part.encode()]
    return tuple(ids)


def case(build: str, parts: Sequence[str], *stops: str, **more: object) -> Case:
    return replace(Case(build, ids_of(build, parts), stops), **more)  # type: ignore[arg-type]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    build = draw(st.sampled_from(sorted(BUILDS)))
    letters = draw(st.sampled_from([WORDS[:7], [*WORDS, *SPECIAL], [*WORDS[:3], *WIDE, *SPECIAL], [*WIDE, "<a>"]]))
    ids = ids_of(build, draw(st.lists(st.sampled_from(letters), max_size=12)))
    return Case(
        build,
        ids,
        tuple(draw(st.lists(st.sampled_from(STOPS), max_size=4))),
        tuple(draw(st.lists(st.integers(0, len(ids)), max_size=4))),
        resumed=draw(st.integers(0, len(ids))) if draw(st.booleans()) else 0,
        min_tokens=draw(st.integers(0, 8)) if draw(st.booleans()) else 0,
        include=draw(st.booleans()),
        skip=draw(st.booleans()),
    )


@dataclass(frozen=True)
class Outcome:
    """What the client has in the end. `text` includes that of the resumed ids; `kept` ids are delivered and billed."""

    text: str
    kept: int
    stop: str


def whole_text(case: Case, count: int) -> list[str]:
    """The text of the first ids, decoded at once, in characters; those of hidden special ids stand in it as Hidden. An unfinished
    character is left out."""
    tokenizer, special = BUILDS[case.build](), {i for i, t in BUILDS[case.build]().get_added_tokens_decoder().items() if t.special}
    chars: list[str] = []
    done = 0
    for n in range(1, count + 1):
        if n < count and case.ids[n - 1] not in special:
            continue
        text = tokenizer.decode(case.ids[:n], skip_special_tokens=case.skip)
        while text.endswith("\ufffd"):
            text = text[:-1]
        chars += text[done:]
        done = max(done, len(text))
        if case.skip and case.ids[n - 1] in special:
            chars += [Hidden(char) for char in tokenizer.id_to_token(case.ids[n - 1])]
    return chars


def searched(case: Case) -> Outcome:
    """Slower and dumber than the product: the whole text after each token, every end in it, every stop string."""
    seen = 0
    for n in range(1, len(case.ids) + 1):
        chars = whole_text(case, n)
        text = "".join(chars)
        for end in range(seen + 1, len(text) + 1):
            found = [stop for stop in case.stops if text[:end].endswith(stop)]
            if found and n >= case.min_tokens:
                stop = max(found, key=len)
                return Outcome(visible(chars[: end if case.include else end - len(stop)]), n, stop)
        seen = max(seen, len(text))
    return Outcome(visible(whole_text(case, len(case.ids))), len(case.ids), "")


def streamed(case: Case) -> Outcome:
    """The product, block by block. What the resumed part showed is asked of a stream that ended there."""
    plan = DecoderPlan(BUILDS[case.build]())

    def stream(resumed: Sequence[int]) -> AnswerStream:
        decoder = IncrementalDecoder(plan, skip_special_tokens=case.skip)
        return AnswerStream(decoder, StopMatcher(case.stops, case.include), prompt_tokens=3, resumed=resumed, min_tokens=case.min_tokens)

    first, answer = stream(()), stream(case.ids[: case.resumed])
    text, made = first.tokens(decided(*case.ids[: case.resumed])).text, 0
    borders = sorted({case.resumed, len(case.ids), *(cut for cut in case.cuts if cut > case.resumed)})
    delivered: list[int] = []
    for a, b in pairwise(borders):
        if answer.stopped is not None:
            break
        delta = answer.tokens(decided(*case.ids[a:b]))
        made += b - a
        text += delta.text
        delivered += delta.token_ids
    stopped = answer.stopped is not None
    rest, last = answer.finish(GenerationStats(decided=made) if stopped else ended(decided=made))
    usage = last.usage
    assert (last.reason is FinishReason.STOP) == stopped and not rest.token_ids
    assert tuple(delivered) == case.ids[case.resumed : case.resumed + len(delivered)]
    assert usage.discarded == made - len(delivered)
    return Outcome(text + rest.text, usage.completion_tokens, last.stop_reason)


def check(case: Case) -> None:
    assert streamed(case) == searched(case)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_answers_end_where_a_search_in_the_whole_text_ends_them(case: Case) -> None:
    check(case)


@pytest.mark.long
@pytest.mark.timeout(600)
@settings(max_examples=5_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_answers_end_where_a_search_ends_them_long(case: Case) -> None:
    check(case)


EXACT = {
    "across tokens": case("byte_level", ["a", "b", "ab", "a"], "bab", cuts=(1, 2, 3)),
    "inside a token": case("byte_level", ["a", "bab", "a"], "ba"),
    "special text": case("byte_fallback", ["b", "<a>", "b"], "<a>b", cuts=(1, 2)),
    "special text, included": case("byte_fallback", ["b", "<a>", "b"], "<a>b", include=True, skip=False),
    "text in front of a special id": case("byte_fallback", ["a", "🎉", "<|end|>", "a"], "<|end|>"),
    "around a special id": case("byte_fallback", ["a", "다", "<|end|>", "a", "b"], "다<|end|>a"),
    "inside a run of bytes": case("byte_fallback", ["a", "다", "🎉", "é", "b"], "다"),
    "uncounted inside a run of bytes": case("byte_fallback", ["é", "다", "🎉", "b", "é", "b"], "é", min_tokens=4),
    "never": case("byte_level", ["a", "b", "a"], "abab", cuts=(1, 2)),
}


@pytest.mark.parametrize("name", EXACT)
def test_answers_by_name(name: str) -> None:
    check(EXACT[name])


def test_an_unfinished_character_in_front_of_a_special_id_shows_as_decoded() -> None:
    """Ids that no text has: the answer ends at the special id, so what came before it is the tokenizer's decoding of it."""
    for build in BUILDS:
        broken = [*ids_of(build, ["a", "🎉"])[:3], *ids_of(build, ["<|end|>"])]
        got = streamed(Case(build, tuple(broken), ("<|end|>",)))
        assert got == Outcome(BUILDS[build]().decode(broken), 4, "<|end|>")
        broken += ids_of(build, ["b"])
        assert streamed(Case(build, tuple(broken), ("a<|end|>",))) == Outcome(BUILDS[build]().decode(broken), 5, "")


@pytest.mark.parametrize("build", BUILDS)
def test_what_leaves_in_front_of_an_error_comes_again_when_resumed(build: str) -> None:
    """A stream that breaks off says what it held back, in a delta without ids. Who resumes drops it: the ids bring it again, whole."""
    ids, plan = ids_of(build, ["a", "b", "🎉", "ab", "다", "é", "b", "a"]), DecoderPlan(BUILDS[build]())
    whole, dropped = BUILDS[build]().decode(ids), ""

    def stream(resumed: Sequence[int] = ()) -> AnswerStream:
        return AnswerStream(IncrementalDecoder(plan), StopMatcher(["bbb", "abx"]), prompt_tokens=1, resumed=resumed)

    for cut in range(len(ids) + 1):
        first, second = stream(), stream(ids[:cut])
        before, rest = first.tokens(decided(*ids[:cut])).text, first.flush()
        assert before + rest == BUILDS[build]().decode(ids[:cut])
        assert before + second.tokens(decided(*ids[cut:])).text + second.flush() == whole
        dropped += rest
    assert "ab" in dropped and "\ufffd" in dropped


# --- broken twins -------------------------------------------------------------------------------------------------------


def fails(*names: str) -> None:
    for name in names:
        with pytest.raises(AssertionError):
            check(EXACT[name])


def test_twin_one_character_too_few_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    link = StopMatcher._link

    def careless(self: StopMatcher) -> None:
        link(self)
        self._hold = [max(0, hold - 1) for hold in self._hold]

    monkeypatch.setattr(StopMatcher, "_link", careless)
    fails("across tokens", "around a special id")


def test_twin_stop_strings_only_at_the_ends_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    push = StopMatcher.push

    def at_ends(self: StopMatcher, text: str, *, hidden: bool = False, armed: bool = True) -> tuple[str, str | None]:
        shown, _ = push(self, text[:-1], hidden=hidden, armed=False)
        more, stop = push(self, text[-1:], hidden=hidden, armed=armed)
        return shown + more, stop

    monkeypatch.setattr(StopMatcher, "push", at_ends)
    fails("inside a token")


def test_twin_only_final_text_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IncrementalDecoder, "pending", lambda self: ())
    fails("text in front of a special id", "inside a run of bytes", "uncounted inside a run of bytes")


def test_twin_special_ids_overtake_the_text_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IncrementalDecoder, "_rest", lambda self: "")
    fails("text in front of a special id", "around a special id")


def test_twin_text_that_was_held_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_module, "_shared", lambda one, other: 0)
    fails("uncounted inside a run of bytes")

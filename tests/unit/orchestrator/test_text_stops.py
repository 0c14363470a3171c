"""Stop strings in a stream: F22, F23, F27, F28; random ones against a search in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.stops import StopMatcher

LETTERS = st.text("ab<|", max_size=24)
STOPS = st.lists(st.text("ab<|", min_size=1, max_size=4), max_size=4)


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    shown = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.flush()], None


def test_a_stop_string_across_tokens_leaks_nothing() -> None:
    """F27."""
    assert run(StopMatcher(["DEFGHIJ"]), ["ABC", "DEF", "G", "HI", "J"]) == (["ABC", "", "", "", ""], "DEFGHIJ")


def test_what_was_held_back_in_vain_leaves_in_order() -> None:
    """F27, the variant without a match; and at the end."""
    assert run(StopMatcher(["DEFGHIJ"]), ["ABC", "DEF", "G", "HI", "K"]) == (["ABC", "", "", "", "DEFGHIK", ""], None)
    assert run(StopMatcher(["DEFGHIJ"]), ["ABC", "DEF"]) == (["ABC", "", "DEF"], None)
    assert run(StopMatcher(["aab"]), ["aaab"]) == (["a"], "aab")


def test_included_stop_strings_hold_nothing_back() -> None:
    assert run(StopMatcher(["DEFG"], include=True), ["ABC", "DE", "FGH"]) == (["ABC", "DE", "FG"], "DEFG")


def test_the_first_to_be_completed_wins_and_the_longest_of_equals() -> None:
    assert run(StopMatcher(["bcd", "c"]), ["abcd"]) == (["ab"], "c")
    assert run(StopMatcher(["b", "ab"]), ["xab"]) == (["x"], "ab")


def test_hidden_text_is_matched_and_never_shown() -> None:
    """F28: a special token that leaves no text; alone, and in the middle of a stop string."""
    matcher = StopMatcher(["<|im_end|>"])
    assert matcher.push("the end") == ("the end", None)
    assert matcher.push("<|im_end|>", hidden=True) == ("", "<|im_end|>")
    matcher = StopMatcher(["x<|im_end|>"], include=True)
    assert [matcher.push("ax"), matcher.push("<|im_end|>", hidden=True)] == [("ax", None), ("", "x<|im_end|>")]
    matcher = StopMatcher(["<|im_end|>!"])
    shown = [matcher.push("a"), matcher.push("<|im_end|>", hidden=True), matcher.push("b")]
    assert "".join(text for text, _ in shown) == "ab"


def test_unarmed_stop_strings_are_text() -> None:
    """F46: before min_tokens; one that is completed later counts, from wherever it began."""
    matcher = StopMatcher(["ha"])
    assert matcher.push("ha", armed=False) == ("ha", None)
    assert matcher.push("h", armed=False) == ("", None)
    assert matcher.push("a") == ("", "ha")


def test_without_stop_strings_text_passes() -> None:
    matcher = StopMatcher([])
    assert (matcher.push("abc"), matcher.push("x", hidden=True), matcher.flush()) == (("abc", None), ("", None), "")


def searched(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Slower and dumber: every prefix, every stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=200, deadline=None)
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=6), include=st.booleans())
def test_any_cut_gives_what_a_search_in_the_whole_text_gives(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    shown, stop = run(StopMatcher(stops, include), pieces)
    assert ("".join(shown), stop) == searched(text, stops, include)


@settings(max_examples=150, deadline=None)
@given(text=LETTERS, stops=STOPS)
def test_nothing_harmless_is_held_back(text: str, stops: list[str]) -> None:
    """Held = the longest end of the text that begins a stop string; one character more would be too much."""
    matcher, shown = StopMatcher(stops), ""
    for i, char in enumerate(text):
        released, stop = matcher.push(char)
        shown += released
        if stop is not None:
            return
        so_far = text[: i + 1]
        wanted = max((n for stop in stops for n in range(1, len(stop)) if so_far.endswith(stop[:n])), default=0)
        assert len(shown) == len(so_far) - wanted


@pytest.mark.timeout(20)
def test_many_long_stop_strings_stay_cheap() -> None:
    matcher = StopMatcher([("a" * 500) + str(i) for i in range(16)])
    assert matcher.push("a" * 200_000)[0] == "a" * 199_500

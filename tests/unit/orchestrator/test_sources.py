"""Which block the next round proposes: forced ids, the lookahead, a lookup in the text, or nothing."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.drafting import DraftSide
from orchestrator.events import Admitted, DraftPlaced, ToDraft
from orchestrator.lookahead import EMPTY, MAX_NODES, Block, Lookahead
from orchestrator.pace import FixedPace
from orchestrator.sources import Sources
from specdec import terms
from specdec.hashing import prefix_hash
from specdec.terms import DraftDistribution, Proposal, RejectionMethod, SamplingParams

PROMPT = (1, 2, 3)
Floats = npt.NDArray[np.float64]


def admitted(k: int = 2, max_block: int = 16, max_tokens: int = 100, window: int = 1000, **other: Any) -> Admitted:
    return Admitted("s", PROMPT, len(PROMPT), SamplingParams(max_tokens=max_tokens), 7, window, k, max_block, **other)


def sources(lookup: int = 0, **request: Any) -> Sources:
    asked = admitted(**request)
    return Sources(asked, lookup, FixedPace(asked.num_speculative_tokens, 0))


def q(token: int) -> DraftDistribution:
    return DraftDistribution((token, token + 1), struct.pack("<2f", 0.75, 0.25))


def draft(made: Sources, *tokens: int, over: tuple[int, ...] = (), committed: tuple[int, ...] = PROMPT) -> int:
    prefix = (*committed, *over)
    return made.lookahead.add(Proposal("s", 1, len(prefix), prefix_hash(prefix), tokens, (), tuple(map(q, tokens))))


def chosen(made: Sources) -> tuple[tuple[int, ...], str] | None:
    choice = made.choose()
    return None if choice is None else (choice[0].tokens, choice[1])


def test_the_order_of_the_sources() -> None:
    made = sources(lookup=1)
    assert chosen(made) is None, "only the draft can help"
    made.commit((1,), ())
    assert chosen(made) == ((2, 3), "ngram")
    draft(made, 8, 9, committed=(*PROMPT, 1))
    assert chosen(made) == ((8, 9), "hit")
    made.commit((5,), (6, 7, 8))
    assert chosen(made) == ((6, 7, 8), "forced")
    made.commit((6,), ())
    assert chosen(made) is None, "what was forced is over when nothing is told to be"


def test_a_chain_that_begins_with_all_that_is_forced_goes_on_behind_it() -> None:
    for tokens, forced, expected in (
        ((8, 9), (8,), ((8, 9), "hit")),
        ((8, 9), (8, 9), ((8, 9), "hit")),
        ((8, 9, 10, 11), (8, 9, 10), ((8, 9, 10), "hit")),  # beyond K, as far as it is forced
        ((8, 9), (8, 9, 10), ((8, 9, 10), "forced")),
        ((8, 9), (9,), ((9,), "forced")),
        ((8, 7, 6), (8, 9), ((8, 9), "forced")),
    ):
        made = sources(k=2)
        made.commit((4,), forced)
        draft(made, *tokens, committed=(*PROMPT, 4))
        assert chosen(made) == expected, (tokens, forced)


def test_whose_block_it_is() -> None:
    made = sources(lookup=1)
    made.commit((4,), (8, 9))
    assert not made.ready()[0].own
    draft(made, 8, 9, committed=(*PROMPT, 4))
    assert made.ready()[0].own
    made = sources(lookup=1)
    made.commit((1,), ())
    choice = made.choose()
    assert choice is not None and not choice[0].own


# --- what waits at the target behind a block that is in flight -------------------------------------------------------


def waiting(made: Sources, block: Block, chain: Block = EMPTY) -> tuple[tuple[int, ...], str]:
    found = made.further(block, chain)
    assert len(found.distributions) == len(found.tokens)
    return found.tokens, found.source


def chain(*tokens: int) -> Block:
    return Block(tokens, (None,) * len(tokens), "draft", (0.9,) * len(tokens))


def repeated(k: int = 2, **request: Any) -> Sources:
    """1, 2, 3 has occurred: 4, 5, 6, 7, 1, 2, 3, 4 is what followed."""
    made = sources(lookup=2, k=k, **request)
    made.commit((4, 5, 6, 7, *PROMPT, 4), ())
    return made


def test_a_lookup_says_how_the_block_ends_and_goes_on_behind_it() -> None:
    made = repeated()
    assert waiting(made, Block((5, 6), (None, None))) == ((5, 6, 7, 1, 2), "ngram"), "one token that the round decides, then K"
    assert waiting(made, EMPTY) == ((5, 6, 7), "ngram")
    assert made.further(Block((5, 9), (None, None)), EMPTY) is EMPTY, "what it ends with has not occurred"
    assert made.further(Block((3, 4), (None, None)), EMPTY).tokens == (3, 4, 5, 6, 7)
    none = sources(lookup=0)
    none.commit((4, 5, 6, 7, *PROMPT, 4), ())
    assert none.further(Block((5, 6), (None, None)), EMPTY) is EMPTY


def test_a_lookup_that_only_says_how_the_block_ends_is_nothing_to_go_on_with() -> None:
    made = repeated()
    assert made.further(Block((5, 6, 7, 1, 2), (None,) * 5), EMPTY).tokens == (5, 6, 7, 1, 2, 3, 4)
    assert made.further(Block((5, 6, 7, 1, 2, 3), (None,) * 6), EMPTY) is EMPTY, "the text ends with 3, 4"


def test_the_drafts_chain_goes_first_where_it_leads_beyond_an_outcome_of_the_block() -> None:
    made = repeated()
    block = Block((5, 6), (None, None))
    assert waiting(made, block, chain(5, 6, 8, 9, 10, 11)) == ((5, 6, 8, 9, 10), "draft"), "the outcome, then K"
    assert waiting(made, block, chain(5, 9, 8)) == ((5, 9, 8), "draft"), "it is refused at the second"
    assert made.further(block, chain(5, 9)) is EMPTY, "an outcome alone is nothing to go on with"
    assert waiting(made, block, chain(5, 6, 7)) == ((5, 6, 7, 1, 2), "ngram"), "behind the draft's outcome"


def test_a_pace_decides_how_much_of_a_lookup_is_worth_it_and_which_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = repeated(), list[tuple[int, bool]]()
    block, ahead = Block((5, 6), (None, None)), chain(5, 6, 7, 9)

    def first(self: FixedPace, guess: int, ready: bool) -> bool:
        asked.append((guess, ready))
        return True

    monkeypatch.setattr(FixedPace, "lookup_first", first)
    assert waiting(made, block, ahead) == ((5, 6, 7, 1, 2), "ngram")
    assert waiting(made, block) == ((5, 6, 7, 1, 2), "ngram")
    assert asked == [(2, True), (2, False)]
    monkeypatch.setattr(FixedPace, "length", lambda self, source, confidences: 1)
    assert waiting(made, block, ahead) == ((5, 6, 7, 1), "ngram")
    monkeypatch.setattr(FixedPace, "length", lambda self, source, confidences: 0 if source == "ngram" else 1)
    assert waiting(made, block, ahead) == ((5, 6, 7, 9), "draft")
    assert made.further(block, EMPTY) is EMPTY
    monkeypatch.setattr(FixedPace, "length", lambda self, source, confidences: 2)
    monkeypatch.setattr(FixedPace, "lookup_first", lambda self, guess, ready: False)
    assert made.further(block, EMPTY) is EMPTY


@pytest.mark.parametrize(("k", "max_block", "max_tokens", "window", "length"), [
    (2, 16, 100, 1000, 9), (2, 5, 100, 1000, 5), (2, 16, 6, 1000, 4), (2, 16, 100, 9, 4), (2, 16, 2, 1000, 0), (0, 16, 100, 1000, 0),
    (2, 2, 100, 1000, 2),
])  # fmt: skip
def test_what_bounds_a_forced_block(k: int, max_block: int, max_tokens: int, window: int, length: int) -> None:
    """The target's longest block, what the answer and the window leave behind the token that every round decides; 0 without speculation."""
    made = sources(k=k, max_block=max_block, max_tokens=max_tokens, window=window)
    made.commit((4,), tuple(range(50, 59)))
    choice = made.choose()
    assert choice is not None and len(choice[0].tokens) == length
    assert choice[1] == ("forced" if length else "tail" if k else "off")


def test_thousands_are_not_kept() -> None:
    made = sources()
    made.commit((4,), tuple(range(100_000)))
    assert len(made._forced) == 16


@settings(max_examples=80, deadline=None)
@given(chain=st.lists(st.integers(0, 2), max_size=6), forced=st.lists(st.integers(0, 2), max_size=4), k=st.integers(1, 4))
def test_forced_ids_come_first_whatever_the_draft_says(chain: list[int], forced: list[int], k: int) -> None:
    made = sources(k=k)
    made.commit((4,), tuple(forced))
    if chain:
        draft(made, *chain, committed=(*PROMPT, 4))
    block, outcome = made.ready()
    assert list(block.tokens[: len(forced)]) == forced
    assert len(block.tokens) <= max(k, len(forced)) and len(block.distributions) == len(block.tokens)
    assert block.distributions[: len(forced)] == (None,) * len(forced)
    assert all(d is not None for d in block.distributions[len(forced) :])
    assert (outcome == "forced") == (bool(forced) and chain[: len(forced)] != forced)


# --- the standard method: no peeking ------------------------------------------------------------------------------------


def test_forced_ids_are_one_hot_under_the_standard_method_too() -> None:
    made = sources(k=3, rejection_method=RejectionMethod.STANDARD)
    made.commit((4,), (8,))
    draft(made, 8, 9, 10, committed=(*PROMPT, 4))
    block, _ = made.ready()
    assert block.tokens == (8, 9, 10) and block.distributions == (None, q(9), q(10))


def slot(p: Floats, token: int, drawn_from: DraftDistribution | None, u: float, v: float) -> int:
    """One slot of speculative sampling: the proposal, or a draw from what p has and q lacks."""
    q_ = np.eye(len(p))[token]
    if drawn_from is not None:
        q_ = np.zeros(len(p))
        q_[list(drawn_from.ids)] = drawn_from.floats()
    if u * q_[token] < p[token]:
        return token
    rest = np.maximum(p - q_, 0.0)
    return int(np.searchsorted(np.cumsum(rest / rest.sum()), v))


def blocks(forced: int, q_: Floats) -> list[Block]:
    """The block that is sent, for each token that the draft may have drawn."""
    made = []
    for drawn in range(len(q_)):
        source = sources(k=1, rejection_method=RejectionMethod.STANDARD)
        source.commit((4,), (forced,))
        prefix = (*PROMPT, 4)
        from_ = DraftDistribution(tuple(range(len(q_))), q_.astype("<f4").tobytes())
        source.lookahead.add(Proposal("s", 1, len(prefix), prefix_hash(prefix), (drawn,), (), (from_,)))
        made.append(source.ready()[0])
    return made


@pytest.mark.parametrize("peeking", [False, True])
def test_choosing_by_what_was_drawn_would_bias(peeking: bool) -> None:
    """A target calls an id forced that is only likely (.6). One-hot keeps p; the twin, "as drawn where the draft agrees", does not."""
    p, q_ = np.array([0.6, 0.4]), np.array([0.5, 0.5])
    sent, forced = blocks(0, q_), 0
    if peeking:
        sent[forced] = Block((forced,), (DraftDistribution((0, 1), q_.astype("<f4").tobytes()),))
    draws = np.random.default_rng(5).random((20_000, 3))
    kept = sum(slot(p, sent[int(x >= q_[0])].tokens[0], sent[int(x >= q_[0])].distributions[0], u, v) == 0 for x, u, v in draws)
    off = abs(kept / len(draws) - p[0])
    assert (off > 0.1) if peeking else (off < 0.02)


# --- what the draft is told ---------------------------------------------------------------------------------------------


def told(commands: list[Any]) -> list[terms.DraftCommand]:
    return [command.command for command in commands if isinstance(command, ToDraft)]


def guest(*tokens: int) -> Block:
    return Block(tokens, (None,) * len(tokens), "ngram")


def own(*tokens: int) -> Block:
    return Block(tokens, (None,) * len(tokens))


def test_the_draft_is_told_a_block_from_elsewhere_and_then_knows_it() -> None:
    tree, side = Lookahead(PROMPT), DraftSide(admitted(), FixedPace(2, 0))
    side.placed(DraftPlaced("d", 16), PROMPT, tree, None)
    tree.assume((8, 9))
    (sent,) = told(side.sent(tree, guest(8, 9)))
    assert isinstance(sent, terms.Sent) and (sent.tokens, sent.num_proposed) == ((8, 9), 2)
    tree.add(Proposal("s", 1, 5, prefix_hash((*PROMPT, 8, 9)), (10, 11, 12)))
    tree.commit((8, 9, 10))
    side.committed(3, prefix_hash(PROMPT), (8, 9, 10), tree)
    (sent,) = told(side.sent(tree, own(11, 12)))
    assert isinstance(sent, terms.Sent) and (sent.tokens, sent.num_proposed) == ((), 2), "all of that is its own"


def test_a_refused_block_leaves_tokens_that_the_draft_dropped_for_it() -> None:
    tree, side = Lookahead(PROMPT), DraftSide(admitted(), FixedPace(2, 0))
    side.placed(DraftPlaced("d", 16), PROMPT, tree, None)
    tree.add(Proposal("s", 1, 3, prefix_hash(PROMPT), (20, 21, 22)))
    tree.assume((8, 9))
    side.sent(tree, guest(8, 9))
    tree.commit((20,))
    side.committed(3, prefix_hash(PROMPT), (20,), tree)
    (sent,) = told(side.sent(tree, own(21, 22)))
    assert isinstance(sent, terms.Sent) and sent.tokens == (21, 22)
    tree.commit((30,))
    side.committed(4, 0, (30,), tree)
    (sent,) = told(side.sent(tree, own(31)))
    assert isinstance(sent, terms.Sent) and sent.tokens == (), "nothing is left of it"


def test_a_draft_with_shorter_blocks_hears_of_the_beginning() -> None:
    """Told of more than it takes it would refuse the session for good."""
    tree, side = Lookahead(PROMPT), DraftSide(admitted(), FixedPace(2, 0))
    side.placed(DraftPlaced("d", 3), PROMPT, tree, None)
    (sent,) = told(side.sent(tree, guest(*range(50, 60))))
    assert isinstance(sent, terms.Sent) and (sent.num_proposed, sent.tokens) == (3, (50, 51, 52))


def test_a_block_from_elsewhere_has_a_place_in_the_lookahead() -> None:
    tree = Lookahead(PROMPT)
    assert tree.add(Proposal("s", 1, 5, prefix_hash((*PROMPT, 8, 9)), (10,))) == 0
    tree.assume((8, 9))
    assert tree.nodes == 2 and tree.add(Proposal("s", 1, 5, prefix_hash((*PROMPT, 8, 9)), (10,))) == 1
    tree.assume((8, 9))
    assert tree.nodes == 3, "what is there is not there twice"
    tree.commit((8, 9))
    assert tree.block(5).tokens == (10,)
    tree.commit((7,))
    assert tree.block(5) is EMPTY and tree.nodes == 0
    tree.assume(tuple(range(MAX_NODES + 50)))
    assert tree.nodes == MAX_NODES

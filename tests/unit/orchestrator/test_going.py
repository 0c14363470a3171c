"""What a target may go on with by itself, as the orchestrator keeps count of it."""

from __future__ import annotations

from orchestrator.events import Admitted
from orchestrator.going import MAX_PATHS, MAX_UNASKED, Going
from orchestrator.lookahead import EMPTY, Block, Lookahead, agreement
from orchestrator.targeting import TargetSide
from specdec.hashing import prefix_hash
from specdec.terms import Proposal, Result, SamplingParams

PROMPT = (1, 2, 3)


def path(*tokens: int) -> Block:
    return Block(tokens, (None,) * len(tokens), confidences=tuple(1.0 / (i + 1) for i in range(len(tokens))))


def decided(*tokens: int, verified: int = 0, accepted: int = 0) -> Result:
    return Result(3, 0, verified, accepted, tokens)


def test_a_path_is_told_once() -> None:
    going = Going(0)
    assert going.tell(path(5, 6))
    assert not going.tell(path(5, 6)) and not going.tell(path(5)), "known there already"
    assert going.tell(path(5, 6, 7)), "goes further"
    assert going.tell(path(5, 8))
    waiting = going.waiting()
    assert waiting is not None and waiting.tokens == (5, 6, 7)


def test_a_commit_keeps_what_begins_with_it() -> None:
    going = Going(0)
    going.tell(path(5, 6, 7))
    going.tell(path(5, 8))
    going.tell(path(9, 9))
    going.commit(decided(5))
    assert [p.tokens for p in going._paths] == [(6, 7), (8,)]
    going.commit(decided(8))
    assert going.waiting() is None, "a path that is used up is nothing to go on with"


def test_paths_are_bounded() -> None:
    going = Going(0)
    assert all(going.tell(path(i, 0)) for i in range(MAX_PATHS))
    assert not going.tell(path(MAX_PATHS, 0))
    going.forget()
    assert going.tell(path(MAX_PATHS, 0))


def test_credit_is_renewed_when_half_of_it_is_left() -> None:
    going = Going(4)
    going.grant(4)
    assert going.runs
    going.spend(late=False)
    assert going.runs
    going.spend(late=False)
    assert not going.runs


def test_a_plain_token_needs_credit_of_its_round() -> None:
    going = Going(4)
    assert going.fits(decided(7), late=False) is None
    going.grant(1)
    assert going.fits(decided(7), late=False) is not None and going.fits(decided(7, 8), late=False) is None
    going.grant(0)
    assert going.fits(decided(7), late=False) is None and going.fits(decided(7), late=True) is not None
    going.spend(late=True)
    assert going.fits(decided(7), late=True) is None
    going.grant(3)
    going.grant(0)
    going.answered()
    assert going.fits(decided(7), late=True) is None, "the Step after it was answered"


def test_a_step_is_due_after_many_results() -> None:
    going = Going(16)
    going.grant(16)
    going.tell(path(*[5] * 200))
    for _ in range(MAX_UNASKED):
        assert going.waiting() is not None and going.runs
        going.commit(decided(5, verified=1, accepted=1))
    assert going.waiting() is None and not going.runs
    going.answered()
    assert going.waiting() is not None and going.runs


def test_results_count_towards_the_next_step_while_no_path_waits_too() -> None:
    """The target counts all that it tells under one round, and rests at its bound."""
    going = Going(16)
    going.grant(16)
    for _ in range(MAX_UNASKED):
        assert going.runs
        going.commit(decided(5))
    assert not going.runs
    going.tell(path(5, 5))
    assert going.waiting() is None
    going.answered()
    assert going.waiting() is not None and going.runs


def test_of_a_placement_that_is_over_nothing_is_left() -> None:
    going = Going(4)
    going.grant(4)
    going.grant(4)
    for _ in range(MAX_UNASKED):
        going.commit(decided(5))
    going.forget()
    assert not going.runs and going.fits(decided(7), late=False) is None and going.fits(decided(7), late=True) is None
    going.grant(4)
    assert going.runs and going.fits(decided(7), late=True) is None


def test_a_block_that_nobody_asked_for_is_one_that_waited() -> None:
    going = Going(0)
    going.tell(path(5, 6, 7))
    block = going.fits(decided(5, 9, verified=2, accepted=1), late=False)
    assert block is not None and block.tokens == (5, 6)
    assert going.fits(decided(8, 9, verified=2, accepted=1), late=False) is None, "it accepts what was never proposed"
    assert going.fits(decided(8, verified=4), late=False) is None, "longer than anything that waited"


def test_blocks_are_cut() -> None:
    block = path(5, 6, 7)
    assert block.head(2).tokens == (5, 6) and block.head(2).confidences == (1.0, 0.5) and block.head(9) is block
    assert block.tail(1).tokens == (6, 7) and block.behind((5, 6)).tokens == (7,) and block.behind((6,)) is EMPTY
    assert agreement((1, 2, 3), (1, 2, 4)) == 2 and agreement((1,), (1, 2)) == 1 and agreement((), (1,)) == 0


def test_the_newest_chain_leads_from_the_root_to_what_joined_last() -> None:
    tree = Lookahead(PROMPT)
    assert tree.newest() is EMPTY

    def propose(over: tuple[int, ...], *tokens: int) -> None:
        prefix = (*PROMPT, *over)
        tree.add(Proposal("s", 1, len(prefix), prefix_hash(prefix), tokens, (0.5,) * len(tokens)))

    propose((), 5, 6)
    propose((5,), 8, 9)
    assert tree.newest().tokens == (5, 8, 9) and tree.newest().confidences == (0.5,) * 3
    assert tree.block(9).tokens == (5, 6), "the first to arrive stays first"
    tree.commit((5,))
    assert tree.newest().tokens == (8, 9)
    tree.commit((6,))
    assert tree.newest() is EMPTY, "it is not behind the committed tokens any more"


def test_what_was_told_already_is_no_news_and_no_fault() -> None:
    """A result behind another prefix than the committed one is passed over, not held against the target."""
    side = TargetSide(Admitted("s", PROMPT, 3, SamplingParams(max_tokens=9), 7, 99, 2, 16), 8)
    side.new_epoch(1)
    side.new_round(EMPTY, "prefill", 8)
    assert side.unasked(1, decided(5), 3) is not None
    assert side.unasked(1, decided(5), 4) is None
    assert side.unasked(2, decided(5), 3) is None, "of a round that never was"
    side.open = True
    assert side.unasked(1, decided(5), 3) is None, "it answers the Step"

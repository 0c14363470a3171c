"""One session at the draft: how far to draft, and when to tell. Pure.

Theory. A proposal is useful when it is there before the target is. While a block of n tokens is in flight the next block begins after
the n accepted tokens and the bonus token, so the draft works towards

    due = (end of the block in flight + 1, or the committed length when none is) + K, the block length wanted now,

along the path on which everything is accepted, and rests when it is there. What it drafts beyond the block includes its guess of the
bonus token; a commit that agrees keeps all of it, a commit that does not costs the cut and one forward of the correction. Past a block
that will hardly be accepted whole it does not draft at all (outlook.py).

Rules
1. Never more than `budget` tokens past the last commit, never past the window or the last token the request may have.
2. Nothing is drafted behind a token that would end the text: the target either ends there or decides something else.
3. Tell in one piece when the goal is reached, and at once what is there when a commit fits, tokens of a running step included: the
   target is free at that moment.
4. A row of logits that is not finite means no proposal until the next commit; several in a row end the session.
5. Where a grammar lets nothing follow that is known here, nothing is drafted until the tokens change or the next commit.
"""

from __future__ import annotations

from dataclasses import dataclass

from draft_service.chain import Chain
from draft_service.plan import Chooser
from specdec.terms import Proposal

MAX_BROKEN = 3  # rounds in a row with logits that are not finite


@dataclass(frozen=True, slots=True)
class Bounds:
    """`k` = block length wanted, `budget` = most tokens past the last commit, `limit` = most tokens in all (the window, or less where
    the request ends earlier), `ends` = ids that end the text from index `ends_from` on."""

    k: int
    budget: int
    limit: int
    ends: frozenset[int]
    ends_from: int
    prompt_length: int
    greedy: bool


@dataclass(frozen=True, slots=True)
class Round:
    """What a commit ended: tokens dropped unverified, drawn since the last commit, drawn here and verified; whether more was wanted than
    there; the block's product of confidences and whether it was accepted whole (None = no block, or not all of it verified)."""

    wasted: int
    drafted: int
    needed: int
    behind: bool
    product: float
    whole: bool | None


class Session:
    def __init__(
        self, stream: int, session_id: str, epoch: int, handle: int, tokens: tuple[int, ...], bounds: Bounds, choose: Chooser
    ) -> None:
        self.stream, self.session_id, self.epoch, self.handle = stream, session_id, epoch, handle
        self.chain = Chain(tokens)
        self.bounds, self.choose = bounds, choose
        self.k = bounds.k  # block length wanted now
        self.block_end: int | None = None  # end of the block in flight
        self.ahead = True  # it is worth drafting past it
        self.product = 1.0  # of its tokens' confidences
        self.paused = self.stalled = self.over = self.flush = self.stepping = False  # stepping: a plan with this session is out
        self.broken = 0
        self.served = 0  # number of the last plan that held this session
        self.drafted = 0  # tokens drawn since the last commit
        self.own_block = 0  # tokens of the block in flight that were drafted here

    @property
    def goal(self) -> int:
        """Length the chain should reach."""
        chain, bounds = self.chain, self.bounds
        past_block = 1 + self.k if self.ahead else 0
        due = chain.committed + self.k if self.block_end is None else self.block_end + past_block
        return min(due, chain.committed + bounds.budget, bounds.limit)

    @property
    def wanted(self) -> int:
        """Tokens to draft now."""
        if self.paused or self.stalled or self.over or self._ended:
            return 0
        return max(0, self.goal - len(self.chain))

    @property
    def _ended(self) -> bool:
        last = self.chain.last_draft
        return last is not None and last.token in self.bounds.ends and len(self.chain) > self.bounds.ends_from

    @property
    def usable(self) -> int:
        """Tokens past the block in flight, or past the commit: what the next round could use."""
        return len(self.chain) - (self.chain.committed if self.block_end is None else self.block_end)

    @property
    def urgency(self) -> tuple[bool, int, int]:
        """Sorts the most urgent first: the target waits for it, it has little, it has not been served for long."""
        return self.block_end is not None, self.usable, self.served

    def sent(self, start: int, num_proposed: int, block: tuple[int, ...]) -> int:
        """A block is in flight. Returns the number of drafted tokens that were dropped for it."""
        length = len(self.chain)
        dropped = self.chain.assume(start, block) if block else 0
        self.over = self.over and not dropped and len(self.chain) == length
        self.block_end = start + num_proposed
        self.product = self.chain.product(start, self.block_end)
        self.own_block = 0 if block else min(self.block_end, len(self.chain)) - start
        return dropped

    def commit(self, start: int, tokens: tuple[int, ...]) -> Round | None:
        """The target decided. None when that contradicts earlier commits; a repeat changes nothing."""
        chain, before, length, behind = self.chain, self.chain.committed, len(self.chain), self.wanted > 0
        dropped = chain.commit(start, tokens)
        if dropped is None:
            return None
        round_ = Round(
            wasted=min(dropped, max(0, length - (self.block_end or 0))),
            drafted=self.drafted,
            needed=self.own_block,
            behind=behind and dropped == 0,
            product=self.product,
            whole=self._whole(before, length - dropped),
        )
        if chain.committed > before:
            self.block_end, self.stalled, self.over = None, False, False
            self.flush = dropped == 0
            self.drafted = self.own_block = 0
        return round_

    def _whole(self, before: int, kept: int) -> bool | None:
        """Whether the block in flight was accepted whole: `before` = its beginning, `kept` = tokens of the chain that stood."""
        if self.block_end is None or self.block_end <= before:
            return None
        if kept < self.block_end:
            return False
        return True if self.chain.committed > self.block_end else None  # else only a part of it was verified

    def proposal(self) -> Proposal | None:
        """What is to be told now."""
        if self.paused or not (self.flush or (self.wanted == 0 and (self.block_end is None or self.usable > 1))):
            return None  # of one token past a block the next round cannot use anything: it is a guess of the bonus
        self.flush = self.flush and self.stepping
        piece = self.chain.take_unpushed()
        if piece is None:
            return None
        drafts = piece.drafts
        told = tuple(d.distribution for d in drafts) if any(d.distribution is not None for d in drafts) else ()
        return Proposal(
            self.session_id,
            self.epoch,
            piece.prefix_length,
            piece.prefix_hash,
            tuple(d.token for d in drafts),
            tuple(d.confidence for d in drafts),
            told,
        )

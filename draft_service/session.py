"""One session at the draft: how far to draft, and when to tell. Pure.

Theory. A proposal is useful when it is there before the target is. While a block of n tokens is in flight the next block begins after
the n accepted tokens and the bonus token, so the draft works towards

    due = (end of the block in flight + 1, or the committed length when none is) + K, the block length wanted now,

along the path on which everything is accepted, and rests when it is there. What it drafts beyond the block includes its guess of the
bonus token; a commit that agrees keeps all of it, a commit that does not costs the cut and one forward of the correction. Past a block
that will hardly be accepted whole it does not draft at all (outlook.py).

With branches (tree.py) the path on which everything is accepted is one guess among others, and what is drafted is what is likeliest to be
of use (specdec/odds.py): the guess that the block ends in and up to K tokens behind it, each as long as its chance is worth a row.

Rules
1. Never more than `budget` tokens past the last commit, never past the window or the last token the request may have.
2. Nothing is drafted behind a token that would end the text: the target either ends there or decides something else.
3. Tell in one piece when the goal is reached, behind a plain token with every step, and at once what is there when a commit fits, tokens
   of a running step included: the target is free at that moment.
4. Branches are told with every step that brings them something: nobody knows when the target will be done.
5. A row of logits that is not finite means no proposal until the next commit; several in a row end the session.
6. Where a grammar lets nothing follow that is known here, nothing is drafted until the tokens change or the next commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.chain import Chain, Piece
from draft_service.outbox import Told
from draft_service.plan import Chooser
from draft_service.tree import Branch, Kept, Seed, Tree
from specdec.odds import Ending, Odds
from specdec.terms import DraftMethod, Proposal

DEEPER = 0.5  # worth of a further token behind a guess, beside that of the first, without which there is no hit at all
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
    method: DraftMethod


@dataclass(frozen=True, slots=True)
class Round:
    """What a commit ended: tokens dropped unverified, drawn since the last commit, drawn here and verified; whether more was wanted than
    there; the block's product of confidences and whether it was accepted whole (None = no block, or not all of it verified); how it ended
    (None = unknown); the branch that became the chain; whether proposals were wanted; whether there was nothing to propose when it came."""

    wasted: int
    drafted: int
    needed: int
    behind: bool
    product: float
    whole: bool | None
    ending: Ending | None
    grown: Branch | None
    wanted: bool
    late: bool


class Session:
    def __init__(
        self, stream: int, session_id: str, epoch: int, handle: int, tokens: tuple[int, ...], bounds: Bounds, choose: Chooser
    ) -> None:
        self.stream, self.session_id, self.epoch, self.handle = stream, session_id, epoch, handle
        self.chain = Chain(tokens)
        self.tree = Tree(self.chain)
        self.bounds, self.choose = bounds, choose
        self.k = bounds.k  # block length wanted now
        self.block_start = 0
        self.block_end: int | None = None  # end of the block in flight
        self.ahead = True  # it is worth drafting past it
        self.product = 1.0  # of its tokens' confidences
        self.paused = self.stalled = self.over = self.flush = self.stepping = False  # stepping: a plan with this session is out
        self.void = False  # a branch became the chain: what the plan does for the chain of before is of no use
        self.broken = 0
        self.served = 0  # number of the last plan that held this session
        self.drafted = 0  # tokens drawn since the last commit
        self.own_block = 0  # tokens of the block in flight that were drafted here

    @property
    def goal(self) -> int:
        """Length the chain should reach."""
        chain = self.chain
        past_block = 1 + self.k if self.ahead else 0
        due = chain.committed + self.k if self.block_end is None else self.block_end + past_block
        return min(max(due, self.tree.reach), self.end)

    @property
    def end(self) -> int:
        """Length beyond which nothing is drafted."""
        return min(self.chain.committed + self.bounds.budget, self.bounds.limit)

    @property
    def wanted(self) -> int:
        """Tokens to draft now."""
        if self.paused or self.stalled or self.over or self._ended:
            return 0
        return max(0, self.goal - len(self.chain))

    def wanted_of(self, branch: Branch, floor: float) -> int:
        """Tokens to draft now behind a branch; none with a chance of less than `floor`."""
        last = branch.last_draft
        worth = branch.chance * (DEEPER if branch.drafts else 1.0)
        if self.paused or branch.over or worth < floor or (last is not None and self.is_end(last.token, len(branch) - 1)):
            return 0
        return max(0, min(branch.base + 1 + self.k, self.end) - len(branch))

    def is_end(self, token: int, index: int) -> bool:
        """Whether this token at this index ends the text."""
        return token in self.bounds.ends and index >= self.bounds.ends_from

    @property
    def _ended(self) -> bool:
        last = self.chain.last_draft
        return last is not None and self.is_end(last.token, len(self.chain) - 1)

    @property
    def usable(self) -> int:
        """Tokens past the block in flight, or past the commit: what the next round could use."""
        return len(self.chain) - (self.chain.committed if self.block_end is None else self.block_end)

    @property
    def lacks(self) -> int:
        """Tokens to draft before the next round could use one: it has no usable proposal. 0 = it has, or wants none."""
        lacking = (1 if self.block_end is None else 2) - self.usable
        return min(self.wanted, lacking) if lacking > 0 else 0

    @property
    def hungry(self) -> bool:
        """The target waits for a proposal, or decides a plain token and will be done soon: the chain comes before all branches."""
        return self.block_end is None or (self.block_end == self.block_start and self.usable < 2)

    @property
    def urgency(self) -> tuple[bool, int, int]:
        """Sorts the most urgent first: the target waits for it, it has little, it has not been served for long."""
        return self.block_end is not None, self.usable, self.served

    def sent(self, start: int, num_proposed: int, block: tuple[int, ...]) -> int:
        """A block is in flight. Returns the number of drafted tokens that were dropped for it."""
        length = len(self.chain)
        dropped = self.tree.assume(start, block) if block else 0
        self.over = self.over and not dropped and len(self.chain) == length
        self.block_start, self.block_end = start, start + num_proposed
        self.product = self.chain.product(start, self.block_end)
        self.own_block = 0 if block else min(self.block_end, len(self.chain)) - start
        return dropped

    def branch_out(self, odds: Odds, fanout: int, floor: float) -> None:
        """Decides which branches the block in flight is worth, `fanout` in all; the path past the block is one of them."""
        start, end = self.block_start, self.block_end
        if end is None or end > len(self.chain):
            return
        drafts = [self.chain.draft_at(place) for place in range(start, end)]
        confidences = [None if draft is None or draft.guesses is None else draft.confidence for draft in drafts]
        wishes = odds.wishes(confidences, fanout, floor)
        own = [wish for wish in wishes if wish.place == end - start and wish.rank == 0]
        self.ahead = bool(own)
        self.tree.sow(
            [
                Seed(wish.chance, start + wish.place, wish.rank - (wish.place == end - start), wish.place == end - start)
                for wish in wishes
                if wish not in own
            ]
        )

    def commit(self, start: int, tokens: tuple[int, ...]) -> Round | None:
        """The target decided. None when that contradicts earlier commits; a repeat changes nothing."""
        chain, before, length, behind = self.chain, self.chain.committed, len(self.chain), self.wanted > 0
        late, ending = self.lacks > 0, self._ending(start, tokens)
        kept = self.tree.commit(start, tokens)
        if kept is None:
            return None
        dropped = kept.dropped
        round_ = Round(
            wasted=min(dropped, max(0, length - (self.block_end or 0))),
            drafted=self.drafted,
            needed=self.own_block,
            behind=behind and dropped == 0,
            product=self.product,
            whole=self._whole(before, kept, length),
            ending=ending,
            grown=kept.grown,
            wanted=not self.paused,
            late=late and kept.grown is None,
        )
        if chain.committed > before:
            self.block_end, self.stalled, self.over = None, False, False
            self.flush = dropped == 0 or kept.grown is not None
            self.void = self.void or (self.stepping and kept.grown is not None)
            self.drafted = self.own_block = 0
        return round_

    def _ending(self, start: int, tokens: Sequence[int]) -> Ending | None:
        """How the block in flight ends with `tokens`, decided from index `start` on; None when they do not say, or parts are not ours."""
        chain, end = self.chain, self.block_end
        if end is None or not start == chain.committed == self.block_start:
            return None
        cut = chain.cut_by(start, tokens)
        refused = cut is not None and cut < end
        place = cut if cut is not None and refused else end
        if place - start >= len(tokens):
            return None
        drafts = [draft for draft in map(chain.draft_at, range(start, place + 1)) if draft is not None and draft.guesses is not None]
        if len(drafts) < place + 1 - start or drafts[-1].guesses is None:
            return None
        ranked = drafts[-1].guesses.ranked()
        order = ranked if refused else (drafts[-1].token, *ranked)
        token = tokens[place - start]
        confidences = tuple(draft.confidence for draft in (drafts if refused else drafts[:-1]))
        return Ending(confidences, refused, order.index(token) if token in order else None)

    def _whole(self, before: int, kept: Kept, length: int) -> bool | None:
        """Whether the block in flight was accepted whole: `before` = its beginning, `length` = the chain's before the commit."""
        if self.block_end is None or self.block_end <= before:
            return None
        if (length if kept.cut is None else kept.cut) < self.block_end:
            return False
        return True if self.chain.committed > self.block_end else None  # else only a part of it was verified

    def told(self) -> list[Told]:
        """What is to be told now, in this order."""
        piece, chain = self._due(), self.chain
        branches = [] if self.paused else [branch for branch in self.tree.branches.values() if branch.untold]
        if piece is None and any(branch.base >= chain.pushed for branch in branches):
            piece = chain.take_unpushed()
        line = self.tree.line
        told = [] if piece is None else [Told(self._proposal(piece), line, line)]
        return [
            *told,
            *(Told(self._proposal(branch.take_untold()), branch.line, line) for branch in branches if branch.base < chain.pushed),
        ]

    def _due(self) -> Piece | None:
        """What is to be told of the chain."""
        reached = self.wanted == 0 or (self.block_end == self.block_start and not self.stepping)
        if self.paused or not (self.flush or (reached and (self.block_end is None or self.usable > 1))):
            return None  # of one token past a block the next round cannot use anything: it is a guess of the bonus
        self.flush = self.flush and self.stepping
        return self.chain.take_unpushed()

    def _proposal(self, piece: Piece) -> Proposal:
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

"""The outcome tree of one session: the chain, and branches that continue it otherwise. Pure; knows no engine, clock or session.

While a block is in flight, a branch begins with one guess of how it may end: the first `base` tokens of the chain, then the guess in place
of the chain's own token there. What is drafted behind the guess is drawn exactly as it would be if those were the committed tokens, so it
is a proposal for that prefix like any other, and useless and harmless if the guess is wrong.

Rules
1. A branch's prefix is the chain's: when the chain changes below `base`, or `base` is committed, the branch is dead, but for rule 2.
2. A commit that refuses the chain's token at `base` and decides the guess instead makes the branch the chain: a graft. Its tokens stay,
   told or not, and so do its keys and values; all other branches are dead. A commit that fits the chain leaves the branches behind it.
3. Of one place no token has two branches, and none has the chain's own token.
4. A branch is told after the chain's own token at its place, never before: under the standard method the chain's was drawn and the guess
   was not, so the guess must not be the first to arrive. Behind the guess there is one chain per exact prefix, each token drawn.
5. `base` <= chain.kv: the engine holds what a branch reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from draft_service.chain import Chain, Draft, Piece
from specdec.hashing import PrefixHash


class Seed(NamedTuple):
    """A branch worth having: the `rank`-th of the guesses (0 = likeliest) that the chain's token at index `base` leaves; `bonus` = the
    block in flight ends there. `chance` of coming true."""

    chance: float
    base: int
    rank: int
    bonus: bool


class Branch:
    """`tokens` = the guess, then what was drawn behind it; `chance` that its newest token will be of use; `kv` and `told` count tokens of
    its own. `line` names it where events wait. `planned`: the engine may know it."""

    def __init__(self, handle: int, line: int, seed: Seed, prefix: PrefixHash, guess: int) -> None:
        self.handle, self.line, self.base, self.bonus, self.chance = handle, line, seed.base, seed.bonus, seed.chance
        self.tokens, self.drafts = [guess], list[Draft]()
        self.kv = self.told = 0
        self.over = self.planned = False
        self._prefix = prefix

    def __len__(self) -> int:
        """Of the whole text."""
        return self.base + len(self.tokens)

    @property
    def kind(self) -> str:
        return "bonus" if self.bonus else "correction"

    @property
    def last_draft(self) -> Draft | None:
        return self.drafts[-1] if self.drafts else None

    def absorb(self, drafts: Sequence[Draft], survival: Callable[[float], float]) -> None:
        """A step fed all its tokens, drew `drafts` and fed all of them but the last. `survival`: confidence → chance of being accepted."""
        for draft in drafts:
            self.chance *= survival(draft.confidence)
            self.tokens.append(draft.token)
            self.drafts.append(draft)
        self.kv = len(self.tokens) - 1

    @property
    def untold(self) -> bool:
        """A guess alone is nothing to tell."""
        return bool(self.drafts) and self.told < len(self.tokens)

    def take_untold(self) -> Piece:
        """What the orchestrator does not know yet, marked as known."""
        prefix = self._prefix.copy().extend(self.tokens[: self.told])
        piece = Piece(prefix.length, prefix.value, tuple([Draft(self.tokens[0]), *self.drafts][self.told :]))
        self.told = len(self.tokens)
        return piece


class Kept(NamedTuple):
    """What a commit left: tokens of the chain `dropped`, the index `cut` from which on they were others (None = all fitted), the branch
    that took their place."""

    dropped: int
    cut: int | None
    grown: Branch | None


class Tree:
    """`dead` = branches whose handles are to be given back, `graft` = the branch whose keys and values the engine is yet to move to the
    chain; who gives back and moves empties them. `line` names the chain where events wait, until it is cut."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.branches: dict[int, Branch] = {}
        self.seeds: list[Seed] = []  # not sprouted yet
        self.dead: list[Branch] = []
        self.graft: int | None = None
        self.grafted = 0  # handle of the branch that became the chain last
        self.line = 0
        self._lines = count(1)

    def commit(self, start: int, tokens: Sequence[int]) -> Kept | None:
        """`tokens` are decided from index `start` on. None, changing nothing, when they contradict what is committed."""
        chain = self.chain
        if chain.contradicts(start, tokens):
            return None
        first = max(start, chain.committed)
        cut = chain.cut_by(first, tokens[first - start :])
        grown = None if cut is None else self._guessed(cut, tokens[cut - start])
        dropped = 0 if grown is None else self._grow(grown)
        dropped += chain.commit(start, tokens) or 0
        if cut is not None:
            self.line = next(self._lines) if grown is None else grown.line
            self.clear()
        if chain.committed > first:
            self.seeds = []
        self._bury(lambda branch: branch.base < chain.committed)
        return Kept(dropped, cut, grown)

    def assume(self, start: int, block: Sequence[int]) -> int:
        """A block drafted elsewhere is in flight from index `start` on. Returns the number of tokens of the chain that were dropped."""
        cut = self.chain.cut_by(start, block)
        dropped = self.chain.assume(start, block)
        if cut is not None:
            self.line = next(self._lines)
            token = self.chain.tokens[cut]
            self._bury(lambda branch: branch.base > cut or (branch.base == cut and branch.tokens[0] == token))
        return dropped

    def clear(self) -> None:
        """No branches any more."""
        self.seeds = []
        self._bury(lambda branch: True)

    def kill(self, branch: Branch) -> None:
        self._bury(lambda other: other is branch)

    def sow(self, seeds: Sequence[Seed]) -> None:
        """The branches worth having for the block in flight, likeliest first; those that are there already stay."""
        self.seeds = list(seeds)

    @property
    def reach(self) -> int:
        """Length of the chain at which every seed has sprouted; 0 = all have."""
        return max((seed.base + 1 for seed in self.seeds), default=0)

    def sprout(self, most: int, admitted: Callable[[int], int | None], is_end: Callable[[int, int], bool]) -> None:
        """Seeds whose place the engine has come to become branches, at most `most` in all. `admitted(base)`: a handle, None = no room;
        `is_end(token, index)`: it ends the text, nothing is worth drafting behind it."""
        ready = [seed for seed in self.seeds if seed.base <= self.chain.kv]
        self.seeds = [seed for seed in self.seeds if seed not in ready] if ready else self.seeds
        for seed in ready:
            guess = self._guess(seed)
            if guess is None or is_end(guess, seed.base) or self._guessed(seed.base, guess) is not None:
                continue
            handle = admitted(seed.base) if len(self.branches) < most else None
            if handle is None:
                return
            self.branches[handle] = Branch(handle, next(self._lines), seed, self.chain.hash_at(seed.base), guess)

    def _guess(self, seed: Seed) -> int | None:
        draft = self.chain.draft_at(seed.base)
        if draft is None or draft.guesses is None:
            return None
        ranked = draft.guesses.ranked()
        return ranked[seed.rank] if seed.rank < len(ranked) else None

    def _guessed(self, place: int, token: int) -> Branch | None:
        return next((b for b in self.branches.values() if b.base == place and b.tokens[0] == token), None)

    def _grow(self, branch: Branch) -> int:
        """It becomes the chain. Returns the number of tokens that it takes the place of."""
        del self.branches[branch.handle]
        if branch.planned:
            self.graft = self.grafted = branch.handle
        base = branch.base
        pushed = base + branch.told if branch.told else min(self.chain.pushed, base)
        return self.chain.replace(base, branch.tokens[0], branch.drafts, base + branch.kv, pushed)

    def _bury(self, is_dead: Callable[[Branch], bool]) -> None:
        for branch in [b for b in self.branches.values() if is_dead(b)]:
            self.dead.append(self.branches.pop(branch.handle))

"""What a target may go on with by itself behind the round it was asked for: plain tokens it has credit for, and continuations that wait
there. Pure; knows the tokens of one session relative to its committed ones.

Theory. Between a result and the next Step lie two ways over the network and a turn of this process, and the target's engine rests unless
it has something else to do. Plain tokens need nobody: with credit the target decides them one per step and tells each. A block needs the
draft, but a proposal that came early may wait at the target, named by its prefix: when the round before decides exactly that prefix, the
target verifies it at once. Neither changes what is decided, only who says "go on".

Rules
1. A path is told once; one that a longer told path begins with is known there already.
2. A commit keeps the paths that begin with the committed tokens, without them; the target does the same, so both sides know which wait.
3. Ahead goes with the coupled method only: under the standard one the target may see one chain per exact prefix, and a path told early
   might not be the one that is told later.
"""

from __future__ import annotations

from orchestrator.lookahead import EMPTY, Block
from specdec.terms import Result

MAX_PATHS = 16  # continuations of one session that wait at its target; half of the target's own bound
MAX_UNASKED = 128  # results in a row that no Step asked for; half of what the target tells under one round


class Going:
    """Of one placement on a target."""

    def __init__(self, run_ahead: int) -> None:
        """`run_ahead` = plain tokens granted with a Step; 0 = none."""
        self.run_ahead = run_ahead
        self.credit = self._late = 0  # of the newest Step, and what was left of the one before
        self._unasked = 0  # results since the newest Step was answered
        self._paths: list[Block] = []

    def grant(self, tokens: int) -> None:
        """A Step left with credit for so many plain tokens. What the target still decides on the old one's is told under the old round."""
        self._late, self.credit = self.credit, tokens

    @property
    def runs(self) -> bool:
        """The target goes on with plain tokens, and it is not yet time to grant more."""
        return self.credit > self.run_ahead // 2 and self._unasked < MAX_UNASKED

    def tell(self, path: Block) -> bool:
        """Whether the path is news. It waits at the target from here on."""
        n = len(path.tokens)
        if any(known.tokens[:n] == path.tokens for known in self._paths):
            return False
        for i, known in enumerate(self._paths):
            if path.tokens[: len(known.tokens)] == known.tokens:
                self._paths[i] = path
                return True
        if len(self._paths) < MAX_PATHS:
            self._paths.append(path)
            return True
        return False

    def waiting(self) -> Block | None:
        """What the target verifies next, if it rests otherwise: the first that was told. None when it is time for a Step."""
        return self._paths[0] if self._paths and self._unasked < MAX_UNASKED else None

    def fits(self, result: Result, late: bool) -> Block | None:
        """The block that a result nobody asked for may be of; None when it is no such result. `late`: it is told under the round before."""
        if result.num_verified == 0:
            plain = (self._late if late else self.credit) > 0 and len(result.tokens) <= 1
            return EMPTY if plain else None
        n = result.num_accepted
        fitting = (p for p in self._paths if len(p.tokens) >= result.num_verified and p.tokens[:n] == result.tokens[:n])
        path = next(fitting, None)
        return None if path is None else path.head(result.num_verified)

    def commit(self, result: Result) -> None:
        """The paths that wait begin behind it."""
        self._unasked += 1
        if not self._paths:
            return
        left = (path.behind(result.tokens) for path in self._paths)
        self._paths = [path for path in left if path.tokens]

    def spend(self, late: bool) -> None:
        """One plain token that nobody asked for was decided."""
        if late:
            self._late -= 1
        else:
            self.credit -= 1

    def answered(self) -> None:
        """The newest Step was: nothing more comes under the round before."""
        self._late = self._unasked = 0

    def forget(self) -> None:
        """The placement is over."""
        self.credit = self._late = self._unasked = 0
        self._paths.clear()

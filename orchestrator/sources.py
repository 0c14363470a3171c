"""Which block the next round proposes. Pure; knows no target, no timer, no client.

The sources
1. Forced ids: a grammar lets nothing else follow, the target said so with its last result. They cost no draft and no waiting, and may be
   more than a block, up to what a target takes. Where the lookahead begins with all of them its chain goes on behind them.
2. The lookahead: what the draft proposed.
3. Prompt lookup: what followed the last time the newest tokens occurred.
What is forced goes first. The pace says whether a lookup goes before the draft's chain, or before waiting for one; it says so without
looking at either's tokens. Nothing fits: only the draft can help, and the caller decides how long to wait for it.

Forced ids depend on committed tokens alone, so the standard method may have them as a one-hot distribution; and it always has them so,
also where the draft drew the same ids. "As drawn if it agrees, else one-hot" would be a choice made by looking at what was drawn,
which biases the output wherever an id is likely and not certain.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.events import Admitted
from orchestrator.lookahead import EMPTY, Block, Lookahead, agreement
from orchestrator.ngram import PromptLookup
from orchestrator.pace import Pace
from orchestrator.pacing import block_length


class Sources:
    """Of one session. Hears of every commit."""

    def __init__(self, request: Admitted, prompt_lookup_min: int, pace: Pace) -> None:
        self._request, self._pace = request, pace
        self.lookahead = Lookahead(request.tokens)
        self._lookup = PromptLookup(prompt_lookup_min if pace.most else 0, request.tokens)
        self._forced: tuple[int, ...] = ()
        self._left = self._worth_verifying()

    def commit(self, tokens: Sequence[int], forced: tuple[int, ...]) -> None:
        """`forced` = ids that alone may follow `tokens`, as the target says."""
        self._lookup.extend(tokens)
        self.lookahead.commit(tokens)
        self._forced = forced[: self._request.max_block]
        self._left = self._worth_verifying()

    def ready(self) -> tuple[Block, str]:
        """The block that waits for nobody, and the round's outcome in tally.py's words; EMPTY when there is none."""
        forced = self._forced[: self._room(self._request.max_block)] if self._pace.most else ()
        chain = self.lookahead.block(max(self._room(self._pace.most), len(forced)))
        if not forced:
            return chain.head(self._pace.length("draft", chain.confidences)), "hit"
        if chain.tokens[: len(forced)] != forced:
            return Block(forced, (None,) * len(forced), "forced"), "forced"
        chain = chain.head(max(len(forced), self._pace.length("draft", chain.confidences)))
        return Block(chain.tokens, (None,) * len(forced) + chain.distributions[len(forced) :], confidences=chain.confidences), "hit"

    def choose(self) -> tuple[Block, str] | None:
        """The next round's block and outcome; None: only the draft can help."""
        if not self._pace.speculates and not (self._pace.most and self._forced):
            return EMPTY, "off"
        room = self._room(self._pace.most)
        if not self._forced and (guess := self._guess(room)) and self._pace.lookup_first(len(guess), self.lookahead.any):
            return Block(guess, (None,) * len(guess), "ngram"), "ngram"
        block, outcome = self.ready()
        if block.tokens:
            return block, outcome
        if not room:
            return EMPTY, "tail"
        if self.lookahead.any or not self._pace.speculates:  # there is a chain, and it is not worth verifying
            return EMPTY, "off"
        return None

    def further(self, block: Block, chain: Block) -> Block:
        """What may wait at the target while `block` is in flight: an outcome of it, then what goes on behind it. `chain`: what the draft
        says, EMPTY when nothing; EMPTY when neither it nor the lookup goes on."""
        if not chain.tokens:  # without a draft's word the lookup says also how the block ends
            looked = self._lookup.propose(self._room(self._pace.most) + 1, behind=block.tokens)
            return self._looked_up((*block.tokens, *looked[:1]), looked[1:], False) or EMPTY
        known = agreement(chain.tokens, block.tokens)
        drafted = chain.head(known + 1 + self._pace.length("draft", chain.confidences[known + 1 :]))
        outcome, goes_on = chain.tokens[: known + 1], len(drafted.tokens) > known + 1
        looked = self._lookup.propose(self._room(self._pace.most), behind=outcome)
        return self._looked_up(outcome, looked, goes_on) or (drafted if goes_on else EMPTY)

    def _looked_up(self, outcome: tuple[int, ...], looked: tuple[int, ...], ready: bool) -> Block | None:
        """The lookup's block behind this outcome; None where there is none, or the draft's, which is there (`ready`), goes first."""
        guess = looked[: self._pace.length("ngram", (0.0,) * len(looked))] if looked else ()
        if not guess or not self._pace.lookup_first(len(guess), ready):
            return None
        tokens = (*outcome, *guess)
        return Block(tokens, (None,) * len(tokens), "ngram")

    def _guess(self, room: int) -> tuple[int, ...]:
        """What the lookup has, as far as it is worth verifying."""
        guess = self._lookup.propose(room)
        return guess[: self._pace.length("ngram", (0.0,) * len(guess))] if guess else ()

    def _room(self, most: int) -> int:
        """Proposals worth verifying now, of `most`."""
        return most if most < self._left else self._left

    def _worth_verifying(self) -> int:
        """The same of any number, behind what is committed."""
        r, committed = self._request, self.lookahead.length
        return block_length(
            r.window,
            decided=committed - r.prompt_length,
            max_tokens=r.sampling.max_tokens or r.window,
            committed=committed,
            window=r.window,
        )

"""What one generation has at a draft: placement, its own epoch, and whether waiting for it still makes sense. Pure.

The draft side never decides anything about the text; losing it, being refused by it or hearing nonsense from it only ever means that
rounds go without proposals.

While the pace lets the draft rest nothing is sent to it, as if there was none: what was committed meanwhile it hears in one piece when it
goes on. A session that begins so has no draft until then.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.events import Admitted, Command, Count, DraftPlaced, PlaceDraft, StartTimer, Timer, ToDraft
from orchestrator.lookahead import Block, Lookahead
from orchestrator.pace import Pace
from orchestrator.pacing import BREAKER_AFTER, grace_ms
from specdec import terms

MAX_RESYNCS = 32  # times in a row, without a usable proposal between, that a draft may lose the thread
FIRST_SHUT, LAST_SHUT = 16, 1024  # commits for which a silent draft is not waited for
PROMPT_COMMITS = 64  # commits that a draft may need to catch up with a prompt
MAX_RETRY_MS = 60_000  # longest a draft's word keeps a session from asking again


class DraftSide:
    def __init__(self, request: Admitted, pace: Pace) -> None:
        self._request, self._pace = request, pace
        self.name, self.epoch = "", 0
        self._max_block = 0  # longest block the present draft can be told of
        self.over = request.num_speculative_tokens == 0  # no draft any more
        self._foreign = False  # the lookahead may hold tokens that the present draft does not know
        self._guest: tuple[int, ...] = ()  # the block in flight, when it came from elsewhere: the draft dropped its own for it
        self._resyncs = self._silent_graces = 0
        self.helps = 0  # usable proposals
        self._spoke, self._commits = False, 0  # since it was opened
        self._shut = self._shut_left = 0  # commits until a silent draft is waited for once more, and how many are left
        self._avoid = ""  # who refused the session last
        self._resting = self._deferred = False  # the draft was told to; a draft was not asked for because it would have to
        self._missed: list[int] = []  # tokens committed while it rests,
        self._missed_after = (0, 0)  # behind this prefix: length and hash

    # Each method returns the commands it causes.

    def want(self) -> list[Command]:
        self._deferred = not self._pace.drafts
        return [] if self.over or self.name or self._deferred else [PlaceDraft(self._avoid)]

    def placed(self, by: DraftPlaced, committed: Sequence[int], lookahead: Lookahead, in_flight: Block | None) -> list[Command]:
        if self.over or self.name:
            return []
        self.name, self._max_block = by.draft, by.max_block
        return self.open(committed, lookahead, in_flight)

    def open(self, committed: Sequence[int], lookahead: Lookahead, in_flight: Block | None) -> list[Command]:
        """Begins, or begins again, from the committed tokens; `in_flight` is the block of the open round."""
        r = self._request
        self.epoch += 1
        self._silent_graces = self._commits = 0
        self._spoke = False
        self._foreign = lookahead.any or bool(in_flight and in_flight.tokens)
        told = self._tell(
            terms.Open(
                session_id=r.session_id,
                epoch=self.epoch,
                tokens=tuple(committed),
                prompt_length=r.prompt_length,
                sampling=r.sampling,
                seed=r.seed,
                rejection_method=r.rejection_method,
                draft_method=r.draft_method,
                budget_tokens=2 * r.num_speculative_tokens + 2,  # a block in flight, its bonus, the next block, one to spare
                num_speculative_tokens=r.num_speculative_tokens,
                traceparent=r.traceparent,
            )
        )
        self._resting = False
        if not self._pace.drafts:
            return [*told, *self._rest(len(committed), lookahead.hash)]
        return told if in_flight is None else [*told, *self._sent(lookahead, in_flight)]

    def sent(self, lookahead: Lookahead, block: Block) -> list[Command]:
        """A block went to the target."""
        self._pace.opened()
        return [] if self._resting else self._sent(lookahead, block)

    def _sent(self, lookahead: Lookahead, block: Block) -> list[Command]:
        """A draft that takes shorter ones than the target hears of the beginning: the rest is news to it."""
        told = block.tokens[: self._max_block]
        tokens = told if self._foreign or not block.own else ()
        self._guest = () if block.own else told
        return self._tell(terms.Sent(self._request.session_id, lookahead.length, lookahead.hash, len(told), tokens))

    def committed(self, length: int, hash_: int, tokens: tuple[int, ...], lookahead: Lookahead) -> list[Command]:
        """`tokens` were committed after a prefix of `length` tokens; `lookahead` has moved on already."""
        self._pace.committed(lookahead.any)
        self._commits += 1
        self._shut_left -= 1
        if self._shut_left == 0:  # a target that is faster than its draft, and does not wait, would never see it catch up
            self._silent_graces = BREAKER_AFTER - 1
        if self._resting:
            self._missed += tokens
            return self._go_on(lookahead) if self._pace.drafts else []
        if not self.name:
            self._guest = ()
            return self.want() if self._deferred else []
        kept = tokens[: len(self._guest)] == self._guest
        self._foreign = (self._foreign or not kept) and lookahead.any
        self._guest = ()
        told = self._tell(self._commit(length, hash_, tokens))
        return told if self._pace.drafts else [*told, *self._rest(lookahead.length, lookahead.hash)]

    def _commit(self, length: int, hash_: int, tokens: tuple[int, ...]) -> terms.Commit:
        k = self._pace.wanted
        return terms.Commit(self._request.session_id, length, hash_, tokens, 0 if k == self._request.num_speculative_tokens else k)

    def _rest(self, length: int, hash_: int) -> list[Command]:
        """Behind a commit that left so many committed tokens."""
        self._resting, self._missed, self._missed_after = True, [], (length, hash_)
        return self._tell(terms.Pause(self._request.session_id))

    def _go_on(self, lookahead: Lookahead) -> list[Command]:
        self._resting, self._foreign, self._guest = False, lookahead.any, ()
        self._silent_graces = 0
        missed, self._missed = tuple(self._missed), []
        told = self._tell(self._commit(*self._missed_after, missed)) if missed else []
        return [*told, *self._tell(terms.Resume(self._request.session_id))]

    def lost(self, alive: bool) -> list[Command]:
        """`alive`: it is of no use, and holds the session still."""
        told = self.close() if alive else []
        lost, self.name = self.name, ""
        return [*told, Count("draft_lost"), PlaceDraft(lost)]

    def resync(self, committed: Sequence[int], lookahead: Lookahead, in_flight: Block | None) -> list[Command]:
        """The draft lost the thread; it begins again unless it did so too often."""
        self._resyncs += 1
        if self._resyncs <= MAX_RESYNCS:
            return [Count("resync"), *self.open(committed, lookahead, in_flight)]
        told = [Count("resync"), *self.close()]
        self.name, self.over = "", True
        return told

    def refused(self, refused: terms.Refused) -> list[Command]:
        self._avoid, self.name = self.name, ""
        if refused.retry_after_ms:
            return [StartTimer(Timer.DRAFT, float(min(refused.retry_after_ms, MAX_RETRY_MS)))]
        self.over = True
        return []

    def close(self) -> list[Command]:
        return self._tell(terms.CloseDraft(self._request.session_id))

    def helped(self) -> None:
        """A usable proposal came: it is worth waiting for the next one. One that only ever says what nobody can use is not."""
        self._silent_graces = self._resyncs = self._shut = 0
        self.helps, self._spoke = self.helps + 1, True
        self._pace.proposed()

    def stayed_silent(self) -> None:
        """A grace passed without a usable proposal."""
        self._silent_graces += 1
        if self._silent_graces >= BREAKER_AFTER:
            self._shut_left = self._shut = min(2 * self._shut, LAST_SHUT) if self._shut else FIRST_SHUT

    @property
    def owes(self) -> bool:
        """It has had the time to compute the prompt: what it does not say now it is late with."""
        return bool(self.name) and (self._spoke or self._commits >= PROMPT_COMMITS)

    def grace_ms(self, most: float) -> float:
        """How long the next round may wait for a proposal."""
        return grace_ms(most, silent_graces=self._silent_graces)

    def _tell(self, command: terms.DraftCommand) -> list[Command]:
        return [ToDraft(self.name, command)] if self.name else []

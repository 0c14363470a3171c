"""What one generation has at a target: the placement's epoch and round, what its K/V hold, what it was told of the session, and how the
next Step is written. Pure.

`begin` travels until the epoch's first result: whoever holds a result of this epoch knows the session. Log-probabilities of the prompt are
asked for until a result has brought them, and never again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.events import Admitted
from orchestrator.going import Going
from orchestrator.lookahead import EMPTY, Block, Lookahead
from specdec import terms
from specdec.hashing import prefix_hash
from specdec.terms import RejectionMethod, Result, Step


class TargetSide:
    """`name` = the replica that holds the session, empty = none. `open`: the newest round's Step awaits its result."""

    def __init__(self, request: Admitted, max_run_ahead: int) -> None:
        self._request = request
        self.name, self.epoch, self.round = "", 0, 0
        self.open = False
        self.block, self.outcome = EMPTY, ""  # of the newest round, or of what the target goes on with; and the round's word in the tally
        self.expired = 0  # times the newest Step expired in the queue
        self.kv_length = 0  # leading committed tokens believed to be in its K/V
        self.prompt_told = request.sampling.prompt_logprobs is None
        self.going = Going(max_run_ahead)
        self._begun = False  # a result of this epoch has arrived
        self._fork_session_id = request.fork_session_id

    @property
    def prompt_entries(self) -> int:
        """Log-probabilities of prompt tokens that its next result must bring."""
        return 0 if self.prompt_told else self._request.prompt_length - 1

    def stands_alone(self) -> None:
        """There is nothing to fork from."""
        self._fork_session_id = ""

    def new_epoch(self, epoch: int) -> None:
        self.epoch, self.round, self.open, self._begun, self.kv_length = epoch, 0, False, False, 0
        self.going.forget()

    def new_round(self, block: Block, outcome: str, run_ahead: int) -> None:
        self.round += 1
        self.block, self.outcome, self.expired = block, outcome, 0
        self.going.grant(run_ahead)

    def step(self, committed: Sequence[int], lookahead: Lookahead, remaining_ms: int) -> Step:
        """The newest round's Step, also when it goes out again."""
        r, block, base = self._request, self.block, self.kv_length
        base_hash = lookahead.hash_at(base)
        self.open = True
        return Step(
            session_id=r.session_id,
            epoch=self.epoch,
            round=self.round,
            base_length=base,
            base_hash=prefix_hash(committed[:base]) if base_hash is None else base_hash,
            tokens=(*committed[base:], *block.tokens),
            num_proposed=len(block.tokens),
            remaining_ms=remaining_ms,
            run_ahead=self.going.credit,
            distributions=self._distributions(),
            begin=None if self._begun else self.begin(),
        )

    def _distributions(self) -> tuple[terms.DraftDistribution | None, ...]:
        """None at all = one-hot, as all that lookups and grammars propose: their blocks may be longer than a list of distributions."""
        told = self.block.distributions
        return told if self._request.rejection_method is RejectionMethod.STANDARD and any(told) else ()

    def begin(self) -> terms.Begin:
        r = self._request
        return terms.Begin(
            prompt_length=r.prompt_length,
            sampling=replace(r.sampling, prompt_logprobs=None) if self.prompt_told else r.sampling,
            seed=r.seed,
            rejection_method=r.rejection_method,
            draft_method=r.draft_method,
            traceparent=r.traceparent,
            priority=r.priority,
            fork_session_id=self._fork_session_id,
        )

    def unasked(self, round_: int, result: Result, committed: int) -> Block | None:
        """The block of a result that no Step asked for, EMPTY for a plain token; None when it is no such result, or an old one."""
        late = round_ == self.round - 1
        if not (late or (round_ == self.round and not self.open)) or result.prefix_length != committed:
            return None
        block = self.going.fits(result, late)
        if block is not None and not result.num_verified:
            self.going.spend(late)
        return block

    def decided(self, result: Result, committed: int, asked: bool) -> None:
        """`committed` = tokens in all, those of the result included. `asked`: it answers the newest round's Step."""
        self._begun = self.prompt_told = True
        self.kv_length = min(result.kv_length_after, committed - 1)
        self.going.commit(result)
        if asked:
            self.open = False
            self.going.answered()
        else:  # what is out already was written before this was known
            self.block = self.block.behind(result.tokens)

    def ahead(self, lookahead: Lookahead, path: Block) -> terms.Ahead:
        return terms.Ahead(self._request.session_id, self.epoch, lookahead.length, lookahead.hash, path.tokens)

    def close(self) -> terms.Close:
        return terms.Close(self._request.session_id, self.epoch)

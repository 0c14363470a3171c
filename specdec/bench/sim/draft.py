"""Sessions of a simulated draft: what it proposes behind which prefix, and when. Pure; events as they travel.

Behind a commit that it had not foreseen it begins again and tells a block; while a block is in flight it works behind it, and behind one
other outcome of it, which is the one that comes with probability `hits`: what a tree of guesses gives a real draft.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.bench.sim.path import Path
from specdec.seeds import MASK64, mix64
from specdec.simulation import FIRST_ID
from specdec.v1 import draft_pb2


@dataclass(frozen=True, slots=True)
class Work:
    """Ids to be drafted: `chain` behind what is committed, and `branch` behind another outcome of the block in flight."""

    chain: int
    branch: bool = False


class Session:
    """`work` is what it does next; whoever carries it out calls `tell` when its time has passed, unless `version` has changed."""

    __slots__ = (
        "_branch",
        "_chain",
        "_confidence",
        "_hits",
        "_in_flight",
        "_most",
        "epoch",
        "fresh",
        "k",
        "length",
        "name",
        "path",
        "version",
    )

    def __init__(self, command: draft_pb2.Open, path: Path, confidence: float, hits: float) -> None:
        self.name, self.epoch, self.path = command.session_id, command.epoch, path
        self.length, self.k = len(command.tokens), command.num_speculative_tokens
        self._most, self._confidence, self._hits = self.k, confidence, hits
        self._chain: list[int] = []  # told, behind the committed ones
        self._branch: list[int] = []
        self._in_flight = 0
        self.version = 0
        self.fresh = True  # it has nothing that continues the committed tokens

    def sent(self, command: draft_pb2.Sent) -> Work | None:
        self.version += 1
        self._in_flight = command.num_proposed
        if command.tokens:
            block = list(command.tokens)
            if self._chain[: len(block)] != block:
                self._chain = block
        return Work(self._in_flight + 1 + self.k - len(self._chain), branch=self._in_flight > 0)

    def commit(self, command: draft_pb2.Commit) -> Work | None:
        self.version += 1
        tokens = list(command.tokens)
        n, self.k = len(tokens), command.num_speculative_tokens or self._most
        kept = next((c[n:] for c in (self._chain, self._branch) if c[:n] == tokens), [])
        self._chain, self._branch, self._in_flight = kept, [], 0
        self.length += n
        self.fresh = not kept
        return Work(self.k - len(kept)) if len(kept) < self.k else None

    def begin(self) -> Work:
        """Behind Open, and behind Resume."""
        self.version += 1
        self._chain, self._branch, self.fresh = [], [], True
        return Work(self.k)

    def pause(self) -> None:
        self.version += 1

    def tell(self, work: Work) -> list[draft_pb2.DraftEvent]:
        events = []
        if work.chain > 0:
            named, said = self.path.drafted(self.length, self._chain, work.chain)
            events.append(self._event(self.length + len(self._chain), named, said))
            self._chain += said
        if work.branch:
            self._branch = self._other_outcome()
            named, _ = self.path.drafted(self.length, (), 0)
            events.append(self._event(self.length, named, self._branch))
        return events

    def _other_outcome(self) -> list[int]:
        """Where the block ends, its correction, and a block behind it; or a guess that does not come."""
        block = self._chain[: self._in_flight]
        accepted = self.path.agrees(self.length, block)
        decided = self.path.upto(self.length + accepted + 1)[self.length : self.length + accepted + 1]
        if mix64(self.path.hash_at(self.length) or 0) >= self._hits * (MASK64 + 1):
            decided = [*decided[:-1], FIRST_ID + (decided[-1] == FIRST_ID)]
        return decided + self.path.drafted(self.length, decided, self.k)[1]

    def _event(self, length: int, named: int, tokens: list[int]) -> draft_pb2.DraftEvent:
        proposal = draft_pb2.Proposal(
            session_id=self.name,
            epoch=self.epoch,
            prefix_length=length,
            prefix_hash=named,
            tokens=tokens,
            confidences=[self._confidence] * len(tokens),
        )
        return draft_pb2.DraftEvent(proposal=proposal)

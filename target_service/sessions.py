"""One session as the target knows it. Plain state with its few invariants; the rules are in verifier.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.hashing import PrefixHash
from specdec.terms import Answer, Begin, DraftDistribution, Step

Key = tuple[str, str]
"""(orchestrator_id, session_id)"""


@dataclass(slots=True)
class Pending:
    """The one outstanding Step of a session, after its committed tokens went into the session."""

    round: int
    block: tuple[int, ...]
    distributions: tuple[DraftDistribution | None, ...]
    arrived_ms: float
    deadline_ms: float
    serial: int  # order of arrival
    started_ms: float | None = None  # when its first row went to the engine
    scoring: bool = False  # its last row is in the engine now: "running" in the protocol's sense

    def queue_us(self) -> int:
        """0 for a Step that never reached the engine."""
        return 0 if self.started_ms is None else max(0, int(1000 * (self.started_ms - self.arrived_ms)))


@dataclass(slots=True)
class Session:
    """`tokens` = committed tokens; the first `kv_length` of them are in KV, never all of them. `resident` names the KV at the engine,
    None = parked: the state is kept, the KV is not. `age` orders admissions: the highest number is the youngest."""

    key: Key
    epoch: int
    begin: Begin
    age: int
    stream: int | None
    tokens: list[int] = field(default_factory=list)
    resident: int | None = None
    kv_length: int = 0
    round: int = 0  # of the last result
    last: Answer | None = None  # that result
    pending: Pending | None = None
    closing: bool = False
    asked_ms: float = 0.0  # when its last Step came
    lease_until_ms: float | None = None  # set while no stream speaks for the session
    _hash: PrefixHash = field(default_factory=PrefixHash)

    def hash_at(self, length: int) -> int:
        """Hash of the first `length` tokens. Lengths only grow between two rollbacks, so this costs the new ids alone."""
        if length < self._hash.length:
            self._hash = PrefixHash(self.tokens[:length])
        else:
            self._hash.extend(self.tokens[self._hash.length : length])
        return self._hash.value

    def rebase(self, base_length: int, committed: tuple[int, ...]) -> None:
        """Committed tokens become tokens[:base_length] + committed. KV that agrees beyond the base is kept, all but the newest token.
        The base was compared by its hash, so no hash reaches past it."""
        assert self._hash.length <= base_length <= len(self.tokens)
        keep, old = base_length, self.tokens
        limit = min(self.kv_length, base_length + len(committed) - 1)
        while keep < limit and old[keep] == committed[keep - base_length]:
            keep += 1
        del old[base_length:]
        old.extend(committed)
        self.kv_length = keep

    def drop_kv(self) -> None:
        self.resident, self.kv_length = None, 0


def continues(step: Step, pending: Pending) -> bool:
    """Does the Step's block begin with the one that waits?"""
    block = step.tokens[len(step.tokens) - step.num_proposed :]
    return len(block) > len(pending.block) and block[: len(pending.block)] == pending.block

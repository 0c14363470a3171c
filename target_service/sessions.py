"""One session as the target knows it. Plain state with its few invariants; the rules are in verifier.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.hashing import PrefixHash
from specdec.sampling import Constraint
from specdec.terms import Answer, Begin, DraftDistribution, Result, Step, TokenLogprobs
from target_service.ahead import Shelf
from target_service.plan import Compile, PromptScore

Key = tuple[str, str]
"""(orchestrator_id, session_id)"""


@dataclass(slots=True)
class Pending:
    """The one open round of a session, after its Step's committed tokens went into the session."""

    round: int
    block: tuple[int, ...]
    distributions: tuple[DraftDistribution | None, ...]
    arrived_ms: float
    deadline_ms: float
    serial: int  # order of arrival
    started_ms: float | None = None  # when its first row went to the engine
    scoring: bool = False  # its last row is in the engine now: "running" in the protocol's sense
    decides: bool = True  # False: no token may follow, the round waits for the prompt's log-probabilities alone
    run_ahead: int = 0  # plain rounds that may follow its result
    own: bool = False  # nobody asked: the target began it by itself, and `round` is that of the last Step

    def queue_us(self) -> int:
        """0 for a Step that never reached the engine."""
        return 0 if self.started_ms is None else max(0, int(1000 * (self.started_ms - self.arrived_ms)))


@dataclass(slots=True)
class Held:
    """A Step that came while a round of the target's own is in the engine."""

    step: Step
    arrived_ms: float
    deadline_ms: float


@dataclass(slots=True)
class Session:
    """`tokens` = committed tokens; the first `kv_length` of them are in KV, never all of them. `resident` names the KV at the engine,
    None = parked: the state is kept, the KV is not. `age` orders admissions: the highest number is the youngest.

    `told` = what was told under `round`, in order: first the result that was asked for, then those of the target's own rounds. A Step that
    names at least the first `floor` tokens, as they are, edits nothing.

    `prompt_logprobs` = entries of tokens[1], tokens[2], ... until the epoch's first result takes them along. A row that was fed gives no
    logits any more, so the KV never reaches past the first token that still lacks its entry.
    """

    key: Key
    epoch: int
    begin: Begin
    age: int
    stream: int | None
    tokens: list[int] = field(default_factory=list)
    resident: int | None = None
    kv_length: int = 0
    round: int = 0  # of the last result
    told: list[Answer] = field(default_factory=list)
    ended: Result | None = None  # the last of them, when the generation ended there
    floor: int = 0
    credit: int = 0  # plain rounds that the target may still begin by itself
    aheads: Shelf = field(default_factory=Shelf)
    pending: Pending | None = None
    held: Held | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    flying: bool = False  # a row of it is in the engine now
    compiling: Compile | None = None  # its grammar is not ready: no row of it runs
    constraint: Constraint | None = None  # the grammar's state, for the engine thread alone; it outlives the KV
    closing: bool = False
    asked_ms: float = 0.0  # when its last Step came
    lease_until_ms: float | None = None  # set while no stream speaks for the session
    _hash: PrefixHash = field(default_factory=PrefixHash)

    @property
    def asked(self) -> int | None:
        """The round of the Step that is open."""
        if self.held is not None:
            return self.held.step.round
        return None if self.pending is None or self.pending.own else self.pending.round

    @property
    def awaited(self) -> bool:
        """Somebody was told what was decided and nothing follows it by itself: the next Step is on its way."""
        return self.stream is not None and self.pending is None and self.ended is None and not self.closing

    def hash_at(self, length: int) -> int:
        """Hash of the first `length` tokens. Lengths only grow between two rollbacks, so this costs the new ids alone."""
        if length < self._hash.length:
            self._hash = PrefixHash(self.tokens[:length])
        else:
            self._hash.extend(self.tokens[self._hash.length : length])
        return self._hash.value

    def hash_aside(self, length: int) -> int:
        """The same, and the next `hash_at` of a shorter length costs no more for it."""
        if length < self._hash.length:
            return PrefixHash(self.tokens[:length]).value
        return self._hash.copy().extend(self.tokens[self._hash.length : length]).value

    @property
    def unscored(self) -> int:
        """Prompt tokens whose log-probabilities are still owed: those from the second on, in the epoch's first result."""
        if self.begin.sampling.prompt_logprobs is None or self.round > 0:
            return 0
        return self.begin.prompt_length - 1 - len(self.prompt_logprobs)

    def knows(self, base_length: int, committed: tuple[int, ...]) -> bool:
        """Is tokens[:base_length] + committed a beginning of what is decided, and does it reach what its sender was told last?"""
        end = base_length + len(committed)
        return self.floor <= end <= len(self.tokens) and tuple(self.tokens[base_length:end]) == committed

    def rebase(self, base_length: int, committed: tuple[int, ...]) -> None:
        """An edit: committed tokens become tokens[:base_length] + committed. KV and prompt log-probabilities that agree beyond the base are
        kept, of the KV all but the newest token. The base was compared by its hash, so no hash reaches past it."""
        assert self._hash.length <= base_length <= len(self.tokens)
        keep = base_length + agreement(self.tokens[base_length:], committed)
        del self.tokens[base_length:]
        self.tokens.extend(committed)
        del self.prompt_logprobs[max(0, keep - 1) :]
        self.floor, self.ended = len(self.tokens), None
        self.aheads.clear()
        self._hold(min(keep, self.kv_length))

    def prefilled(self, end: int, prompt: PromptScore | None, logprobs: Sequence[TokenLogprobs]) -> None:
        """A piece up to `end`, of tokens that are still the session's, is in KV. The token behind the piece may be another by now."""
        for token, entry in zip(() if prompt is None else prompt.tokens, logprobs, strict=True):
            place = len(self.prompt_logprobs) + 1
            if self.tokens[place] != token:
                break
            self.prompt_logprobs.append(entry)
        self._hold(end)

    def _hold(self, kv_length: int) -> None:
        self.kv_length = min(kv_length, len(self.tokens) - 1, len(self.prompt_logprobs) if self.unscored else kv_length)

    def shareable(self, committed: Sequence[int]) -> int:
        """How many leading tokens of `committed` are in KV here; never all of them, since the newest one's row is needed."""
        return min(agreement(self.tokens[: self.kv_length], committed), len(committed) - 1)

    def drop_kv(self) -> None:
        self.resident, self.kv_length = None, 0


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))

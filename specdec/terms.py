"""The nouns of the system, frozen. Standard library only. One word per thing: see the glossary in docs/architecture.md."""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.errors import InvalidRequest

GREEDY_BELOW = 1e-5  # temperatures below this choose by argmax
MAX_LOGPROBS = 20  # most alternatives reported per token
MAX_ID_BYTES = 128  # of session, request and orchestrator ids
MAX_SEED = (1 << 64) - 1
MAX_GRAMMAR_BYTES = 1 << 16  # of a grammar's text, or of all its options
MAX_CHOICES = 1024
MAX_START_BYTES = 256  # of the text a grammar begins after


class RejectionMethod(enum.Enum):
    COUPLED = "coupled"
    STANDARD = "standard"


class DraftMethod(enum.Enum):
    GUMBEL = "gumbel"
    GREEDY = "greedy"
    PROBABILISTIC = "probabilistic"


LEGAL_METHODS = {
    RejectionMethod.COUPLED: (DraftMethod.GUMBEL, DraftMethod.GREEDY),  # first = default
    RejectionMethod.STANDARD: (DraftMethod.PROBABILISTIC, DraftMethod.GREEDY),
}


class Origin(enum.Enum):
    """Where a decided token came from. accepted + corrected + bonus + plain = decided = delivered + discarded."""

    ACCEPTED = "accepted"
    CORRECTED = "corrected"
    BONUS = "bonus"
    PLAIN = "plain"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


class GrammarForm(enum.Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A formal language for the output. `text` = the schema, expression or grammar; `options` = the answers of a choice.

    `start_after` = the text after which it begins; None = from the first token on.
    """

    form: GrammarForm
    text: str = ""
    options: tuple[str, ...] = ()
    start_after: str | None = None

    def check(self) -> None:
        """Sizes only: whether it is a grammar is found out by compiling it. Raises InvalidRequest."""
        name = f"sampling.grammar.{self.form.value}"
        if self.form is GrammarForm.CHOICE:
            if not 1 <= len(self.options) <= MAX_CHOICES or not all(self.options):
                raise InvalidRequest(name, f"must hold 1 to {MAX_CHOICES} options, none of them empty")
        elif not self.text:
            raise InvalidRequest(name, "must not be empty")
        if (size := len(self.text.encode()) + sum(len(option.encode()) for option in self.options)) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(name, f"at most {MAX_GRAMMAR_BYTES} bytes (MAX_GRAMMAR_BYTES), got {size}")
        if self.start_after is not None and not 1 <= len(self.start_after.encode()) <= MAX_START_BYTES:
            raise InvalidRequest(
                "sampling.grammar.start_after", f"must be 1 to {MAX_START_BYTES} bytes long; leave it unset to begin at once"
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What shapes the target's decisions. The defaults here are the only defaults; no checkpoint's generation_config is ever read.

    Complete on every hop behind the front: `max_tokens` is resolved at admission. `logprobs` None = none at all,
    0 = the chosen token's only. Log-probabilities are those of the raw logits.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def check(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first field that is out of range. `vocab_size` = ids the target's tokenizer knows."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise InvalidRequest(f"sampling.{name}", f"must be a number in [{low:.10g}, {high:.10g}], got {value!r}")
        if self.top_p == 0.0:
            raise InvalidRequest("sampling.top_p", "must be in (0, 1]; leave it unset to keep all ids")
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("sampling.repetition_penalty", "must be in (0, 10]; 1 changes nothing")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("sampling.min_tokens", f"must not exceed max_tokens ({self.max_tokens})")
        id_lists = {n: getattr(self, n) for n in ("stop_token_ids", "allowed_token_ids", "banned_token_ids")}
        id_lists["logit_bias"] = tuple(self.logit_bias)
        for name, ids in id_lists.items():
            bad = next((i for i in ids if not 0 <= i < vocab_size), None)
            if bad is not None:
                raise InvalidRequest(f"sampling.{name}", f"token id {bad} is not in the vocabulary (0 to {vocab_size - 1})")
        bad_bias = next((b for b in self.logit_bias.values() if not abs(b) <= 100.0), None)
        if bad_bias is not None:
            raise InvalidRequest("sampling.logit_bias", f"values must be in [-100, 100], got {bad_bias!r}")
        if self.grammar is not None:
            self.grammar.check()


_RANGES = (
    ("temperature", 0.0, 1e4),
    ("top_k", 0, 2**31 - 1),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("frequency_penalty", -2.0, 2.0),
    ("presence_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 10.0),
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """log p of the chosen token and of the likeliest alternatives (likeliest first, ties by id), under the raw logits."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """q of one proposed token under the standard method: ids and the very float32 numbers that were sampled from."""

    ids: tuple[int, ...]
    probs: bytes  # float32 little-endian, len(ids) of them

    def floats(self) -> list[float]:
        """The numbers, as Python floats. Call `check` first on what a stranger sent."""
        return list(struct.unpack(f"<{len(self.ids)}f", self.probs))

    def check(self, vocab_size: int, name: str = "distribution") -> None:
        """Raises InvalidRequest, calling the distribution `name`. Sums may be off by a thousandth: readers divide by the sum."""
        if not self.ids or len(self.probs) != 4 * len(self.ids):
            raise InvalidRequest(name, f"{len(self.ids)} ids need {4 * len(self.ids)} bytes of float32, got {len(self.probs)}")
        if len(set(self.ids)) != len(self.ids):
            raise InvalidRequest(name, "ids must be distinct")
        bad = next((i for i in self.ids if not 0 <= i < vocab_size), None)
        if bad is not None:
            raise InvalidRequest(name, f"token id {bad} is not in the vocabulary (0 to {vocab_size - 1})")
        numbers = self.floats()
        if not all(0.0 <= number <= 1.01 for number in numbers):  # refuses NaN too
            raise InvalidRequest(name, "probabilities must be finite and in [0, 1]")
        if abs(math.fsum(numbers) - 1.0) > 1e-3:
            raise InvalidRequest(name, f"probabilities must sum to 1, got {math.fsum(numbers)!r}")


@dataclass(frozen=True, slots=True)
class Begin:
    """What a target must know of a session, in the first Step of an epoch. `fork_session_id` names a session of the same orchestrator whose
    KV may be shared where ids agree; empty = none."""

    prompt_length: int
    sampling: SamplingParams
    seed: int
    rejection_method: RejectionMethod = RejectionMethod.COUPLED
    draft_method: DraftMethod = DraftMethod.GUMBEL
    traceparent: str = ""
    priority: int = 0
    fork_session_id: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One round as asked. `tokens` = committed tokens from base_length on, then `num_proposed` proposals."""

    session_id: str
    epoch: int
    round: int
    base_length: int
    base_hash: int
    tokens: tuple[int, ...]
    num_proposed: int
    remaining_ms: int
    run_ahead: int = 0
    distributions: tuple[DraftDistribution | None, ...] = ()  # standard: one per proposal, None = one-hot; else empty
    begin: Begin | None = None


@dataclass(frozen=True, slots=True)
class Close:
    session_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Result:
    """One round as decided. An end-of-sequence or stop token is not among `tokens`; it is named in `stop_token_id`."""

    prefix_length: int
    kv_length_after: int
    num_verified: int
    num_accepted: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    forced: tuple[int, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt from its second token on, in the epoch's first result


@dataclass(frozen=True, slots=True)
class PrefixNeeded:
    have: int


@dataclass(frozen=True, slots=True)
class UnknownSession:
    pass


@dataclass(frozen=True, slots=True)
class NoRoom:
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class StaleEpoch:
    current: int


@dataclass(frozen=True, slots=True)
class StaleRound:
    current: int


@dataclass(frozen=True, slots=True)
class Expired:
    pass


@dataclass(frozen=True, slots=True)
class Failed:
    code: int  # gRPC status code number
    message: str
    drop: bool = True


@dataclass(frozen=True, slots=True)
class Closed:
    pass


Outcome = Result | PrefixNeeded | UnknownSession | NoRoom | StaleEpoch | StaleRound | Expired | Failed | Closed


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one item, addressed."""

    session_id: str
    epoch: int
    round: int
    outcome: Outcome
    queue_us: int = 0


@dataclass(frozen=True, slots=True)
class Open:
    """Begins a session at a draft, or replaces it under a higher epoch. `tokens` = all committed tokens."""

    session_id: str
    epoch: int
    tokens: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    seed: int
    rejection_method: RejectionMethod
    draft_method: DraftMethod
    budget_tokens: int
    num_speculative_tokens: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Sent:
    session_id: str
    prefix_length: int
    prefix_hash: int
    num_proposed: int
    tokens: tuple[int, ...] = ()  # the block, unless it is the draft's own


@dataclass(frozen=True, slots=True)
class Commit:
    session_id: str
    prefix_length: int
    prefix_hash: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pause:
    session_id: str


@dataclass(frozen=True, slots=True)
class Resume:
    session_id: str


@dataclass(frozen=True, slots=True)
class CloseDraft:
    session_id: str


DraftCommand = Open | Sent | Commit | Pause | Resume | CloseDraft


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that continue one exact prefix, undecided tokens included; useless and harmless for any other."""

    session_id: str
    epoch: int
    prefix_length: int
    prefix_hash: int
    tokens: tuple[int, ...]
    confidences: tuple[float, ...] = ()
    distributions: tuple[DraftDistribution | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Resync:
    session_id: str
    epoch: int
    have: int


@dataclass(frozen=True, slots=True)
class Refused:
    session_id: str
    epoch: int
    reason: str
    retry_after_ms: int


DraftEvent = Proposal | Resync | Refused


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model server is; servers of one release must agree in vocabulary_fingerprint."""

    model: str
    vocab_size: int  # ids the tokenizer knows
    vocabulary_fingerprint: bytes
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    boot_id: str
    numerics_fingerprint: str
    batch_invariant: bool
    dtype: str
    kv_total_tokens: int
    max_num_speculative_tokens: int
    max_sessions: int


@dataclass(frozen=True, slots=True)
class TargetBeat:
    sessions: int
    queued: int
    kv_used_tokens: int
    kv_total_tokens: int
    running_step_ms: int
    predicted_step_ms: int


@dataclass(frozen=True, slots=True)
class DraftLoad:
    needed_work_share: float
    late_share: float
    sessions: int
    kv_used_tokens: int
    kv_total_tokens: int

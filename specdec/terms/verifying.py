"""The words between orchestrator and target."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.terms.decided import DraftDistribution, FinishReason, TokenLogprobs
from specdec.terms.record import record
from specdec.terms.request import DraftMethod, RejectionMethod, SamplingParams

MAX_AHEAD_TOKENS = 256  # in one Ahead
MAX_AHEADS = 32  # of one session that wait at a target; the oldest makes way
MAX_ROUND_RESULTS = 256  # told under one round; then a target decides nothing by itself until the next Step


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


@record(frozen=True, slots=True)
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


@record(frozen=True, slots=True)
class Ahead:
    """A continuation that may wait at the target. `prefix_*` name everything before `tokens`, undecided tokens included."""

    session_id: str
    epoch: int
    prefix_length: int
    prefix_hash: int
    tokens: tuple[int, ...]


VerifyItem = Step | Close | Ahead


@record(frozen=True, slots=True)
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


@record(frozen=True, slots=True)
class Answer:
    """The outcome of one item, addressed."""

    session_id: str
    epoch: int
    round: int
    outcome: Outcome
    queue_us: int = 0


@dataclass(frozen=True, slots=True)
class TargetBeat:
    sessions: int
    queued: int
    kv_used_tokens: int
    kv_total_tokens: int
    running_step_ms: int
    predicted_step_ms: int
    draining: bool = False
    drain_remaining_ms: int = 0
    backlog_ms: float = 0.0
    kv_demand: float = 0.0

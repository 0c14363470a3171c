"""The words between orchestrator and draft."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.terms.decided import DraftDistribution
from specdec.terms.record import record
from specdec.terms.request import DraftMethod, RejectionMethod, SamplingParams


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


@record(frozen=True, slots=True)
class Sent:
    session_id: str
    prefix_length: int
    prefix_hash: int
    num_proposed: int
    tokens: tuple[int, ...] = ()  # the block, unless it is the draft's own


@record(frozen=True, slots=True)
class Commit:
    session_id: str
    prefix_length: int
    prefix_hash: int
    tokens: tuple[int, ...]
    num_speculative_tokens: int = 0  # block length wanted from here on; 0 = as in Open


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


@record(frozen=True, slots=True)
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
class DraftLoad:
    needed_work_share: float
    late_share: float
    sessions: int
    kv_used_tokens: int
    kv_total_tokens: int
    draining: bool = False
    needed_time_share: float = 0.0
    late_demand: float = 0.0

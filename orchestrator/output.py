"""What the driver hands to a front: the events of one answer, and its counts. Frozen; no protobuf."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.terms import FinishReason, Origin, TokenLogprobs


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Counts of one answer; the words are the glossary's. `histogram[j]` = rounds with a block that accepted j proposals."""

    rounds: int = 0
    spec_rounds: int = 0  # rounds with a block
    drafted: int = 0  # proposals verified
    accepted: int = 0  # proposals kept
    histogram: tuple[int, ...] = ()
    spec_tokens: int = 0  # tokens decided in rounds with a block
    hits: int = 0
    wanted: int = 0  # rounds that wanted speculation: the base of the hit rate
    replacements: int = 0  # times the answer was moved to another target


@dataclass(frozen=True, slots=True)
class TokensDecided:
    """Decided tokens in order; `logprobs` has one entry per token or is empty, `origins` one per token."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    origins: tuple[Origin, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of an answer. An end-of-sequence or stop token is not among the decided tokens; it is named here."""

    finish: FinishReason
    stop_token_id: int | None
    stats: GenerationStats

"""What a generation tells the front that asked for it. Frozen; standard library only; knows no wire, no loop, no text."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.terms import FinishReason, Origin, TokenLogprobs
from specdec.terms.record import record


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """How speculation went for one answer. Rounds are steps of the target; every count is of what happened, never reconstructed.

    `histogram[j]` = rounds with a block that accepted j proposals, so sum(histogram) = spec_rounds and
    sum(j * histogram[j]) = accepted. `spec_tokens` = tokens decided in rounds with a block. `hits` of `wanted` rounds that wanted
    speculation found a fitting proposal when the commit before was processed. `decided` counts all decided tokens, those behind a
    stop included; the id that ends an answer is not among them.
    """

    rounds: int = 0
    spec_rounds: int = 0
    drafted: int = 0  # proposals the target verified
    accepted: int = 0  # proposals kept
    histogram: tuple[int, ...] = ()
    spec_tokens: int = 0
    hits: int = 0
    wanted: int = 0
    replacements: int = 0  # moves to another target
    decided: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds with a block; 1 when there was none."""
        return 1.0 + self.accepted / max(1, self.spec_rounds)

    @property
    def draft_acceptance_rate(self) -> float:
        """accepted / verified proposals; 0 when there was none."""
        return self.accepted / max(1, self.drafted)

    @property
    def hit_rate(self) -> float:
        """hits / rounds that wanted speculation; 0 when there was none."""
        return self.hits / max(1, self.wanted)


@record(frozen=True, slots=True)
class TokensDecided:
    """Newly decided tokens, in order. `logprobs` holds one per token, or none at all when none were asked for. `prompt_logprobs`: one per
    prompt token from the second on, once in an answer that was asked for them; there may be no tokens beside them."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    origins: tuple[Origin, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event. `stop_token_id` = the end-of-sequence or stop id that ended it; it is not among the tokens."""

    finish: FinishReason
    stop_token_id: int | None
    stats: GenerationStats


GenerationEvent = TokensDecided | Ended

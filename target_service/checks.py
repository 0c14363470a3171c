"""Everything a Step may get wrong, found before it can reach the engine. Each check names the field and what would be accepted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specdec.errors import InvalidRequest
from specdec.terms import LEGAL_METHODS, MAX_AHEAD_TOKENS, MAX_PROMPT_LOGPROBS, Ahead, Begin, RejectionMethod, Step

MAX_TRACEPARENT_CHARS = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """`window` = longest sequence, prompt and output together, that model and KV pool can hold for one session.
    `prefix_block_tokens` = unit of the prefix cache, that of the KV store; 0 = no cache."""

    vocab_size: int
    window: int
    max_sessions: int
    max_step_rows: int
    max_num_speculative_tokens: int
    reserve_tokens: int
    lease_ms: float
    retry_after_ms: int = 50
    wave_fraction: float = 0.2  # of a step that it takes whatever its rows, until that is known
    prefix_block_tokens: int = 64
    max_run_ahead: int = 64  # plain rounds after one Step; more is asked for in vain


def check_step(step: Step, limits: Limits) -> None:
    """What can be said of a Step without its session. Raises InvalidRequest."""
    _count("step.epoch", step.epoch)
    _count("step.round", step.round)
    if step.num_proposed > limits.max_num_speculative_tokens:
        raise InvalidRequest("step.num_proposed", f"at most {limits.max_num_speculative_tokens}, got {step.num_proposed}")
    committed = len(step.tokens) - step.num_proposed
    if step.num_proposed < 0 or committed < 1:
        raise InvalidRequest("step.tokens", "must hold at least the newest committed token before the proposals")
    if step.base_length + committed > limits.window:
        raise InvalidRequest("step.tokens", f"at most {limits.window} committed tokens fit here, got {step.base_length + committed}")
    _ids("step.tokens", step.tokens, limits.vocab_size)


def check_begin(step: Step, begin: Begin, limits: Limits) -> None:
    """The first Step of an epoch."""
    if step.base_length != 0:
        raise InvalidRequest("step.base_length", "must be 0 in the first Step of an epoch")
    if step.round != 1:
        raise InvalidRequest("step.round", "must be 1 in the first Step of an epoch")
    committed = len(step.tokens) - step.num_proposed
    if not 1 <= begin.prompt_length <= committed:
        raise InvalidRequest("begin.prompt_length", f"must be in [1, {committed}], the committed tokens sent")
    begin.sampling.check(limits.vocab_size)
    if begin.sampling.max_tokens is None:
        raise InvalidRequest("sampling.max_tokens", "must be complete: the target fills nothing in")
    if (count := begin.sampling.prompt_logprobs) is not None and begin.prompt_length * (1 + count) > MAX_PROMPT_LOGPROBS:
        most = f"tokens of the prompt times (1 + prompt_logprobs) must be at most {MAX_PROMPT_LOGPROBS} (MAX_PROMPT_LOGPROBS)"
        raise InvalidRequest("sampling.prompt_logprobs", f"{most}, got {begin.prompt_length} times {1 + count}")
    if begin.draft_method not in LEGAL_METHODS[begin.rejection_method]:
        legal = " or ".join(m.value for m in LEGAL_METHODS[begin.rejection_method])
        raise InvalidRequest("begin.draft_sample_method", f"must be {legal} with {begin.rejection_method.value}")
    if len(begin.traceparent) > MAX_TRACEPARENT_CHARS:
        raise InvalidRequest("begin.traceparent", f"at most {MAX_TRACEPARENT_CHARS} characters")


def check_distributions(step: Step, begin: Begin, limits: Limits) -> None:
    """q of the proposals, once the session's method is known."""
    if not step.distributions:
        return
    if begin.rejection_method is not RejectionMethod.STANDARD:
        raise InvalidRequest("step.distributions", "go with rejection_sample_method standard only; leave them out")
    if len(step.distributions) != step.num_proposed:
        raise InvalidRequest("step.distributions", f"one per proposal or none: {step.num_proposed} proposals")
    for index, q in enumerate(step.distributions):
        if q is not None:
            q.check(limits.vocab_size, f"step.distributions[{index}]")


def check_ahead(ahead: Ahead, limits: Limits) -> None:
    """What can be said of an Ahead without its session. Raises InvalidRequest."""
    _count("ahead.epoch", ahead.epoch)
    _count("ahead.prefix_length", ahead.prefix_length)
    if not 1 <= len(ahead.tokens) <= MAX_AHEAD_TOKENS:
        raise InvalidRequest("ahead.tokens", f"must hold 1 to {MAX_AHEAD_TOKENS} proposals (MAX_AHEAD_TOKENS), got {len(ahead.tokens)}")
    _ids("ahead.tokens", ahead.tokens, limits.vocab_size)


def _ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    top = max(ids, default=0)
    if top >= vocab_size:
        raise InvalidRequest(field, f"token id {top} is not in the vocabulary (0 to {vocab_size - 1})")


def _count(field: str, value: int) -> None:
    if value < 1:
        raise InvalidRequest(field, "counts from 1")

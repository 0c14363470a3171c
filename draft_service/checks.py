"""Everything a command may get wrong, found before it can reach the engine. Raises InvalidRequest naming the field. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.session import Bounds
from specdec.errors import InvalidRequest
from specdec.terms import LEGAL_METHODS, MAX_ID_BYTES, Commit, Open, Sent


@dataclass(frozen=True, slots=True)
class Limits:
    """`vocab_size` = ids the tokenizer knows, `window` = longest sequence of the draft model, `step_rows` = tokens fed in one pass,
    `chunk_rows` = tokens of one prompt in a pass while there are other sessions, `lookahead_floor` = see outlook.py, `fanout` = branches of
    a session in all, the chain included, `branch_floor` = smallest chance of a branch's next token to be of use."""

    vocab_size: int
    window: int
    eos_ids: tuple[int, ...]
    max_sessions: int = 64
    max_block: int = 16
    max_budget: int = 64
    step_rows: int = 256
    chunk_rows: int = 64
    lookahead_floor: float = 0.0
    fanout: int = 0
    branch_floor: float = 0.0


def bounds_of(command: Open, limits: Limits) -> Bounds:
    """How far the session may be drafted. A budget of 0 means: as much as the service allows."""
    sampling, limit = command.sampling, limits.window
    if sampling.max_tokens is not None:
        limit = min(limit, command.prompt_length + sampling.max_tokens)
    ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(limits.eos_ids))
    return Bounds(
        k=command.num_speculative_tokens,
        budget=min(command.budget_tokens or limits.max_budget, limits.max_budget),
        limit=limit,
        ends=ends,
        ends_from=command.prompt_length + sampling.min_tokens,
        prompt_length=command.prompt_length,
        greedy=sampling.greedy,
        method=command.draft_method,
    )


def check_open(command: Open, limits: Limits) -> None:
    check_name(command.session_id)
    if command.epoch < 1:
        raise InvalidRequest("open.epoch", "must be at least 1")
    if not 1 <= command.num_speculative_tokens <= limits.max_block:
        got = command.num_speculative_tokens
        raise InvalidRequest("open.num_speculative_tokens", f"must be in [1, {limits.max_block}], got {got}")
    if not 1 <= command.prompt_length <= len(command.tokens):
        raise InvalidRequest("open.prompt_length", f"must be in [1, {len(command.tokens)}], got {command.prompt_length}")
    if command.draft_method not in LEGAL_METHODS[command.rejection_method]:
        pair = f"{command.draft_method.value} does not go with {command.rejection_method.value}"
        raise InvalidRequest("open.draft_sample_method", pair)
    _check_ids("open.tokens", command.tokens, limits)
    command.sampling.check(limits.vocab_size)


def check_sent(command: Sent, limits: Limits) -> None:
    if command.num_proposed > limits.max_block:
        raise InvalidRequest("sent.num_proposed", f"must be at most {limits.max_block}, got {command.num_proposed}")
    if command.tokens and len(command.tokens) != command.num_proposed:
        raise InvalidRequest("sent.tokens", f"must hold num_proposed ({command.num_proposed}) ids or none")
    _check_ids("sent.tokens", command.tokens, limits)


def check_reach(command: Sent, limits: Limits, committed: int) -> None:
    """How far a block may end past the last commit: behind all that the draft may have drafted there."""
    past, most = command.prefix_length + command.num_proposed - committed, limits.max_budget + limits.max_block
    if past > most:
        raise InvalidRequest("sent.num_proposed", f"may end {most} tokens past the last commit at most, got {past}; send the commits first")


def check_commit(command: Commit, limits: Limits) -> None:
    if not command.tokens:
        raise InvalidRequest("commit.tokens", "must hold at least one token")
    _check_ids("commit.tokens", command.tokens, limits)
    if command.num_speculative_tokens > limits.max_block:
        got = command.num_speculative_tokens
        raise InvalidRequest("commit.num_speculative_tokens", f"must be at most {limits.max_block}, got {got}")


def check_name(session_id: str) -> None:
    if not session_id or len(session_id.encode()) > MAX_ID_BYTES:
        raise InvalidRequest("session_id", f"must be 1 to {MAX_ID_BYTES} bytes")


def _check_ids(field: str, ids: Sequence[int], limits: Limits) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        raise InvalidRequest(field, f"ids must be in [0, {limits.vocab_size - 1}]")

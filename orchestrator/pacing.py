"""How many tokens next. Pure: numbers in, a number out."""

from __future__ import annotations

BREAKER_AFTER = 2  # graces that passed without a usable word from the draft


def block_length(num_speculative_tokens: int, *, decided: int, max_tokens: int, committed: int, window: int) -> int:
    """Proposals worth verifying in the next round.

    Every round decides one token more than it accepts, so the last token of the answer and the last position of the window
    are never proposed.
    """
    return max(0, min(num_speculative_tokens, max_tokens - decided - 1, window - committed - 1))


def grace_ms(max_grace_ms: float, *, silent_graces: int) -> float:
    """How long a miss may wait for the draft. A draft that let several graces pass in silence is not waited for."""
    return 0.0 if silent_graces >= BREAKER_AFTER else max_grace_ms

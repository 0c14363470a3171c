"""Which rows make the next engine step, when it is worth waiting for more, and what a step costs. Pure; time comes in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from target_service.checks import Limits
from target_service.plan import PromptScore, Row, Score
from target_service.sessions import Key, Session

PREFILL_SHARE = 8  # one part in so many of the row budget is kept for prefills while decode rows would take all of it


def choose_rows(queued: Sequence[Session], limits: Limits) -> list[tuple[Session, Row]]:
    """Rows of the next step, in order of arrival: sessions that only decode first, then pieces of prefills, within `max_step_rows`.

    A block is scored only together with the last committed token, never before the prompt is complete. A round that decides nothing feeds
    the rows of the prompt that score a token, and no other.
    """
    decodes = [s for s in queued if _todo(s) + _block(s) <= 1 + limits.max_num_speculative_tokens]
    prefills = [s for s in queued if _todo(s) + _block(s) > 1 + limits.max_num_speculative_tokens]
    chosen: list[tuple[Session, Row]] = []
    left = limits.max_step_rows
    kept_back = max(1, limits.max_step_rows // PREFILL_SHARE) if prefills else 0
    for session in decodes:
        need = _todo(session) + _block(session)
        if need <= left - kept_back or not chosen:
            chosen.append((session, _row(session, limits, _todo(session))))
            left -= need
    for session in prefills:
        todo = _todo(session)
        size = todo if todo + _block(session) <= left else min(left, todo - 1)
        if size > 0:
            row = _row(session, limits, size)
            chosen.append((session, row))
            left -= len(row.tokens)
    return chosen


def _todo(session: Session) -> int:
    """Committed tokens that have to be fed, at least 1."""
    assert session.pending is not None
    end = len(session.tokens) if session.pending.decides else session.begin.prompt_length - 1
    return end - session.kv_length


def _block(session: Session) -> int:
    assert session.pending is not None
    return len(session.pending.block)


def _row(session: Session, limits: Limits, size: int) -> Row:
    """The next `size` committed tokens; with the last of them goes the block."""
    assert session.pending is not None and session.resident is not None
    start = session.kv_length
    tokens = tuple(session.tokens[start : start + size])
    prompt = _prompt(session, start + size) if session.unscored else None
    if start + size < len(session.tokens):
        return Row(session.resident, start, tokens, prompt=prompt)
    pending = session.pending
    room = limits.window - len(session.tokens)
    score = Score(session.begin, session.tokens, pending.block, pending.distributions, room, session.constraint)
    return Row(session.resident, start, tokens + pending.block, score, prompt)


def _prompt(session: Session, end: int) -> PromptScore | None:
    """What a row up to `end` says of the prompt that is not known yet; nothing when it only brings back what was parked."""
    count = session.begin.sampling.prompt_logprobs
    first, last = len(session.prompt_logprobs), min(end, session.begin.prompt_length - 1)
    return None if count is None or first >= last else PromptScore(first, tuple(session.tokens[first + 1 : last + 1]), count)


class Wave:
    """After a step the first to return must not start a batch of its own: the others are a moment behind it, and sessions that once run in
    turns would do so for ever. So whoever is back waits for the rest, at most a fraction of a step; and only as long as most sessions do
    return within that time: where the wire is slower than that, waiting is lost and turns hide the wire behind the other's step.

    A session that is alone is never delayed: nobody is missing when it is back.
    """

    WEIGHT = 0.1

    def __init__(self) -> None:
        self._missing: set[Key] = set()
        self._until_ms = 0.0
        self.prompt_share = 1.0  # running share of the sessions that were back in time

    def begin(self, answered: Iterable[Key], until_ms: float) -> None:
        """A step ended; these sessions are expected back."""
        for _ in self._missing:
            self._learn(False)
        self._missing, self._until_ms = set(answered), until_ms

    def returned(self, key: Key, now_ms: float) -> None:
        if key in self._missing:
            self._missing.remove(key)
            self._learn(now_ms <= self._until_ms)

    def gone(self, key: Key) -> None:
        """It will not come."""
        self._missing.discard(key)

    def hold_ms(self, queued: int, now_ms: float) -> float:
        """How much longer to wait before a step with the `queued` sessions."""
        if not self._missing or not queued or self.prompt_share < 0.5:
            return 0.0
        return max(0.0, self._until_ms - now_ms)

    def _learn(self, prompt: bool) -> None:
        self.prompt_share += self.WEIGHT * (float(prompt) - self.prompt_share)


class StepCost:
    """Time of an engine step by its rows: a running mean per power of two, neighbours scaled where nothing was seen."""

    FIRST_GUESS_MS = 50.0
    WEIGHT = 0.2

    def __init__(self) -> None:
        self._mean_ms: dict[int, float] = {}

    def seen(self, rows: int, took_ms: float) -> None:
        bucket = rows.bit_length()
        mean = self._mean_ms.get(bucket, took_ms)
        self._mean_ms[bucket] = mean + self.WEIGHT * (took_ms - mean)

    def predicted_ms(self, rows: int) -> float:
        if not self._mean_ms:
            return self.FIRST_GUESS_MS
        bucket = rows.bit_length()
        nearest = min(self._mean_ms, key=lambda b: abs(b - bucket))
        return self._mean_ms[nearest]

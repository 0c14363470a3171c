"""Which rows make the next engine step, when it is worth waiting for more, and what a step costs. Pure; time comes in."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence

from target_service.checks import Limits
from target_service.plan import PromptScore, Row, Score
from target_service.sessions import Key, Session
from target_service.turns import in_turns

PREFILL_SHARE = 8  # one part in so many of the row budget is kept for prefills while decode rows would take all of it
STRETCH = 2.0  # prefills may make a step that others wait for so many times longer
LEAST_ROWS = 8  # and so many rows of them go with it in any case
RETURN_STEPS = 10  # who does not come back within the time of so many full steps is not waited for


def choose_rows(queued: Sequence[Session], limits: Limits, cost: StepCost, away: int = 0) -> list[tuple[Session, Row]]:
    """Rows of the next step: sessions that only decode first, then pieces of prefills, within `max_step_rows`; `queued` by rank, and
    orchestrators in turns. While sessions decode, those that are `away` between two rounds among them, pieces are no longer than STRETCH
    allows.

    A block is scored only together with the last committed token, never before the prompt is complete. A round that decides nothing feeds
    the rows of the prompt that score a token, and no other.
    """
    decodes = [s for s in queued if _todo(s) + _block(s) <= 1 + limits.max_num_speculative_tokens]
    prefills = [s for s in queued if _todo(s) + _block(s) > 1 + limits.max_num_speculative_tokens]
    chosen: list[tuple[Session, Row]] = []
    left = limits.max_step_rows
    kept_back = max(1, limits.max_step_rows // PREFILL_SHARE) if prefills else 0
    for session in in_turns(decodes, lambda s: _todo(s) + _block(s)):
        need = _todo(session) + _block(session)
        if need <= left - kept_back or not chosen:
            chosen.append((session, _row(session, limits, _todo(session))))
            left -= need
    if prefills and (decodes or away):
        rows = limits.max_step_rows - left
        left = min(left, max(min(kept_back, LEAST_ROWS), cost.rows_within(STRETCH * cost.at(rows + away), limits.max_step_rows) - rows))
    return chosen + [(session, _row(session, limits, size)) for session, size in _pieces(prefills, left)]


def waiting_rows(waiting: Iterable[Session]) -> int:
    """Rows that the Steps of these sessions still want, prompts included."""
    return sum(max(1, _todo(session)) + _block(session) for session in waiting)


def returning(sessions: Iterable[Session], now_ms: float, within_ms: float) -> int:
    """How many decode and are not queued: between a result and their next Step."""
    return sum(s.awaited and s.resident is not None and s.round > 0 and now_ms - s.asked_ms <= within_ms for s in sessions)


def _pieces(prefills: Sequence[Session], rows: int) -> list[tuple[Session, int]]:
    """How many committed tokens of each are fed: the first in order gets half of the rows, the others by how little they lack and
    orchestrators in turns, what is left the first again. So a short prompt passes a long one, and the long one gets on."""
    if not prefills:
        return []
    first = prefills[0]
    sizes = {first.key: (size := _piece(first, -(-rows // 2)))}
    rows -= size + _scored(first, size)
    by_size = sorted(prefills, key=lambda s: (s.begin.priority, _todo(s) - sizes.get(s.key, 0)))
    for session in in_turns(by_size, lambda s: _todo(s) + _block(s)):
        had = sizes.get(session.key, 0)
        spent = had + _scored(session, had)
        size = _piece(session, rows + spent)
        sizes[session.key], rows = size, rows + spent - size - _scored(session, size)
    return [(session, sizes[session.key]) for session in prefills if sizes[session.key] > 0]


def _piece(session: Session, rows: int) -> int:
    todo = _todo(session)
    return todo if todo + _block(session) <= rows else max(0, min(rows, todo - 1))


def _scored(session: Session, size: int) -> int:
    """Rows that come with a piece of this size."""
    return _block(session) if size == _todo(session) else 0


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
    """Whom the next step waits for. After a step the first to return must not start a batch of its own: the others are a moment behind it,
    and sessions that once run in turns would do so for ever.

    Theory. Sessions that go out with their results come back after a while, each in its usual time; others go on by themselves. Whoever is
    not waited for takes part in every second step. So with j of m waited for, the slowest of them back after w ms, a step of `own` + j +
    (m - j) / 2 sessions takes w and its own time; of all j, quickest first, that with the most sessions per ms is taken. What its rows
    cost is in proportion to its sessions, so it decides nothing: together they share w and what a step costs once, whatever its rows.
    That is nearly all of a step of a GPU, where a long wire is worth waiting for, and little of one of a CPU, where two waves in turn hide
    the wire of one behind the step of the other.

    A session that is alone is never delayed: nobody is missing when it is back.
    """

    WEIGHT = 0.1  # of the newest return
    SPREADS = 2.0  # how far from its usual time a session is waited for
    MOST_STEPS = 4.0  # a return that took longer counts as this

    def __init__(self) -> None:
        self._left: dict[Key, float] = {}  # sessions that are away, and since when
        self._usual: dict[Key, tuple[float, float]] = {}  # ms of a session's returns: mean, and mean distance from it; while it is here
        self._waited: set[Key] = set()
        self._until_ms = self._most_ms = 0.0

    def begin(self, away: Iterable[Key], back: Iterable[Key], own: int, step_ms: float, once_ms: float, now_ms: float) -> None:
        """A step ended that took `step_ms`, `once_ms` of it whatever its rows. `away` went out with its results, `back` wait with a Step,
        `own` go on by themselves."""
        self._most_ms = self.MOST_STEPS * step_ms
        for key in away:
            self._left[key] = now_ms
        late = {key for key, left_ms in self._left.items() if now_ms >= left_ms + self._due_ms(key, once_ms)}
        due = sorted((self._due_ms(key, once_ms), key) for key in {*self._left, *back} - late)
        best, waited = 0.0, 0
        for j in range(len(due) + 1):
            sessions = own + j + (len(due) - j) / 2
            shared_ms = max(1e-6, (due[j - 1][0] if j else 0.0) + once_ms)
            if sessions > best * shared_ms:
                best, waited = sessions / shared_ms, j
        chosen = [(due_ms, key) for due_ms, key in due[:waited] if key in self._left]
        self._waited = {key for _, key in chosen}
        self._until_ms = max((self._left[key] + due_ms for due_ms, key in chosen), default=0.0)

    def returned(self, key: Key, now_ms: float) -> None:
        left_ms = self._left.pop(key, None)
        if left_ms is None:
            return
        self._waited.discard(key)
        took_ms = min(now_ms - left_ms, self._most_ms)
        mean, spread = self._usual.get(key, (took_ms, 0.0))
        apart = abs(took_ms - mean)
        self._usual[key] = mean + self.WEIGHT * (took_ms - mean), spread + self.WEIGHT * (apart - spread)

    def gone(self, key: Key) -> None:
        """It will not come."""
        self._left.pop(key, None)
        self._usual.pop(key, None)
        self._waited.discard(key)

    def hold_ms(self, queued: int, now_ms: float) -> float:
        """How much longer to wait before a step with the `queued` sessions."""
        return max(0.0, self._until_ms - now_ms) if queued and self._waited else 0.0

    def _due_ms(self, key: Key, once_ms: float) -> float:
        """When a session is back for certain, ms after it left. One that never did gets half of what waiting may be worth."""
        mean, spread = self._usual.get(key, (0.0, once_ms / 2 / self.SPREADS))
        return mean + self.SPREADS * spread


class StepCost:
    """Time of an engine step by its rows: running means of both per power of two, and lines between them."""

    FIRST_GUESS_MS = 50.0
    WEIGHT = 0.2
    LEAST = 0.25  # share of the smallest step seen that a smaller one costs in any case
    MOST = 4.0  # means that a step counts at most: a process that was stopped for a second is no slow one for minutes

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # power of two → rows, ms

    def seen(self, rows: int, took_ms: float) -> None:
        mean_rows, mean_ms = self._means.get(rows.bit_length(), (float(rows), took_ms))
        took_ms = min(took_ms, self.MOST * mean_ms or took_ms)
        self._means[rows.bit_length()] = mean_rows + self.WEIGHT * (rows - mean_rows), mean_ms + self.WEIGHT * (took_ms - mean_ms)

    def predicted_ms(self, rows: int) -> float:
        """The mean of the steps nearest in size."""
        if not self._means:
            return self.FIRST_GUESS_MS
        bucket = rows.bit_length()
        return self._means[min(self._means, key=lambda b: abs(b - bucket))][1]

    def at(self, rows: int) -> float:
        """ms, never less for more rows. Outside of what was seen the nearest line goes on: to the right it rises at least half as steeply
        as one through the origin, to the left it ends at LEAST."""
        means = [self._means[bucket] for bucket in sorted(self._means)]
        if not means:
            return self.FIRST_GUESS_MS
        first_rows, first_ms = means[0]
        if len(means) == 1:
            return first_ms * max(rows / first_rows, self.LEAST)
        rising = itertools.accumulate((ms for _, ms in means), max)
        for (low, low_ms), (high, high_ms) in itertools.pairwise(zip((seen for seen, _ in means), rising, strict=True)):
            slope = (high_ms - low_ms) / (high - low)
            if rows <= high:
                return max(min(low_ms + slope * (rows - low), high_ms), first_ms * self.LEAST)  # rounding may lead past the end of the line
        return high_ms + max(slope, high_ms / high / 2) * (rows - high)

    def once_ms(self, rows: int) -> float | None:
        """The part of a step of so many rows that two steps of half of them would take twice. None while steps of one size were seen."""
        return max(0.0, 2 * self.at(max(1, rows // 2)) - self.at(rows)) if len(self._means) > 1 else None

    def rows_within(self, ms: float, most: int) -> int:
        """How many rows, at most `most`, a step may have that is expected to take no longer."""
        return bisect.bisect_right(range(1, most + 1), ms, key=self.at)

"""What was said before: repetition, frequency and presence penalties on the ids they touch. Knows no session; counts nothing twice.

A row is penalised by the tokens before that very row, so the counts move from output to output: forward with a block, back to what was
committed, at the cost of the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specdec.ranking import Floats
from specdec.terms import SamplingParams


def penalized(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


def _repeated(scores: Floats, penalty: float) -> Floats:
    """A tiny penalty lifts positive scores to the end of the format's range, and not beyond."""
    limits = np.finfo(scores.dtype)
    penalty = max(penalty, float(limits.tiny))
    with np.errstate(over="ignore"):
        return np.minimum(np.where(scores > 0, scores / penalty, scores * penalty), limits.max)


class Penalties:
    """Of one generation. `column_of`: where a head has an id; None = nowhere. `prompt`: what else the repetition penalty touches."""

    def __init__(self, column_of: Callable[[int], int | None], prompt: Sequence[int]) -> None:
        self._column_of = column_of
        self._tokens: list[int] = []  # the output that is counted
        # Touched columns and how often the output holds each: the prompt's first, then the others in the order in which the output
        # brought them. An output that is cut back loses its newest columns, so the rest stays where it is.
        self._columns, self._times, self._slots = np.zeros(0, dtype=np.int64), np.zeros(0), dict[int, int]()
        for column in sorted({c for token in set(prompt) if (c := column_of(token)) is not None}):
            self._append(column)
        self._of_prompt = len(self._slots)

    def apply(self, row: Floats, output: Sequence[int], params: SamplingParams) -> None:
        """Penalises a private row [width] for the prompt and for `output`, in place."""
        self._move_to(output)
        columns, times = self._columns[: len(self._slots)], self._times[: len(self._slots)]
        scores = row[columns]
        if params.repetition_penalty != 1.0:
            scores = _repeated(scores, params.repetition_penalty)
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            less = times.astype(row.dtype) * params.frequency_penalty + params.presence_penalty
            less[times == 0.0] = 0.0
            scores -= less
        row[columns] = scores

    def _move_to(self, output: Sequence[int]) -> None:
        known, wanted = self._tokens, list(output)
        shared = min(len(known), len(wanted))
        if known[:shared] != wanted[:shared]:
            shared = next(i for i in range(shared) if known[i] != wanted[i])
        for token in reversed(known[shared:]):
            self._count(token, -1.0)
        for token in wanted[shared:]:
            self._count(token, 1.0)
        self._tokens = wanted

    def _count(self, token: int, change: float) -> None:
        column = self._column_of(token)
        if column is None:
            return
        slot = self._slots.get(column)
        if slot is None:
            slot = self._append(column)
        self._times[slot] += change
        if self._times[slot] == 0.0 and slot >= self._of_prompt:
            del self._slots[column]

    def _append(self, column: int) -> int:
        slot = len(self._slots)
        if slot == len(self._columns):
            self._columns, self._times = np.resize(self._columns, 2 * slot + 16), np.resize(self._times, 2 * slot + 16)
        self._columns[slot], self._times[slot], self._slots[column] = column, 0.0, slot
        return slot

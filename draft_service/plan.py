"""What the decider asks of the engine's side, and what comes back. Frozen; no behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draft_service.chain import Draft


class Chooser(Protocol):
    """Draws a session's next token from one row of logits. Pure: the same arguments give the same token."""

    def __call__(self, logits: Any, position: int, output: Sequence[int]) -> Draft | None:
        """`logits` [head rows], `position` = index of the token to be drafted, `output` = the tokens between prompt and position.

        None when nothing can be proposed: the row is not finite, or no id of the head is allowed.
        """


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One session's share of a plan: keep `start` tokens of K/V, feed `tokens`, then draw `draws` tokens, feeding each but the last.

    `draws` = 0: a piece of a long prompt. `output` = the tokens between prompt and first draw. Nothing is drawn after one of `ends` at
    index `ends_from` or later.
    """

    handle: int
    start: int
    tokens: tuple[int, ...]
    draws: int
    choose: Chooser
    output: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()
    ends_from: int = 0


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """At most `steps` forward passes over `rows`; `release` = handles whose K/V go first."""

    rows: tuple[DraftRow, ...]
    steps: int
    release: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """`drafts` may be fewer than asked for. `broken`: the last row of logits gave no token; its K/V must not be used."""

    drafts: tuple[Draft, ...] = ()
    broken: bool = False


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """`rows` as in the plan, or empty with `fault` set: the pass failed and the engine's K/V of these rows are gone."""

    rows: tuple[RowOutcome, ...]
    steps: int = 0
    fault: str = ""

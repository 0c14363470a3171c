"""What the decider asks of the engine's side, and what comes back. Frozen; no behaviour."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draft_service.chain import Draft


class Silence(enum.Enum):
    """Why a row gave no token. BROKEN: its logits are not finite, or no id of the head is allowed; its K/V must not be used. OVER: by the
    session's grammar nothing may follow these tokens, or nothing that is known here."""

    BROKEN = enum.auto()
    OVER = enum.auto()


class Chooser(Protocol):
    """Draws a session's next token from one row of logits. The same arguments give the same token, once they give one."""

    def __call__(self, logits: Any, position: int, output: Sequence[int]) -> Draft | Silence:
        """`logits` [head rows], `position` = index of the token to be drafted, `output` = the tokens between prompt and position."""


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A chain's or branch's share of a plan: keep `start` tokens of K/V, feed `tokens`, then draw `draws`, feeding each but the last.

    `draws` = 0: a piece of a long prompt. `output` = the tokens between prompt and first draw. Nothing is drawn after one of `ends` at
    index `ends_from` or later. `branch` = its handle, which reads the first `base` tokens where `handle` has them; 0 = the chain's own row.
    """

    handle: int
    start: int
    tokens: tuple[int, ...]
    draws: int
    choose: Chooser
    output: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()
    ends_from: int = 0
    branch: int = 0
    base: int = 0

    @property
    def name(self) -> int:
        """Whose K/V it writes."""
        return self.branch or self.handle


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """At most `steps` forward passes over `rows`; `release` = handles whose K/V go first; `grafts` = (handle, branch): then the branch's
    K/V become those of the handle. `needed` = the first passes, without which some session has no usable proposal."""

    rows: tuple[DraftRow, ...]
    steps: int
    release: tuple[int, ...] = ()
    grafts: tuple[tuple[int, int], ...] = ()
    needed: int = 0


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """`drafts` may be fewer than asked for; `silence`: why the row after them gave none, if it was asked."""

    drafts: tuple[Draft, ...] = ()
    silence: Silence | None = None


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """`rows` as in the plan, or empty with `fault` set: the pass failed and the engine's K/V of these rows are gone."""

    rows: tuple[RowOutcome, ...]
    steps: int = 0
    fault: str = ""

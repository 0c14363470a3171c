"""Runs plans on the engine. Lives on the engine's thread; owns the map from handles, of chains and of branches, to K/V slots and decides
nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable

from draft_service.chain import Draft
from draft_service.plan import DraftPlan, DraftRow, PlanOutcome, RowOutcome, Silence
from specdec.engine import Engine, Segment

log = logging.getLogger("draft")


class Stepper:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._slots: dict[int, int] = {}
        self._parents: dict[int, int] = {}  # of a branch: the chain that it reads

    def run(self, plan: DraftPlan, interrupted: Callable[[], bool]) -> PlanOutcome:
        """Up to `plan.steps` forward passes, fewer when `interrupted()` says that a command arrived or a row has nothing more to give.

        Never raises: a failing pass costs the sessions in it.
        """
        try:
            for handle in plan.release:
                self._close(handle)
            for handle, branch in plan.grafts:
                self._graft(handle, branch)
            return self._steps(plan, interrupted) if plan.rows else PlanOutcome(())
        except Exception as error:
            log.exception("a draft step failed")
            for row in plan.rows:
                self._close(row.handle)
            return PlanOutcome((), fault=type(error).__name__)

    def _steps(self, plan: DraftPlan, interrupted: Callable[[], bool]) -> PlanOutcome:
        rows = plan.rows
        slots = [self._slot(row) for row in rows]
        drafts: list[list[Draft]] = [[] for _ in rows]
        outputs = [list(row.output) for row in rows]
        segments = [
            Segment(slot, row.start, row.tokens, len(row.tokens) - (1 if row.draws else 0)) for slot, row in zip(slots, rows, strict=True)
        ]
        silences: dict[int, Silence] = {}
        steps, last = 0, False
        while not last:
            logits = self._engine.forward(segments)
            steps += 1
            last = steps == plan.steps
            for i, row in enumerate(rows):
                if not row.draws:
                    continue
                position = row.start + len(row.tokens) + len(drafts[i])
                draft = row.choose(logits[i][-1], position, outputs[i])
                if isinstance(draft, Silence):
                    silences[i] = draft
                    last = True
                    continue
                drafts[i].append(draft)
                outputs[i].append(draft.token)
                last = last or (draft.token in row.ends and position >= row.ends_from)
                segments[i] = Segment(slots[i], position, (draft.token,), 0)
            last = last or interrupted()
        return PlanOutcome(tuple(RowOutcome(tuple(d), silences.get(i)) for i, d in enumerate(drafts)), steps)

    def _slot(self, row: DraftRow) -> int:
        kv = self._engine.kv
        slot = self._slots.get(row.name)
        if slot is None and row.branch:
            slot = self._slots[row.branch] = kv.branch(self._slots[row.handle], row.base)
            self._parents[row.branch] = row.handle
        elif slot is None:
            slot = self._slots[row.handle] = kv.open()
        kv.truncate(slot, row.start)
        return slot

    def _graft(self, handle: int, branch: int) -> None:
        slot = self._slots.pop(branch, None)
        if slot is not None:
            del self._parents[branch]
            self._engine.kv.graft(self._slots[handle], slot)

    def _close(self, handle: int) -> None:
        slot = self._slots.pop(handle, None)
        if slot is None:
            return
        self._engine.kv.close(slot)
        if self._parents.pop(handle, None) is None:
            for branch in [b for b, parent in self._parents.items() if parent == handle]:  # they went with it
                del self._parents[branch], self._slots[branch]

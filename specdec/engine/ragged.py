"""The engine proper: checks a batch, books its K/V, has a model compute it, moves the slots on. Used by one thread only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.engine.api import EngineInfo
from specdec.engine.attention import Attention, Plan
from specdec.engine.batch import Layout, Segment, check, lay_out
from specdec.engine.kv import KvStore


class Model(Protocol):
    """What computes: lean.LeanModel or generic.GenericModel."""

    def run(self, layout: Layout, plan: Plan) -> Tensor:
        """Logits of the scored rows [scored, columns], after writing keys and values of all rows, finite ones, into the slots.

        A row in which something was not finite answers NaN, and no other row notices.
        """


class RaggedEngine:
    """Implements api.Engine."""

    def __init__(self, info: EngineInfo, kv: KvStore, attention: Attention, model: Model) -> None:
        self.info, self.kv, self._attention, self._model = info, kv, attention, model

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        if not segments:
            return []
        info = self.info
        check(segments, self.kv, vocab_size=info.vocab_size, window=info.window, max_rows=info.max_rows)
        ends = {s.slot: s.start + len(s.tokens) for s in segments}
        self.kv.reserve(ends)
        layout = lay_out(segments)
        logits = self._model.run(layout, self._attention.plan(layout, self.kv))
        for slot, end in ends.items():
            self.kv.slot(slot).length = end
        return list(torch.split(logits, layout.scored_counts))

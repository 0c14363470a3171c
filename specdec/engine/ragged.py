"""The engine proper: checks a batch, books its K/V, has a model compute it, moves the slots on. Used by one thread only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.engine.api import EngineInfo, KvSlots
from specdec.engine.batch import Layout, Segment, check, lay_out


class Model(Protocol):
    """What computes: native.NativeModel, lean.LeanModel or generic.GenericModel. `weight_bytes`: see api.Engine.memory."""

    weight_bytes: int

    def run(self, layout: Layout, plan: Any) -> Tensor:
        """Logits of the scored rows [scored, columns] on the host, after writing keys and values of all rows, finite ones, into the slots.

        A row in which something was not finite answers NaN, and no other row notices.
        """


class Store(KvSlots, Protocol):
    """Where keys and values are: kv.KvStore or paged.PagedStore. `room_bytes`: what they take at their bound; `token_bytes`: one token of
    all layers; `device`: None = this machine's memory."""

    room_bytes: int
    token_bytes: int
    device: torch.device | None

    @property
    def total_tokens(self) -> int: ...
    def reserve(self, ends: Mapping[int, int]) -> None: ...
    def slot(self, slot: int) -> Any: ...


class Planner(Protocol):
    """Says where a batch's keys and values are, in the way that the model's attention reads them."""

    def plan(self, layout: Layout, store: Any) -> Any: ...


class RaggedEngine:
    """Implements api.Engine."""

    def __init__(self, info: EngineInfo, kv: Store, attention: Planner, model: Model) -> None:
        self.info, self.kv, self._attention, self._model = info, kv, attention, model

    @property
    def memory(self) -> Mapping[str, int]:
        kv = self.kv
        here = {"weights": self._model.weight_bytes, "kv": kv.room_bytes, "kv_used": kv.used_tokens * kv.token_bytes}
        if kv.device is None or kv.device.type != "cuda":
            return here
        return {
            **here, "device": torch.cuda.memory_allocated(kv.device), "device_peak": torch.cuda.max_memory_allocated(kv.device)
        }  # fmt: skip

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

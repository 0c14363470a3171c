"""Steps of a recurring shape, recorded once and replayed: a GPU step is hundreds of small kernels, and launching each from Python takes
longer than most of them run. A recorded step reads its numbers from one buffer and writes its answers into others, always the same.

A shape is recorded when it comes back for the third time, the least recently used is forgotten; all recordings share one pool of memory,
so an answer is good until the next step.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

RECORD_AT = 3
MOST = 64
log = logging.getLogger(__name__)

Compute = Callable[[Any, Tensor], tuple[Tensor, ...]]
"""(shape, numbers on the device) → answers; the same kernels for the same shape, and no wait among them."""


class Recording(NamedTuple):
    numbers: Tensor
    answers: tuple[Tensor, ...]
    replay: Callable[[], None]


class Replayer:
    def __init__(self, compute: Compute, device: torch.device) -> None:
        self._compute, self._device = compute, device
        self._record = Graphs().record
        self._seen: Counter[Hashable] = Counter()
        self._recorded: OrderedDict[Hashable, Recording] = OrderedDict()
        self.replays = 0

    def __call__(self, shape: Hashable, numbers: Tensor) -> tuple[Tensor, ...]:
        """`numbers`: on the host. Answers on the device, good until the next call."""
        recording = self._recorded.get(shape) or self._recorded_at_last(shape, numbers)
        if recording is None:
            return self._compute(shape, numbers.to(self._device, non_blocking=True))
        self._recorded.move_to_end(shape)
        recording.numbers.copy_(numbers, non_blocking=True)
        recording.replay()
        self.replays += 1
        return recording.answers

    def _recorded_at_last(self, shape: Hashable, numbers: Tensor) -> Recording | None:
        self._seen[shape] += 1
        if self._seen[shape] < RECORD_AT:
            return None
        del self._seen[shape]
        if len(self._seen) > 64 * MOST:
            self._seen.clear()
        if len(self._recorded) >= MOST:
            self._recorded.popitem(last=False)
        recording = self._recorded[shape] = self._record(self._compute, shape, numbers.to(self._device))
        return recording


class Graphs:
    """CUDA graphs, all in one memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, compute: Compute, shape: Any, numbers: Tensor) -> Recording:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            answers = compute(shape, numbers)
        self._pool = self._pool or graph.pool()
        return Recording(numbers, answers, graph.replay)

"""F108: what is measured of a round costs no look at a tensor. Each `.item()`, `.tolist()`, `.cpu()` waits for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from specdec.engine.cache import KvBudget
from specdec.runtime.session_spans import SessionSpans
from specdec.runtime.telemetry import Telemetry
from specdec.terms import Answer, Result
from target_service.observer import StepObserver
from target_service.tracing import Tracing
from target_service.verifier import Verifier
from tests.collector import collector
from tests.tiny import tiny_engine
from tests.unit.target.harness import SAMPLED, Bench, Caller, run_all

WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}
HEADER = "00-{0:032x}-{0:016x}-01"


class Waits(TorchFunctionMode):
    """Counts, by name, whatever needs a tensor's values on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in WAITS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


class Observed(Bench):
    """A target on an engine with weights; every step is told to `observer`."""

    def __init__(self, telemetry: Telemetry | None) -> None:
        super().__init__(vocab=64, window=256, prefix_block_tokens=0)
        self.engine = self.executor._engine = tiny_engine(vocab=64, window=256)  # type: ignore[assignment]
        self.verifier = Verifier(self.limits, KvBudget(4096))
        self.tracing = None if telemetry is None else Tracing(SessionSpans(telemetry, "verify"))
        self.observer = None if telemetry is None else StepObserver(telemetry, self.verifier, self.tracing)

    def turn(self) -> list[tuple[int, Answer]]:
        heard = super().turn()
        if self.observer is not None:
            self.observer.stepped(len(heard), 1000, 100, [answer for _, answer in heard if isinstance(answer.outcome, Result)])
        return heard


def waits(telemetry: Telemetry | None, sessions: int, texts: Sequence[Sequence[int]] = ()) -> tuple[Counter[str], list[list[int]], int]:
    """Of so many sessions to their ends, whose blocks are taken from `texts`, every third token wrong: looks at tensors, outputs, accepted
    tokens."""
    bench = Observed(telemetry)
    stream = bench.hello()

    def guessing(which: int) -> Any:
        def draft(committed: Sequence[int]) -> list[int]:
            text = texts[which] if texts else ()
            return [(token + (place % 3 == 2)) % 64 for place, token in enumerate(text[len(committed) :][:3], start=len(committed))]

        return draft

    callers = [Caller(bench, stream, [5 + i, 6, 7], f"s{i}", SAMPLED, draft=guessing(i), want=24) for i in range(sessions)]
    if bench.tracing is not None:
        bench.tracing.asked(stream, [_traced(caller, i) for i, caller in enumerate(callers)])
    with Waits() as seen:
        run_all(bench, callers)
        bench.settle()
    if bench.tracing is not None:
        bench.tracing.end()
    return seen.seen, [caller.committed for caller in callers], sum(result.num_accepted for c in callers for result in c.results)


def _traced(caller: Caller, number: int) -> Any:
    step = caller.build(())
    assert step.begin is not None
    return replace(step, begin=replace(step.begin, traceparent=HEADER.format(number + 1)))


def test_f108_metrics_and_spans_of_a_round_look_at_no_tensor() -> None:
    _, texts, _ = waits(None, 3)
    without = waits(None, 3, texts)
    with collector() as kept:
        telemetry = Telemetry("target", metrics_port=0, otlp_endpoint=kept.url)
        measured = waits(telemetry, 3, texts)
        telemetry.close()
        assert len(kept.named("verify")) == 3 and kept.named("engine step")
    assert measured == without
    looked, told, accepted = measured
    assert told == texts and accepted > 20 and sum(looked.values()) > 20, "there was something to count"


def test_the_count_sees_a_look() -> None:
    with Waits() as seen:
        bool(torch.ones(1)), float(torch.ones(1)), torch.ones(2).tolist(), torch.ones(1).item(), torch.ones(1).cpu().numpy()
    assert set(seen.seen) >= {"item", "tolist", "cpu", "numpy"} and sum(seen.seen.values()) >= 6

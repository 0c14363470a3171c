"""A client without a service: answers from a function of the question, and remembers what was asked in which order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

from specdec.client import Delta, EffectiveSettings, Event, Finished, SpeculativeStats, Started, Usage
from specdec.errors import Unsupported
from specdec.terms import DraftMethod, FinishReason, Origin, RejectionMethod, SamplingParams

Says = Callable[[str, int], list[int]]


def way_of(options: dict[str, Any]) -> str:
    return "none" if options.get("disable_spec_decode") else "auto" if options.get("enable_adaptive_verification") else "fixed"


class FakeClient:
    """`says(way, seed)` = token ids of the answer; one round decides two of them where there is speculation."""

    def __init__(
        self,
        says: Says = lambda way, seed: [seed, 1, 2, 3],
        refused: tuple[str, ...] = (),
        method: RejectionMethod = RejectionMethod.COUPLED,
        pause_s: float = 0.0,
    ) -> None:
        self.says, self.refused, self.method, self.pause_s = says, refused, method, pause_s
        self.asked: list[tuple[str, int, float]] = []
        self.open = self.most_open = 0
        self.draft_available = True

    async def get_model_info(self) -> Any:
        return SimpleNamespace(draft_available=self.draft_available)

    async def generate(self, prompt: Any, sampling: SamplingParams, **options: Any) -> AsyncGenerator[Event]:
        way = way_of(options)
        if way in self.refused:
            raise Unsupported("enable_adaptive_verification", "not here")
        self.asked.append((way, options["seed"], sampling.temperature))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            yield Started("r", options["seed"], 3, "fake")
            tokens = self.says(way, options["seed"])[: sampling.max_tokens]
            step = 1 if way == "none" else 2
            for at in range(0, len(tokens), step):
                await asyncio.sleep(self.pause_s)
                piece = tuple(tokens[at : at + step])
                origins = (Origin.PLAIN,) if way == "none" else (Origin.ACCEPTED, Origin.BONUS)[: len(piece)]
                yield Delta(piece, "".join(f"<{token}>" for token in piece), origins=origins)
            yield self._end(way, len(tokens), sampling)
        finally:
            self.open -= 1

    def _end(self, way: str, tokens: int, sampling: SamplingParams) -> Finished:
        rounds = tokens if way == "none" else (tokens + 1) // 2
        spec = 0 if way == "none" else rounds
        stats = SpeculativeStats(
            num_rounds=rounds, num_spec_steps=spec, num_draft_tokens=2 * spec, num_accepted_draft_tokens=spec, hit_rate=1.0
        )
        settings = EffectiveSettings(sampling, self.method, DraftMethod.GUMBEL, 2, way == "auto", True, "f")
        return Finished(FinishReason.LENGTH, "", Usage(3, tokens), stats, settings)

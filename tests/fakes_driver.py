"""The core of the orchestrator as a script: what a front sees of it, without targets, drafts or a network.

`ScriptedBackend` answers every request with the same steps: events to hand on, seconds to wait, an error to raise, or WAIT_FOR_EVER.
It keeps what it was asked and what became of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from orchestrator.events import Admitted
from orchestrator.output import Ended, GenerationEvent, GenerationStats, TokensDecided
from specdec.errors import AlreadyExists, SpecdecError, Unavailable
from specdec.terms import FinishReason, ModelInfo, Origin, TokenLogprobs

WAIT_FOR_EVER = 1e9
Step = GenerationEvent | SpecdecError | float


def decided(*tokens: int, origin: Origin = Origin.PLAIN, logprobs: bool = False) -> TokensDecided:
    entries = tuple(TokenLogprobs(-0.5 - token / 1000, (token,), (-0.5,)) for token in tokens) if logprobs else ()
    return TokensDecided(tokens, entries, (origin,) * len(tokens))


def ended(finish: FinishReason = FinishReason.LENGTH, stop_token_id: int | None = None, **counts: int) -> Ended:
    return Ended(finish, stop_token_id, GenerationStats(**counts))  # type: ignore[arg-type]


def model_info(vocab_size: int = 1000, window: int = 64, **other: object) -> ModelInfo:
    values: dict[str, object] = {
        "model": "scripted",
        "vocab_size": vocab_size,
        "vocabulary_fingerprint": b"scripted",
        "eos_token_ids": (2,),
        "max_model_len": window,
        "boot_id": "boot",
        "numerics_fingerprint": "numerics",
        "batch_invariant": True,
        "dtype": "float64",
        "kv_total_tokens": 4096,
        "max_num_speculative_tokens": 8,
        "max_sessions": 16,
    }
    return ModelInfo(**{**values, **other})  # type: ignore[arg-type]


@dataclass
class ScriptedRunning:
    admitted: Admitted
    request_id: str
    steps: Sequence[Step]
    backend: ScriptedBackend
    cancelled: int = 0
    stopped_here: int = 0
    given: int = 0  # tokens handed to the front
    decided: int = 0

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        for step in self.steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, SpecdecError):
                raise step
            else:
                if isinstance(step, TokensDecided):
                    self.given += len(step.tokens)
                yield step

    def cancel(self) -> None:
        self.cancelled += 1
        self.backend.live.pop(self.request_id, None)

    def stop_here(self) -> GenerationStats:
        self.stopped_here += 1
        self.cancel()
        return GenerationStats(decided=sum(len(step.tokens) for step in self.steps if isinstance(step, TokensDecided)))


@dataclass
class ScriptedBackend:
    steps: Sequence[Step] = ()
    info: ModelInfo | None = field(default_factory=model_info)
    refuse: SpecdecError | None = None
    draft_available: bool = True
    live: dict[str, ScriptedRunning] = field(default_factory=dict)
    started: list[ScriptedRunning] = field(default_factory=list)

    async def model_info(self) -> ModelInfo:
        if self.info is None:
            raise Unavailable("no target is connected")
        return self.info

    def start(self, request: Admitted, request_id: str) -> ScriptedRunning:
        if self.refuse is not None:
            raise self.refuse
        if request_id in self.live:
            raise AlreadyExists(f"request_id: {request_id}")
        running = ScriptedRunning(request, request_id, self.steps, self)
        self.live[request_id] = running
        self.started.append(running)
        return running

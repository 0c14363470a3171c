"""The core of the orchestrator as a script: what a front sees of it, without targets, drafts or a network.

`ScriptedBackend` answers every request with the same steps: events to hand on, seconds to wait, an error to raise, or WAIT_FOR_EVER; an
answer may have `other` steps than answer 0. It keeps what it was asked and what became of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


async def _sleep(seconds: float) -> float:
    if seconds > 0:
        await asyncio.sleep(seconds)
    return max(0.0, seconds)


@dataclass
class ScriptedRunning:
    answers: tuple[Admitted, ...]
    request_id: str
    steps: tuple[Sequence[Step], ...]  # of each answer
    backend: ScriptedBackend
    cancelled: int = 0
    stopped_here: int = 0
    given: int = 0  # tokens handed to the front

    @property
    def admitted(self) -> Admitted:
        """Answer 0."""
        return self.answers[0]

    async def __aiter__(self) -> AsyncIterator[tuple[int, GenerationEvent]]:
        """One step of each answer in turn; an answer that waits lets the others go on."""
        walks = [iter(steps) for steps in self.steps]
        self._due = dict.fromkeys(range(len(self.answers)), 0.0)  # when an answer's next step is; who waited longest is first
        now = 0.0
        while self._due:
            index = min(self._due, key=lambda i: self._due[i])
            now += await _sleep(self._due.pop(index) - now)
            step = next(walks[index], None)
            if step is not None:
                self._due[index] = now + (step if isinstance(step, float) else 0.0)
            if isinstance(step, SpecdecError):
                raise step
            if isinstance(step, TokensDecided | Ended):
                if isinstance(step, TokensDecided):
                    self.given += len(step.tokens)
                yield index, step

    def cancel(self) -> None:
        self.cancelled += 1
        self.backend.live.pop(self.request_id, None)

    def stop_here(self, index: int) -> GenerationStats:
        self.stopped_here += 1
        self._due.pop(index, None)
        return GenerationStats(decided=sum(len(step.tokens) for step in self.steps[index] if isinstance(step, TokensDecided)))


@dataclass
class ScriptedBackend:
    steps: Sequence[Step] = ()
    other: Mapping[int, Sequence[Step]] = field(default_factory=dict)
    info: ModelInfo | None = field(default_factory=model_info)
    refuse: SpecdecError | None = None  # what `start` says
    full: SpecdecError | None = None  # what `arriving` says
    arrivals: list[tuple[int, int, int, float | None]] = field(default_factory=list)
    draft_available: bool = True
    live: dict[str, ScriptedRunning] = field(default_factory=dict)
    started: list[ScriptedRunning] = field(default_factory=list)

    async def model_info(self) -> ModelInfo:
        if self.info is None:
            raise Unavailable("no target is connected")
        return self.info

    @contextmanager
    def arriving(self, answers: int, size: int, priority: int, left_s: float | None) -> Iterator[float]:
        self.arrivals.append((answers, size, priority, left_s))
        if self.full is not None:
            raise self.full
        yield 0.0

    def start(self, answers: Sequence[Admitted], request_id: str, deadline_ms: float) -> ScriptedRunning:
        if self.refuse is not None:
            raise self.refuse
        if request_id in self.live:
            raise AlreadyExists(f"request_id: {request_id}")
        steps = tuple(self.other.get(index, self.steps) for index in range(len(answers)))
        running = ScriptedRunning(tuple(answers), request_id, steps, self)
        self.live[request_id] = running
        self.started.append(running)
        return running

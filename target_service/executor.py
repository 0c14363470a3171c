"""The engine thread's part of a step: forward, decide, roll back. One session's trouble stays its own; an exception of the forward
itself leaves `execute` and ends the process, since nobody knows any more what the KV holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from specdec.acceptance import verify
from specdec.engine import Segment
from specdec.errors import EngineFault, InvalidRequest, NonFinite
from specdec.logprobs import finite, token_logprobs
from specdec.sampling import Sampler
from specdec.terms import SamplingParams, TokenLogprobs
from target_service.plan import (
    Decided,
    Drop,
    Fork,
    Keep,
    Prefilled,
    PromptScore,
    Row,
    RowFault,
    RowOutcome,
    Score,
    StepOutcome,
    StepPlan,
    kv_length_after,
)

INVALID_ARGUMENT, INTERNAL = 3, 13  # gRPC status code numbers
log = logging.getLogger(__name__)


class KvStore(Protocol):
    def open(self) -> int: ...
    def fork(self, slot: int, length: int) -> int: ...
    def close(self, slot: int) -> None: ...
    def length(self, slot: int) -> int: ...
    def truncate(self, slot: int, length: int) -> None: ...


class Engine(Protocol):
    """The part of specdec.engine.Engine that is used here."""

    @property
    def kv(self) -> KvStore: ...
    def forward(self, segments: list[Segment]) -> Sequence[torch.Tensor]: ...


class Executor:
    """Owns slots and samplers of the residents. Every method runs on the engine thread."""

    def __init__(self, engine: Engine, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._engine, self._vocab_size, self._eos_ids = engine, vocab_size, tuple(eos_ids)
        self._plain = Sampler(SamplingParams(), 0, vocab_size, (), ())  # reads rows that belong to no choice
        self._slots: dict[int, int] = {}
        self._samplers: dict[int, Sampler] = {}

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Raises EngineFault when the step as a whole failed."""
        begun = time.perf_counter()
        try:
            for change in plan.changes:
                self._change(change)
            segments = [Segment(self._slot(row), row.start, row.tokens, row.logits_from) for row in plan.rows]
            logits = self._engine.forward(segments) if segments else []
            scored = time.perf_counter()
            outcomes = tuple(self._outcome(row, scores) for row, scores in zip(plan.rows, logits, strict=True))
        except Exception as error:
            raise EngineFault(f"engine step of {plan.size} rows failed: {type(error).__name__}: {error}") from error
        done = time.perf_counter()
        return StepOutcome(outcomes, int(1e6 * (done - begun)), int(1e6 * (done - scored)))

    def _change(self, change: Fork | Drop | Keep) -> None:
        """A resident that was parked before its first row has nothing to drop."""
        resident = change.resident
        if isinstance(change, Fork):
            self._slots[resident] = self._engine.kv.fork(self._slots[change.donor], change.length)
            return
        self._samplers.pop(resident, None)
        if isinstance(change, Keep):
            self._engine.kv.truncate(self._slots[resident], change.length)
            return
        slot = self._slots.pop(resident, None)
        if slot is not None:
            self._engine.kv.close(slot)

    def _slot(self, row: Row) -> int:
        """The row's slot, cut back to where the row starts."""
        if row.resident not in self._slots:
            self._slots[row.resident] = self._engine.kv.open()
        slot = self._slots[row.resident]
        if self._engine.kv.length(slot) != row.start:
            self._engine.kv.truncate(slot, row.start)
            self._samplers.pop(row.resident, None)  # the history was edited, perhaps the prompt with it
        return slot

    def _outcome(self, row: Row, logits: torch.Tensor) -> RowOutcome:
        """logits [rows scored, head rows]"""
        try:
            prompt = () if row.prompt is None else self._prompt_logprobs(row, row.prompt, logits)
            return Prefilled(prompt) if row.score is None else self._decide(row, row.score, logits[-1 - len(row.score.block) :], prompt)
        except InvalidRequest as error:
            return RowFault(INVALID_ARGUMENT, str(error))
        except NonFinite as error:
            log.error("session fails alone: %s", error, extra=_about(row))
            return RowFault(INTERNAL, str(error))
        except Exception as error:  # sampling touches this session's state only
            log.exception("session fails alone", extra=_about(row))
            return RowFault(INTERNAL, f"{type(error).__name__}: {error}")

    def _prompt_logprobs(self, row: Row, prompt: PromptScore, logits: torch.Tensor) -> tuple[TokenLogprobs, ...]:
        """logits [rows scored, head rows]. Made as those of the output are. Raises NonFinite."""
        first = prompt.first - row.start - row.logits_from
        scored = zip(logits[first : first + len(prompt.tokens)], prompt.tokens, strict=True)
        return tuple(finite(token_logprobs(self._plain.raw(line), token, prompt.count)) for line, token in scored)

    def _decide(self, row: Row, score: Score, logits: torch.Tensor, prompt_logprobs: tuple[TokenLogprobs, ...]) -> Decided:
        begin = score.begin
        sampler = self._samplers.get(row.resident)
        if sampler is None:
            prompt = score.committed[: begin.prompt_length]
            sampler = Sampler(begin.sampling, begin.seed, self._vocab_size, self._eos_ids, prompt, constraint=score.constraint)
            self._samplers[row.resident] = sampler
        verdict = verify(logits, score.block, score.distributions, sampler, score.output, begin.rejection_method, score.room)
        committed = len(score.committed)
        kv_length = kv_length_after(committed, verdict.num_accepted, len(verdict.tokens))
        self._engine.kv.truncate(self._slots[row.resident], kv_length)
        forced = _forced(sampler, [*score.output, *verdict.tokens]) if verdict.finish is None else ()
        return Decided(
            verdict.tokens,
            verdict.num_verified,
            verdict.num_accepted,
            kv_length,
            verdict.logprobs,
            verdict.finish,
            verdict.stop_token_id,
            forced,
            prompt_logprobs,
        )


def _about(row: Row) -> dict[str, Any]:
    """Whose line it is. A piece of a prefill does not know."""
    return {"resident": row.resident} | ({} if row.score is None else {"traceparent": row.score.begin.traceparent})


def _forced(sampler: Sampler, output: Sequence[int]) -> tuple[int, ...]:
    """A grammar that has nothing to say behind `output` says so to the round that asks; what was decided in front of it stands."""
    try:
        return sampler.forced(output)
    except InvalidRequest:
        return ()

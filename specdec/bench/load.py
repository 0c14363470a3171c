"""Questions to a service, and every arrival with its time: in a closed loop of streams, or when each is due."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.bench.prompts import PROMPTS, load_prompts
from specdec.client import Client, Delta, Finished, Options, Prompt, SpeculativeStats, Started
from specdec.errors import InvalidRequest, Overloaded, ProtocolFault, SpecdecError
from specdec.terms import Origin, SamplingParams

__all__ = ["PROMPTS", "Answer", "Question", "Slice", "ask", "ask_all", "load_prompts"]


OF_QUESTIONS = (InvalidRequest, Overloaded)  # say nothing of others: too long for this model, too many at once


@dataclass(frozen=True, slots=True)
class Question:
    """`kind` groups prompts in reports; `seed` makes the answer repeatable."""

    kind: str
    prompt: Prompt
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds since the question was asked, or due. `arrivals` = (seconds, tokens that came). `error` = why there is no whole answer."""

    token_ids: tuple[int, ...]
    text: str
    origins: tuple[Origin | None, ...]
    arrivals: tuple[tuple[float, int], ...]
    total_s: float
    stats: SpeculativeStats
    settings: dict[str, Any]
    prompt_tokens: int = 0
    error: str = ""

    @property
    def first_s(self) -> float:
        """Time to the first token; the whole time of an answer without one."""
        return self.arrivals[0][0] if self.arrivals else self.total_s

    @property
    def per_token_s(self) -> float | None:
        """Mean time of a token behind the first arrival; None when nothing came behind it."""
        behind = sum(count for _, count in self.arrivals[1:])
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / behind if behind else None


@dataclass(frozen=True, slots=True)
class Slice:
    """Answers in the order of their questions, and the time from the first question to the last word."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def rate(self) -> float:
        """Tokens per second of all streams together, prompts included in the time."""
        return self.tokens / self.seconds if self.seconds else 0.0


async def ask_all(
    client: Client,
    questions: Sequence[Question],
    sampling: SamplingParams,
    options: Options,
    concurrency: int,
    due: Sequence[float] = (),
    tolerant: bool = False,
) -> Slice:
    """All questions, `concurrency` at a time; with `due`, each not before so many seconds. The first failure ends it, unless `tolerant`:
    then an answer tells its error, and only a turn without any answer fails, unless these questions were refused as such."""
    answers: list[Answer | None] = [None] * len(questions)
    failures: list[SpecdecError] = []
    waiting = iter(enumerate(questions))
    began = time.perf_counter()

    async def stream() -> None:
        for index, question in waiting:
            asked = began + due[index] if due else time.perf_counter()
            if due:
                await asyncio.sleep(asked - time.perf_counter())
            try:
                answers[index] = await ask(client, question, sampling, options, asked)
            except SpecdecError as error:
                if not tolerant:
                    raise
                failures.append(error)
                since = time.perf_counter() - asked
                answers[index] = Answer((), "", (), (), since, SpeculativeStats(), {}, error=f"{type(error).__name__}: {error}"[:200])

    async def all_streams() -> None:
        async with asyncio.TaskGroup() as streams:
            for _ in range(min(concurrency, len(questions))):
                streams.create_task(stream())

    try:
        # In a task of its own: before Python 3.13 a group whose member fails leaves its task marked as being cancelled, and a Ctrl-C that
        # comes later would not be known for one.
        await asyncio.create_task(all_streams())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    if len(failures) == len(questions) and not all(isinstance(error, OF_QUESTIONS) for error in failures):
        raise next(error for error in failures if not isinstance(error, OF_QUESTIONS))
    return Slice(tuple(answer for answer in answers if answer is not None), time.perf_counter() - began)


async def ask(client: Client, question: Question, sampling: SamplingParams, options: Options, due: float | None = None) -> Answer:
    """`due` = when it should have been asked, on time.perf_counter; the times of the answer count from then."""
    token_ids, texts, origins, arrivals = list[int](), list[str](), list[Origin | None](), list[tuple[float, int]]()
    merged: Options = {**options, "seed": question.seed}
    prompt_tokens = 0
    began = time.perf_counter() if due is None else due
    async with contextlib.aclosing(client.generate(question.prompt, sampling, **merged)) as events:
        async for event in events:
            if isinstance(event, Delta):
                if event.token_ids:
                    arrivals.append((time.perf_counter() - began, len(event.token_ids)))
                token_ids += event.token_ids
                origins += event.origins
                texts.append(event.text)
            elif isinstance(event, Started):
                prompt_tokens = event.prompt_tokens
            elif isinstance(event, Finished):
                total_s = time.perf_counter() - began
                return Answer(
                    tuple(token_ids), "".join(texts), tuple(origins), tuple(arrivals), total_s, event.speculative, _settings(event),
                    prompt_tokens,
                )  # fmt: skip
    raise ProtocolFault("the stream ended before the answer did")


def _settings(end: Finished) -> dict[str, Any]:
    return {
        "rejection_sample_method": end.settings.rejection_method.value,
        "draft_sample_method": end.settings.draft_method.value,
        "num_speculative_tokens": end.settings.num_speculative_tokens,
        "enable_adaptive_verification": end.settings.enable_adaptive_verification,
        "batch_invariant": end.settings.batch_invariant,
        "numerics_fingerprint": end.settings.numerics_fingerprint,
    }

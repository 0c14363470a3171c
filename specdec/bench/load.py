"""A closed loop of streams: so many questions are open at once, the next is asked when one is answered. Every arrival keeps its time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.client import Client, Delta, Finished, Options, Prompt, SpeculativeStats
from specdec.errors import InvalidRequest, ProtocolFault
from specdec.terms import Origin, SamplingParams

PROMPTS = Path(__file__).with_name("prompts.jsonl")
MAX_PROMPTS = 100_000


@dataclass(frozen=True, slots=True)
class Question:
    """`kind` groups prompts in reports; `seed` makes the answer repeatable."""

    kind: str
    prompt: Prompt
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds since the question was asked. `arrivals` = (seconds, tokens that came)."""

    token_ids: tuple[int, ...]
    text: str
    origins: tuple[Origin | None, ...]
    arrivals: tuple[tuple[float, int], ...]
    total_s: float
    stats: SpeculativeStats
    settings: dict[str, Any]

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


def load_prompts(path: Path = PROMPTS) -> list[tuple[str, Prompt]]:
    """(kind, prompt) of JSON lines with "messages", "prompt" (one user turn) or "token_ids"; "kind" if wanted. Raises InvalidRequest."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("--prompts", f"{path}: {error}") from error
    if not 0 < len(lines) <= MAX_PROMPTS:
        raise InvalidRequest("--prompts", f"{path}: must hold 1 to {MAX_PROMPTS} prompts, one a line, has {len(lines)}")
    return [_prompt(path, number, line) for number, line in enumerate(lines, 1)]


def _prompt(path: Path, number: int, line: str) -> tuple[str, Prompt]:
    wanted = 'a JSON object with "prompt", "messages" or "token_ids", and "kind" if wanted'
    try:
        entry = json.loads(line)
        kind = str(entry.get("kind", "all")).lower()
        if "token_ids" in entry:
            return kind, [int(token) for token in entry["token_ids"]]
        messages = entry.get("messages") or [{"role": "user", "content": entry["prompt"]}]
        return kind, [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in messages]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest("--prompts", f"{path}:{number}: must be {wanted} ({type(error).__name__}: {error})") from error


async def ask_all(client: Client, questions: Sequence[Question], sampling: SamplingParams, options: Options, concurrency: int) -> Slice:
    """All questions, `concurrency` at a time. The first failure ends it."""
    answers: list[Answer | None] = [None] * len(questions)
    waiting = iter(enumerate(questions))

    async def stream() -> None:
        for index, question in waiting:
            answers[index] = await ask(client, question, sampling, options)

    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as streams:
            for _ in range(min(concurrency, len(questions))):
                streams.create_task(stream())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    seconds = time.perf_counter() - began
    return Slice(tuple(answer for answer in answers if answer is not None), seconds)


async def ask(client: Client, question: Question, sampling: SamplingParams, options: Options) -> Answer:
    token_ids, texts, origins, arrivals = list[int](), list[str](), list[Origin | None](), list[tuple[float, int]]()
    merged: Options = {**options, "seed": question.seed}
    began = time.perf_counter()
    async with contextlib.aclosing(client.generate(question.prompt, sampling, **merged)) as events:
        async for event in events:
            if isinstance(event, Delta):
                if event.token_ids:
                    arrivals.append((time.perf_counter() - began, len(event.token_ids)))
                token_ids += event.token_ids
                origins += event.origins
                texts.append(event.text)
            elif isinstance(event, Finished):
                return _answer(token_ids, texts, origins, arrivals, time.perf_counter() - began, event)
    raise ProtocolFault("the stream ended before the answer did")


def _answer(
    token_ids: list[int], texts: list[str], origins: list[Origin | None], arrivals: list[tuple[float, int]], total_s: float, end: Finished
) -> Answer:
    settings = {
        "rejection_sample_method": end.settings.rejection_method.value,
        "draft_sample_method": end.settings.draft_method.value,
        "num_speculative_tokens": end.settings.num_speculative_tokens,
        "enable_adaptive_verification": end.settings.enable_adaptive_verification,
        "batch_invariant": end.settings.batch_invariant,
        "numerics_fingerprint": end.settings.numerics_fingerprint,
    }
    return Answer(tuple(token_ids), "".join(texts), tuple(origins), tuple(arrivals), total_s, end.speculative, settings)

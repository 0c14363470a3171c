"""Tokenising, templates and grammars off the event loop: few threads, a bounded queue in front of them.

Grammars have threads of their own: one takes up to half a second of computing to refuse, a prompt a few milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.answer import AnswerStream
from orchestrator.opening import is_whole_sentence
from orchestrator.request import Chat, Ids, Request, Text
from orchestrator.stops import StopMatcher
from orchestrator.text import TextModel, template_args
from specdec.errors import InvalidRequest, Overloaded

THREADS = 2  # for short texts
LARGE_BYTES = 256 << 10  # messages beyond it have one thread among them: 4 MiB of text take 2 s and 600 MB while they are read
MAX_TASKS = 2048  # running and waiting; more than admission lets in by default, so that it is admission that refuses a burst
MAX_BYTES = 64 << 20  # of their messages, for calls that need no place: what is read of one takes many times its size
RETRY_AFTER_MS = 1000
T = TypeVar("T")


class TextWork:
    def __init__(self, threads: int = THREADS, max_tasks: int = MAX_TASKS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large text")
        self._max_tasks = max_tasks
        self._tasks = self._bytes = 0

    async def run(self, work: Callable[[], T], size: int = 0, placed: bool = False) -> T:
        """`size` = bytes of the message; `placed` = admission bounds them. Raises Overloaded when MAX_TASKS, or MAX_BYTES of messages
        without a place, wait already. A caller that goes away takes its waiting work with it."""
        held = 0 if placed else size
        if self._tasks >= self._max_tasks or self._bytes + held > MAX_BYTES:
            raise Overloaded(f"{self._tasks} texts or grammars wait already", RETRY_AFTER_MS)
        self._tasks, self._bytes = self._tasks + 1, self._bytes + held
        pool = self._large if size > LARGE_BYTES else self._pool
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            self._tasks, self._bytes = self._tasks - 1, self._bytes - held

    def close(self) -> None:
        for pool in (self._pool, self._large):
            pool.shutdown(wait=False, cancel_futures=True)


def encode(text_model: TextModel, prompt: Text | Ids | Chat, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Ids of a prompt. Raises InvalidRequest for a chat that the template refuses."""
    if isinstance(prompt, Ids):
        return prompt.ids
    if isinstance(prompt, Text):
        return text_model.encode(prompt.text, add_special_tokens)
    return text_model.encode_messages(prompt.messages, template_args(prompt.template_args), prompt.add_generation_prompt)


@dataclass(frozen=True, slots=True)
class Prepared:
    """`prompt` = its ids; `streams` = the request's answers, with what they resume behind them."""

    prompt: tuple[int, ...]
    streams: tuple[AnswerStream, ...]


def prepare(text_model: TextModel, request: Request) -> Prepared:
    """All text work that comes before the first token, but for the grammar."""
    prompt = encode(text_model, request.prompt)
    if not prompt:
        raise InvalidRequest("prompt", "must hold at least one token; this tokenizer adds none of its own")
    matcher = StopMatcher(request.stop, request.include_stop)  # as large as all stop strings together: the answers share what it knows
    streams = (
        AnswerStream(
            text_model.decoder(skip_special_tokens=request.skip_special, prompt=prompt),
            matcher.fork(),
            prompt_tokens=len(prompt),
            resumed=request.output_ids,
            min_tokens=request.sampling.min_tokens,
        )
        for _ in range(request.n)
    )
    return Prepared(prompt, tuple(streams))


def is_sentence(text_model: TextModel, request: Request) -> bool:
    """Whether the request's grammar lets nothing follow what it resumes. Raises InvalidRequest for one that is none, or does not fit."""
    return is_whole_sentence(text_model.grammars, request.sampling, request.output_ids, text_model.vocabulary.eos_ids)

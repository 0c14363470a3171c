"""A target in a process of its own, and one session that talks to it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import torch

from specdec.hashing import prefix_hash
from specdec.terms import (
    Answer,
    Begin,
    Close,
    Closed,
    FinishReason,
    NoRoom,
    PrefixNeeded,
    Result,
    SamplingParams,
    Step,
)
from tests.service.target_client import Stream, verify_stream

READY_S = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % 300 + 3 for j in range(5 + 6 * i)] for i in range(4)]


class TargetProcess:
    """`python -m target_service` on free ports; `code` replaces the program, `BREAKING` for one."""

    def __init__(self, model: Path, code: str = "", **settings: object) -> None:
        values = {"MODEL": model, "DTYPE": "float64", "METRICS_PORT": 0, "KV_TOKENS": 8192, "LEASE_MS": 300, **settings}
        env = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
        env |= {f"SPECDEC_{name}": str(value) for name, value in values.items()} | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *(("-c", code) if code else ("-m", "target_service"))], env=env, stdout=subprocess.PIPE, text=True
        )
        watchdog = threading.Timer(READY_S, self.process.kill)
        watchdog.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        watchdog.cancel()
        assert line.startswith("ready role=target "), line
        ready = dict(part.split("=", 1) for part in line.split()[1:])
        self.port, self.metrics_port, self.health_port = (int(ready[name]) for name in ("port", "metrics_port", "health_port"))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stream(self, orchestrator_id: str = "orch") -> AbstractAsyncContextManager[Stream]:
        return verify_stream(self.port, orchestrator_id)


# The engine dies, or never returns, on the token 299.
BREAKING = """
import sys, time
from target_service import __main__ as target

def broken(settings, load=target.load):
    engine, *rest = load(settings)
    forward = engine.forward
    def breaking(segments):
        if any(299 in segment.tokens for segment in segments):
            {fault}
        return forward(segments)
    engine.forward = breaking
    return engine, *rest

target.load = broken
sys.exit(target.main())
"""


# Loading never ends.
SLOW_TO_LOAD = """
import sys, time
from pathlib import Path
from target_service import __main__ as target

def slow(settings):
    Path({path!r}).touch()
    time.sleep(3600)

target.load = slow
sys.exit(target.main())
"""


def generated(hf: Any, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' own greedy continuation."""
    ids = torch.tensor([list(prompt)])
    out = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [int(token) for token in out[0, len(prompt) :]]


class Talk:
    """One session on a stream that others may share: `feed` gives it its answers."""

    def __init__(
        self, stream: Stream, prompt: Sequence[int], session: str, sampling: SamplingParams = GREEDY, seed: int = 11, fork: str = ""
    ) -> None:
        self.stream, self.session, self.sampling, self.seed, self.fork = stream, session, sampling, seed, fork
        self.prompt, self.committed = list(prompt), list(prompt)
        self.round, self.kv, self.begun = 1, 0, False
        self.finish: FinishReason | None = None
        self.results: list[Result] = []
        self.prefills = 0

    @property
    def output(self) -> list[int]:
        return self.committed[len(self.prompt) :]

    async def ask(self, block: Sequence[int] = ()) -> None:
        begin = None if self.begun else Begin(len(self.prompt), self.sampling, self.seed, fork_session_id=self.fork)
        tokens = (*self.committed[self.kv :], *block)
        base_hash = prefix_hash(self.committed[: self.kv])
        await self.stream.send(Step(self.session, 1, self.round, self.kv, base_hash, tokens, len(block), 30_000, begin=begin))

    async def feed(self, answer: Answer) -> None:
        match answer.outcome:
            case Result() as result:
                self.prefills += self.kv == 0
                self.results.append(result)
                self.committed += result.tokens
                self.kv, self.round, self.begun, self.finish = result.kv_length_after, self.round + 1, True, result.finish
            case PrefixNeeded(have):
                self.kv = have
            case NoRoom(retry_after_ms):
                await asyncio.sleep(retry_after_ms / 1000)
            case other:
                raise AssertionError(other)

    async def run(self, count: int, blocks: Any = lambda output: ()) -> list[int]:
        while len(self.output) < count and self.finish is None:
            await self.ask(blocks(self.output))
            await self.feed(await self.stream.answer(20.0))
        await self.stream.send(Close(self.session, 1))
        assert (await self.stream.answer(20.0)).outcome == Closed()
        return self.output[:count]


def spoiled(expected: Sequence[int], k: int, period: int) -> Any:
    """Blocks of the right tokens; now and then one of them is not."""

    def block(output: Sequence[int]) -> list[int]:
        tokens = list(expected[len(output) : len(output) + k])
        if tokens and len(output) % period == 1:
            tokens[len(output) % len(tokens)] = 5
        return tokens

    return block


async def sessions_held(stream: Stream) -> int:
    """As the next beat tells it; those that lay unread are old."""
    while True:
        asked, stream.beats = time.monotonic(), []
        while not stream.beats:
            await stream.listen()
        if time.monotonic() - asked > 0.02:
            return stream.beats[-1].sessions


def contextual(target: TargetProcess, count: int) -> Any:
    from contextlib import AsyncExitStack, asynccontextmanager

    @asynccontextmanager
    async def opened() -> Any:
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(target.stream(f"o{i}")) for i in range(count)]

    return opened()

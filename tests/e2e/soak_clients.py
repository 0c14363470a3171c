"""Clients of the soak: every parameter there is, each answer compared with its reference. Some leave, read slowly, or come in crowds."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer

from specdec.runtime.channels import open_channel
from specdec.v1 import generation_pb2_grpc
from tests.e2e.parameters import Fields, merged, request, table
from tests.e2e.raw import Reply

ANSWER_S = 90.0  # longest answer, over all its attempts
ATTEMPT_S = 60.0
# Who is told this asks again. CANCELLED is wrong: gRPC gives up 4096 calls that nobody looked at, or one after 30 s, and there are neither.
AGAIN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
HURRIED = {*AGAIN, grpc.StatusCode.DEADLINE_EXCEEDED}
AT_ONCE = 8
CROWD = 300
BASE: Fields = {"seed": 11, "temperature": 1.0, "max_tokens": 30, "ignore_eos": True, "logprobs": 1}


def questions(model: Path) -> list[Fields]:
    """Every row of the table of parameters, with short and long prompts, and answers of some length."""
    rows = table(Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id, lure=8.0, end_lure=8.0, heat=1.0)
    prompts = [[10, 11, 12, 13, 11, 10], [(7 * j) % 300 + 3 for j in range(150)], [20, 30, 40]]
    asked = [merged({**BASE, "token_ids": prompts[i % 3]}, row.given, row.fields) for i, row in enumerate(rows.values())]
    return asked + [{**BASE, "token_ids": prompt, "seed": i, "max_tokens": 200} for i, prompt in enumerate(prompts * 2)]


@dataclass
class Answer:
    """Of one index, over the attempts it took."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    end: tuple[Any, ...] = ()

    def add(self, reply: Reply) -> None:
        """A whole reply, or one that broke off: its text counts as far as ids came with it."""
        sure, before = 0, 0
        for ids, characters in reply.pieces:
            sure, before = (characters, ids) if ids > before else (sure, before)
        self.ids += reply.token_ids
        self.text += reply.text if reply.finished is not None else reply.text[:sure]
        self.logprobs += [(entry.logprob, tuple(entry.top_ids), tuple(entry.top_logprobs)) for entry in reply.logprobs]
        if (done := reply.finished) is not None:
            self.end = done.finish_reason, done.stop_reason, done.usage.completion_tokens


@dataclass
class Tally:
    """What became of the requests. `wrong` = answers that differ, statuses that nobody should see, answers that never ended."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Clients:
    """`names` = host:port where they connect, each through a network of its own."""

    def __init__(self, names: Sequence[str], asked: Sequence[Fields], seed: int) -> None:
        self.names, self.asked, self.draw = names, asked, random.Random(seed)
        self.wanted: list[list[Answer]] = []
        self.tally = Tally()
        self.over = asyncio.Event()

    async def learn(self, name: str) -> None:
        """The references, without speculation; nothing is wrong with the network yet."""
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(fields: Fields) -> list[Answer]:
            async with limit:
                return await self._whole(lambda: name, {**fields, "disable_spec_decode": True}, 0.0)

        self.wanted = list(await asyncio.gather(*map(one, self.asked)))

    def roles(self, count: int) -> list[Coroutine[Any, Any, None]]:
        """Lanes to be run until `over`: mostly honest ones."""
        lanes = [self._lane(self._honest) for _ in range(count)]
        return [*lanes, *(self._lane(self._slow) for _ in range(2)), *(self._lane(self._leaver) for _ in range(4)), self._lane(self._crowd)]

    # --- what they do -------------------------------------------------------------------------------------------------

    async def _lane(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while not self.over.is_set():
            await act()

    async def _honest(self) -> None:
        await self._compared(self.draw.randrange(len(self.asked)), 0.0)

    async def _slow(self) -> None:
        await self._compared(self.draw.randrange(len(self.asked)), 0.05)

    async def _leaver(self) -> None:
        fields = {**self.draw.choice(self.asked), "num_speculative_tokens": self.draw.randrange(6)}
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
            async with asyncio.timeout(self.draw.choice((0.0005, 0.005, 0.05, 0.3))):
                await self._attempt(self.draw.choice(self.names), fields, 0.0)
        self.tally.outcomes["left"] += 1
        await asyncio.sleep(self.draw.uniform(0, 0.05))

    async def _crowd(self) -> None:
        """More at once than is let in, every few seconds. Whoever is refused does not come back."""
        await asyncio.sleep(self.draw.uniform(4, 12))
        name = self.draw.choice(self.names)
        if not self.over.is_set():
            await asyncio.gather(*(self._impatient(name, self.draw.randrange(len(self.asked))) for _ in range(CROWD)))

    async def _impatient(self, name: str, i: int) -> None:
        try:
            replies = await self._attempt(name, self.asked[i], 0.0)
        except grpc.aio.AioRpcError as failure:
            if failure.code() in HURRIED:
                self.tally.outcomes[f"crowd {failure.code().name}"] += 1
            else:
                self.tally.wrong.append(f"question {i}: {failure.code().name}: {failure.details()}")
            return
        self._judge(i, [whole(reply) for reply in replies])

    async def _compared(self, i: int, pause_s: float) -> None:
        fields = {**self.asked[i], "num_speculative_tokens": self.draw.choice((1, 3, 5, 8))}
        fields["enable_adaptive_verification"] = self.draw.random() < 0.5
        try:
            async with asyncio.timeout(ANSWER_S):
                self._judge(i, await self._whole(lambda: self.draw.choice(self.names), fields, pause_s))
        except TimeoutError:
            self.tally.wrong.append(f"question {i} was not answered in {ANSWER_S:g} s")
        except grpc.aio.AioRpcError as failure:
            self.tally.wrong.append(f"question {i}: {failure.code().name}: {failure.details()}")

    def _judge(self, i: int, got: list[Answer]) -> None:
        self.tally.outcomes["answered"] += 1
        if got != self.wanted[i]:
            self.tally.wrong.append(f"question {i}: {got} instead of {self.wanted[i]}")

    # --- the wire -----------------------------------------------------------------------------------------------------

    async def _whole(self, choose: Callable[[], str], fields: Fields, pause_s: float) -> list[Answer]:
        """Asked again, by ids, until it has ended. Several answers at once are asked for from the beginning."""
        answers = [Answer() for _ in range(fields.get("n", 1))]
        for attempt in range(10_000):
            replies: list[Reply] = [Reply() for _ in answers]
            resumed = {**fields, "output_token_ids": answers[0].ids} if answers[0].ids else fields
            try:
                await self._attempt(choose(), resumed, pause_s, replies)
            except grpc.aio.AioRpcError as failure:
                if failure.code() not in AGAIN:
                    raise
                self.tally.outcomes[f"again {failure.code().name}"] += 1
                await asyncio.sleep(min(1.0, 0.02 * (1 + attempt)))
            finished = all(reply.finished is not None for reply in replies)
            if len(answers) == 1 or finished:
                for answer, reply in zip(answers, replies, strict=True):
                    answer.add(reply)
            if finished:
                return answers
        raise AssertionError("ten thousand attempts")

    async def _attempt(self, name: str, fields: Mapping[str, Any], pause_s: float, replies: list[Reply] | None = None) -> list[Reply]:
        replies = [Reply() for _ in range(fields.get("n", 1))] if replies is None else replies
        async with open_channel(name) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Generate(request(fields), timeout=ATTEMPT_S)
            try:
                async for message in call:
                    replies[message.index].take(message)
                    if pause_s:
                        await asyncio.sleep(pause_s)
            finally:
                call.cancel()
        return replies


def whole(reply: Reply) -> Answer:
    answer = Answer()
    answer.add(reply)
    return answer

"""Streams that run without a pause, each compared with its reference, while the table of faults (fault_phases.py) is worked through."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.client import Client, Completion, Delta, Finished
from specdec.errors import Unavailable
from specdec.terms import Grammar, GrammarForm, SamplingParams
from tests.e2e.ask import Ask, gather_answers
from tests.e2e.fault_phases import CLIENT, SHORT_S, Connection, Row, Trigger, Watch
from tests.e2e.network import Link

ANSWER_S = 40.0  # longest answer, whatever happens meanwhile
ARM_S = 0.4  # then it is asked again what is left
RECOVER_S = 6.0
MOST_ATTEMPTS = 60  # of one answer


def asks() -> list[Ask]:
    """Short and long prompts, greedy and sampled, every kind of parameter that has a state to lose. About 40 tokens each."""
    plain: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (plain, {}),
        (plain | {"temperature": 0.0, "logprobs": 2}, {"num_speculative_tokens": 4, "enable_adaptive_verification": False}),
        (plain | {"frequency_penalty": 1.0, "repetition_penalty": 1.2}, {"enable_adaptive_verification": True}),
        (plain | {"top_k": 8, "top_p": 0.9, "max_tokens": 70}, {"num_speculative_tokens": 8, "enable_adaptive_verification": False}),
        (
            {"temperature": 0.7, "max_tokens": 60, "grammar": Grammar(GrammarForm.REGEX, "([a-f]{3}-){6,9}end")},
            {"enable_adaptive_verification": False},
        ),
        (plain | {"ignore_eos": False, "min_tokens": 10, "temperature": 1.5}, {"stop": ("zq", "Q#")}),
        (plain | {"min_p": 0.02, "logit_bias": {40: 2.0, 50: -3.0}, "max_tokens": 1}, {}),
        (plain | {"max_tokens": 30, "presence_penalty": -1.0}, {"disable_spec_decode": True}),
    ]
    lengths = (3, 30, 200, 12, 5, 60, 8, 130)
    return [
        Ask([10 + (7 * i + 3 * j) % 300 for j in range(length)], SamplingParams(**sampling), {"seed": i, **options})
        for i, (length, (sampling, options)) in enumerate(zip(lengths, kinds, strict=True))
    ]


async def references(endpoint: str, asked: Sequence[Ask]) -> list[Completion]:
    """The same without speculation and, since nothing is armed yet, without faults."""
    plain = [Ask(ask.prompt, ask.sampling, {**ask.options, "num_speculative_tokens": 0}) for ask in asked]
    for ask in plain:
        ask.options.pop("disable_spec_decode", None)
    return await gather_answers(endpoint, plain)


@dataclass
class Told:
    """What a client has of an answer, over all its attempts."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finished: Finished | None = None
    _loose: str = ""
    attempts: list[str] = field(default_factory=list)  # how each but the last ended, behind how many tokens

    @classmethod
    def of(cls, whole: Completion) -> Told:
        return cls(list(whole.token_ids), whole.text, list(whole.logprobs or ()), finished=whole.finished)

    def all(self) -> tuple[Any, ...]:
        assert self.finished is not None
        return self.ids, self.text, self.logprobs, self.finished.finish_reason, self.finished.usage.completion_tokens

    def take(self, event: object) -> None:
        if isinstance(event, Delta):
            self.ids += event.token_ids
            self.logprobs += event.logprobs
            if event.token_ids:
                self.text, self._loose = self.text + self._loose + event.text, ""
            else:
                self._loose += event.text
        if isinstance(event, Finished):
            self.finished, self.text = event, self.text + self._loose

    def broke_off(self, why: str) -> None:
        """Text without ids that nothing followed is brought again."""
        self._loose = ""
        self.attempts.append(f"{len(self.ids)}: {why}")


@dataclass
class Report:
    injected: Counter[Row] = field(default_factory=Counter)
    answers: int = 0
    resumed: int = 0  # answers that a client had to ask for again
    moved: int = 0  # placements on another target, as the last messages tell

    def __str__(self) -> str:
        return f"{self.injected.total()} faults, {self.answers} answers, {self.moved} moves, {self.resumed} resumed"


class Turmoil:
    """`names` = where clients connect. `run` ends when every row was injected and `least` faults in all, or after `seconds`."""

    def __init__(self, asked: Sequence[Ask], wanted: Sequence[Completion], names: Sequence[str], seed: int = 0) -> None:
        self.asked, self.wanted, self.names = asked, wanted, names
        self.report = Report()
        self._draw = random.Random(seed)
        self._over = asyncio.Event()

    async def run(self, links: Sequence[tuple[Link, Trigger, list[Row]]], least: int, seconds: float, lanes: int = 4) -> Report:
        """Links that share a list of rows share the work."""
        self._left, self._least = {id(rows): rows for _, _, rows in links}, least
        for rows in self._left.values():
            self._draw.shuffle(rows)
        numbers = itertools.count()
        tasks = [asyncio.create_task(self._lane(numbers)) for _ in range(lanes)]
        injecting = [asyncio.create_task(self._inject(*link)) for link in links]
        try:
            done, _ = await asyncio.wait((*tasks, *injecting), timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            self._over.set()
            await asyncio.gather(*injecting)
            for link, _, _ in links:
                link.heal()
            await asyncio.wait_for(asyncio.gather(*tasks), ANSWER_S)
        finally:
            for task in (*tasks, *injecting):
                task.cancel()
            await asyncio.gather(*tasks, *injecting, return_exceptions=True)
        return self.report

    # --- clients ------------------------------------------------------------------------------------------------------

    async def _lane(self, numbers: Iterator[int]) -> None:
        while not self._over.is_set():
            i = next(numbers)
            async with asyncio.timeout(ANSWER_S):
                await self._answer(i)

    async def _answer(self, i: int) -> None:
        ask, want = self.asked[i % len(self.asked)], self.wanted[i % len(self.asked)]
        told = Told()
        for attempt in range(MOST_ATTEMPTS):
            if attempt:
                self.report.resumed += 1
                await asyncio.sleep(0.01 * attempt)
            try:
                await self._attempt(self.names[(i + attempt) % len(self.names)], ask, told)
            except Unavailable as error:
                told.broke_off(str(error))
            if told.finished is not None:
                break
        assert told.finished is not None, f"answer {i} did not end in {MOST_ATTEMPTS} attempts"
        self.report.answers += 1
        self.report.moved += told.finished.speculative.num_replacements
        assert told.all() == Told.of(want).all(), f"answer {i} after {told.attempts}"

    async def _attempt(self, name: str, ask: Ask, told: Told) -> None:
        """What was delivered counts; the rest is asked for by ids."""
        options = {**ask.options, "output_token_ids": tuple(told.ids)} if told.ids else ask.options
        async with (
            Client(name) as client,
            contextlib.aclosing(client.generate(ask.prompt, ask.sampling, timeout_s=ANSWER_S, **options)) as events,
        ):
            async for event in events:
                told.take(event)

    # --- faults -------------------------------------------------------------------------------------------------------

    async def _inject(self, link: Link, trigger: Trigger, left: list[Row]) -> None:
        """Each row once, whichever's phase comes first; then any, until it is over."""
        table = tuple(left)
        while not self._over.is_set():
            trigger.arm(*(left or self._draw.sample(table, 1)))
            if (struck := await trigger.strikes(ARM_S)) is not None:
                row, connection = struck
                self.report.injected[row] += 1
                if row in left:
                    left.remove(row)
                await self._recovered(link, connection, row)
            if not any(self._left.values()) and self.report.injected.total() >= self._least:
                self._over.set()

    async def _recovered(self, link: Link, struck: Connection, row: Row) -> None:
        if row.fault in ("stall", "deaf"):
            await asyncio.sleep(1.5 * SHORT_S)
            return
        if row.link != CLIENT:
            await self._again(link, struck, row)
        struck.cut()  # who was left with half a connection learns of it at last

    async def _again(self, link: Link, struck: Connection, row: Row) -> None:
        """Until the peer has been dialled again and something was said."""
        now = asyncio.get_running_loop().time
        deadline = now() + RECOVER_S
        before = link.back.bytes
        while all(connection is struck for connection in link.connections) or link.back.bytes == before:
            assert now() < deadline, f"{row}: not dialled again within {RECOVER_S} s"
            await asyncio.sleep(0.01)


def watched(to: str, kind: str) -> tuple[Link, Trigger]:
    """A link whose connections wait for what its trigger is armed with."""
    trigger = Trigger()
    return Link(to, lambda connection: Watch(kind, connection, trigger)), trigger

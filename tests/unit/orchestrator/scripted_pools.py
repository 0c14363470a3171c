"""Pools without a network: peers that answer by the protocol, in the next turn of the loop, and count what they hold.

The target's tokens are a function of prefix and seed alone, so every text has one right value; the drafts guess it well and badly in turn.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator import pools as pools_module
from orchestrator.driver import Driver
from orchestrator.handle import Handle
from orchestrator.observe import Observer
from orchestrator.output import Ended
from orchestrator.peers import Dialect, Heard, Listener
from orchestrator.request import others
from orchestrator.settings import OrchestratorSettings
from specdec import terms
from specdec.hashing import prefix_hash
from specdec.runtime.telemetry import Telemetry
from specdec.seeds import mix64
from tests.fakes_driver import model_info

VOCAB = 50
RESTING: dict[str, Any] = {"max_run_ahead": 0, "ahead": False}  # these targets do what they are asked for
SEED = 7
FINGERPRINT = b"scripted"


def next_token(prefix: Sequence[int], seed: int = SEED) -> int:
    return mix64(prefix_hash(prefix) ^ seed) % VOCAB


def answer_of(prompt: Sequence[int], count: int, seed: int = SEED) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


class ScriptedPeer:
    """Takes Peer's place in a driver."""

    def __init__(self, name: str, dialect: Dialect, orchestrator_id: str, listener: Listener, dialler: object = None) -> None:
        self.name, self.dialect, self._listener = name, dialect, listener
        self.info: terms.ModelInfo | None = model_info(VOCAB, window=10_000, boot_id=f"boot of {name}")
        self.beat: Any = None
        self.connected = False
        self.held: dict[str, list[int]] = {}
        self.released: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()  # items by session
        self.begun: dict[str, terms.Begin | terms.Open] = {}  # by session, the newest
        self.forks: dict[str, bool] = {}  # session -> what it forks from was held when its first Step came
        self.forced: tuple[int, ...] = ()  # told with every result
        self.not_found = 0
        self.silent = False  # keeps its answers
        self.kept: list[Any] = []
        self._inbox: list[Any] = []

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def flushed(self) -> None:
        return

    def rise(self) -> None:
        self.connected = True
        self._listener.up(self)  # type: ignore[arg-type]

    def fall(self) -> None:
        self.connected, self.held = False, {}
        self._inbox.clear()
        self._listener.down(self, "scripted")  # type: ignore[arg-type]

    def say(self, *items: Any) -> None:
        self._listener.heard(self, Heard(items))  # type: ignore[arg-type]

    def send(self, item: Any) -> None:
        if not self.connected:
            return
        if not self._inbox:
            asyncio.get_running_loop().call_soon(self._turn)
        self._inbox.append(item)

    def _turn(self) -> None:
        items, self._inbox = self._inbox, []
        said = [answer for item in items for answer in self._answers(item)]
        if self.silent:
            self.kept += said
        elif said and self.connected:
            self.say(*said)

    def _answers(self, item: Any) -> list[Any]:
        self.seen[item.session_id] += 1
        if isinstance(item, terms.Close | terms.CloseDraft):
            if self.held.pop(item.session_id, None) is None:
                self.not_found += 1
            self.released[item.session_id] += 1
            return [terms.Answer(item.session_id, item.epoch, 0, terms.Closed())] if isinstance(item, terms.Close) else []
        return [self._verify(item)] if isinstance(item, terms.Step) else self._draft(item)

    def _verify(self, step: terms.Step) -> terms.Answer:
        held = self.held.setdefault(step.session_id, [])
        split = len(step.tokens) - step.num_proposed
        assert step.base_length <= len(held) and prefix_hash(held[: step.base_length]) == step.base_hash
        held[step.base_length :] = step.tokens[:split]
        before = len(held)
        entries: tuple[terms.TokenLogprobs, ...] = ()
        if step.begin is not None:
            self.begun[step.session_id] = step.begin
            if step.begin.fork_session_id:
                self.forks[step.session_id] = step.begin.fork_session_id in self.held
            if step.begin.sampling.prompt_logprobs is not None:
                entries = tuple(terms.TokenLogprobs(-float(i)) for i in range(1, step.begin.prompt_length))
        begin, accepted = self.begun[step.session_id], 0
        limit = begin.prompt_length + (begin.sampling.max_tokens or 0)
        for proposed in (*step.tokens[split:], None):
            if len(held) >= limit:
                break
            held.append(next_token(held, begin.seed))
            if held[-1] != proposed:
                break
            accepted += 1
        finish = terms.FinishReason.LENGTH if len(held) >= limit else None
        result = terms.Result(
            before,
            len(held) - 1,
            step.num_proposed,
            accepted,
            tuple(held[before:]),
            forced=self.forced,
            finish=finish,
            prompt_logprobs=entries,
        )
        return terms.Answer(step.session_id, step.epoch, step.round, result)

    def _draft(self, item: Any) -> list[Any]:
        if isinstance(item, terms.Open):
            self.held[item.session_id] = list(item.tokens)
            self.begun[item.session_id] = item
        elif isinstance(item, terms.Commit):
            self.held[item.session_id][item.prefix_length :] = item.tokens
        else:
            return []
        tokens, opened = self.held[item.session_id], self.begun[item.session_id]
        assert isinstance(opened, terms.Open)
        guess = answer_of(tokens, 4, opened.seed)
        if len(tokens) % 3 == 0:
            guess[1] = (guess[1] + 1) % VOCAB
        return [terms.Proposal(item.session_id, opened.epoch, len(tokens), prefix_hash(tokens), tuple(guess))]


class Pools:
    """A driver between scripted targets t0, t1, ... and drafts d0, ..."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, targets: int = 1, drafts: int = 1, eos_ids: tuple[int, ...] | None = None, **settings: Any
    ) -> None:
        monkeypatch.setattr(pools_module, "Peer", ScriptedPeer)
        self._told = {"vocab_size": VOCAB, "eos_ids": eos_ids}
        names = {"targets": [f"t{i}:1" for i in range(targets)], "drafts": [f"d{i}:1" for i in range(drafts)]}
        self.driver = Driver(
            OrchestratorSettings(tokenizer=Path(), **{k: tuple(v) for k, v in names.items()}, **(RESTING | settings)),
            FINGERPRINT,
            Observer(Telemetry("orchestrator")),
        )
        self.targets: list[ScriptedPeer] = list(self.driver.pools.targets)  # type: ignore[arg-type]
        self.drafts: list[ScriptedPeer] = list(self.driver.pools.drafts)  # type: ignore[arg-type]
        for peer in (*self.targets, *self.drafts):
            peer.rise()

    def start(self, name: str, *, count: int = 20, k: int = 3, priority: int = 0, n: int = 1, **sampling: Any) -> Handle:
        """Sessions are named `name`, and `name.1`, `name.2`, ... for the other answers."""
        params = terms.SamplingParams(max_tokens=count, **sampling)
        prompt = prompt_of(name)
        first = ev.Admitted(name, prompt, len(prompt), params, SEED, 10_000, k, 8, priority=priority, **self._told)
        return self.driver.start((first, *others(first, [f"{name}.{i}" for i in range(1, n)])), f"request of {name}")

    def check_empty(self) -> None:
        """Nothing is left of any session, anywhere."""
        driver = self.driver
        assert (driver.running, driver.waiting, len(driver._live), len(driver._requests)) == (0, 0, 0, 0)
        assert not any(pool.places.wanted for pool in driver.pools) and not driver._events
        assert not any(pool.places.sessions for pool in driver.pools)
        assert [len(peer.held) for peer in (*self.targets, *self.drafts)] == [0] * (len(self.targets) + len(self.drafts))


def prompt_of(name: str) -> tuple[int, ...]:
    return tuple(byte % VOCAB for byte in name.encode())


async def fetch(handle: Handle) -> list[int]:
    """All tokens of a request with one answer."""
    (tokens,) = await fetch_all(handle)
    return tokens


async def fetch_all(handle: Handle) -> list[list[int]]:
    """All tokens of every answer."""
    tokens: list[list[int]] = [[] for _ in handle._answers]
    open_answers = set(range(len(tokens)))
    async for index, event in handle:
        assert index in open_answers
        if isinstance(event, Ended):
            open_answers.discard(index)
        else:
            tokens[index] += event.tokens
    assert not open_answers
    return tokens


async def settle(turns: int = 20) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)

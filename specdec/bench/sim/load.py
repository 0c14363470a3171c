"""Clients of a simulated system: a closed loop of streams, several on each connection, every answer compared with what the target says."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specdec.bench.sim.http2 import Connection
from specdec.bench.sim.path import Path, Paths
from specdec.simulation import FIRST_ID
from specdec.v1 import generation_pb2 as pb

METHOD = "/specdec.v1.GenerationService/Generate"
PER_CONNECTION = 64
clock = time.perf_counter


@dataclass(frozen=True, slots=True)
class Wish:
    """What every request asks for. `block` 0 = without speculation; `adaptive`: the block is a maximum."""

    prompt_tokens: int
    max_tokens: int
    block: int
    adaptive: bool


@dataclass(slots=True)
class Seen:
    """Since the last reset. `delay_s`: from a target's result to the client, of each message with tokens."""

    answers: int = 0
    tokens: int = 0
    messages: int = 0
    differing: int = 0
    failed: int = 0
    reason: bytes = b""  # of the newest failure: its trailers as they came
    delay_s: list[float] = field(default_factory=list)


def prompts(paths: Paths, length: int) -> Iterator[tuple[int, ...]]:
    """No two alike."""
    base = paths.vocab_size - FIRST_ID
    for number in itertools.count():
        head = (number % base, number // base % base, number // base**2 % base)
        yield tuple(FIRST_ID + digit for digit in head) + tuple(FIRST_ID + (7 * i) % base for i in range(length - len(head)))


class Slot:
    """One stream after the other."""

    def __init__(self, connection: Connection, paths: Paths, numbers: Iterator[tuple[int, ...]], wish: Wish, seen: Seen) -> None:
        self._connection, self._paths, self._numbers, self._wish, self.seen = connection, paths, numbers, wish, seen
        self._path: Path | None = None
        self._ids: list[int] = []
        self._finished = self.stopped = False
        self.began = False  # it has had tokens

    def start(self) -> None:
        wish, prompt = self._wish, next(self._numbers)
        self._path, self._ids, self._finished = self._paths.of(prompt), [], False
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), num_speculative_tokens=wish.block)
        request.enable_adaptive_verification = wish.adaptive
        request.sampling.temperature, request.sampling.max_tokens, request.sampling.ignore_eos = 0.0, wish.max_tokens, True
        self._connection.call(request.SerializeToString(), self._heard)

    def _heard(self, raw: bytes | None) -> None:
        assert self._path is not None
        if raw is None:
            return self._over()
        message = pb.GenerateResponse.FromString(raw)
        if message.HasField("delta"):
            self.began = True
            self._ids += message.delta.token_ids
            self.seen.messages += 1
            self.seen.tokens += len(message.delta.token_ids)
            self._time()
        elif message.HasField("finished"):
            self._finished = True

    def _time(self) -> None:
        assert self._path is not None
        told, length = self._path.told, self._path.prompt_length + len(self._ids)
        if told and told[0][0] <= length:
            self.seen.delay_s.append(clock() - told[0][1])
            del told[: next((i for i, (at, _) in enumerate(told) if at > length), len(told))]

    def _over(self) -> None:
        path, seen = self._path, self.seen
        assert path is not None
        seen.answers += 1
        seen.failed += not self._finished
        if not self._finished:
            seen.reason = self._connection.trailers
        if self._finished:
            end = path.prompt_length + self._wish.max_tokens
            seen.differing += self._ids != path.upto(end)[path.prompt_length : end]
        if not self.stopped and not self._connection.lost:
            self.start() if self._finished else asyncio.get_running_loop().call_later(0.1, self.start)


async def connect(endpoints: Sequence[str], sessions: int, paths: Paths, wish: Wish, seen: Seen) -> list[Slot]:
    """`sessions` slots, in turn at each endpoint, none started."""
    loop, numbers = asyncio.get_running_loop(), prompts(paths, wish.prompt_tokens)
    slots: list[Slot] = []
    connections: dict[str, Connection] = {}
    for number in range(sessions):
        endpoint = endpoints[number % len(endpoints)]
        if number // len(endpoints) % PER_CONNECTION == 0:
            host, port = endpoint.rsplit(":", 1)
            _, connections[endpoint] = await loop.create_connection(lambda at=endpoint: Connection(METHOD, at), host, int(port))  # type: ignore[misc]
        slots.append(Slot(connections[endpoint], paths, numbers, wish, seen))
    return slots

"""A draft process and a stream to it, as an orchestrator holds them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from specdec import wire
from specdec.engine import Engine, Segment
from specdec.hashing import prefix_hash
from specdec.terms import Commit, DraftCommand, DraftEvent, DraftLoad, DraftMethod, Open, Proposal, RejectionMethod, SamplingParams, Sent
from specdec.v1 import draft_pb2, draft_pb2_grpc

READY_S = 60
ANSWER_S = 20
PROMPT = (40, 41, 42, 43, 44)


def naive(engine: Engine, prefix: Sequence[int], count: int) -> list[int]:
    """The engine's own greedy continuation, every token from a fresh slot; of a full head the tokenizer's 320 ids."""
    columns = engine.info.draft_ids or tuple(range(320))
    tokens = list(prefix)
    for _ in range(count):
        slot = engine.kv.open()
        (logits,) = engine.forward([Segment(slot, 0, tuple(tokens), len(tokens) - 1)])
        engine.kv.close(slot)
        tokens.append(columns[int(logits[-1][: len(columns)].argmax())])
    return tokens[len(prefix) :]


class Process:
    """`python -m draft_service` on free ports; killed at the end whatever happens."""

    def __init__(self, model: Path, code: str = "", **settings: object) -> None:
        """`code` replaces the program."""
        self._program = ("-c", code) if code else ("-m", "draft_service")
        values = {"MODEL": model, "DTYPE": "float64", "METRICS_PORT": 0, "SELF_TEST": "false", "KV_TOKENS": 4096, **settings}
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")}
        self._env |= {f"SPECDEC_{name}": str(value) for name, value in values.items()} | {"OMP_NUM_THREADS": "1"}
        self.ready: dict[str, str] = {}

    def __enter__(self) -> Process:
        self.process = subprocess.Popen([sys.executable, *self._program], env=self._env, stdout=subprocess.PIPE, text=True)
        watchdog = threading.Timer(READY_S, self.process.kill)
        watchdog.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        watchdog.cancel()
        assert line.startswith("ready role=draft "), line
        self.ready = dict(part.split("=", 1) for part in line.split()[1:])
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def endpoint(self) -> str:
        return f"{self.ready['host']}:{self.ready['port']}"


class Stream:
    """One Draft stream as an orchestrator holds it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Any = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        self._named = False
        self.pending: list[DraftEvent] = []
        self.load: DraftLoad | None = None

    async def send(self, *commands: DraftCommand) -> None:
        await self._call.write(wire.draft_request_to_wire(commands, None if self._named else "test"))
        self._named = True

    async def send_raw(self, message: draft_pb2.DraftRequest) -> None:
        await self._call.write(message)

    async def _read(self) -> None:
        message = await asyncio.wait_for(self._call.read(), ANSWER_S)
        assert message is not grpc.aio.EOF
        response = wire.draft_response_from_wire(message)
        assert response.faults == ()
        self.pending += response.events
        self.load = response.load or self.load

    async def event(self) -> Any:
        async with asyncio.timeout(ANSWER_S):
            while not self.pending:
                await self._read()
        return self.pending.pop(0)

    async def proposed(self, count: int) -> Proposal:
        """Pieces joined until `count` tokens are there."""
        joined = await self.event()
        while len(joined.tokens) < count:
            piece = await self.event()
            assert piece.prefix_length == joined.prefix_length + len(joined.tokens)
            joined = Proposal(joined.session_id, joined.epoch, joined.prefix_length, joined.prefix_hash, joined.tokens + piece.tokens)
        return joined

    async def until_load(self, wanted: Callable[[DraftLoad], bool]) -> DraftLoad:
        async with asyncio.timeout(ANSWER_S):
            while self.load is None or not wanted(self.load):
                await self._read()
        return self.load

    async def code(self) -> grpc.StatusCode:
        """The status, once everything that came before it is read."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await asyncio.wait_for(self._call.read(), ANSWER_S) is not grpc.aio.EOF:
                pass
        return await asyncio.wait_for(self._call.code(), ANSWER_S)  # type: ignore[no-any-return]

    def cancel(self) -> None:
        self._call.cancel()


def open_of(session_id: str = "s", tokens: Sequence[int] = PROMPT, epoch: int = 1, k: int = 3, **more: Any) -> Open:
    sampling = more.pop("sampling", SamplingParams(temperature=0.0, ignore_eos=True))
    return Open(
        session_id, epoch, tuple(tokens), len(tokens), sampling, 1, RejectionMethod.COUPLED, DraftMethod.GUMBEL, 2 * k + 2, k, **more
    )


def sent_of(prefix: Sequence[int], n: int, block: Sequence[int] = (), session_id: str = "s") -> Sent:
    return Sent(session_id, len(prefix), prefix_hash(prefix), n, tuple(block))


def commit_of(prefix: Sequence[int], tokens: Sequence[int], session_id: str = "s") -> Commit:
    return Commit(session_id, len(prefix), prefix_hash(prefix), tuple(tokens))

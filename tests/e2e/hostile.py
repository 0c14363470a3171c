"""A draft service made for tests: it follows its sessions as a real one does and then says whatever the test wants.

It runs on the test's own event loop. `behave` is called after every Open and every Commit of a session, and what it yields goes out.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from specdec import wire
from specdec.hashing import prefix_hash
from specdec.runtime.channels import server_options
from specdec.terms import ModelInfo
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from specdec.vocabulary import Vocabulary

BEAT_S = 0.2


class HangUp(Exception):
    """Yielded by a behaviour: the stream ends here, with an error status when `code` is given."""

    def __init__(self, code: grpc.StatusCode | None = None) -> None:
        super().__init__("the behaviour ends the stream")
        self.code = code


@dataclass
class Held:
    """A session as the draft knows it. `truth` = all tokens, prompt included, that the target will decide; empty when nobody knows."""

    open: draft_pb2.Open
    tokens: list[int]
    truth: tuple[int, ...]
    others: dict[str, Held]  # all sessions of the stream, this one included
    memory: dict[str, Any] = field(default_factory=dict)  # for a behaviour's own use

    @property
    def k(self) -> int:
        return self.open.num_speculative_tokens

    def ahead(self, count: int) -> list[int]:
        """The next tokens as the target will decide them."""
        return list(self.truth[len(self.tokens) : len(self.tokens) + count])

    def proposal(self, tokens: Sequence[int], at: int | None = None, **changes: Any) -> draft_pb2.DraftEvent:
        """Continues the committed tokens, or the first `at` of them; `changes` replaces fields of the message."""
        length = len(self.tokens) if at is None else at
        fields = {
            "session_id": self.open.session_id,
            "epoch": self.open.epoch,
            "prefix_length": length,
            "prefix_hash": prefix_hash(self.tokens[:length]),
            "tokens": tokens,
            **changes,
        }
        return draft_pb2.DraftEvent(proposal=draft_pb2.Proposal(**fields))

    def resync(self) -> draft_pb2.DraftEvent:
        return draft_pb2.DraftEvent(resync=draft_pb2.Resync(session_id=self.open.session_id, epoch=self.open.epoch, have=1))

    def refused(self, retry_after_ms: int, reason: str = "no") -> draft_pb2.DraftEvent:
        fields = {"session_id": self.open.session_id, "epoch": self.open.epoch, "reason": reason, "retry_after_ms": retry_after_ms}
        return draft_pb2.DraftEvent(refused=draft_pb2.Refused(**fields))


Said = draft_pb2.DraftEvent | draft_pb2.DraftResponse | HangUp
Behaviour = Callable[[Held, random.Random], Iterable[Said]]


def distribution(ids: Sequence[int], probs: Sequence[float]) -> common_pb2.DraftDistribution:
    return common_pb2.DraftDistribution(ids=ids, probs=struct.pack(f"<{len(probs)}f", *probs))


def silent(held: Held, draw: random.Random) -> Iterable[Said]:
    return ()


def honest(held: Held, draw: random.Random) -> Iterable[Said]:
    """What a perfect draft says, as far as the truth is known."""
    if tokens := held.ahead(held.k + 1):
        yield held.proposal(tokens)


class HostileDraft(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self, words: Vocabulary, window: int = 1024, seed: int = 0) -> None:
        self.behave: Behaviour = silent
        self.mute = False  # no signs of life either
        self.truths: dict[tuple[int, ...], tuple[int, ...]] = {}  # prompt -> prompt and answer
        self.seen: Counter[str] = Counter()  # commands by kind, and streams
        self._draw = random.Random(seed)
        self._info = ModelInfo(
            model="hostile",
            vocab_size=words.size,
            vocabulary_fingerprint=words.fingerprint,
            eos_token_ids=words.eos_ids,
            max_model_len=window,
            boot_id="hostile",
            numerics_fingerprint="none",
            batch_invariant=False,
            dtype="none",
            kv_total_tokens=1 << 20,
            max_num_speculative_tokens=16,
            max_sessions=1 << 16,
        )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """host:port"""
        server = grpc.aio.server(options=server_options())
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)

    async def GetModelInfo(self, request: Any, context: Any) -> draft_pb2.DraftServiceGetModelInfoResponse:
        return draft_pb2.DraftServiceGetModelInfoResponse(info=wire.model_info_to_wire(self._info))

    async def Draft(self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:
        self.seen["streams"] += 1
        lock = asyncio.Lock()  # one writer at a time

        async def say(message: draft_pb2.DraftResponse) -> None:
            async with lock:
                await context.write(message)

        async def beat() -> None:
            while True:
                if not self.mute:
                    await say(draft_pb2.DraftResponse(load=draft_pb2.Load()))
                await asyncio.sleep(BEAT_S)

        beats = asyncio.create_task(beat())
        try:
            await self._converse(requests, say)
        except HangUp as end:
            if end.code is not None:
                await context.abort(end.code, "hostile")
        finally:
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)

    async def _converse(self, requests: AsyncIterator[draft_pb2.DraftRequest], say: Callable[[Any], Any]) -> None:
        sessions: dict[str, Held] = {}
        async for request in requests:
            for command in request.commands:
                held = self._follow(sessions, command)
                for said in self.behave(held, self._draw) if held is not None else ():
                    if isinstance(said, HangUp):
                        raise said
                    await say(said if isinstance(said, draft_pb2.DraftResponse) else draft_pb2.DraftResponse(events=[said]))

    def _follow(self, sessions: dict[str, Held], command: draft_pb2.DraftCommand) -> Held | None:
        """Keeps the committed tokens; the session when they have changed."""
        kind = command.WhichOneof("command")
        self.seen[str(kind)] += 1
        if kind == "open":
            opened = command.open
            tokens = list(opened.tokens)
            truth = self.truths.get(tuple(tokens[: opened.prompt_length]), ())
            sessions[opened.session_id] = Held(opened, tokens, truth, sessions)
            return sessions[opened.session_id]
        if kind == "close":
            sessions.pop(command.close.session_id, None)
        if kind == "commit" and (held := sessions.get(command.commit.session_id)) is not None:
            held.tokens[command.commit.prefix_length :] = command.commit.tokens
            return held
        return None

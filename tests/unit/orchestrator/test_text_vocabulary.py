"""F49: what ids mean is compared at every connection. The driver and its peers against servers in this process that are rolled from
one model to another behind the same address."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tokenizers import Tokenizer, decoders, models

from orchestrator import peers
from orchestrator import pools as membership
from orchestrator.driver import Driver
from orchestrator.observe import Observer
from orchestrator.settings import OrchestratorSettings
from specdec import terms, wire
from specdec.runtime.channels import server_options
from specdec.runtime.telemetry import Telemetry
from specdec.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from specdec.vocabulary import vocabulary
from tests.fakes_driver import model_info
from tests.waiting import until

pytestmark = pytest.mark.timeout(30)
TOKENS = ["a", "b", "c", "d"]


def model(path: Path, tokens: list[str], head: int = 4) -> terms.ModelInfo:
    """A model folder's words, as a server tells of them. `head` = rows of its output head, the tokenizer's ids and padding."""
    path.mkdir()
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(f'{{"vocab_size": {head}}}')
    words = vocabulary(path)
    return model_info(words.size, vocabulary_fingerprint=words.fingerprint)


@dataclass
class Server(target_pb2_grpc.TargetServiceServicer, draft_pb2_grpc.DraftServiceServicer):
    """Both pools behind one address: says its model and greets."""

    info: terms.ModelInfo
    asked: list[str] = field(default_factory=list)
    spoken_to: list[str] = field(default_factory=list)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        target = isinstance(request, target_pb2.TargetServiceGetModelInfoRequest)
        self.asked.append("target" if target else "draft")
        response = target_pb2.TargetServiceGetModelInfoResponse if target else draft_pb2.DraftServiceGetModelInfoResponse
        return response(info=wire.model_info_to_wire(self.info))

    async def Verify(self, requests: Any, context: Any) -> None:
        self.spoken_to.append("target")
        await context.write(wire.verify_response_to_wire((), beat=terms.TargetBeat(0, 0, 0, 100, 0, 1)))
        await context.read()
        await asyncio.sleep(60)

    async def Draft(self, requests: Any, context: Any) -> None:
        self.spoken_to.append("draft")
        await context.read()
        await asyncio.sleep(60)

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[int]:
        server = grpc.aio.server(options=server_options())
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        try:
            yield port
        finally:
            await server.stop(0)


def connected(driver: Driver) -> list[str]:
    return [pool.name for pool in driver.pools if pool.connected]


@contextlib.asynccontextmanager
async def driving(port: int, fingerprint: bytes) -> AsyncIterator[Driver]:
    address = (f"127.0.0.1:{port}",)
    settings = OrchestratorSettings(tokenizer=Path(), targets=address, drafts=address)
    driver = Driver(settings, fingerprint, Observer(Telemetry("orchestrator")))
    driver.run()
    try:
        yield driver
    finally:
        await driver.close()


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MISMATCH_BACKOFF_S", 0.02)
    monkeypatch.setattr(peers, "FIRST_BACKOFF_S", 0.02)


async def rolled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ours, then one of equal size with two ids swapped, then ours with a longer head: F48."""
    ours = model(tmp_path / "ours", TOKENS)
    swapped = model(tmp_path / "swapped", ["a", "c", "b", "d"])
    padded = model(tmp_path / "padded", TOKENS, head=128)
    assert ours.vocab_size == swapped.vocab_size == padded.vocab_size
    async with contextlib.AsyncExitStack() as stack:
        async with Server(ours).serving() as port:
            driver = await stack.enter_async_context(driving(port, ours.vocabulary_fingerprint))
            await until(lambda: connected(driver) == ["target", "draft"])
        await until(lambda: connected(driver) == [])
        stranger = Server(swapped)
        async with stranger.serving(port):
            await until(lambda: stranger.asked.count("target") > 2 and stranger.asked.count("draft") > 2)
            assert stranger.spoken_to == [] and connected(driver) == [] and not driver.draft_available
        async with Server(padded).serving(port):
            await until(lambda: connected(driver) == ["target", "draft"])
    reasons = [record.reason for record in caplog.records if record.message == "peer cannot be reached"]  # type: ignore[attr-defined]
    assert sorted(reason.split()[0] for reason in reasons if "vocabulary is not the tokenizer's" in reason) == ["draft", "target"]


async def test_F49_a_pool_that_is_rolled_to_other_words_is_not_spoken_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    await rolled(tmp_path, caplog)


async def test_F49_twin_words_are_compared_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, seen = membership.Pools.accept, set[str]()

    def once(self: membership.Pools, peer: peers.Peer, info: terms.ModelInfo) -> None:
        if peer.dialect.pool not in seen:
            seen.add(peer.dialect.pool)
            accept(self, peer, info)

    monkeypatch.setattr(membership.Pools, "accept", once)
    with pytest.raises((AssertionError, TimeoutError)):
        async with asyncio.timeout(0.6):
            await rolled(tmp_path, caplog)

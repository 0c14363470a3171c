"""The three services in the test's own process and event loop, over real gRPC: for tests that inject hundreds of faults or messages.

Signs of life and dialling are faster than in a process of their own (`hurried`), so that a lost peer costs tenths of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

import draft_service.__main__ as draft
import draft_service.servicer
import orchestrator.__main__
import orchestrator.peers
import target_service.__main__ as target
import target_service.servicer
from draft_service.settings import Settings as DraftSettings
from orchestrator.settings import OrchestratorSettings
from specdec.engine import EngineThread
from specdec.runtime import logs
from specdec.runtime.channels import server_options
from specdec.runtime.interceptor import CallInterceptor
from specdec.runtime.server import Runtime, Service
from specdec.runtime.telemetry import Telemetry
from target_service.settings import Settings as TargetSettings
from tests import scraped

BEAT_S, TICK_S, FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 0.075, 0.02, 0.1


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """A peer is silent after 0.3 s instead of 1 s and dialled again after at most 0.1 s instead of 2 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_service.servicer, "BEAT_S", BEAT_S)
        patch.setattr(draft_service.servicer, "BEAT_S", BEAT_S)
        patch.setattr(orchestrator.peers, "TICK_S", TICK_S)
        patch.setattr(orchestrator.peers, "FIRST_BACKOFF_S", FIRST_BACKOFF_S)
        patch.setattr(orchestrator.peers, "LAST_BACKOFF_S", LAST_BACKOFF_S)
        yield


@dataclass
class Hosted:
    """One service. `endpoint` is host:port."""

    role: str
    endpoint: str
    runtime: Runtime

    def metric(self, name: str) -> float:
        """Sum over all labels. Not on the event loop."""
        return scraped.total(self.runtime.telemetry.metrics_port, name)


@contextlib.asynccontextmanager
async def hosted(role: str, build: Callable[[Any, Runtime], Awaitable[Service]], settings: Any) -> AsyncIterator[Hosted]:
    logs.quiet_hang_ups()
    push_s = settings.otlp_metrics_ms / 1000
    telemetry = Telemetry(role, host="127.0.0.1", metrics_port=0, otlp_endpoint=settings.otlp_endpoint, push_s=push_s)
    runtime = Runtime(role, telemetry)
    server = grpc.aio.server(interceptors=[CallInterceptor(telemetry)], options=server_options())
    service = await build(settings, runtime)
    service.add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Hosted(role, f"127.0.0.1:{port}", runtime)
    finally:
        await server.stop(0)
        if service.close is not None:
            await service.close()
        await asyncio.to_thread(telemetry.close)
        assert not runtime.reason, runtime.reason


@dataclass
class Cluster:
    """Services of one model. `begin_orchestrator` adds one that talks to the given endpoints."""

    model: Path
    exit: contextlib.AsyncExitStack
    targets: list[Hosted] = field(default_factory=list)
    drafts: list[Hosted] = field(default_factory=list)
    orchestrators: list[Hosted] = field(default_factory=list)

    async def begin_target(self, **settings: Any) -> Hosted:
        thread = EngineThread("engine", time.monotonic)
        self.exit.callback(thread.close)
        complete = TargetSettings(model=self.model, **{"dtype": "float64", "self_test": False, "lease_ms": 500, **settings})
        entered = hosted("target", lambda settings, runtime: target.build(settings, runtime, thread), complete)
        self.targets.append(await self.exit.enter_async_context(entered))
        return self.targets[-1]

    async def begin_draft(self, **settings: Any) -> Hosted:
        complete = DraftSettings(**{"model": self.model, "dtype": "float64", "self_test": False, **settings})
        self.drafts.append(await self.exit.enter_async_context(hosted("draft", draft.build, complete)))
        return self.drafts[-1]

    async def begin_orchestrator(self, targets: Sequence[str], drafts: Sequence[str], **settings: Any) -> Hosted:
        complete = OrchestratorSettings(tokenizer=self.model, targets=tuple(targets), drafts=tuple(drafts), **settings)
        entered = hosted("orchestrator", orchestrator.__main__.build, complete)
        self.orchestrators.append(await self.exit.enter_async_context(entered))
        return self.orchestrators[-1]


@contextlib.asynccontextmanager
async def cluster(model: Path, targets: int = 1, drafts: int = 1, **target_settings: Any) -> AsyncIterator[Cluster]:
    async with contextlib.AsyncExitStack() as exit:
        made = Cluster(model, exit)
        for _ in range(targets):
            await made.begin_target(**target_settings)
        for _ in range(drafts):
            await made.begin_draft()
        yield made

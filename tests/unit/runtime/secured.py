"""A service in this process that listens as every service does: TLS, tokens, limits and the interceptor are the real ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specdec import terms, wire
from specdec.client import Client, Credentials
from specdec.errors import SpecdecError
from specdec.runtime.channels import server_options
from specdec.runtime.interceptor import CallInterceptor
from specdec.runtime.listening import Listening
from specdec.runtime.security import FrontSettings
from specdec.runtime.telemetry import Telemetry
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import generation_pb2_grpc

INFO = terms.ModelInfo(
    model="m",
    vocab_size=8,
    vocabulary_fingerprint=b"f" * 16,
    eos_token_ids=(),
    max_model_len=8,
    boot_id="b",
    numerics_fingerprint="n",
    batch_invariant=True,
    dtype="float64",
    kv_total_tokens=8,
    max_num_speculative_tokens=1,
    max_sessions=1,
)


@dataclass
class Secured(generation_pb2_grpc.GenerationServiceServicer):
    """`Generate` says one token for each time `more` is set."""

    listening: Listening
    telemetry: Telemetry
    port: int = 0
    calls: int = 0
    more: asyncio.Queue[bool] = field(default_factory=asyncio.Queue)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        self.calls += 1
        return pb.GetModelInfoResponse(info=wire.model_info_to_wire(INFO))

    async def GetMetrics(self, request: Any, context: Any) -> pb.GetMetricsResponse:
        self.calls += 1
        return pb.GetMetricsResponse(text=self.telemetry.for_clients().decode())

    async def Generate(self, request: Any, context: Any) -> None:
        self.calls += 1
        while await self.more.get():
            await context.write(pb.GenerateResponse(delta=pb.Delta(token_ids=[1], text="x")))

    async def ask(self, credentials: Credentials | None = None) -> SpecdecError | None:
        """What becomes of one call: None = answered."""
        async with Client(self.endpoint, credentials or Credentials()) as client:
            try:
                await client.get_model_info()
            except SpecdecError as error:
                return error
        return None

    async def healthy(self, channel: grpc.aio.Channel) -> bool:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


@contextlib.asynccontextmanager
async def serving(*, measured: bool = False, **settings: Any) -> AsyncIterator[Secured]:
    """`measured` = with a metrics port, which takes half a second to close."""
    telemetry = Telemetry("orchestrator", metrics_port=0 if measured else -1)
    listening = Listening(FrontSettings(**settings), telemetry)
    secured = Secured(listening, telemetry)
    server = grpc.aio.server(interceptors=[CallInterceptor(telemetry, guard=listening.guard)], options=server_options())
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(secured, server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    secured.port = listening.add_port(server, "127.0.0.1:0")
    await server.start()
    watching = asyncio.create_task(listening.watch())
    try:
        yield secured
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await server.stop(0)
        telemetry.close()

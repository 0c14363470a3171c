"""externalscaler.ExternalScaler, which KEDA calls, and specdec.v1.ScalingService, which the other orchestrators call: a plaintext port of
their own. Converts, calls, converts.

Values travel in whole thousandths of a replica: versions of KEDA that know no fractions read them as well.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from orchestrator.scaling.board import Board
from orchestrator.scaling.metadata import THOUSANDTHS, Wish, wish
from orchestrator.scaling.siblings import Siblings
from specdec import status
from specdec.errors import Overloaded, SpecdecError, Unavailable
from specdec.runtime.channels import server_options
from specdec.runtime.listening import joined
from specdec.v1 import externalscaler_pb2 as pb
from specdec.v1 import externalscaler_pb2_grpc, scaling_pb2, scaling_pb2_grpc

MAX_CALLS = 256  # at once
MAX_WATCHERS = 64  # open StreamIsActive calls among them
LOOK_S = 0.5  # how often a StreamIsActive call looks for a change
RETRY_MS = 1000
STOP_S = 0.5
Context = grpc.aio.ServicerContext[Any, Any]
Method = Callable[[Any, Any, Context], Awaitable[Any]]


def _told(method: Method) -> Method:
    """A fault that is raised becomes the call's status."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Context) -> Any:
        try:
            return await method(self, request, context)
        except SpecdecError as error:
            await status.abort(context, error)

    return call


class Scaler(externalscaler_pb2_grpc.ExternalScalerServicer):
    def __init__(self, board: Board, siblings: Siblings) -> None:
        self._board, self._siblings = board, siblings
        self._watchers = 0

    @_told
    async def IsActive(self, request: pb.ScaledObjectRef, context: Context) -> pb.IsActiveResponse:
        return pb.IsActiveResponse(result=await self._active(self._wish(request)))

    @_told
    async def StreamIsActive(self, request: pb.ScaledObjectRef, context: Context) -> None:
        """The caller ends it."""
        asked, told = self._wish(request), None
        if self._watchers >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} callers watch already (MAX_WATCHERS)", RETRY_MS)
        self._watchers += 1
        try:
            while True:
                if (active := await self._active(asked)) != told:
                    told = active
                    await context.write(pb.IsActiveResponse(result=active))
                await asyncio.sleep(LOOK_S)
        finally:
            self._watchers -= 1

    @_told
    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Context) -> pb.GetMetricSpecResponse:
        asked = self._wish(request)
        specs = [pb.MetricSpec(metric_name=asked.metric(signal), target_size=size) for signal, size in asked.thresholds.items()]
        return pb.GetMetricSpecResponse(metric_specs=specs)

    @_told
    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsResponse:
        asked = self._wish(request.scaled_object_ref)
        signal, load = asked.signal(request.metric_name), self._board.signals.load(asked.key)
        if load is None:
            raise Unavailable(f"no {asked.key.pool} of pool {asked.key.pool_name!r} speaks, though there are some: their load is unknown")
        value = pb.MetricValue(metric_name=request.metric_name, metric_value=round(THOUSANDTHS * load[signal]))
        return pb.GetMetricsResponse(metric_values=[value])

    def _wish(self, request: pb.ScaledObjectRef) -> Wish:
        return wish(dict(request.scaler_metadata), self._board.signals.pools)

    async def _active(self, asked: Wish) -> bool:
        elsewhere = await self._siblings.waiting()
        return self._board.active(asked.key, elsewhere.get(asked.key, 0))


class Waiting(scaling_pb2_grpc.ScalingServiceServicer):
    def __init__(self, board: Board) -> None:
        self._board = board

    async def GetWaiting(self, request: scaling_pb2.GetWaitingRequest, context: Context) -> scaling_pb2.GetWaitingResponse:
        pools = [
            scaling_pb2.PoolWaiting(pool=key.pool, pool_name=key.pool_name, waiting=count) for key, count in self._board.waiting().items()
        ]
        return scaling_pb2.GetWaitingResponse(orchestrator_id=self._board.orchestrator_id, pools=pools)


async def serve(host: str, port: int, board: Board, siblings: Siblings) -> tuple[grpc.aio.Server, int]:
    """Listens; the port it listens on comes back. `port` 0 = any free one. Raises Unavailable."""
    server = grpc.aio.server(options=server_options(), maximum_concurrent_rpcs=MAX_CALLS)
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(Scaler(board, siblings), server)
    scaling_pb2_grpc.add_ScalingServiceServicer_to_server(Waiting(board), server)
    try:
        bound = server.add_insecure_port(joined(host, port))
    except RuntimeError:
        raise Unavailable(f"cannot listen on {joined(host, port)} (SPECDEC_SCALER_PORT); is the port in use?") from None
    await server.start()
    return server, bound

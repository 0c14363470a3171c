"""The parts together: the board, and where a port for it is set the scaler's server and the questions to the other orchestrators."""

from __future__ import annotations

import asyncio
import logging

import grpc.aio

from orchestrator.driver import Driver
from orchestrator.scaling.board import Board
from orchestrator.scaling.front import STOP_S, serve
from orchestrator.scaling.siblings import Siblings
from orchestrator.settings import OrchestratorSettings
from specdec.runtime.telemetry import Telemetry

log = logging.getLogger(__name__)


class Scaling:
    def __init__(self, settings: OrchestratorSettings, driver: Driver, telemetry: Telemetry) -> None:
        self._settings = settings
        self._board = Board(driver, telemetry, settings.scaling_queue_ms)
        silent = telemetry.counter("specdec.scaling.silent")
        silent.add(0)
        self._siblings = Siblings(
            settings.peers,
            driver.orchestrator_id,
            poll_s=settings.discovery_poll_ms / 1000,
            keep_s=settings.discovery_keep_ms / 1000,
            failed=lambda kind: driver.discovery_failed("orchestrator", kind),
            silent=lambda: silent.add(1),
        )
        self._server: grpc.aio.Server | None = None
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Needs a running loop. Raises Unavailable when the port cannot be had."""
        self._looking = asyncio.create_task(self._board.run(), name="the pools' load")
        if self._settings.scaler_port < 0:
            return
        self._siblings.run()
        self._server, port = await serve(self._settings.host, self._settings.scaler_port, self._board, self._siblings)
        log.info("scaler listens", extra={"host": self._settings.host, "port": port})

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(STOP_S)
            await self._siblings.close()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

"""A peer and its connections, one after the other, without a server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orchestrator import peers
from orchestrator.peers import TARGET, Peer
from specdec import wire
from specdec.v1 import target_pb2
from tests.fakes_driver import model_info
from tests.unit.orchestrator.test_peers import BEAT, Ears
from tests.waiting import until


async def test_what_a_replica_said_before_it_was_dialled_again_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine hung and the process was started again: it may take its time for its first word."""

    class Slow:
        """The stream of one that greets late."""

        def __init__(self) -> None:
            self.greets = asyncio.Event()

        async def write(self, message: Any) -> None:
            pass

        async def read(self) -> Any:
            await self.greets.wait()
            self.greets.clear()
            return wire.verify_response_to_wire((), beat=BEAT)

        def cancel(self) -> None:
            pass

    async def info(stub: Any) -> target_pb2.TargetServiceGetModelInfoResponse:
        return target_pb2.TargetServiceGetModelInfoResponse(info=wire.model_info_to_wire(model_info()))

    monkeypatch.setattr(peers, "TICK_S", 0.01)
    call = Slow()
    peer = Peer("h:1", replace(TARGET, ask_info=info, open_stream=lambda stub: call), "o", Ears())
    peer.beat = replace(BEAT, running_step_ms=60_000)
    connection = asyncio.create_task(peer._connection())
    try:
        await asyncio.wait([connection], timeout=3 * peers.TICK_S)
        assert not connection.done() and peer.beat is None
        call.greets.set()
        await until(lambda: peer.connected)
        assert peer.beat == BEAT
    finally:
        connection.cancel()
        await asyncio.gather(connection, return_exceptions=True)

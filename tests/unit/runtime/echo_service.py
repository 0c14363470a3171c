"""A draft service whose one method does what the caller's name asks for."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from specdec.errors import EngineFault, InvalidRequest, Overloaded
from specdec.runtime import server
from specdec.runtime.server import Runtime, Service, serve
from specdec.runtime.settings import CommonSettings, setting
from specdec.runtime.trace import current_traceparent
from specdec.v1 import draft_pb2, draft_pb2_grpc


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    budget_tokens: int = setting(0, doc="milliseconds this fake takes to load")


class Echo(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        raise InvalidRequest("model", "there is none")

    async def Draft(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            what = request.orchestrator_id
            match what:
                case "invalid":
                    raise InvalidRequest("a.field", "a remedy")
                case "overload":
                    raise Overloaded("full", 5)
                case "defect":
                    raise ZeroDivisionError
                case "cancel-inside":
                    raise asyncio.CancelledError
                case "trace":
                    yield said(current_traceparent.get())
                case "slow":
                    for _ in range(3):
                        await asyncio.sleep(0.4)
                        yield said(what)
                case "late-fault":
                    yield said(what)
                    await asyncio.sleep(1.0)
                    raise InvalidRequest("a.field", "a remedy")
                case "hang" | "wake" | "break" | "unready":
                    state.add(what)
                    yield said(what)
                case "for-ever":
                    yield said(what)
                    await asyncio.sleep(3600)
                case "die":
                    self._runtime.fail("the engine is gone")
                case _:
                    yield said(what[:10])


state: set[str] = set()


def alive() -> bool:
    if "break" in state:
        raise EngineFault("the engine is broken")
    return "hang" not in state or "wake" in state


def said(text: str) -> Any:
    return draft_pb2.DraftResponse(events=[draft_pb2.DraftEvent(refused=draft_pb2.Refused(reason=text))])


async def build(settings: Settings, runtime: Runtime) -> Service:
    if settings.budget_tokens:
        await asyncio.sleep(settings.budget_tokens / 1000)
    return Service(
        add=lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(Echo(runtime), server),
        draining=lambda: print(f"draining {time.monotonic():.3f}", file=sys.stderr, flush=True),
        alive=alive,
        ready=lambda: "unready" not in state,
    )


if __name__ == "__main__":
    server.MAX_CONCURRENT_CALLS = int(os.environ.get("ECHO_CALLS", "64"))
    sys.exit(serve("draft", Settings, build))

"""What the interceptor makes of a handler's end, without a network."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc.aio
import pytest

from specdec.runtime.interceptor import About, CallInterceptor
from specdec.runtime.telemetry import Telemetry


class Context:
    """A call that is over, seen from a handler."""

    def code(self) -> Any:
        return None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def add_done_callback(self, callback: Any) -> None:
        callback(self)

    def cancelled(self) -> bool:
        return False  # the news may come later than the failed write

    def done(self) -> bool:
        return False

    async def abort(self, code: Any, *_: Any) -> None:
        raise grpc.aio.InternalError("Failed execute_batch")


class Living(Context):
    """One that is not."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def code(self) -> Any:
        return grpc.StatusCode.INTERNAL

    async def abort(self, code: Any, *_: Any) -> None:
        self.told.append(code)
        raise grpc.aio.AbortError("Locally aborted.")


async def test_a_write_that_fails_is_the_caller_hanging_up(caplog: pytest.LogCaptureFixture) -> None:
    interceptor = CallInterceptor(Telemetry("orchestrator"))
    with caplog.at_level(logging.INFO), pytest.raises(asyncio.CancelledError):
        async with interceptor._around(Context(), About("m", "")):  # type: ignore[arg-type]
            raise grpc.aio.InternalError("Failed execute_batch")
    assert not caplog.records  # no defect, no alarm


async def test_a_write_that_fails_while_the_call_lives_is_answered() -> None:
    """Else its caller would wait for ever."""
    context, telemetry = Living(), Telemetry("orchestrator")
    with pytest.raises(grpc.aio.AbortError):
        async with CallInterceptor(telemetry)._around(context, About("m", "")):  # type: ignore[arg-type]
            raise grpc.aio.InternalError("Failed grpc_call_start_batch")
    assert context.told == [grpc.StatusCode.INTERNAL]
    labels = telemetry.histogram("rpc.server.call.duration").read().samples[0].labels
    assert labels["rpc_status_code"] == labels["error_type"] == "INTERNAL"

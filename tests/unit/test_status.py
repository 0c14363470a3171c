"""Errors ⇄ status: every class there and back, through a real call as well."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from specdec import errors, status

pytestmark = pytest.mark.unit

SAMPLES = [
    errors.InvalidRequest("sampling.top_p", "must be in (0, 1]"),
    errors.Unsupported("sampling.grammar"),
    errors.Unauthenticated("authorization: this service asks for a token"),
    errors.PermissionDenied("certificate: not among"),
    errors.NotFound("model 'x' is not served here"),
    errors.AlreadyExists("request 'x' is live"),
    errors.Overloaded("64 requests are waiting", 250),
    errors.Mismatch("vocabularies differ"),
    errors.Unavailable("no target"),
    errors.Unavailable("no target; 17 tokens were decided", 250, 17),
    errors.Unavailable("no target; nothing was decided", 1000, 0),
    errors.DeadlineExceeded("after 3 tokens"),
    errors.InternalFault("boom"),
]


def same(one: errors.SpecdecError, other: errors.SpecdecError) -> bool:
    return (type(one), str(one), vars(one)) == (type(other), str(other), vars(other))


@pytest.mark.parametrize("error", SAMPLES, ids=lambda e: type(e).__name__)
def test_there_and_back(error: errors.SpecdecError) -> None:
    full = status.status_of(error)
    assert same(status.error_of(full.code, full.message, full.SerializeToString()), error)


def test_every_error_class_has_a_code() -> None:
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.SpecdecError) and kind is not errors.SpecdecError:
            assert any(parent in status.TABLE for parent in kind.__mro__), kind
    assert {type(e) for e in SAMPLES} == set(status.TABLE)


def test_the_table_reads_both_ways() -> None:
    codes = [code for code, _ in status.TABLE.values()]
    assert len(set(codes)) == len(codes)
    assert status.code_of(errors.NonFinite("row 3")) is grpc.StatusCode.INTERNAL
    assert status.code_of(ValueError("?")) is grpc.StatusCode.INTERNAL
    assert isinstance(status.error_of(grpc.StatusCode.DATA_LOSS, "x"), errors.InternalFault)
    assert isinstance(status.error_of(99, "x"), errors.InternalFault)


def test_without_details() -> None:
    error = status.error_of(grpc.StatusCode.INVALID_ARGUMENT, "bad")
    assert isinstance(error, errors.InvalidRequest) and error.remedy == "bad"
    error = status.error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert isinstance(error, errors.Overloaded) and error.retry_after_ms == status.DEFAULT_RETRY_MS


def test_long_messages_are_cut() -> None:
    for error in LONG:
        full = status.status_of(error)
        assert len(full.message) < 1000 and full.message.endswith("…")
        assert 4 * full.ByteSize() // 3 + status.MAX_ENCODED < 8192 - 1024  # base64, beside the message itself
    assert status.cut("é" * 300) == "é" * 300


LONG = [errors.InvalidRequest("f" * 3000, text * 20000) for text in ("x", "é", "%", "\n", "😀")]


@pytest.fixture
async def stopping() -> AsyncIterator[contextlib.AsyncExitStack]:
    async with contextlib.AsyncExitStack() as stack:
        yield stack


async def test_through_a_call(stopping: contextlib.AsyncExitStack) -> None:
    """The client sees the very class, field and delay; no text is so long or so odd that it replaces the status."""

    raised: list[BaseException] = []

    async def unary(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await status.abort(context, raised[-1])

    async def stream(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        yield b"one"
        await status.abort(context, raised[-1])

    server = grpc.aio.server()
    handlers = {"Unary": grpc.unary_unary_rpc_method_handler(unary), "Stream": grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stopping.push_async_callback(server.stop, 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for error in [*SAMPLES, *LONG]:
            raised.append(error)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/t.T/Unary")(b"", timeout=5)
            assert type(status.error_from_rpc(caught.value)) is type(error)
            got = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for item in channel.unary_stream("/t.T/Stream")(b"", timeout=5):
                    got.append(item)
            assert got == [b"one"]
            rebuilt = status.error_from_rpc(caught.value)
            assert same(rebuilt, error) or len(str(error)) > 1000


def test_a_failed_call_has_its_error_type() -> None:
    """As the semantic conventions have it: a refusal is no failure of the server's, and a failure for whoever called."""
    for code, served, failed in (
        ("OK", True, False),
        ("OK", False, False),
        ("INVALID_ARGUMENT", True, False),
        ("INVALID_ARGUMENT", False, True),
        ("CANCELLED", True, False),
        ("INTERNAL", True, True),
        ("UNAVAILABLE", False, True),
    ):
        labels = {"rpc.system.name": "grpc", "rpc.method": "s/M", "rpc.status_code": code}
        assert status.rpc_labels("s/M", code, served=served) == labels | ({"error.type": code} if failed else {}), (code, served)
    assert {"OK", *status.SERVER_FAULTS} < {code.name for code in grpc.StatusCode}


def test_a_call_that_a_server_under_a_surge_ended_may_be_made_again() -> None:
    error = status.error_of(grpc.StatusCode.CANCELLED, "CANCELLED")
    assert isinstance(error, errors.Unavailable) and "come back" in str(error)

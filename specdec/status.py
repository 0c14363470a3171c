"""Errors ⇄ gRPC status: one table, read both ways. Rich details travel as google.rpc.Status (grpcio-status).

A fault raised in a servicer reaches the caller as the same class with the same field and remedy, whatever hops lie between.
Messages are cut to MAX_MESSAGE characters and MAX_ENCODED bytes: a status travels in headers, and from 8 KB on a peer may, from 16 KB on
it does, replace it by RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2, descriptor_pool
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from specdec import errors

MAX_MESSAGE = 999  # characters
MAX_ENCODED = 2000  # bytes as gRPC writes them: three for each byte that is not printable ASCII; the details carry the text again, twice
DEFAULT_RETRY_MS = 1000  # of an Overloaded without RetryInfo
RESUMABLE, DOMAIN, OUTPUT_TOKENS = "RESUMABLE", "specdec.v1", "output_tokens"  # of the ErrorInfo that tells how much of an answer there is
Unreadable = DecodeError  # what reading raises for bytes that are not the message they should be
OTHER_METHOD = "_OTHER"  # the semantic conventions' word for a method that nobody knows
# What is a server's own failure, by the semantic conventions for gRPC; to a caller everything but OK is a failure.
SERVER_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
_COUNT = re.compile(r"[0-9]{1,10}")
_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(slots=True)
class _Details:
    """What travels beside code and message: BadRequest, RetryInfo, ErrorInfo."""

    violations: list[tuple[str, str]] = field(default_factory=list)
    retry_after_ms: int | None = None
    output_tokens: int | None = None


_Rebuild = Callable[[str, _Details], errors.SpecdecError]


def _named(kind: type[errors.InvalidRequest] | type[errors.Unsupported]) -> _Rebuild:
    def rebuild(message: str, details: _Details) -> errors.SpecdecError:
        named, remedy = details.violations[0] if details.violations else ("request", message)
        return kind(named, remedy)

    return rebuild


def _plain(kind: type[errors.SpecdecError]) -> _Rebuild:
    return lambda message, details: kind(message)


def _overloaded(message: str, details: _Details) -> errors.SpecdecError:
    return errors.Overloaded(message, DEFAULT_RETRY_MS if details.retry_after_ms is None else details.retry_after_ms)


def _unavailable(message: str, details: _Details) -> errors.SpecdecError:
    return errors.Unavailable(message, details.retry_after_ms, details.output_tokens)


# class → (code, how a caller rebuilds it). Classes under InternalFault travel as INTERNAL.
TABLE: dict[type[errors.SpecdecError], tuple[grpc.StatusCode, _Rebuild]] = {
    errors.InvalidRequest: (grpc.StatusCode.INVALID_ARGUMENT, _named(errors.InvalidRequest)),
    errors.Unsupported: (grpc.StatusCode.UNIMPLEMENTED, _named(errors.Unsupported)),
    errors.Unauthenticated: (grpc.StatusCode.UNAUTHENTICATED, _plain(errors.Unauthenticated)),
    errors.PermissionDenied: (grpc.StatusCode.PERMISSION_DENIED, _plain(errors.PermissionDenied)),
    errors.NotFound: (grpc.StatusCode.NOT_FOUND, _plain(errors.NotFound)),
    errors.AlreadyExists: (grpc.StatusCode.ALREADY_EXISTS, _plain(errors.AlreadyExists)),
    errors.Overloaded: (grpc.StatusCode.RESOURCE_EXHAUSTED, _overloaded),
    errors.Mismatch: (grpc.StatusCode.FAILED_PRECONDITION, _plain(errors.Mismatch)),
    errors.Unavailable: (grpc.StatusCode.UNAVAILABLE, _unavailable),
    errors.DeadlineExceeded: (grpc.StatusCode.DEADLINE_EXCEEDED, _plain(errors.DeadlineExceeded)),
    errors.InternalFault: (grpc.StatusCode.INTERNAL, _plain(errors.InternalFault)),
}
_BY_CODE = {code: rebuild for code, rebuild in TABLE.values()}
# gRPC itself reports an argument past the window or a message past the limit this way.
_BY_CODE[grpc.StatusCode.OUT_OF_RANGE] = _named(errors.InvalidRequest)
# A call that its caller did not cancel: a server under a surge of calls ends those that it has not looked at.
_BY_CODE[grpc.StatusCode.CANCELLED] = lambda message, details: _unavailable(f"the server ended the call ({message}); come back", details)
CODES = {code.value[0]: code for code in grpc.StatusCode}  # number → code


def code_of(error: BaseException) -> grpc.StatusCode:
    """The status of a fault. Anything that is not one of ours is INTERNAL: a defect, whatever its class."""
    for kind in type(error).__mro__:
        if kind in TABLE:
            return TABLE[kind][0]
    return grpc.StatusCode.INTERNAL


def status_of(error: BaseException) -> status_pb2.Status:
    """The full status: code, cut message, BadRequest for a named field, RetryInfo where it is known when to come back, ErrorInfo with
    the number of tokens for an answer that can be resumed."""
    message = str(error) if isinstance(error, errors.SpecdecError) else f"{type(error).__name__}: {error}"
    status = status_pb2.Status(code=code_of(error).value[0], message=cut(message))
    if isinstance(error, errors.InvalidRequest | errors.Unsupported):
        violation = error_details_pb2.BadRequest.FieldViolation(field=cut(error.field), description=cut(error.remedy))
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.Overloaded | errors.Unavailable) and error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        _attach(status, retry)
    if isinstance(error, errors.Unavailable) and error.output_tokens is not None:
        told = {OUTPUT_TOKENS: str(error.output_tokens)}
        _attach(status, error_details_pb2.ErrorInfo(reason=RESUMABLE, domain=DOMAIN, metadata=told))
    return status


def cut(message: str) -> str:
    size = 0
    for index, character in enumerate(message):
        size += sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in character.encode("utf-8", "replace"))
        if index >= MAX_MESSAGE or size > MAX_ENCODED:
            return message[: max(0, index - 8)] + "…"
    return message


def error_of(code: grpc.StatusCode | int, message: str, details: bytes | None = None) -> errors.SpecdecError:
    """The fault behind a status; `details` = the serialised google.rpc.Status, when there is one."""
    told = _Details()
    for detail in status_pb2.Status.FromString(details).details if details else ():
        bad, retry, info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo(), error_details_pb2.ErrorInfo()
        if detail.Unpack(bad):
            told.violations += [(v.field, v.description) for v in bad.field_violations]
        elif detail.Unpack(retry):
            told.retry_after_ms = retry.retry_delay.ToMilliseconds()
        elif detail.Unpack(info) and info.reason == RESUMABLE and _COUNT.fullmatch(info.metadata.get(OUTPUT_TOKENS, "")):
            told.output_tokens = int(info.metadata[OUTPUT_TOKENS])
    known = CODES.get(code, grpc.StatusCode.UNKNOWN) if isinstance(code, int) else code
    rebuild = _BY_CODE.get(known)
    if rebuild is None:
        return errors.InternalFault(f"{known.name}: {message}")
    return rebuild(message, told)


def error_from_rpc(failure: grpc.RpcError) -> errors.SpecdecError:
    """The fault behind a failed call, from either gRPC API."""
    call = cast(Any, failure)
    trailing = call.trailing_metadata() or ()
    details = next((value for key, value in trailing if key == _DETAILS_KEY and isinstance(value, bytes)), None)
    return error_of(call.code(), call.details() or "", details)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """Ends a call with the status of `error`. A cancelled call is not answered: the cancellation goes on."""
    if isinstance(error, asyncio.CancelledError):
        raise error
    status = rpc_status.to_status(status_of(error))
    # grpc.aio has no abort_with_status: the same three pieces, by hand.
    await context.abort(status.code, status.details or "", tuple(status.trailing_metadata or ()))
    raise AssertionError("abort returned")  # pragma: no cover - grpc raises


def _attach(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def rpc_labels(method: str, code: str, *, served: bool) -> dict[str, str | int | bool]:
    """Of a call's metric, by the semantic conventions. `code` = the status' name, `served`: here, not elsewhere for us."""
    labels: dict[str, str | int | bool] = {"rpc.system.name": "grpc", "rpc.method": method, "rpc.status_code": code}
    return labels | {"error.type": code} if (code in SERVER_FAULTS if served else code != "OK") else labels


@functools.lru_cache(256)
def method_label(method: str) -> str:
    """`service/method` for a metric. While a process starts or ends every name that a caller makes up gets an answer, and none of them
    may become a label."""
    try:
        descriptor_pool.Default().FindMethodByName(method.replace("/", "."))
    except KeyError:
        return OTHER_METHOD
    return method

"""A client that speaks in bytes, and neighbours whose streams must not notice what it says.

Everything here is the blocking gRPC API: what a test sends was not built by the service's own client.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from specdec import status
from specdec.runtime.channels import MAX_MESSAGE_BYTES
from specdec.v1 import generation_pb2 as pb

TIMEOUT_S = 60.0
OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", -1)]


# ---------------------------------------------------------------- bytes on the wire (protobuf encoding, by hand)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers take ten bytes
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def num(field_number: int, value: int) -> bytes:
    return varint(field_number << 3) + varint(value)


def fixed64(field_number: int, value: int) -> bytes:
    return varint(field_number << 3 | 1) + struct.pack("<Q", value)


def double(field_number: int, value: float) -> bytes:
    return varint(field_number << 3 | 1) + struct.pack("<d", value)


def sub(field_number: int, content: bytes) -> bytes:
    """A string, a message or packed numbers."""
    return varint(field_number << 3 | 2) + varint(len(content)) + content


def packed(field_number: int, values: Iterable[int]) -> bytes:
    return sub(field_number, b"".join(map(varint, values)))


def token_prompt(ids: Iterable[int]) -> bytes:
    """GenerateRequest.token_ids"""
    return sub(2, packed(1, ids))


# ---------------------------------------------------------------- one call


@dataclass
class Reply:
    """What came over the wire. `field` = what a BadRequest names, else the words before the first colon."""

    started: pb.Started | None = None
    finished: pb.Finished | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    pieces: list[tuple[int, int]] = field(default_factory=list)  # after each delta: ids and characters so far
    code: str = "OK"
    details: str = ""
    field: str = ""

    def take(self, message: pb.GenerateResponse) -> None:
        kind = message.WhichOneof("event")
        if kind == "started":
            assert self.started is None
            self.started = message.started
        elif kind == "finished":
            self.finished = message.finished
        else:
            self._take_delta(message.delta)

    def _take_delta(self, delta: pb.Delta) -> None:
        assert self.started is not None and self.finished is None
        assert len(delta.logprobs) in (0, len(delta.token_ids))  # F35: in every message
        assert len(delta.origins) == len(delta.token_ids)
        assert not (delta.prompt_logprobs and self.pieces), "log-probabilities of the prompt belong to the first delta"
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.origins += delta.origins
        self.prompt_logprobs += delta.prompt_logprobs
        self.pieces.append((len(self.token_ids), len(self.text)))

    def failed(self, failure: grpc.RpcError) -> None:
        code: Any = failure
        error = status.error_from_rpc(failure)
        self.code, self.details = code.code().name, code.details() or ""
        self.field = getattr(error, "field", self.details.partition(":")[0])


class RawClient:
    def __init__(self, endpoint: str, options: Sequence[tuple[str, int]] = ()) -> None:
        self._channel = grpc.insecure_channel(endpoint, options=[*OPTIONS, *options])

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def generate(self, request: bytes | pb.GenerateRequest, timeout_s: float = TIMEOUT_S) -> Reply:
        """The answer of a request with one."""
        (reply,) = self.answers(request, timeout_s)
        return reply

    def answers(self, request: bytes | pb.GenerateRequest, timeout_s: float = TIMEOUT_S) -> list[Reply]:
        """By index. A failure is told to each of them."""
        replies: collections.defaultdict[int, Reply] = collections.defaultdict(Reply)
        try:
            for message in self.stream(request, timeout_s):
                replies[message.index].take(message)
        except grpc.RpcError as failure:
            for reply in list(replies.values()) or [replies[0]]:
                reply.failed(failure)
        assert set(replies) == set(range(len(replies)))
        return [replies[i] for i in sorted(replies)]

    def stream(self, request: bytes | pb.GenerateRequest, timeout_s: float = TIMEOUT_S) -> Any:
        content = request if isinstance(request, bytes) else request.SerializeToString()
        method = self._channel.unary_stream("/specdec.v1.GenerationService/Generate", lambda raw: raw, pb.GenerateResponse.FromString)
        return method(content, timeout=timeout_s)

    def unary(self, name: str, request: Any, reply_type: Any) -> Any:
        method = self._channel.unary_unary(f"/specdec.v1.GenerationService/{name}", lambda m: m.SerializeToString(), reply_type.FromString)
        return method(request, timeout=TIMEOUT_S)

    def conversation(self, method: str, reply_type: Any) -> Conversation:
        return Conversation(self._channel, method, reply_type)


class Conversation:
    """A bidirectional stream: `say` raw bytes or messages, `hear` what comes; `end` gives the status."""

    def __init__(self, channel: grpc.Channel, method: str, reply_type: Any) -> None:
        self._said: queue.Queue[bytes | None] = queue.Queue()
        encode = lambda m: m if isinstance(m, bytes) else m.SerializeToString()  # noqa: E731
        stream = channel.stream_stream(method, encode, reply_type.FromString)
        self._call: Any = stream(iter(self._said.get, None), timeout=TIMEOUT_S)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self._said.put(None)
        self._call.cancel()

    def say(self, *messages: Any) -> None:
        for message in messages:
            self._said.put(message)

    def hear(self) -> Any:
        """The next message. Raises grpc.RpcError or StopIteration at the end."""
        return next(self._call)

    def close(self) -> None:
        self._said.put(None)

    def end(self) -> tuple[str, str]:
        """Code and details, after everything else was read."""
        with contextlib.suppress(grpc.RpcError):
            for _ in self._call:
                pass
        return self._call.code().name, self._call.details() or ""


# ---------------------------------------------------------------- neighbours


class Neighbours:
    """Streams that run all the time, one after the other per lane, each compared with what it must be."""

    def __init__(self, endpoint: str, requests: Sequence[pb.GenerateRequest], wanted: Sequence[Reply]) -> None:
        self._endpoint, self._work = endpoint, list(zip(requests, wanted, strict=True))
        self._stop = threading.Event()
        self.tokens = 0
        self.complaints: list[str] = []
        self._threads = [threading.Thread(target=self._lane, args=work, daemon=True) for work in self._work]

    def __enter__(self) -> Neighbours:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def _lane(self, request: pb.GenerateRequest, want: Reply) -> None:
        with RawClient(self._endpoint) as client:
            while not self._stop.is_set():
                got = Reply()
                try:
                    for message in client.stream(request):
                        got.take(message)
                        self.tokens += len(message.delta.token_ids)
                except grpc.RpcError as failure:
                    got.failed(failure)
                if (got.code, got.token_ids, got.text) != ("OK", want.token_ids, want.text):
                    self.complaints.append(f"{got.code} {got.details} {got.token_ids[:20]} instead of {want.token_ids[:20]}")

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Around a test: the streams went on meanwhile, and were right."""
        yield
        before, deadline = self.tokens, time.monotonic() + 10
        while self.tokens < before + 10:
            assert time.monotonic() < deadline, "the neighbours stand still"
            time.sleep(0.005)
        assert not self.complaints, self.complaints

"""The messages of an orchestrator to a target, by hand."""

from __future__ import annotations

import secrets
from typing import Any

from specdec.v1 import common_pb2, target_pb2
from tests.e2e.raw import Conversation

PROMPT = [10, 11, 12]
COMPLETE = {"temperature": 0.0, "max_tokens": 20}


def hello() -> target_pb2.VerifyRequest:
    """Of an orchestrator that nobody has seen before: sessions outlive their stream."""
    return target_pb2.VerifyRequest(hello=target_pb2.Hello(orchestrator_id=secrets.token_hex(8)))


def item(
    tokens: list[int] | None = None, begin: dict[str, Any] | None = None, sampling: dict[str, Any] | None = None, **fields: Any
) -> Any:
    """A good first Step, with changes."""
    params = common_pb2.SamplingParams(**{**COMPLETE, **(sampling or {})})
    head = target_pb2.Begin(**{"prompt_length": 3, "sampling": params, "seed": 1, **(begin or {})})
    step = {"session_id": "s", "epoch": 1, "round": 1, "remaining_ms": 20_000, "begin": head, **fields}
    return target_pb2.VerifyItem(step=target_pb2.Step(tokens=PROMPT if tokens is None else tokens, **step))


def answer(stream: Conversation, *items: Any) -> Any:
    """The next answer after a message with these items; beats are passed over."""
    stream.say(target_pb2.VerifyRequest(items=items))
    while True:
        if answers := stream.hear().answers:
            (only,) = answers
            return only

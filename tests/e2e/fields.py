"""For the tests of every field: one request with one field changed, what must become of it, and the slow way to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.terms import SamplingParams
from specdec.v1 import common_pb2
from specdec.v1 import generation_pb2 as pb
from tests.e2e.oracle import Oracle
from tests.e2e.raw import RawClient, Reply

PROMPT = [10, 11, 12, 13, 11, 10]
SEED, LENGTH = 11, 24
STOP, LENGTH_REACHED = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
ORACLE = Oracle(PROMPT)


def greedy(**fields: Any) -> tuple[dict[str, Any], list[int]]:
    """The parameters at temperature 0, and what they must give."""
    told = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, **fields}
    return told, ORACLE.greedy(SamplingParams(**{k: tuple(v) if isinstance(v, list) else v for k, v in told.items()}))


Case = Callable[[RawClient], None]


def ask(client: RawClient, sampling: dict[str, Any] | None = None, **fields: Any) -> Reply:
    params = {"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True, **(sampling or {})}
    if not {"text", "messages", "token_ids"} & fields.keys():
        fields["token_ids"] = pb.TokenIds(ids=PROMPT)
    return client.generate(pb.GenerateRequest(**{"seed": SEED, "sampling": common_pb2.SamplingParams(**params), **fields}))


def good(reply: Reply) -> Any:
    assert (reply.code, reply.details) == ("OK", "")
    return reply.finished


def good_answer(reply: Reply) -> Reply:
    good(reply)
    return reply


def refused(reply: Reply, field: str, code: str = "UNIMPLEMENTED") -> None:
    assert (reply.code, reply.field) == (code, field), reply.details
    assert reply.started is None

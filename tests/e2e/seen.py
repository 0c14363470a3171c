"""Requests to one service as field dictionaries, and what a client sees of the answers: plain values that can be compared and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.e2e.parameters import Fields, request
from tests.e2e.raw import RawClient, Reply

AT_ONCE = 8
Seen = list[Fields]  # one per answer


def ask_all(questions: Sequence[tuple[RawClient, Mapping[str, Any]]], at_once: int = AT_ONCE) -> list[list[Reply]]:
    """Replies, one list per request, in the order of the requests."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda question: question[0].answers(request(question[1])), questions))


def seen(fields: Mapping[str, Any], replies: Sequence[Reply]) -> Seen:
    """Everything but how speculation went. Tokens behind a stop string are as many as happened to be decided."""
    return [_seen(fields, reply) for reply in replies]


def _seen(fields: Mapping[str, Any], reply: Reply) -> Fields:
    told: Fields = {"code": reply.code, "details": reply.details, "ids": reply.token_ids, "text": reply.text}
    told |= {"logprobs": _logprobs(reply.logprobs), "prompt_logprobs": _logprobs(reply.prompt_logprobs)}
    if reply.started is not None:
        told |= {"seed": reply.started.seed, "prompt_tokens": reply.started.prompt_tokens}
    if (done := reply.finished) is not None:
        told |= {"finish_reason": done.finish_reason, "stop_reason": done.stop_reason}
        told |= {"usage": (done.usage.prompt_tokens, done.usage.completion_tokens)}
        if done.stop_reason not in fields.get("stop", ()):
            told["discarded"] = done.usage.discarded_tokens
        settings = type(done.settings).FromString(done.settings.SerializeToString())
        settings.ClearField("num_speculative_tokens")
        told["settings"] = str(settings)
    return told


def _logprobs(entries: Sequence[Any]) -> list[Any]:
    return [(entry.logprob, tuple(entry.top_ids), tuple(entry.top_logprobs)) for entry in entries]


def without_settings(answers: Seen) -> Seen:
    """The answers themselves."""
    return [{name: value for name, value in answer.items() if name != "settings"} for answer in answers]

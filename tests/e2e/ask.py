"""Many requests to a running service, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.client import Client, Completion, Prompt
from specdec.terms import SamplingParams

TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Ask:
    prompt: Prompt
    sampling: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)


def answers(endpoint: str, asks: Sequence[Ask], at_once: int = 8) -> list[Completion]:
    """Answers in the order of the questions."""
    return asyncio.run(gather_answers(endpoint, asks, at_once))


async def gather_answers(endpoint: str, asks: Sequence[Ask], at_once: int = 8) -> list[Completion]:
    """The same inside a running event loop."""
    limit = asyncio.Semaphore(at_once)
    async with Client(endpoint) as client:

        async def one(ask: Ask) -> Completion:
            async with limit:
                return await client.complete(ask.prompt, ask.sampling, timeout_s=TIMEOUT_S, **ask.options)

        return await asyncio.gather(*map(one, asks))


def same(got: Completion, want: Completion) -> None:
    """Everything a client sees of the text is equal, bit for bit."""
    assert got.token_ids == want.token_ids
    assert got.logprobs == want.logprobs
    assert got.text == want.text
    assert got.finished.finish_reason == want.finished.finish_reason
    assert got.finished.usage.completion_tokens == want.finished.usage.completion_tokens == len(want.token_ids)

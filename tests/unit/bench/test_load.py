"""One turn of questions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from specdec.bench.load import Question, ask_all
from specdec.client import Event
from specdec.errors import InvalidRequest
from specdec.terms import SamplingParams


class Refusing:
    """Takes 50 ms for each no."""

    async def generate(self, prompt: Any, sampling: SamplingParams, **options: Any) -> AsyncGenerator[Event]:
        await asyncio.sleep(0.05)
        raise InvalidRequest("prompt", "no")
        yield


async def test_what_a_failed_answer_took_counts_from_its_own_question() -> None:
    client: Any = Refusing()
    questions = [Question("all", "x", seed) for seed in range(4)]
    asked = await ask_all(client, questions, SamplingParams(), {}, 1, tolerant=True)
    assert sum(answer.total_s for answer in asked.answers) <= asked.seconds, "one stream: they are one after the other"

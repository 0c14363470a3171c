"""Grammars are compiled beside the engine: what waits for that is bounded by the sessions that are there."""

from __future__ import annotations

import asyncio

from specdec.sampling import Constraint
from specdec.terms import Close, Grammar, GrammarForm, SamplingParams
from target_service.plan import Compile
from tests.unit.target.harness import first_step
from tests.unit.target.test_own_rounds_loop import looping


async def test_grammars_of_sessions_that_are_gone_are_not_compiled() -> None:
    """Clients that leave would fill the compiler's queue, and whoever comes next waits behind all that nobody wants."""
    begun, ended = list[str](), list[str]()

    async def compile_grammar(order: Compile) -> Constraint:
        begun.append(order.key[1])
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(order.key[1])
            raise
        raise AssertionError

    async with looping(1024) as (_, loop):
        loop._compile_grammar = compile_grammar
        stream, _ = loop.attach("orch")
        for number in range(20):
            params = SamplingParams(temperature=0.0, max_tokens=5, grammar=Grammar(GrammarForm.REGEX, "a" * (number + 1)))
            loop.submit(stream, [first_step([1, 2], session=str(number), sampling=params)])
            async with asyncio.timeout(5):
                while str(number) not in begun or len(ended) < number:
                    await asyncio.sleep(0.001)
            assert len(loop._compiling) == 1
            loop.submit(stream, [Close(str(number), 1)])

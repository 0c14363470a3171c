"""The client against a scripted orchestrator."""

from __future__ import annotations

import contextlib
import time

import pytest

from specdec.client import Client, Delta, Finished, Started, SyncClient
from specdec.client.answers import completions_of
from specdec.errors import InvalidRequest, Overloaded, ProtocolFault, Unavailable
from specdec.seeds import answer_seed
from specdec.terms import FinishReason, Origin, RejectionMethod, SamplingParams, TokenLogprobs

pytestmark = pytest.mark.unit


async def test_events(endpoint: str) -> None:
    async with Client(endpoint) as client:
        events = [event async for event in client.generate("hi", SamplingParams(logprobs=1, max_tokens=3), seed=9)]
    first, *middle, last = events
    assert first == Started("r", 9, 5, "fake")
    assert middle[1] == Delta((11,), "lo ", (TokenLogprobs(-0.5, (1,), (-0.25,)),), (Origin.ACCEPTED,))
    assert isinstance(last, Finished) and last.finish_reason is FinishReason.LENGTH and last.speculative.acceptance_histogram == (0, 1)
    assert last.settings.sampling.max_tokens == 3 and last.settings.rejection_method is RejectionMethod.COUPLED


async def test_complete(endpoint: str) -> None:
    async with Client(endpoint) as client:
        answer = await client.complete("hi")
        assert (answer.text, answer.token_ids, answer.started.seed) == ("Hello wörld", (10, 11, 12), 2**64 - 1)
        assert answer.origins == (Origin.PLAIN, Origin.ACCEPTED, Origin.BONUS) and answer.logprobs == ()
        resumed = await client.complete("hi", output_token_ids=[10])
        assert resumed.text == "lo wörld"
        with pytest.raises(InvalidRequest, match="completions"):
            await client.complete("hi", n=2)
        assert (await client.complete("hi", n=1)).text == "Hello wörld"


async def test_several_answers(endpoint: str) -> None:
    """They come mixed and are told apart by their index, in events and in what is collected."""
    async with Client(endpoint) as client:
        events = [event async for event in client.generate("hi", n=3)]
        answers = await client.completions("hi", SamplingParams(logprobs=0, prompt_logprobs=1), n=3, seed=4)
        (alone,) = await client.completions("hi")
    assert [event.index for event in events][:3] == [2, 1, 0] and sum(isinstance(event, Finished) for event in events) == 3
    assert [answer.text for answer in answers] == ["Hello wörld" * (i + 1) for i in range(3)]
    assert [answer.started.seed for answer in answers] == [4, answer_seed(4, 1), answer_seed(4, 2)]
    assert [(answer.started.index, answer.finished.index, len(answer.logprobs)) for answer in answers] == [(0, 0, 3), (1, 1, 6), (2, 2, 9)]
    assert [answer.prompt_logprobs for answer in answers] == [(TokenLogprobs(-0.5, (1,), (-0.25,)),), (), ()]
    assert alone.text == "Hello wörld" and alone.prompt_logprobs == ()


async def test_answers_that_nobody_asked_for_are_a_fault(endpoint: str) -> None:
    async with Client(endpoint) as client:
        with pytest.raises(ProtocolFault):
            await client.completions("too many", n=2)
    with pytest.raises(ProtocolFault, match="asked for 2"):
        completions_of([Started("r", 1, 1, "fake")], 2)


async def test_the_other_calls(endpoint: str) -> None:
    async with Client(endpoint) as client:
        info = await client.get_model_info()
        assert info.info.model == "fake" and info.draft_available and info.num_speculative_tokens == 3
        assert await client.tokenize("four", add_special_tokens=False) == (4, 0)
        assert await client.tokenize([{"role": "user", "content": "abc"}]) == (3,)
        chat = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": ""}]
        assert await client.tokenize(chat, template_args={"a": 1}, add_generation_prompt=False) == (3, 0, 0, 1)
        assert await client.detokenize([1, 2], skip_special_tokens=True) == "[1, 2] True"
        with pytest.raises(InvalidRequest, match="goes with a chat"):
            await client.tokenize("text", template_args={"a": 1})
        with pytest.raises(InvalidRequest, match="token ids"):
            await client.detokenize([-1])


async def test_failures_are_ours(endpoint: str) -> None:
    async with Client(endpoint) as client:
        with pytest.raises(InvalidRequest) as refused:
            await client.complete("invalid")
        assert (refused.value.field, refused.value.remedy) == ("sampling.top_p", "must be in (0, 1]")
        with pytest.raises(Overloaded) as full:
            await client.complete("full")
        assert full.value.retry_after_ms == 250
        with pytest.raises(ProtocolFault):
            await client.complete("cut")
    async with Client("127.0.0.1:1") as nobody:
        with pytest.raises(Unavailable):
            await nobody.wait_ready(0.3)
        with pytest.raises(Unavailable):
            await nobody.get_model_info()


async def test_an_abandoned_stream_ends_at_once(endpoint: str) -> None:
    async with Client(endpoint) as client:
        began = time.monotonic()
        async with contextlib.aclosing(client.generate("slow")) as events:
            assert isinstance(await anext(events), Started)
    assert time.monotonic() - began < 10.0, "the rest comes after half a minute"


def test_sync(endpoint: str) -> None:
    with SyncClient(endpoint) as client:
        assert client.complete("hi").text == "Hello wörld"
        assert [answer.text for answer in client.completions("hi", n=2)] == ["Hello wörld", "Hello wörldHello wörld"]
        assert [type(event) for event in client.generate("hi")] == [Started, Delta, Delta, Delta, Finished]
        for event in client.generate("slow"):
            assert isinstance(event, Started)
            break
        assert client.tokenize("four") == (4, 1) and client.get_model_info().info.model == "fake" and client.detokenize([1]) == "[1] False"
        assert client.tokenize([{"role": "user", "content": "abc"}], add_generation_prompt=True) == (3, 1, 0)

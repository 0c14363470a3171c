"""The client against a scripted orchestrator."""

from __future__ import annotations

import contextlib
import time

import pytest

from specdec.client import Client, Delta, Finished, Started, SyncClient, generate_request
from specdec.errors import InvalidRequest, Overloaded, ProtocolFault, Unavailable
from specdec.terms import DraftMethod, FinishReason, Origin, RejectionMethod, SamplingParams, TokenLogprobs

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
        with pytest.raises(InvalidRequest, match="one answer"):
            await client.complete("hi", n=2)


async def test_the_other_calls(endpoint: str) -> None:
    async with Client(endpoint) as client:
        info = await client.get_model_info()
        assert info.info.model == "fake" and info.draft_available and info.num_speculative_tokens == 3
        assert await client.tokenize("four", add_special_tokens=False) == (4, 0)
        assert await client.tokenize([{"role": "user", "content": "abc"}]) == (3,)
        assert await client.detokenize([1, 2], skip_special_tokens=True) == "[1, 2] True"


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
    assert time.monotonic() - began < 2.0


def test_sync(endpoint: str) -> None:
    with SyncClient(endpoint) as client:
        assert client.complete("hi").text == "Hello wörld"
        assert [type(event) for event in client.generate("hi")] == [Started, Delta, Delta, Delta, Finished]
        for event in client.generate("slow"):
            assert isinstance(event, Started)
            break
        assert client.tokenize("four") == (4, 1) and client.get_model_info().info.model == "fake" and client.detokenize([1]) == "[1] False"


def test_request_fields() -> None:
    request = generate_request([1, 2], seed=0, num_speculative_tokens=0, draft_method=DraftMethod.GREEDY, priority=None)
    assert request.HasField("seed") and request.HasField("num_speculative_tokens") and not request.HasField("priority")
    assert list(request.token_ids.ids) == [1, 2] and request.draft_sample_method == 2 and not request.HasField("sampling")
    chat = generate_request([{"role": "user", "content": "x"}], template_args={"a": False, "b": "1"})
    assert chat.messages.messages[0].role == "user" and chat.messages.template_args == {"a": "false", "b": '"1"'}


BAD = {
    "seed": lambda: generate_request("x", seed=-1),
    "nonsense": lambda: generate_request("x", nonsense=1),
    "prompt.token_ids": lambda: generate_request([-1]),
    "prompt.messages": lambda: generate_request([{"role": "user"}]),
    "sampling.max_tokens": lambda: generate_request("x", SamplingParams(max_tokens=-1)),
    "sampling.logit_bias": lambda: generate_request("x", SamplingParams(logit_bias={-1: 1.0})),
    "sampling.stop_token_ids": lambda: generate_request("x", SamplingParams(stop_token_ids=(2**32,))),
}


@pytest.mark.parametrize("field", BAD)
def test_what_the_wire_cannot_carry_is_named(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BAD[field]()
    assert caught.value.field == field

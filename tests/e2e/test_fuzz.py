"""Every message that a service accepts, made strange: no crash, no hang, no fault of ours as an answer, and the streams beside are right.

The services run in this process, spoken to over real gRPC in bytes. Neighbours run between and during the examples.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.client import Client, Completion
from specdec.hashing import prefix_hash
from specdec.terms import SamplingParams
from specdec.v1 import common_pb2, draft_pb2, target_pb2
from specdec.v1 import generation_pb2 as pb
from specdec.vocabulary import vocabulary
from tests.e2e.hostile import Held, HostileDraft, honest, silent
from tests.e2e.inprocess import Cluster, cluster
from tests.e2e.mutation import conversation, mutated
from tests.e2e.steps import PROMPT, hello, item
from tests.tiny import save_tiny

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]
EXAMPLES, MANY = 50, 5000  # per service
HANG_S = 15.0
NEIGHBOURS = 2
ANSWER = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
LOAD = draft_pb2.DraftResponse(load=draft_pb2.Load(needed_work_share=0.5, sessions=1))
OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.DATA_LOSS}
WRITTEN_TO_NOBODY = "Internal error from Core"  # what grpc.aio makes of a write that meets the end of its call
T = TypeVar("T")


class World:
    """The services, their neighbours' streams, and a loop that runs only while somebody waits."""

    def __init__(self, model: Any) -> None:
        self._runner = asyncio.Runner()
        self._exit = contextlib.AsyncExitStack()
        self.rounds, self.complaints = 0, []  # type: ignore[var-annotated]
        self.made: Cluster = self.run(self._begin(model), 60)

    def run(self, work: Coroutine[Any, Any, T], seconds: float = HANG_S) -> T:
        return self._runner.run(asyncio.wait_for(work, seconds))

    async def _begin(self, model: Any) -> Cluster:
        made = await self._exit.enter_async_context(cluster(model))
        await made.begin_orchestrator([made.targets[0].endpoint], [made.drafts[0].endpoint], enable_adaptive_verification=False)
        self.client = await self._exit.enter_async_context(Client(made.orchestrators[0].endpoint))
        self.liar = HostileDraft(vocabulary(model))
        lies = await self._exit.enter_async_context(self.liar.serving())
        settings = {"enable_adaptive_verification": False, "max_ejection_ms": 0}
        deceived = await made.begin_orchestrator([made.targets[0].endpoint], [lies], **settings)
        self.deceived = await self._exit.enter_async_context(Client(deceived.endpoint))
        self.truth = await self.deceived.complete(PROMPT, ANSWER, seed=3, num_speculative_tokens=0)
        self.liar.truths = {tuple(PROMPT): (*PROMPT, *self.truth.token_ids)}
        wanted = [await self._neighbour(i, num_speculative_tokens=0) for i in range(NEIGHBOURS)]
        self._lanes = [asyncio.create_task(self._lane(i, want)) for i, want in enumerate(wanted)]
        channels = [made.orchestrators[0], made.targets[0], made.drafts[0]]
        self.channels = [
            await self._exit.enter_async_context(grpc.aio.insecure_channel(one.endpoint, [("grpc.max_receive_message_length", -1)]))
            for one in channels
        ]
        return made

    async def _neighbour(self, i: int, **options: Any) -> Completion:
        sampling = SamplingParams(temperature=float(i), max_tokens=60, ignore_eos=True)
        return await self.client.complete([20 + i, 30, 40], sampling, seed=i, **options)

    async def _lane(self, i: int, want: Completion) -> None:
        while True:
            try:
                got = await self._neighbour(i)
                if (got.token_ids, got.text) != (want.token_ids, want.text):
                    self.complaints.append(f"{got.token_ids} instead of {want.token_ids}")
            except Exception as error:
                self.complaints.append(repr(error))
            self.rounds += 1

    async def _more_rounds(self, count: int) -> None:
        enough = self.rounds + count
        while self.rounds < enough:
            await asyncio.sleep(0.01)

    def undisturbed(self) -> None:
        self.run(self._more_rounds(2 * NEIGHBOURS))
        assert not self.complaints, self.complaints[0]

    def close(self) -> None:
        """Once no session is left, which takes no longer than the lease."""
        try:
            self.run(self._nothing_left())
        finally:
            self.run(self._exit.aclose(), 30)
            self._runner.close()

    async def _nothing_left(self) -> None:
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        for service in (self.made.targets[0], self.made.drafts[0]):
            while await asyncio.to_thread(service.metric, "specdec_sessions"):
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    all_of_the_protocol_is_here()
    world = World(save_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=0, window=256))
    yield world
    world.close()


@pytest.fixture(autouse=True)
def undisturbed(world: World, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    world.undisturbed()
    defects = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not defects, defects[0].getMessage()


# ---------------------------------------------------------------- how each is spoken to


def raw(content: bytes) -> bytes:
    return content


async def ended(call: Any) -> None:
    """Reads to the end, which comes, and is not a fault of the service's."""
    try:
        async with asyncio.timeout(HANG_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            code = await call.code()
    finally:
        call.cancel()
    if code in OURS:
        assert await call.details() == WRITTEN_TO_NOBODY, (code, await call.details())


async def ask(channel: grpc.aio.Channel, method: str, content: bytes, streamed: bool = True) -> None:
    kind = channel.unary_stream if streamed else channel.unary_unary
    call: Any = kind(f"/specdec.v1.{method}", raw, raw)(content)
    if streamed:
        return await ended(call)
    try:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with asyncio.timeout(HANG_S):
                await call
        assert await call.code() not in OURS, (await call.code(), await call.details())
    finally:
        call.cancel()


async def converse(channel: grpc.aio.Channel, method: str, contents: Sequence[bytes], pause_after: int) -> None:
    """Says everything, after the first so many listens once, and hangs up."""
    call: Any = channel.stream_stream(f"/specdec.v1.{method}", raw, raw)()

    async def say() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for place, content in enumerate(contents, start=1):
                await call.write(content)
                if place == pause_after:
                    await asyncio.sleep(0.005)
            await call.done_writing()

    saying = asyncio.create_task(say())
    try:
        await ended(call)
    finally:
        saying.cancel()
        await asyncio.gather(saying, return_exceptions=True)


# ---------------------------------------------------------------- what is valid


def sampling(**fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **fields})


REQUESTS = [
    pb.GenerateRequest(text="the cat sat", sampling=sampling(temperature=0.7, top_k=5, logprobs=2), seed=1, stop=["zz"]),
    pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), output_token_ids=[5, 6], sampling=sampling(top_p=0.9, min_p=0.01), priority=1),
    pb.GenerateRequest(
        messages=pb.Messages(messages=[pb.Message(role="user", content="hi")], template_args={"a": "1"}),
        sampling=sampling(grammar=common_pb2.Grammar(regex="[a-c]{4,8}"), logit_bias={5: 1.0}, stop_token_ids=[9]),
        n=2,
        num_speculative_tokens=3,
    ),
    pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling(prompt_logprobs=1), rejection_sample_method=2),
]
UNARY: dict[str, Any] = {
    "GenerationService/Tokenize": pb.TokenizeRequest(messages=pb.Messages(messages=[pb.Message(role="user", content="hi")])),
    "GenerationService/Detokenize": pb.DetokenizeRequest(token_ids=[5, 6, 200], skip_special_tokens=True),
    "GenerationService/GetModelInfo": pb.GetModelInfoRequest(),
    "GenerationService/GetMetrics": pb.GetMetricsRequest(),
    "TargetService/GetModelInfo": target_pb2.TargetServiceGetModelInfoRequest(),
    "DraftService/GetModelInfo": draft_pb2.DraftServiceGetModelInfoRequest(),
}
STREAMED = {"GenerationService/Generate", "TargetService/Verify", "DraftService/Draft"}


def all_of_the_protocol_is_here() -> None:
    described = {name: service for file in (pb, target_pb2, draft_pb2) for name, service in file.DESCRIPTOR.services_by_name.items()}
    methods = {f"{name}/{method.name}": method for name, service in described.items() for method in service.methods}
    assert set(methods) == STREAMED | set(UNARY)
    for name, valid in UNARY.items():
        assert methods[name].input_type is valid.DESCRIPTOR, name


def steps() -> list[target_pb2.VerifyRequest]:
    """Names of their own, as of an orchestrator that is new."""
    second = item([*PROMPT[2:], 7, 8, 9], round=2, base_length=2, base_hash=prefix_hash(PROMPT[:2]), num_proposed=2)
    second.step.ClearField("begin")
    name = {"session_id": "s", "epoch": 1}
    ahead = target_pb2.VerifyItem(ahead=target_pb2.Ahead(**name, prefix_length=3, prefix_hash=prefix_hash(PROMPT), tokens=[5, 6]))
    close = target_pb2.VerifyItem(close=target_pb2.Close(**name))
    grammar = {"grammar": common_pb2.Grammar(regex="[a-c]{4,8}")}
    other = item(session_id="t", sampling=grammar, run_ahead=4, begin={"rejection_sample_method": 2})
    return [hello(), *(target_pb2.VerifyRequest(items=items) for items in ([item(), other], [second, ahead], [ahead], [close]))]


def commands() -> list[draft_pb2.DraftRequest]:
    name = {"session_id": "s"}
    prefix = {**name, "prefix_length": 3, "prefix_hash": prefix_hash(PROMPT)}
    opened = draft_pb2.Open(
        **name, epoch=1, tokens=PROMPT, prompt_length=3, sampling=sampling(temperature=1.0), num_speculative_tokens=3, budget_tokens=8
    )
    turns = [
        [draft_pb2.DraftCommand(open=opened)],
        [draft_pb2.DraftCommand(sent=draft_pb2.Sent(**prefix, num_proposed=2, tokens=[5, 6]))],
        [draft_pb2.DraftCommand(commit=draft_pb2.Commit(**prefix, tokens=[5, 7])), draft_pb2.DraftCommand(pause=draft_pb2.Pause(**name))],
        [draft_pb2.DraftCommand(resume=draft_pb2.Resume(**name)), draft_pb2.DraftCommand(close=draft_pb2.CloseDraft(**name))],
    ]
    first = draft_pb2.DraftRequest(orchestrator_id=secrets.token_hex(8))
    return [first, *(draft_pb2.DraftRequest(commands=turn) for turn in turns)]


# ---------------------------------------------------------------- the examples


def unary(world: World, data: st.DataObject, channel: int, service: str) -> None:
    method = data.draw(st.sampled_from([method for method in UNARY if method.startswith(f"{service}/")]))
    world.run(ask(world.channels[channel], method, mutated(data.draw, UNARY[method]), streamed=False))


def generation(world: World, data: st.DataObject) -> None:
    if data.draw(st.integers(0, 3)):
        request = data.draw(st.sampled_from(REQUESTS))
        world.run(ask(world.channels[0], "GenerationService/Generate", mutated(data.draw, request)))
    else:
        unary(world, data, 0, "GenerationService")


def target(world: World, data: st.DataObject) -> None:
    if data.draw(st.integers(0, 15)):
        world.run(converse(world.channels[1], "TargetService/Verify", conversation(data.draw, steps()), data.draw(st.integers(0, 3))))
    else:
        unary(world, data, 1, "TargetService")


def draft(world: World, data: st.DataObject) -> None:
    if data.draw(st.integers(0, 15)):
        world.run(converse(world.channels[2], "DraftService/Draft", conversation(data.draw, commands()), data.draw(st.integers(0, 3))))
    else:
        unary(world, data, 2, "DraftService")


NAMED = {"session_id": "s", "epoch": 1}
EVENTS = [
    {"proposal": draft_pb2.Proposal(**NAMED, prefix_length=3, prefix_hash=7, tokens=[5, 6, 7], confidences=[0.5, 0.4, 0.3])},
    {"resync": draft_pb2.Resync(**NAMED, have=2)},
    {"refused": draft_pb2.Refused(**NAMED, reason="no", retry_after_ms=1)},
]
SAID = [LOAD, draft_pb2.DraftResponse(events=[draft_pb2.DraftEvent(**event) for event in EVENTS])]


def fitted(response: draft_pb2.DraftResponse, held: Held) -> draft_pb2.DraftResponse:
    """What is as in SAID names the session and its tokens; the rest is as strange as it came."""
    for event in response.events:
        kind = event.WhichOneof("event")
        said = getattr(event, kind) if kind else event.proposal
        if said.session_id == NAMED["session_id"]:
            said.session_id = held.open.session_id
        if said.epoch == NAMED["epoch"]:
            said.epoch = held.open.epoch
        if kind == "proposal" and said.prefix_length == 3:
            said.prefix_length = len(held.tokens)
        if kind == "proposal" and said.prefix_hash == 7:
            said.prefix_hash = prefix_hash(held.tokens)
    return response


def proposals(world: World, data: st.DataObject) -> None:
    """What a draft says to an orchestrator, beside what is right. Bytes that are no message end the connection; other tests do that."""
    said: list[draft_pb2.DraftResponse] = []
    for content in conversation(data.draw, SAID * 2):
        with contextlib.suppress(DecodeError):
            said.append(draft_pb2.DraftResponse.FromString(content))

    def behave(held: Held, draw: random.Random) -> Iterator[Any]:
        yield from honest(held, draw)
        for response in said:
            strange = draft_pb2.DraftResponse()
            strange.CopyFrom(response)
            yield fitted(strange, held)

    world.liar.behave = behave

    async def answer() -> None:
        got = await world.deceived.complete(PROMPT, ANSWER, seed=3)
        assert (got.token_ids, got.text) == (world.truth.token_ids, world.truth.text)

    try:
        world.run(answer())
    finally:
        world.liar.behave = silent


SERVICES = {"generation": generation, "target": target, "draft": draft}
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.parametrize("service", SERVICES)
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=CHECKS, database=None)
@given(data=st.data())
def test_F16_F52_strange_messages(world: World, service: str, data: st.DataObject) -> None:
    SERVICES[service](world, data)


@settings(max_examples=EXAMPLES // 4, deadline=None, derandomize=True, suppress_health_check=CHECKS, database=None)
@given(data=st.data())
def test_F51_strange_words_of_a_draft(world: World, data: st.DataObject) -> None:
    proposals(world, data)


@pytest.mark.long
@pytest.mark.timeout(1200)
@settings(max_examples=MANY // 5, deadline=None, suppress_health_check=CHECKS, database=None)
@given(data=st.data())
def test_F51_very_many_strange_words_of_a_draft(world: World, data: st.DataObject) -> None:
    proposals(world, data)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("service", SERVICES)
@settings(max_examples=MANY, deadline=None, suppress_health_check=CHECKS, database=None)
@given(data=st.data())
def test_F16_F52_very_many_strange_messages(world: World, service: str, data: st.DataObject) -> None:
    SERVICES[service](world, data)

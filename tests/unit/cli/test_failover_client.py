"""A client of several orchestrators: whatever breaks off wherever, the answer is the one that was never interrupted. F86, F87, F88.

The service is scripted: ids are a function of prefix and seed, text is what the orchestrator makes of them, stop strings included. It
breaks off where the test wants, with the text it lets go of then or without a word.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.answer import AnswerStream
from orchestrator.detokenise import DecoderPlan, IncrementalDecoder
from orchestrator.output import Ended, GenerationStats, TokensDecided
from orchestrator.stops import StopMatcher
from specdec import terms
from specdec.client import Client, Completion, Delta, Event, FailoverClient, Finished, Started, SyncClient, Usage, client_of
from specdec.client import failover as failover_module
from specdec.client import origin as origin_module
from specdec.client import resuming as resuming_module
from specdec.client.answers import ServiceInfo
from specdec.client.legs import Leg
from specdec.client.resuming import Resuming
from specdec.errors import DeadlineExceeded, InvalidRequest, Mismatch, Overloaded, PermissionDenied, SpecdecError, Unavailable
from specdec.seeds import answer_seed
from specdec.terms import FinishReason, ModelInfo, Origin, SamplingParams
from tests.fakes_driver import model_info
from tests.unit.orchestrator.scripted_pools import answer_of
from tests.unit.orchestrator.tokenizers_here import byte_level

pytestmark = pytest.mark.timeout(30)
PLAN = DecoderPlan(byte_level())
PLAIN, ACCEPTED, CORRECTED, BONUS = Origin.PLAIN, Origin.ACCEPTED, Origin.CORRECTED, Origin.BONUS
ROUNDS = (PLAIN, ACCEPTED, ACCEPTED, CORRECTED, ACCEPTED, BONUS, CORRECTED)  # by the place in the output, again and again
PROMPT = [1, 2, 3]
OURS = model_info(model_fingerprint="ours")
OTHER = replace(OURS, model_fingerprint="other")


@dataclass
class Service:
    """What all orchestrators have in common: `breaks` = tokens after which the next calls break off, None = not; `refuses` = errors that
    the next calls meet before they begin."""

    breaks: list[int | None] = field(default_factory=list)
    refuses: list[SpecdecError | None] = field(default_factory=list)
    flushes: bool = True  # a call that breaks off lets go of the text it held back
    stop: tuple[str, ...] = ()
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    models: dict[str, ModelInfo | SpecdecError] = field(default_factory=dict)  # by endpoint; else OURS
    asked: list[str] = field(default_factory=list)  # for their models

    def connect(self, endpoint: str) -> Client:
        return _Scripted(endpoint, self)


class _Scripted(Client):
    def __init__(self, endpoint: str, service: Service) -> None:
        super().__init__(endpoint)
        self._service = service

    async def get_model_info(self) -> ServiceInfo:
        self._service.asked.append(self.endpoint)
        told = self._service.models.get(self.endpoint, OURS)
        if isinstance(told, SpecdecError):
            raise told
        return ServiceInfo(told, draft_available=True, num_speculative_tokens=3)

    async def generate(  # type: ignore[override]
        self, prompt: Any, sampling: SamplingParams | None = None, *, timeout_s: float = 1.0, traceparent: str = "", **options: Any
    ) -> AsyncGenerator[Event]:
        service = self._service
        service.calls.append((self.endpoint, {"sampling": sampling, **options}))
        if service.refuses and (error := service.refuses.pop(0)) is not None:
            raise error
        left = service.breaks.pop(0) if service.breaks else None
        n, seed = options.get("n") or 1, options.get("seed")
        seed = 77 if seed is None else seed
        assert sampling is not None and sampling.max_tokens is not None
        draw = random.Random(len(service.calls))
        for index in range(n):
            yield Started("r", answer_seed(seed, index), len(prompt), "scripted", index)
        for index in range(n):
            resumed = list(options.get("output_token_ids") or ())
            stream = AnswerStream(IncrementalDecoder(PLAN), StopMatcher(service.stop), prompt_tokens=len(prompt), resumed=resumed)
            leg = Leg()
            ids = answer_of([*prompt, *resumed], sampling.max_tokens - len(resumed), answer_seed(seed, index))
            while ids and stream.stopped is None:
                count = draw.randint(1, 4) if left is None else min(left, draw.randint(1, 4))
                if left is not None:
                    if count == 0:
                        if service.flushes and (text := stream.flush()):
                            yield Delta(text=text, index=index)
                        raise Unavailable("gone", 0, len(resumed))
                    left -= min(count, len(ids))
                piece, ids = ids[:count], ids[count:]
                entries = tuple(terms.TokenLogprobs(-float(token)) for token in piece)
                place = sampling.max_tokens - len(ids) - len(piece)
                origins = tuple(ROUNDS[(place + i) % len(ROUNDS)] for i in range(len(piece)))
                leg.take(origins)
                told = stream.tokens(TokensDecided(tuple(piece), entries, origins))
                asked = sampling.prompt_logprobs is not None and not index and stream.delivered == len(piece)
                prompt_logprobs = (terms.TokenLogprobs(-1.0),) if asked else ()
                yield Delta(told.token_ids, told.text, told.logprobs, told.origins, index, prompt_logprobs)
            last, end = stream.finish(
                GenerationStats() if stream.stopped is not None else Ended(FinishReason.LENGTH, None, GenerationStats())
            )
            if last.text:
                yield Delta(text=last.text, index=index)
            leg.end()
            stats = leg.stats()
            accepted = stats.num_accepted_draft_tokens
            usage = Usage(len(prompt), end.usage.completion_tokens, accepted, stats.num_draft_tokens - accepted)
            yield Finished(end.reason, end.stop_reason, usage, stats, None, index)  # type: ignore[arg-type]


async def ask(service: Service, count: int = 40, endpoints: int = 2, **options: Any) -> tuple[Completion, ...]:
    async with FailoverClient([f"o{i}:1" for i in range(endpoints)], connect=service.connect) as client:
        return await client.completions(PROMPT, SamplingParams(max_tokens=count, logprobs=0), **options)


def same(one: Completion, other: Completion) -> None:
    assert (one.token_ids, one.text, one.logprobs, one.origins) == (other.token_ids, other.text, other.logprobs, other.origins)
    assert (one.finished.finish_reason, one.finished.stop_reason) == (other.finished.finish_reason, other.finished.stop_reason)
    assert one.finished.usage.completion_tokens == other.finished.usage.completion_tokens
    assert one.started.seed == other.started.seed


def agrees(answer: Completion) -> None:
    """The glossary's sums, over all legs. What was decided behind a stop was not told, so only the last leg knows of it."""
    count, stats, usage = Counter(answer.origins), answer.finished.speculative, answer.finished.usage
    behind = stats.num_accepted_draft_tokens - count[ACCEPTED]
    assert behind >= 0 and (not behind or answer.finished.finish_reason is FinishReason.STOP)
    if not behind and answer.finished.finish_reason is not FinishReason.STOP:
        assert stats.num_spec_tokens == count[ACCEPTED] + count[CORRECTED] + count[BONUS]
        assert stats.num_draft_tokens == count[ACCEPTED] + count[CORRECTED]
        assert stats.num_rounds == stats.num_spec_steps + count[PLAIN]
    histogram = stats.acceptance_histogram
    assert sum(histogram) == stats.num_spec_steps
    assert sum(j * rounds for j, rounds in enumerate(histogram)) == stats.num_accepted_draft_tokens
    assert usage.accepted_prediction_tokens == stats.num_accepted_draft_tokens
    assert usage.accepted_prediction_tokens + usage.rejected_prediction_tokens == stats.num_draft_tokens


@settings(deadline=None)
@given(st.lists(st.integers(0, 25), max_size=6), st.booleans(), st.integers(0, 36), st.sampled_from([None, 5]), st.integers(1, 3))
def test_F88_an_answer_in_pieces_is_the_answer(breaks: list[int], flushes: bool, at: int, seed: int | None, n: int) -> None:
    async def run() -> None:
        whole = await ask(Service(), seed=seed, n=n)
        stop = (whole[0].text[at : at + 3],) if at % 2 else ()  # also one that is half there where it breaks
        whole = await ask(Service(stop=stop), seed=seed, n=n)
        service = Service(breaks=[*breaks], flushes=flushes, stop=stop)
        for mine, want in zip(await ask(service, seed=seed, n=n), whole, strict=True):
            same(mine, want)
            agrees(mine)

    asyncio.run(_without_pauses(run()))


async def _without_pauses(run: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failover_module, "FIRST_PAUSE_S", 0.0)
        await run


async def test_twin_text_that_is_let_go_is_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (await ask(Service()))[0].text

    def careless(self: Any, event: Event) -> list[Event]:
        news: list[Event] = take(self, event)
        told, self.let_go = [] if self.let_go is None else [self.let_go], None
        return [*news, *told]

    take = resuming_module._Answer.take
    service = Service(breaks=[20], stop=(answer_text(20)[-2:] + "never",))
    assert (await ask(replace(service, breaks=[20])))[0].text == whole
    monkeypatch.setattr(resuming_module._Answer, "take", careless)
    assert (await ask(service))[0].text != whole


def answer_text(count: int) -> str:
    return byte_level().decode(answer_of(PROMPT, count, 77))


async def test_twin_a_request_that_is_sent_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = await ask(Service())
    monkeypatch.setattr(Resuming, "next", lambda self: (self._sampling, self._options))
    assert (await ask(Service(breaks=[7])))[0].token_ids != whole[0].token_ids


async def test_each_endpoint_in_turn_and_what_goes_on_the_wire() -> None:
    service = Service(breaks=[3, 4])
    (answer,) = await ask(service, endpoints=3, request_id="mine", priority=2)
    assert [endpoint for endpoint, _ in service.calls] == ["o0:1", "o1:1", "o2:1"]
    assert service.calls[0][1]["request_id"] == "mine" and service.calls[2][1]["request_id"] is None
    assert service.calls[2][1]["output_token_ids"] == answer.token_ids[:7] and service.calls[2][1]["seed"] == 77
    assert all(call["priority"] == 2 for _, call in service.calls) and answer.started.request_id == "r"


async def test_prompt_logprobs_are_told_once() -> None:
    service = Service(breaks=[5])
    async with FailoverClient(["a:1", "b:1"], connect=service.connect) as client:
        answer = await client.complete(PROMPT, SamplingParams(max_tokens=9, logprobs=0, prompt_logprobs=0))
    assert len(answer.prompt_logprobs) == 1 and service.calls[1][1]["sampling"].prompt_logprobs is None


async def test_what_cannot_be_helped_is_raised_with_all_there_is() -> None:
    service = Service(breaks=[5], refuses=[None, *[Unavailable("gone")] * 1000], stop=(answer_text(5)[-1:] + "never",))
    client = FailoverClient(["a:1", "b:1"], retry_s=0.5, connect=service.connect)
    ids: list[int] = []
    text = ""
    with pytest.raises(Unavailable):
        async for event in client.generate(PROMPT, SamplingParams(max_tokens=40)):
            if isinstance(event, Delta):
                ids, text = [*ids, *event.token_ids], text + event.text
    assert ids == answer_of(PROMPT, 5, 77) and text == byte_level().decode(ids)
    assert 4 <= len(service.calls) < 12


@pytest.mark.parametrize("error", [InvalidRequest("seed", "no"), SpecdecError("x")])
async def test_other_errors_are_raised_at_once(error: SpecdecError) -> None:
    service = Service(refuses=[error])
    with pytest.raises(type(error)):
        await ask(service)
    assert len(service.calls) == 1


async def test_a_full_orchestrator_is_left_for_the_next() -> None:
    service = Service(refuses=[Overloaded("full", 60_000)])
    assert len((await ask(service))[0].token_ids) == 40
    with pytest.raises(Overloaded):
        await ask(Service(refuses=[Overloaded("full", 60_000)] * 2))


@pytest.mark.parametrize(
    "other",
    [
        OTHER,
        replace(OURS, model="theirs"),
        replace(OURS, vocabulary_fingerprint=b"theirs"),
        replace(OURS, eos_token_ids=(9,)),
        DeadlineExceeded("no target"),
    ],
    ids=["weights", "name", "tokenizer", "ends", "does not tell"],
)
async def test_an_answer_goes_on_with_the_model_that_it_began_with_alone(other: ModelInfo | SpecdecError) -> None:
    whole = await ask(Service())
    service = Service(breaks=[5, 5], models={"o1:1": other})
    same((await ask(service, endpoints=3))[0], whole[0])
    assert [endpoint for endpoint, _ in service.calls] == ["o0:1", "o2:1", "o0:1"], "never where another model is"


async def test_who_serves_another_model_in_place_of_the_first_is_named() -> None:
    """The orchestrator itself, too: its pools serve something else by now, and another one is not there."""
    service = Service(breaks=[5])
    told: list[Event] = []
    client = FailoverClient(["a:1", "b:1"], retry_s=5.0, connect=service.connect)
    with pytest.raises(Mismatch, match=r"^[ab]:1 serves 'scripted'; another model of that name cannot go on there: ask for a new answer"):
        async for event in client.generate(PROMPT, SamplingParams(max_tokens=40)):
            told.append(event)
            service.models.update(dict.fromkeys(("a:1", "b:1"), OTHER))
    assert [endpoint for endpoint, _ in service.calls] == ["a:1"] and sorted(service.asked) == ["a:1", "a:1", "b:1"]
    assert [token for event in told if isinstance(event, Delta) for token in event.token_ids] == answer_of(PROMPT, 5, 77)


async def test_where_the_first_does_not_tell_its_model_names_are_compared() -> None:
    silent = PermissionDenied("not yours")
    service = Service(breaks=[5], models={"o0:1": silent, "o1:1": replace(OTHER, model="theirs")})
    same((await ask(service, endpoints=3))[0], (await ask(Service()))[0])
    assert [endpoint for endpoint, _ in service.calls] == ["o0:1", "o2:1"]
    service = Service(breaks=[5], models={"o0:1": silent, "o1:1": OTHER})
    await ask(service)
    assert [endpoint for endpoint, _ in service.calls] == ["o0:1", "o1:1"]


async def test_a_busy_client_asks_for_the_model_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    async with FailoverClient(["a:1", "b:1"], connect=service.connect) as client:
        for _ in range(10):
            await client.complete(PROMPT, SamplingParams(max_tokens=4))
        assert service.asked == ["a:1"]
        service.breaks = [2]
        await client.complete(PROMPT, SamplingParams(max_tokens=4))
        assert service.asked == ["a:1", "b:1"], "before it goes on there, each time"
        service.breaks = [2]
        await client.complete(PROMPT, SamplingParams(max_tokens=4))
        assert service.asked == ["a:1", "b:1", "a:1"], "what b told is known; a is asked again"
        with monkeypatch.context() as patch:
            patch.setattr(origin_module, "KNOWN_S", 0.0)
            await client.complete(PROMPT, SamplingParams(max_tokens=4))
        assert service.asked == ["a:1", "b:1", "a:1", "a:1"]
    service = Service(refuses=[None, Unavailable("gone")])
    async with FailoverClient(["a:1"], connect=service.connect) as client:
        for _ in range(2):
            await client.complete(PROMPT, SamplingParams(max_tokens=4))
    assert service.asked == ["a:1", "a:1"], "a call failed: another process may be there"


def test_endpoints_are_a_list() -> None:
    for wrong in ("a:1", []):
        with pytest.raises(InvalidRequest, match="endpoints"):
            FailoverClient(wrong)


async def test_the_figures_of_two_legs_are_sums() -> None:
    """Five tokens, then three: of the first leg only the tokens' origins are known."""
    (answer,) = await ask(Service(breaks=[5]), count=8)
    stats = answer.finished.speculative
    assert answer.origins == (PLAIN, ACCEPTED, ACCEPTED, CORRECTED, ACCEPTED, BONUS, CORRECTED, PLAIN)
    assert stats.acceptance_histogram == (2, 1, 1) and (stats.num_rounds, stats.num_spec_steps) == (6, 4)
    assert (stats.num_accepted_draft_tokens, stats.num_draft_tokens, stats.num_spec_tokens) == (3, 5, 6)
    assert stats.mean_acceptance_length == 1 + 3 / 4 and stats.draft_acceptance_rate == 3 / 5


def test_one_endpoint_or_several() -> None:
    assert type(client_of("a:1")) is Client
    several = client_of("a:1, b:2")
    assert isinstance(several, FailoverClient) and [client.endpoint for client in several._clients] == ["a:1", "b:2"]
    for wrong in ("", "a", "a:", ":1", "a:1,", "a:1,,b:2", "a:1;b:2x"):
        with pytest.raises(InvalidRequest, match="endpoint"):
            SyncClient(wrong)

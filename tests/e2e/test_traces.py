"""One trace per request through client, orchestrator, draft and target, over real HTTP to a collector; right on every kind of end."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from specdec.bench.proxy import Proxy
from specdec.client import Client
from specdec.errors import SpecdecError
from specdec.runtime.metrics import METRICS
from specdec.terms import SamplingParams
from tests import scraped
from tests.collector import Collector, collector
from tests.e2e.inprocess import Hosted, cluster
from tests.metric_names import family
from tests.tiny import save_tiny

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]
LONG = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
SECRET = "xylophone-quartz"
MOVING = ("age", "load")  # also of a system at rest


def header(number: int, sampled: bool = True) -> str:
    return f"00-{number:032x}-{number:016x}-{'01' if sampled else '00'}"


@dataclass
class Rig:
    endpoint: str
    content: str  # an orchestrator that keeps what is said
    kept: Collector
    targets: list[Hosted]
    links: list[Proxy]  # to the targets, from `endpoint`
    services: list[Hosted]  # that work for `endpoint`

    async def sessions(self) -> list[float]:
        return [await asyncio.to_thread(target.metric, "specdec_sessions") for target in self.targets]

    async def of(self, number: int, *names: str) -> dict[str, dict[str, Any]]:
        """The spans of one trace by name, once all of these are there; more than one of a name is an error."""
        deadline = time.monotonic() + 20
        while True:
            spans = [span for span in list(self.kept.spans) if span["traceId"] == f"{number:032x}"]
            if set(names) <= {span["name"] for span in spans}:
                assert len({span["name"] for span in spans}) == len(spans), [span["name"] for span in spans]
                return {span["name"]: span for span in spans}
            assert time.monotonic() < deadline, [(span["name"], span["service"]) for span in spans]
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    model = save_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=0, window=512)
    with collector() as kept:
        async with cluster(model, targets=0, drafts=0) as made:
            told: dict[str, Any] = {"otlp_endpoint": kept.url, "otlp_metrics_ms": 200}
            targets = [await made.begin_target(**told) for _ in range(2)]
            draft = await made.begin_draft(**told)
            common = {"enable_adaptive_verification": False, **told}
            links = [Proxy(target.endpoint, 0.0) for target in targets]
            for link in links:
                link.start()
            front = await made.begin_orchestrator([f"127.0.0.1:{link.port}" for link in links], [draft.endpoint], **common)
            content = await made.begin_orchestrator([targets[0].endpoint], [draft.endpoint], **common, trace_content=True)
            for endpoint in (front.endpoint, content.endpoint):
                async with Client(endpoint) as client:
                    while not (await client.get_model_info()).draft_available:
                        await asyncio.sleep(0.02)
            yield Rig(front.endpoint, content.endpoint, kept, targets, links, [front, *targets, draft])
            for link in links:
                link.close()


async def test_f181_f183_one_trace_with_rounds_and_linked_batches(rig: Rig) -> None:
    async with Client(rig.endpoint) as client:
        asks = [client.complete(SECRET, LONG, seed=i, num_speculative_tokens=3, traceparent=header(i)) for i in (1, 2, 3)]
        answers = await asyncio.gather(*asks)
        ended = time.time_ns()
    for number, answer in zip((1, 2, 3), answers, strict=True):
        spans = await rig.of(number, "text_completion specdec", "generation", "verify", "draft")
        request, generation = spans["text_completion specdec"], spans["generation"]
        assert request["parentSpanId"] == f"{number:016x}" and request["kind"] == 2
        assert generation["parentSpanId"] == request["spanId"]
        assert spans["verify"]["parentSpanId"] == spans["draft"]["parentSpanId"] == generation["spanId"]
        services = [spans[name]["service"] for name in ("text_completion specdec", "generation", "verify", "draft")]
        assert services == ["specdec-orchestrator", "specdec-orchestrator", "specdec-target", "specdec-draft"]
        told, stats = generation["attributes"], answer.finished.speculative
        assert int(told["draft_tokens"]) == stats.num_draft_tokens and int(told["accepted_tokens"]) == stats.num_accepted_draft_tokens
        assert int(told["rounds"]) == stats.num_rounds and told["end"] == "length" and "error.type" not in told
        rounds = [{entry["key"]: entry["value"] for entry in e["attributes"]} for e in generation["events"] if e["name"] == "round"]
        assert len(rounds) == int(told["rounds_told"]) >= min(16, stats.num_rounds) and len(rounds) < stats.num_rounds
        assert all({"block", "accepted", "source", "queue_ms", "engine_ms", "outcome", "number"} <= set(event) for event in rounds)
        assert "wire_ms" in rounds[0], "a round that was asked for was on the wire"
        told_at = [int(e["timeUnixNano"]) for e in generation["events"] if e["name"] == "round"]
        assert told_at == sorted(told_at) and told_at[-1] <= int(generation["endTimeUnixNano"])
        assert {e["name"] for e in spans["draft"]["events"]} >= {"commit", "proposal"}
        assert any(e["name"] == "round" for e in spans["verify"]["events"])
        assert 0 <= ended - int(request["endTimeUnixNano"]) < 5e9 and int(request["attributes"]["gen_ai.usage.output_tokens"]) == 200
    for service, of_session in (("specdec-target", "verify"), ("specdec-draft", "draft")):  # a session's span comes behind its steps'
        steps = [step for step in rig.kept.named("engine step") if step["service"] == service]
        sessions = {span["spanId"] for span in rig.kept.named(of_session)}
        assert all("parentSpanId" not in step and {link["spanId"] for link in step["links"]} <= sessions for step in steps)
        assert any(len(step["links"]) > 1 for step in steps), f"no batch with several sessions at a {service}"
    assert SECRET not in str(rig.kept.spans)
    assert {span["name"] for span in rig.kept.spans} == {"text_completion specdec", "generation", "verify", "draft", "engine step"}


async def test_every_end_is_told(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """F178: a client that breaks off, one that is cancelled, a refusal; none of them leaves a span open or a context behind."""
    async with Client(rig.endpoint) as client:
        stream = client.generate(SECRET, LONG, seed=1, traceparent=header(11))
        for _ in range(3):
            await anext(stream)
        await asyncio.create_task(stream.aclose())
        while any(await rig.sessions()):
            await asyncio.sleep(0.01)
        task = asyncio.create_task(client.complete(SECRET, LONG, seed=2, traceparent=header(12)))
        while not any(await rig.sessions()):
            assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(SpecdecError):
            await client.complete(SECRET, SamplingParams(temperature=-1), traceparent=header(13))
        await client.complete(SECRET, SHORT, traceparent=header(14, sampled=False))
    left = await rig.of(11, "text_completion specdec", "generation", "verify")
    assert left["generation"]["attributes"]["end"] == "left" and left["verify"]["attributes"]["end"] == "closed"
    request = left["text_completion specdec"]
    assert request["attributes"]["rpc.status_code"] == "CANCELLED" and request["status"]["code"] == 0, "who leaves is no failure of ours"
    await rig.of(12, "text_completion specdec")
    refused = (await rig.of(13, "text_completion specdec"))["text_completion specdec"]
    assert refused["status"]["code"] == 2 and refused["attributes"]["error.type"] == "InvalidRequest" and not refused["status"]["message"]
    assert not [span for span in rig.kept.spans if span["traceId"] == f"{14:032x}"], "the caller had decided against it"
    assert "detach" not in caplog.text


async def test_what_is_pushed_is_what_is_scraped(rig: Rig) -> None:
    """Every metric of each of the services, under its own name, once they are at rest."""
    async with Client(rig.endpoint) as client:
        await client.complete(SECRET, SHORT, seed=4, num_speculative_tokens=3)
    at_work = {"orchestrator": "specdec.delivered.tokens", "target": "specdec.batch.size", "draft": "specdec.draft.proposed_tokens"}
    worked = dict.fromkeys(at_work, 0.0)
    for service in rig.services:
        deadline = time.monotonic() + 20
        while True:
            page = await asyncio.to_thread(scraped.page, service.runtime.telemetry.metrics_port)
            (instance,) = re.findall(r'service_instance_id="([^"]+)"', page)
            pushed, found = rig.kept.values(instance), _values(page)
            if pushed.keys() == found.keys() and all(pushed[name] == found[name] for name in found if not name.endswith(MOVING)):
                break
            assert time.monotonic() < deadline, (service.role, set(pushed.items()) ^ set(found.items()))
            await asyncio.sleep(0.02)
        worked[service.role] += pushed.get(at_work[service.role], 0.0)  # one of the targets may have had nothing to do
    assert all(worked.values()) and len(found) > 10, worked


def _values(page: str) -> dict[str, float]:
    """Sums over all labels of what a scraper finds, by the table's names; of distributions how many values they hold."""
    held = {name.split("{")[0] for name in scraped.parsed(page)}
    samples = {name: family(name).samples[-1] for name in METRICS}  # a distribution's last one is its count
    return {name: scraped.summed(page, sample) for name, sample in samples.items() if sample in held}


async def test_text_is_there_when_asked_for(rig: Rig) -> None:
    async with Client(rig.content) as client:
        answer = await client.complete(SECRET, SHORT, seed=5, traceparent=header(21))
    request = (await rig.of(21, "text_completion specdec"))["text_completion specdec"]
    assert request["attributes"]["gen_ai.input.messages"] == SECRET
    assert request["attributes"]["gen_ai.output.messages"] == answer.text


async def test_a_lost_target_is_in_the_trace(rig: Rig) -> None:
    """Last: one of two targets loses its streams in the middle of an answer, which goes on at the other within the same trace."""
    async with Client(rig.endpoint) as client:
        events = client.generate(SECRET, LONG, seed=7, num_speculative_tokens=3, traceparent=header(31))
        for _ in range(4):
            await anext(events)
        held = await rig.sessions()
        rig.links[held.index(max(held))].close()
        rest = [event async for event in events]
    assert rest
    deadline = time.monotonic() + 20
    while True:
        mine = [span for span in list(rig.kept.spans) if span["traceId"] == f"{31:032x}"]
        found, generations = ([span for span in mine if span["name"] == name] for name in ("verify", "generation"))
        if len(found) >= 2 and generations:
            break
        assert time.monotonic() < deadline, [(span["name"], span["service"]) for span in mine]
        await asyncio.sleep(0.05)
    (generation,) = generations
    assert all(span["parentSpanId"] == generation["spanId"] for span in found) and int(generation["attributes"]["replacements"]) >= 1
    assert [event["name"] for event in generation["events"]].count("placed") >= 3  # a target, a draft, another target

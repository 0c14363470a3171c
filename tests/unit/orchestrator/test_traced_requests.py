"""F179: who records requests does not record how records leave. A hundred requests are a hundred spans, whatever is sent meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry import trace

from specdec.runtime import outbound
from specdec.runtime.telemetry import Telemetry
from tests import scraped
from tests.collector import collector
from tests.fakes_driver import decided, ended
from tests.unit.orchestrator.front_rig import Service, request, serving, text_model_in

REQUESTS, AFTERWARDS = 100, 8


async def ask(service: Service, number: int) -> None:
    """Every tenth request begins a trace of its own."""
    header = None if number % 10 == 0 else (("traceparent", f"00-{number:032x}-{number:016x}-01"),)
    call = service.stub.Generate(request(sampling={"max_tokens": 1}), metadata=header)
    assert [message async for message in call]


async def test_f179_a_hundred_requests_are_a_hundred_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans and metrics leave all the time, and metrics go on doing so behind the last request."""
    monkeypatch.setattr(outbound, "DELAY_S", 0.02)
    with collector() as kept:
        telemetry = Telemetry("orchestrator", metrics_port=0, otlp_endpoint=kept.url, push_s=0.02)
        async with serving(text_model_in(tmp_path), telemetry) as service:
            service.backend.steps = [decided(5), ended()]
            await asyncio.gather(*(ask(service, number) for number in range(REQUESTS)))
            async with asyncio.timeout(20):
                while len(kept.spans) < REQUESTS:
                    await asyncio.sleep(0.01)
                enough = kept.taken + AFTERWARDS
                while kept.taken < enough:
                    await asyncio.sleep(0.01)
            exported = await asyncio.to_thread(scraped.total, telemetry.metrics_port, "specdec_telemetry_spans_exported_total")
        assert len(kept.spans) == REQUESTS == exported and {span["name"] for span in kept.spans} == {"text_completion specdec"}
        assert len({span["traceId"] for span in kept.spans}) == REQUESTS
    assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider", "an instrumented library could record here"

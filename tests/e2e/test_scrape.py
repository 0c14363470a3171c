"""What the three processes export: every metric of the table with its name, type and labels, and sums that are those of the answers.

F104 F105 F107: counted is what happened, however short a block was and wherever an answer ended.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdec.bench import telemetry
from specdec.cli.main import main
from specdec.client import Client, Completion
from specdec.runtime.metrics import METRICS
from specdec.terms import Origin, SamplingParams
from tests.collector import silent
from tests.e2e.stack import Process, Stack, start, wait_ready
from tests.metric_names import families, sample_labels
from tests.tools import require_tool
from tests.waiting import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

APPEARS_WHEN = {
    "specdec.requests.refused": "a request is refused",
    "specdec.calls.refused": "a call is refused before it begins",
    "specdec.lookahead.stale": "a proposal comes too late",
    "specdec.proposals.rejected": "a proposal is malformed or a row is not finite",
    "specdec.discovery.age": "replicas are looked up by name",
    "specdec.discovery.failures": "replicas cannot be looked up",
    "specdec.pool.ejections": "a replica keeps failing",
    "specdec.pool.sessions": "a session is placed",
    "specdec.session.handovers": "a replica drains or a session is hungry",
    "specdec.session.replacements": "a session moves to another replica",
    "specdec.draft.branch_tokens": "a draft guesses how blocks end",
    "specdec.tls.certificate.expires": "the service speaks TLS",
}
EXIT_S = 5.0  # after the drain, whatever the collector does
PROMPT = "the quick brown fox jumps over the lazy dog"
Samples = Counter[tuple[str, frozenset[tuple[str, str]]]]


def scrape(process: Process) -> str:
    with urllib.request.urlopen(f"http://{process.host}:{process.metrics_port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def samples(text: str) -> Samples:
    return Counter(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )


def total(found: Samples, name: str, **labels: str) -> float:
    return sum(value for (sample, has), value in found.items() if sample == name and set(labels.items()) <= has)


async def load(endpoint: str) -> list[Completion]:
    """Every kind of end, with and without blocks, several answers, resumed output."""
    warm, greedy = (SamplingParams(temperature=t, max_tokens=21, ignore_eos=True) for t in (1.0, 0.0))
    asks: list[dict[str, Any]] = [
        *({"sampling": warm, "seed": i, "num_speculative_tokens": 3} for i in range(3)),
        {"sampling": greedy, "disable_spec_decode": True},
        {"sampling": greedy, "num_speculative_tokens": 5, "n": 2},
        {"sampling": greedy, "num_speculative_tokens": 4, "output_token_ids": (17, 93)},
        {"sampling": SamplingParams(temperature=1.0, max_tokens=60), "seed": 3, "num_speculative_tokens": 3},
        {"sampling": SamplingParams(temperature=0.0, max_tokens=1), "num_speculative_tokens": 3},
    ]
    async with Client(endpoint) as client:
        first = await client.complete(PROMPT, greedy, num_speculative_tokens=3)
        for at in (3, 6, 9, 12):  # where blocks end is the machine's affair; some of these are in the middle of one
            asks.append({"sampling": greedy, "num_speculative_tokens": 5, "stop": (first.text[at : at + 2],)})
        return [first, *(answer for answers in await asyncio.gather(*(ask_all(client, **ask) for ask in asks)) for answer in answers)]


async def ask_all(client: Client, sampling: SamplingParams, **options: Any) -> tuple[Completion, ...]:
    return await client.completions(PROMPT, sampling, **options)


async def settled(stack: Stack) -> None:
    """Counts follow the answers by a few milliseconds; an answer that a stop string ended may still owe a round, and keeps its session
    until then."""
    front, pools = stack.orchestrators[0], (*stack.targets, *stack.drafts)

    def look() -> tuple[float, float]:
        running = sum(map(front.metric, ("specdec_requests_running", "specdec_requests_waiting")))
        return running + sum(process.metric("specdec_sessions") for process in pools), front.metric("specdec_rounds_total")

    before = (1.0, 0.0)
    async with asyncio.timeout(30):
        while (now := await asyncio.to_thread(look)) != before or now[0]:
            before = now
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def loaded(questioned: Stack) -> tuple[list[Completion], Samples, dict[str, str]]:
    """(answers, what the orchestrator counted for them, each process's text)."""
    front = questioned.orchestrators[0]
    processes = {"orchestrator": front, "target": questioned.targets[0], "draft": questioned.drafts[0]}

    async def run() -> tuple[list[Completion], Samples]:
        await settled(questioned)
        before = samples(scrape(front))
        answers = await load(questioned.endpoint)
        await settled(questioned)
        counted = samples(scrape(front))
        counted.subtract(before)
        return answers, counted

    answers, counted = asyncio.run(run())
    return answers, counted, {role: scrape(process) for role, process in processes.items()}


def test_the_sums_are_those_of_the_answers(loaded: tuple[list[Completion], Samples, dict[str, str]]) -> None:
    answers, counted, _ = loaded
    spec = [answer.finished.speculative for answer in answers]
    usage = [answer.finished.usage for answer in answers]
    drafted, accepted = sum(s.num_draft_tokens for s in spec), sum(s.num_accepted_draft_tokens for s in spec)
    rounds, blocks = sum(s.num_rounds for s in spec), sum(s.num_spec_steps for s in spec)
    resumed = 2  # tokens, which were delivered before
    delivered = sum(u.completion_tokens for u in usage) - resumed
    assert 0 < blocks < rounds and 0 < accepted <= drafted

    def count(name: str, **labels: str) -> float:
        return total(counted, name, **labels)

    assert count("specdec_rounds_total") == rounds
    assert count("specdec_draft_rounds_total") == blocks == count("specdec_acceptance_length_count")
    assert count("specdec_draft_tokens_total") == drafted == count("specdec_draft_length_sum")
    assert count("specdec_accepted_tokens_total") == accepted == count("specdec_acceptance_length_sum")
    assert count("specdec_accepted_tokens_per_position_total") == accepted
    assert count("specdec_draftless_rounds_total") == rounds - blocks
    decided = count("specdec_decided_tokens_total")
    assert decided == count("specdec_delivered_tokens_total") + count("specdec_discarded_tokens_total")
    assert count("specdec_delivered_tokens_total") == delivered == sum(len(answer.token_ids) for answer in answers)
    by_origin = Counter(origin for answer in answers for origin in answer.origins)
    discarded = sum(u.discarded_tokens for u in usage)
    for origin in Origin:  # what was discarded has an origin, which only the metric tells
        assert 0 <= count("specdec_decided_tokens_total", origin=origin.value) - by_origin[origin] <= discarded
    histogram: Counter[int] = Counter()
    for one in spec:
        histogram.update(dict(enumerate(one.acceptance_histogram)))
    for kept in range(max(histogram) + 1):
        at_least = sum(times for length, times in histogram.items() if length > kept)
        assert count("specdec_accepted_tokens_per_position_total", position=str(kept)) == at_least
    wanted = count("specdec_lookahead_rounds_total")
    assert wanted == sum(count("specdec_lookahead_rounds_total", outcome=o) for o in ("hit", "late", "forced", "ngram", "miss")) <= rounds
    # F106: a token is a token, however many travel together.
    first_tokens = sum(bool(answer.token_ids) for answer in answers)
    assert count("gen_ai_server_time_per_output_token_seconds_count") == delivered - first_tokens
    assert count("gen_ai_server_request_duration_seconds_count") == len(answers) - 1  # two answers of one request


def test_vllms_names_say_the_same(loaded: tuple[list[Completion], Samples, dict[str, str]]) -> None:
    _, _, texts = loaded
    found = samples(texts["orchestrator"])
    for ours, theirs in (
        ("specdec_draft_rounds_total", "vllm:spec_decode_num_drafts_total"),
        ("specdec_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
        ("specdec_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
        ("specdec_accepted_tokens_per_position_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"),
        ("specdec_requests_running", "vllm:num_requests_running"),
        ("specdec_requests_waiting", "vllm:num_requests_waiting"),
    ):
        assert total(found, theirs, model_name="tiny", engine="0") == total(found, ours), theirs
    assert 0 <= total(found, "vllm:kv_cache_usage_perc") <= 1


def test_every_metric_is_what_the_table_says(loaded: tuple[list[Completion], Samples, dict[str, str]]) -> None:
    """Names, types and labels as parsed by Prometheus' own library; all of the table is there, or named above with its reason."""
    texts, known, allowed = loaded[2], {found.name: found for found in families().values()}, sample_labels()
    exported: set[str] = set()
    for role, text in texts.items():
        for line in (line for line in text.splitlines() if line.startswith("# TYPE ")):
            _, _, name, kind = line.split()
            if name == "target_info":
                continue
            assert name in known and known[name].type == kind, (role, line)
            exported.add(name)
        for (name, labels), value in samples(text).items():
            assert name == "target_info" or {label for label, _ in labels} <= allowed[name], (role, name)
            assert value >= 0 or not name.endswith(("_total", "_count", "_bucket")), (role, name, value)
        assert f'service_name="specdec-{role}"' in text and "specdec_ready 1.0" in text
    missing = {name for name in METRICS if families()[name].name not in exported}
    scaling = {name for name in METRICS if name.startswith("specdec.scaling.")}  # test_scaling.py looks at them
    assert missing <= set(APPEARS_WHEN) | scaling, f"say in APPEARS_WHEN when it appears: {sorted(missing - set(APPEARS_WHEN) - scaling)}"
    assert set(APPEARS_WHEN) <= set(METRICS)


def test_promtool_has_nothing_to_say(loaded: tuple[list[Completion], Samples, dict[str, str]]) -> None:
    promtool = require_tool("promtool")
    for role, text in loaded[2].items():
        own = "\n".join(line for line in text.splitlines() if "vllm:" not in line) + "\n"  # their names have a colon, as the aliases must
        checked = subprocess.run([promtool, "check", "metrics"], input=own, capture_output=True, text=True, timeout=20)
        assert checked.returncode == 0, (role, checked.stdout, checked.stderr)


def test_top_shows_it(questioned: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """Two looks with answers between them; where the machine held the draft up meanwhile, they are repeated."""
    ports = ",".join(f"{p.host}:{p.metrics_port}" for p in (*questioned.orchestrators, *questioned.targets, *questioned.drafts))
    seen = threading.Event()

    def ask() -> None:
        while not seen.is_set():
            asyncio.run(load(questioned.endpoint))

    asking = threading.Thread(target=ask)
    asking.start()
    told: list[str] = []

    def speculates() -> bool:
        assert main(["top", "--once", "--interval", "0.6", "--metrics", ports]) == 0
        told.append(capsys.readouterr().out)
        return "  on  " in told[-1]

    try:
        wait_until(speculates, what=told)
    finally:
        seen.set()
        asking.join()
    out = told[-1]
    for word in ("orchestrator", "target", "draft", "ANSWERS", "SPECULATION", "KEPT BY SLOT"):
        assert word in out, out
    assert "away" not in out and "…" not in out, "a script gets whole lines"
    assert main(["top", "--once", "--interval", "0.3", "--endpoint", questioned.endpoint]) == 0
    out = capsys.readouterr().out
    for word in ("SPECULATION", "  on  ", "ROUNDS AT THE TARGETS", "NOT TOLD BY ORCHESTRATORS"):
        assert word in out, out


def test_clients_are_told_what_a_scraper_is(questioned: Stack, loaded: tuple[list[Completion], Samples, dict[str, str]]) -> None:
    """Of a system at rest."""

    async def told() -> str:
        await settled(questioned)
        async with Client(questioned.endpoint) as client:
            return await client.get_metrics()

    text = asyncio.run(told())
    clients, scraped = samples(text), samples(scrape(questioned.orchestrators[0]))
    counts = [key for key in scraped if key[0].endswith(("_total", "_count", "_sum", "_bucket"))]
    ours = {key for key in counts if key[0].startswith(("specdec_", "gen_ai_", "vllm:"))}
    assert {key: clients[key] for key in ours} == {key: scraped[key] for key in ours} and len(ours) > 100
    steps, rows = (total(clients, f"specdec_target_batch_size_{part}") for part in ("count", "sum"))
    target = samples(scrape(questioned.targets[0]))
    assert 0 < steps <= rows and steps <= total(target, "specdec_step_duration_seconds_count"), "it has no other orchestrator"


def test_f177_a_silent_collector_delays_no_exit(questioned: Stack, tmp_path: Path) -> None:
    """It accepts and never answers, spans as little as metrics. What is lost is counted, and told once."""
    with silent() as url:
        settings = {"TOKENIZER": str(questioned.target_model), "TARGETS": questioned.targets[0].endpoint, "OTLP_ENDPOINT": url}
        settings |= {"OTLP_METRICS_MS": "100", "PRE_DRAIN_MS": "0"}
        process = wait_ready(start("orchestrator", "orchestrator", settings, tmp_path))
        try:
            asyncio.run(ask_some(process.endpoint))
            deadline = time.monotonic() + 20
            while total(samples(scrape(process)), "specdec_telemetry_spans_dropped_total", reason="collector") < 6:
                assert time.monotonic() < deadline  # all of the first three, or the rest of them would be lost with the others
                time.sleep(0.05)
            asyncio.run(ask_some(process.endpoint))  # these wait when the signal comes
            began = time.monotonic()
            process.popen.send_signal(signal.SIGTERM)
            assert process.popen.wait(30) == 0
            assert time.monotonic() - began < EXIT_S
        finally:
            process.kill()
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    messages = Counter(line["message"] for line in lines)
    assert [messages[f"the collector takes no {what}; they are dropped"] for what in ("spans", "metrics")] == [1, 1]
    assert [line["spans"] for line in lines if line["message"] == "spans were lost at the end of the process"] == [6]


async def ask_some(endpoint: str) -> None:
    async with Client(endpoint) as client:
        await asyncio.gather(*(client.complete(PROMPT, SamplingParams(max_tokens=4), seed=i) for i in range(3)))


@pytest.mark.long
def test_f176_tokens_of_a_traced_system_are_as_fast(questioned: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole measurement, once. Time belongs to a machine that may be busy; what the services compute for a token is theirs."""
    words = ["--model", str(questioned.target_model), "--sides", "full", "--repeats", "2", "--slices", "2", "--max-tokens", "120", "--json"]
    assert telemetry.main(words) in telemetry.EXIT_CODES.values()
    found = json.loads(capsys.readouterr().out)
    assert found["repeats"] == 2 and all(one["off"]["median_ms"] > 1 and one["full"]["gaps"] > 100 for one in found["measured"])
    told = found["sides"]["full"]
    assert told["median_ms"]["ratio"]["mean"] < 2 and told["cpu_us"]["ratio"]["mean"] < 1.5, told

"""What clients may see of the metrics: all counts of ours, no name that an operator gave."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.bench.scrape import Samples, parse
from specdec.runtime.metrics import METRICS
from specdec.runtime.security import FrontSettings
from specdec.runtime.shown import OPERATORS, PREFIXES
from specdec.runtime.telemetry import Telemetry

pytestmark = pytest.mark.unit

SEEN = frozenset(
    ["reason", "origin", "position", "outcome", "guess", "phase", "pool", "state", "signal", "fingerprint", "kind"]
)  # labels whose values this code chooses, one of a few


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Telemetry]:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=secret-pod,host.name=secret-host")
    made = Telemetry("orchestrator", metrics_port=0)
    made.counter("specdec.rounds").add(7)
    made.histogram("specdec.target.batch.size").record(5)
    made.histogram("gen_ai.server.time_to_first_token").record(0.1)
    made.histogram("rpc.server.call.duration").record(0.1, {"rpc.method": "specdec.v1.GenerationService/Generate"})
    pools = [(2.0, {"pool": "target", "replica": "10.0.0.7:1"}), (3.0, {"pool": "target", "replica": "10.0.0.8:1"})]
    made.gauge("specdec.pool.sessions", lambda: [*pools, (4.0, {"pool": "draft", "replica": "10.0.0.9:1"})])
    made.gauge("specdec.scaling.load", lambda: [(1.5, {"pool": "draft", "pool_name": "secret-zone", "signal": "late"})])
    made.aliases(lambda: "m", lambda: 0.5)
    yield made
    made.close()


def at_the_port(telemetry: Telemetry) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{telemetry.metrics_port}/metrics", timeout=5) as response:
        return parse(response.read().decode())


def test_counts_are_those_of_the_port_and_names_of_operators_stay_there(telemetry: Telemetry) -> None:
    text = telemetry.for_clients().decode()
    clients, scraped = parse(text), at_the_port(telemetry)
    named = {key for key in scraped if OPERATORS & {label for label, _ in key[1]}}
    assert {key: value for key, value in scraped.items() if key[0].startswith(PREFIXES) and key not in named} == {
        key: value for key, value in clients.items() if key in scraped
    }
    for word in ("10.0.0", "secret", "replica=", "pool_name", "rpc_", "telemetry_sdk"):
        assert word not in text and any(word.strip("=") in str(key) for key in scraped), word
    assert clients["specdec_pool_sessions", frozenset({("pool", "target")})] == 5.0
    assert clients["specdec_pool_sessions", frozenset({("pool", "draft")})] == 4.0
    assert clients["specdec_scaling_load", frozenset({("pool", "draft"), ("signal", "late")})] == 1.5
    assert clients["vllm:kv_cache_usage_perc", frozenset({("model_name", "m"), ("engine", "0")})] == 0.5
    (process,) = (dict(labels) for name, labels in clients if name == "target_info")
    assert process.keys() == {"service_name", "service_instance_id"} and process["service_name"] == "specdec-orchestrator"
    assert {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE specdec_target_batch")} == {
        "specdec_target_batch_size"
    }


def test_every_label_was_thought_of() -> None:
    """A label of ours is seen by clients or is not; whoever adds one says which."""
    ours = {label for name, metric in METRICS.items() if name.startswith("specdec.") for label in metric.labels}
    assert ours == SEEN | OPERATORS, "add it to SEEN here, or to OPERATORS in specdec/runtime/shown.py if an operator chose its values"


@pytest.mark.parametrize(
    ("given", "shows"),
    [
        ({}, True),
        ({"tokens_file": Path("t")}, False),
        ({"tls_client_ca": Path("c")}, False),
        ({"tls_cert": Path("c"), "tls_key": Path("k")}, True),
        ({"tokens_file": Path("t"), "show_metrics": True}, True),
        ({"show_metrics": False}, False),
    ],
)
def test_who_is_told(given: dict[str, object], shows: bool) -> None:
    """Where callers are told apart, somebody has to allow it."""
    assert FrontSettings(**given).shows_metrics is shows  # type: ignore[arg-type]

"""What the scalers ask for exists: queries are parsed, their metrics and labels are those that orchestrators export."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from orchestrator.scaling.metadata import wish
from orchestrator.scaling.signals import SIGNALS, Key
from specdec.runtime.metrics import METRICS
from tests.helm.objects import Render, render
from tests.helm.programs import CHART, RELEASE
from tests.helm.promql import ADDED_BY_SCRAPING, named, parsed
from tests.helm.scenes import SCENES, keda, scene

pytestmark = pytest.mark.chart
EXPORTED = {
    name.replace(".", "_"): frozenset(METRICS[name].labels) | ADDED_BY_SCRAPING
    for name in ("specdec.scaling.load", "specdec.scaling.waiting")
}


def triggers(render: Render, kind: str) -> Iterator[dict[str, Any]]:
    for scaled in render.kind("ScaledObject"):
        yield from (trigger for trigger in scaled["spec"]["triggers"] if trigger["type"].startswith(kind))


def queries() -> dict[str, str]:
    """All that any scene renders, and the rule of the adapter with its holes filled as the adapter does."""
    found = {trigger["metadata"]["query"]: name for name in SCENES for trigger in triggers(scene(name), "prometheus")}
    [rule] = yaml.safe_load((CHART / "files" / "prometheus-adapter.yaml").read_text())["rules"]["external"]
    matchers = 'namespace="models",pool="target",pool_name="default",signal="kv"'
    filled = rule["metricsQuery"].replace("<<.Series>>", "specdec_scaling_load").replace("<<.LabelMatchers>>", matchers)
    return found | {filled: "the adapter's rule", rule["seriesQuery"]: "the adapter's rule"}


def test_queries_name_what_is_exported_and_have_one_answer() -> None:
    found = queries()
    assert len(found) > 5
    for query, scene_name in found.items():
        for metric, labels in named(query):
            assert metric is None or labels <= EXPORTED[metric], query
        if scene_name in SCENES:
            assert query.startswith(("max(", "clamp_max(sum(")) and " by " not in query, "one answer, whatever there is"


def test_a_query_that_is_broken_or_asks_for_a_label_that_nobody_has_is_seen() -> None:
    with pytest.raises(ValueError):
        parsed("max(specdec_scaling_load{")
    assert any(not labels <= EXPORTED["specdec_scaling_load"] for _, labels in named('max(specdec_scaling_load{replica="a"})'))


@pytest.mark.parametrize("length", [10, 33, 34, 35])
def test_queries_find_the_pods_of_orchestrators_by_the_names_that_kubernetes_makes(length: int) -> None:
    """generateName of a pod is that of its ReplicaSet, cut to 58 characters, and five more (k8s.io/apiserver, storage/names)."""
    found = render({"fullnameOverride": "a" * length, "target": keda("prometheus")})
    (front,) = found.of("orchestrator")
    chosen = {re.search('pod=~"([^"]*)"', trigger["metadata"]["query"])[1] for trigger in triggers(found, "prometheus")}  # type: ignore[index]
    (pattern,) = chosen
    for replica_set in ("7c5ddbdf54", "6b9f8c77d"):
        name = f"{front.owner['metadata']['name']}-{replica_set}-"[:58] + "x7k2p"
        assert re.fullmatch(pattern, name), name
    others = (f"{'a' * length}-target-default-7c5ddbdf54-x7k2p", f"b{front.owner['metadata']['name']}-7c5ddbdf54-x7k2p")
    assert not any(re.fullmatch(pattern, name) for name in others)


def test_every_pool_s_queries_are_of_its_own_pool_and_of_each_of_its_signals() -> None:
    for name in SCENES:
        for scaled in scene(name).kind("ScaledObject"):
            asked = [t["metadata"]["query"] for t in scaled["spec"]["triggers"] if t["type"] == "prometheus"]
            if not asked:
                continue
            kind, pool = next(
                (kind, scaled["metadata"]["name"].rpartition(f"-{kind}-")[2])
                for kind in SIGNALS
                if f"-{kind}-" in scaled["metadata"]["name"]
            )
            assert all(f'pool="{kind}",pool_name="{pool}"' in query and f'pod=~"{RELEASE}-' in query for query in asked)
            assert all(any(f'signal="{signal}"' in query for query in asked) for signal in SIGNALS[kind])
            waits = any("specdec_scaling_waiting" in query for query in asked)
            assert waits == (scaled["spec"]["minReplicaCount"] == 0), "a pool at zero has no load: what makes it grow is who waits"


def test_the_external_scaler_understands_every_trigger() -> None:
    """By the code that answers KEDA."""
    seen = 0
    for name in SCENES:
        for trigger in triggers(scene(name), "external"):
            metadata = trigger["metadata"]
            pools = [Key(metadata["pool"], metadata["poolName"])]
            assert set(wish(metadata, pools).thresholds) == set(SIGNALS[metadata["pool"]])
            seen += 1
    assert seen > 3


def test_thresholds_of_an_hpa_are_thousandths_of_its_pool_s_signals() -> None:
    seen = set()
    for name in SCENES:
        for scaler in scene(name).kind("HorizontalPodAutoscaler"):
            for metric in scaler["spec"]["metrics"]:
                if metric["type"] != "External":
                    continue
                labels = metric["external"]["metric"]["selector"]["matchLabels"]
                assert labels["signal"] in SIGNALS[labels["pool"]] and set(labels) <= EXPORTED["specdec_scaling_load"]
                assert scaler["metadata"]["name"].endswith(f"-{labels['pool']}-{labels['pool_name']}")
                target = metric["external"]["target"]
                assert target["type"] == "AverageValue" and 0 < int(target["averageValue"].removesuffix("m")) <= 1000
                seen.add(labels["signal"])
    assert seen >= {"queue", "kv"}

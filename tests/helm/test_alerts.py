"""Alerts and dashboards: every query names what the services export, every alert fires on its trouble and only then, and has its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.runtime.metrics import METRICS
from tests.helm.objects import Render, parse
from tests.helm.programs import CHART, HELM_3, HELM_4, template
from tests.helm.promql import ADDED_BY_SCRAPING, OTHERS, named
from tests.metric_names import family, sample_labels
from tests.tools import ROOT, require_tool

ALERTS = CHART / "files" / "alerts.yaml"
RUNBOOK = ROOT / "docs" / "runbook.md"
KNOWS = ["--api-versions", "monitoring.coreos.com/v1/PrometheusRule"]
AT = 'job="specdec",instance="a"'
Series = dict[str, str]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]


def test_every_query_names_what_is_exported() -> None:
    known, seen = {**sample_labels(), **OTHERS}, set()
    for where, query in queries():
        found = list(named(query))
        assert found, where
        for name, labels in found:
            assert name in known, f"{where}: nobody exports {name}"
            assert labels <= known[name] | ADDED_BY_SCRAPING, f"{where}: {name} has no label {sorted(labels - known[name])}"
            seen.add(name)
    assert len(seen) > 50


def test_every_metric_is_looked_at() -> None:
    """In a dashboard, or by an alert: what nobody looks at need not be counted. vLLM's names repeat ours."""
    seen = {name for _, query in queries() for name, _ in named(query)}
    unseen = [name for name in METRICS if not seen & set(family(name).samples)]
    assert not unseen, f"give them a panel in tools/dashboards.py: {unseen}"


@pytest.mark.parametrize("query", ["specdec_nope", 'specdec_rounds_total{reason="x"}', "sum by (session) (specdec_rounds_total)"])
def test_the_check_sees_what_nobody_exports(query: str) -> None:
    known = {**sample_labels(), **OTHERS}
    assert [name for name, labels in named(query) if not labels <= known.get(name, frozenset()) | ADDED_BY_SCRAPING or name not in known]


def test_dashboards_are_current_and_legends_have_their_labels() -> None:
    checked = subprocess.run([sys.executable, str(ROOT / "tools" / "dashboards.py"), "--check"], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    for path in (CHART / "dashboards").glob("*.json"):
        board = json.loads(path.read_text())
        assert board["uid"] == f"specdec-{path.stem}"
        for panel in board["panels"]:
            assert panel["description"] and panel["targets"]
            for target in panel["targets"]:
                asked = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                has = set().union(*(labels | sample_labels().get(name, frozenset()) for name, labels in named(target["expr"])))
                assert asked <= has | ADDED_BY_SCRAPING, (panel["title"], asked - has)


def test_prometheus_finds_nothing_wrong() -> None:
    checked = subprocess.run([require_tool("promtool"), "check", "rules", "--lint=all", str(ALERTS)], capture_output=True, text=True)
    assert checked.returncode == 0 and "FAILED" not in checked.stdout + checked.stderr, checked.stdout + checked.stderr


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    headings = [line.removeprefix("## ") for line in RUNBOOK.read_text().splitlines() if line.startswith("## Specdec")]
    assert headings == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["annotations"]["runbook_url"].endswith(f"docs/runbook.md#{rule['alert'].lower()}")
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        page = RUNBOOK.read_text().split(f"## {rule['alert']}\n")[1].split("\n## ")[0]
        for part in ("**Means**", "**Confirm**", "**Do**"):
            assert part in page, (rule["alert"], part)


def test_the_runbook_names_what_there_is() -> None:
    """Metrics and settings that it sends people to."""
    from specdec.runtime.names import known_elsewhere

    text = RUNBOOK.read_text()
    samples = set(sample_labels())
    for name in re.findall(r"`(specdec_\w+|gen_ai_\w+)", text):
        assert name in samples or f"{name}_bucket" in samples, name
    for name in re.findall(r"SPECDEC_(\w+)", text):
        assert name in known_elsewhere(), name


# ---------------------------------------------------------------- they fire, and only on their own trouble


def line(metric: str, values: str, labels: str = "") -> Series:
    return {"series": f"{metric}{{{','.join(filter(None, (AT, labels)))}}}", "values": values}


def pool(state: str, value: str, name: str = "target") -> Series:
    return line("specdec_pool_endpoints", f"{value}x45", f'pool="{name}",state="{state}"')


def lookahead(hit: int, late: int) -> list[Series]:
    return [
        line("specdec_lookahead_rounds_total", f"0+{hit}x45", 'outcome="hit"'),
        line("specdec_lookahead_rounds_total", f"0+{late}x45", 'outcome="miss"'),
    ]


def acceptance(drafted: int, accepted: int) -> list[Series]:
    return [line("specdec_draft_tokens_total", f"0+{drafted}x45"), line("specdec_accepted_tokens_total", f"0+{accepted}x45")]


def speculation(enabled: int, wanted: int) -> list[Series]:
    return [line("specdec_spec_enabled", f"{enabled}x45"), line("specdec_spec_wanted", f"{wanted}x45")]


def kv(share: float, role: str) -> list[Series]:
    return [line("specdec_kv_cache_utilization", f"{share}x45"), line("target_info", "1x45", f'service_name="specdec-{role}"')]


def refused(per_minute: int, code: str) -> Series:
    return line("specdec_requests_refused_total", f"0+{per_minute}x45", f'reason="{code}"')


def moved(per_minute: int, reason: str = "target_lost", fingerprint: str = "equal") -> Series:
    return line("specdec_session_replacements_total", f"0+{per_minute}x45", f'reason="{reason}",fingerprint="{fingerprint}"')


# A sample a minute for three quarters of an hour. alert -> (its trouble, what looks like it and is none)
CASES: dict[str, tuple[list[Series], list[Series]]] = {
    "SpecdecSpeculationOff": (speculation(0, 1), [*speculation(0, 0)]),
    "SpecdecAcceptanceCollapsed": (acceptance(6000, 600), acceptance(6000, 1500)),
    "SpecdecProposalsLate": (lookahead(1000, 5000), lookahead(5000, 1000)),
    "SpecdecProposalsRejected": (
        [line("specdec_proposals_rejected_total", "0+1x45", 'reason="malformed"')],
        [line("specdec_proposals_rejected_total", "7x45", 'reason="malformed"')],
    ),
    "SpecdecTargetPoolEmpty": (
        [pool("up", "0"), pool("leaving", "1"), pool("down", "2")],
        [pool("up", "0"), pool("probing", "1"), pool("up", "0", "draft")],
    ),
    "SpecdecRequestsRefused": ([refused(60, "RESOURCE_EXHAUSTED")], [refused(60, "INVALID_ARGUMENT")]),
    "SpecdecRequestsWait": ([line("specdec_requests_waiting", "4x45")], [line("specdec_requests_waiting", "4 0 " * 23)]),
    "SpecdecKvFull": (kv(0.97, "target"), kv(0.97, "draft")),
    "SpecdecReplicaEjected": ([pool("ejected", "1", "draft")], [pool("ejected", "0"), pool("down", "1", "draft")]),
    "SpecdecReplicaFlapping": (
        [line("specdec_pool_ejections_total", "0+1x45", 'pool="draft",reason="late"')],
        [line("specdec_pool_ejections_total", "0+1x3 3x42", 'pool="draft",reason="late"')],
    ),
    "SpecdecSessionsMoved": ([moved(60)], [moved(60, "draining")]),
    "SpecdecTargetsDiffer": ([moved(1, "draining", "other")], [moved(1, "draining", "equal")]),
    "SpecdecDiscoveryFailing": (
        [line("specdec_discovery_failures_total", "0+1x45", 'pool="target",reason="timeout"')],
        [line("specdec_discovery_failures_total", "0+1x3 3x42", 'pool="target",reason="timeout"')],
    ),
    "SpecdecStepStuck": ([line("specdec_step_age_seconds", "0+60x45")], [line("specdec_step_age_seconds", "2x45")]),
    "SpecdecNotReady": ([line("specdec_ready", "0x45")], [line("specdec_ready", "1x30 0x5 1x10")]),
    "SpecdecCertificateExpires": (
        [line("specdec_tls_certificate_expires_seconds", "86400x45")],
        [line("specdec_tls_certificate_expires_seconds", "2000000x45")],
    ),
    "SpecdecTelemetryDrops": (
        [line("specdec_telemetry_spans_dropped_total", "0+9x45", 'reason="collector"')],
        [line("specdec_telemetry_spans_dropped_total", "9x45", 'reason="collector"')],
    ),
    "SpecdecSeriesLeftOut": (
        [line("specdec_telemetry_series_left_out_total", "0+1x45")],
        [line("specdec_telemetry_series_left_out_total", "0x45")],
    ),
}


def test_every_alert_fires_on_its_trouble_alone(tmp_path: Path) -> None:
    assert list(CASES) == [rule["alert"] for rule in rules()]
    tests = []
    for alert, (trouble, none) in CASES.items():
        for name, series, fires in ((alert, trouble, [alert]), (f"not {alert}", none, [])):
            samples = [{"labels": f'{{alertname="{fired}"}}', "value": 1} for fired in fires]
            asked = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"} > bool 0)', "eval_time": "40m", "exp_samples": samples}
            tests.append({"name": name, "interval": "1m", "input_series": series, "promql_expr_test": [asked]})
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run([require_tool("promtool"), "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- in the chart


def rendered(values: dict[str, Any], *more: str, version: str = HELM_4) -> Render:
    done = template(values, version=version, more=more)
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def test_the_rule_is_there_where_the_cluster_knows_it() -> None:
    """auto, on, off; YAML 1.1 reads the last two as true and false."""
    assert not rendered({}).kind("PrometheusRule") and len(rendered({}, *KNOWS).kind("PrometheusRule")) == 1
    assert not rendered({"alerts": {"enabled": False}}, *KNOWS).kind("PrometheusRule")
    own = {"enabled": "on", "labels": {"release": "prometheus"}, "ruleLabels": {"team": "inference"}, "runbookUrl": "https://wiki/specdec"}
    for version in (HELM_3, HELM_4):
        (made,) = rendered({"alerts": own}, version=version).kind("PrometheusRule")
        assert made["metadata"]["labels"]["release"] == "prometheus"
        told = [rule for group in made["spec"]["groups"] for rule in group["rules"]]
        assert [rule["alert"] for rule in told] == [rule["alert"] for rule in rules()]
        assert [rule["expr"].split() for rule in told] == [rule["expr"].split() for rule in rules()]
        assert all(rule["labels"]["team"] == "inference" and "severity" in rule["labels"] for rule in told)
        assert told[0]["annotations"]["runbook_url"] == "https://wiki/specdec#specdecspeculationoff"
        assert "{{ $labels.instance }}" in told[0]["annotations"]["description"]


def test_dashboards_are_a_config_map() -> None:
    name = "demo-specdec-dashboards"
    assert rendered({}).find("ConfigMap", name) is None
    made = rendered({"dashboards": {"enabled": True, "annotations": {"grafana_folder": "specdec"}}}).find("ConfigMap", name)
    assert made is not None and made["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert made["metadata"]["annotations"] == {"grafana_folder": "specdec"}
    files = {path.name: json.loads(path.read_text()) for path in (CHART / "dashboards").glob("*.json")}
    assert {key: json.loads(value) for key, value in made["data"].items()} == {f"specdec-{name}": board for name, board in files.items()}
    assert sum(map(len, made["data"].values())) < 900_000, "a ConfigMap holds 1 MiB"

"""The dashboards of the chart: helm/specdec/dashboards/*.json, made from the tables below.

    python tools/dashboards.py          # writes them
    python tools/dashboards.py --check  # only tells which are out of date; exit code 1 then

A panel is a title, what it tells, a unit of Grafana's and its queries. `{S}` in a query is the selector of the variables: namespace and
job, either of which may be missing from the series of a Prometheus that adds none.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "helm" / "specdec" / "dashboards"
SELECTOR = 'namespace=~"$namespace",job=~"$job"'
RATE = "$__rate_interval"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
SCHEMA_VERSION = 39  # of Grafana 10 and later


@dataclass(frozen=True)
class Panel:
    title: str
    tells: str
    unit: str
    queries: tuple[tuple[str, str], ...]  # (query, legend)
    kind: str = "timeseries"


def _rate(metric: str, by: str = "", labels: str = "") -> str:
    inner = f"rate({metric}{{{labels}{{S}}}}[{RATE}])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def _quantile(q: float, metric: str, by: str = "", labels: str = "") -> str:
    return f"histogram_quantile({q}, {_rate(metric + '_bucket', ', '.join(filter(None, ('le', by))), labels)})"


def _info(role: str) -> str:
    return f'target_info{{service_name="specdec-{role}"}}'


def _of_role(metric: str, role: str) -> str:
    """A metric that targets and drafts both have."""
    return f"{metric}{{{{S}}}} and on (job, instance) {_info(role)}"


def _both_roles(metric: str) -> tuple[tuple[str, str], ...]:
    """Median and 99 % of a histogram that targets and drafts both have: one scrape job may hold all of a release."""
    return tuple(
        (
            f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{{{S}}}}[$__rate_interval]) and on (job, instance) {_info(role)}))",
            f"{named} {role}",
        )
        for role in ("target", "draft")
        for q, named in ((0.5, "median"), (0.99, "99 %"))
    )


FIRST, PER_TOKEN = "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_time_per_output_token_seconds"
DURATION, ROUND = "gen_ai_server_request_duration_seconds", "specdec_round_duration_seconds"
ACCEPTED, DRAFTED, BLOCKS = "specdec_accepted_tokens_total", "specdec_draft_tokens_total", "specdec_draft_rounds_total"
LOOKAHEAD = "specdec_lookahead_rounds_total"
HIT, LATE = 'outcome="hit",', 'outcome=~"late|miss",'

OVERVIEW = (
    Panel("Answers in progress", "Generations that run and that wait for a place.", "short", (
        ("sum(specdec_requests_running{{S}})", "running"), ("sum(specdec_requests_waiting{{S}})", "waiting"),
    )),
    Panel("Tokens to clients", "Delivered tokens; those decided behind a stop are not among them.", "short", (
        (_rate("specdec_delivered_tokens_total"), "delivered"), (_rate("specdec_discarded_tokens_total"), "discarded"),
    )),
    Panel("Requests by end", "Ended requests; `error_type` is empty for those that ended well.", "reqps", (
        (_rate(f"{DURATION}_count", "error_type"), "{{error_type}}"),
    )),
    Panel("Time to the first token", "From the request to its first token.", "s", (
        (_quantile(0.5, FIRST), "median"), (_quantile(0.99, FIRST), "99 %"),
    )),
    Panel("Time per token", "After the first; tokens that arrive together share the time before them.", "s", (
        (_quantile(0.5, PER_TOKEN), "median"), (_quantile(0.99, PER_TOKEN), "99 %"),
    )),
    Panel("Time of a request", "Whole answers.", "s", ((_quantile(0.5, DURATION), "median"), (_quantile(0.99, DURATION), "99 %"))),
    Panel("Refusals", "Requests turned away at admission, calls refused before they began.", "reqps", (
        (_rate("specdec_requests_refused_total", "reason"), "{{reason}}"),
        (_rate("specdec_calls_refused_total", "reason"), "call: {{reason}}"),
    )),
    Panel("Speculation", "1 while a draft can be used, by orchestrator; below it who wants one.", "short", (
        ("specdec_spec_enabled{{S}}", "usable {{instance}}"), ("specdec_spec_wanted{{S}}", "wanted {{instance}}"),
    )),
    Panel("Ready", "1 while a process takes work.", "short", (("specdec_ready{{S}}", "{{instance}}"),)),
    Panel("Calls that ended", "By method and status: those that came in, and those of orchestrators to replicas.", "reqps", (
        (_rate("rpc_server_call_duration_seconds_count", "rpc_method, rpc_status_code"), "{{rpc_method}} {{rpc_status_code}}"),
        (_rate("rpc_client_call_duration_seconds_count", "rpc_method, rpc_status_code"), "to {{rpc_method}} {{rpc_status_code}}"),
    )),
    Panel("Certificates", "Time until the one in use expires.", "s", (
        ("specdec_tls_certificate_expires_seconds{{S}} - time()", "{{instance}}"),
    )),
    Panel("Telemetry", "Spans that a collector took; spans, log lines and labels that were dropped to keep within bounds.", "short", (
        (_rate("specdec_telemetry_spans_exported_total"), "spans taken"),
        (_rate("specdec_telemetry_spans_dropped_total", "reason"), "spans dropped: {{reason}}"),
        (_rate("specdec_telemetry_log_lines_left_out_total"), "log lines left out"),
        (_rate("specdec_telemetry_series_left_out_total"), "samples without their labels"),
    )),
)  # fmt: skip

POOLS = (
    Panel("Replicas", "By pool and state, as the orchestrator that sees fewest of them says.", "short", (
        ("min by (pool, state) (specdec_pool_endpoints{{S}})", "{{pool}} {{state}}"),
    )),
    Panel("Sessions by replica", "Placed by the orchestrators, all together; beside it what each replica says it holds.", "short", (
        ("sum by (pool, replica) (specdec_pool_sessions{{S}})", "{{pool}} {{replica}}"),
        ("specdec_sessions{{S}}", "held by {{instance}}"),
    )),
    Panel("KV room of targets", "Share in use; at 1 sessions wait for room.", "percentunit", (
        (_of_role("specdec_kv_cache_utilization", "target"), "{{instance}}"),
    )),
    Panel("KV room of drafts", "Share in use.", "percentunit", ((_of_role("specdec_kv_cache_utilization", "draft"), "{{instance}}"),)),
    Panel("Memory of engines", "Weights, room for keys and values and what is booked of it, and on a GPU what is allocated.", "bytes", (
        ("specdec_memory_bytes{{S}}", "{{instance}} {{kind}}"),
    )),
    Panel("Rows of a step", "How full the batches are.", "short", _both_roles("specdec_batch_size")),
    Panel("Rows of the steps that answered", "Of targets' steps with answers for an orchestrator, whoever else was in them.", "short", (
        (_quantile(0.5, "specdec_target_batch_size", "instance"), "median {{instance}}"),
        (_quantile(0.99, "specdec_target_batch_size", "instance"), "99 % {{instance}}"),
    )),
    Panel("Time of an engine step", "Of targets and of drafts.", "s", _both_roles("specdec_step_duration_seconds")),
    Panel("Age of the running step", "A line that rises is a step that hangs.", "s", (("specdec_step_age_seconds{{S}}", "{{instance}}"),)),
    Panel("Queue at the targets", "What a round waits before its step.", "s", (
        (_quantile(0.5, "specdec_queue_duration_seconds"), "median"), (_quantile(0.99, "specdec_queue_duration_seconds"), "99 %"),
    )),
    Panel("Shut out", "Replicas ejected, by pool and reason.", "short", (
        (_rate("specdec_pool_ejections_total", "pool, reason"), "{{pool}} {{reason}}"),
    )),
    Panel("Sessions that moved", "To another replica: because they had to, or handed over.", "short", (
        (_rate("specdec_session_replacements_total", "reason, fingerprint"), "{{reason}} ({{fingerprint}})"),
        (_rate("specdec_session_handovers_total", "pool, reason"), "{{pool}} {{reason}}"),
    )),
    Panel("Placement", "Why a session got its replica.", "short", (
        (_rate("specdec_session_placements_total", "pool, reason"), "{{pool}} {{reason}}"),
    )),
    Panel("Prefix cache", "Share of the tokens sessions began with that were in KV already.", "percentunit", (
        (f"{_rate('specdec_prefix_cache_hit_tokens_total')} / {_rate('specdec_prefix_cache_asked_tokens_total')}", "hit"),
    )),
    Panel("Prefix cache's room", "KV of targets that only the prefix cache holds; it counts as free.", "short", (
        ("specdec_prefix_cache_tokens{{S}}", "{{instance}}"),
    )),
    Panel("Load", "In replicas' worth over the whole pool, by signal: what autoscaling aims at.", "short", (
        ("max by (pool, pool_name, signal) (specdec_scaling_load{{S}})", "{{pool}} {{pool_name}}: {{signal}}"),
    )),
    Panel("Calls that no replica can take", "They wait for a pool that is empty, draining or shut out, as far as all say.", "short", (
        ("sum by (pool, pool_name) (specdec_scaling_waiting{{S}})", "{{pool}} {{pool_name}}"),
        (_rate("specdec_scaling_silent_total"), "orchestrators that did not say"),
    )),
    Panel("Look-ups that failed", "Of replicas, by pool and reason.", "short", (
        (_rate("specdec_discovery_failures_total", "pool, reason"), "{{pool}} {{reason}}"),
    )),
    Panel("Age of a pool's membership", "Of the oldest answer that it depends on; a line that rises is a look-up that fails.", "s", (
        ("max by (pool) (specdec_discovery_age_seconds{{S}})", "{{pool}}"),
    )),
)  # fmt: skip

SPECULATION = (
    Panel("Share of proposals kept", "Accepted of verified tokens.", "percentunit", ((f"{_rate(ACCEPTED)} / {_rate(DRAFTED)}", "kept"),)),
    Panel("Mean acceptance length", "1 + accepted / rounds with a block; beside it tokens per round, plain ones included.", "short", (
        (f"1 + {_rate(ACCEPTED)} / {_rate(BLOCKS)}", "acceptance length"),
        (f"{_rate('specdec_decided_tokens_total')} / {_rate('specdec_rounds_total')}", "tokens per round"),
    )),
    Panel("Kept by position", "Of the rounds with a block, those that kept the slot's token.", "percentunit", (
        (f"{_rate('specdec_accepted_tokens_per_position_total', 'position')} / on () group_left () {_rate(BLOCKS)}", "slot {{position}}"),
    )),
    Panel("Where blocks come from", "Rounds that wanted speculation: a hit was there at once, a miss had nothing.", "short", (
        (_rate(LOOKAHEAD, "outcome"), "{{outcome}}"),
    )),
    Panel("Hit rate", "Hits of the rounds that wanted speculation; below it those that came late or never.", "percentunit", (
        (f"{_rate(LOOKAHEAD, labels=HIT)} / {_rate(LOOKAHEAD)}", "hit"),
        (f"{_rate(LOOKAHEAD, labels=LATE)} / {_rate(LOOKAHEAD)}", "late or miss"),
    )),
    Panel("Rounds without a block", "By why; each is a token that speculation did not help.", "short", (
        (_rate("specdec_draftless_rounds_total", "reason"), "{{reason}}"),
    )),
    Panel("Decided tokens by origin", "accepted + corrected + bonus + plain.", "short", (
        (_rate("specdec_decided_tokens_total", "origin"), "{{origin}}"),
    )),
    Panel("Block length", "Verified proposals of a round with a block.", "short", (
        (f"{_rate('specdec_draft_length_sum')} / {_rate('specdec_draft_length_count')}", "mean"),
        (f"{_rate('specdec_acceptance_length_sum')} / {_rate('specdec_acceptance_length_count')}", "mean kept"),
    )),
    Panel("Wasted drafts", "Share of drafted tokens that no target verified.", "percentunit", (
        (f"{_rate('specdec_draft_wasted_tokens_total')} / {_rate('specdec_draft_proposed_tokens_total')}", "wasted"),
    )),
    Panel("Guesses", "Tokens behind guesses of how a block ends, by kind and outcome, and rounds that ended as guessed.", "short", (
        (_rate("specdec_draft_branch_tokens_total", "guess, outcome"), "{{guess}} {{outcome}}"),
        (_rate("specdec_draft_grafts_total"), "grafts"),
    )),
    Panel("Proposals not used", "Stale, or broken.", "short", (
        (_rate("specdec_lookahead_stale_total"), "stale"), (_rate("specdec_proposals_rejected_total", "reason"), "{{reason}}"),
    )),
    Panel("A round's time", "Mean by phase; phases of different processes overlap.", "s", (
        (f"{_rate(ROUND + '_sum', 'phase')} / {_rate(ROUND + '_count', 'phase')}", "{{phase}}"),
    )),
)  # fmt: skip

DASHBOARDS = {"overview": OVERVIEW, "pools": POOLS, "speculation": SPECULATION}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {"refId": chr(ord("A") + i), "datasource": source, "expr": query.replace("{S}", SELECTOR), "legendFormat": legend}
        for i, (query, legend) in enumerate(panel.queries)
    ]
    at = {"x": number % COLUMNS * WIDTH, "y": number // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT}
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.tells,
        "datasource": source,
        "gridPos": at,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def dashboard(name: str) -> dict[str, Any]:
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "current": {}},
        _variable("namespace", "label_values(specdec_ready, namespace)"),
        _variable("job", 'label_values(specdec_ready{namespace=~"$namespace"}, job)'),
    ]
    others = [{"type": "dashboards", "title": "specdec", "tags": ["specdec"], "asDropdown": True, "includeVars": True, "keepTime": True}]
    return {
        "uid": f"specdec-{name}",
        "title": f"specdec / {name}",
        "tags": ["specdec"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": others,
        "templating": {"list": variables},
        "panels": [_panel(number, panel) for number, panel in enumerate(DASHBOARDS[name])],
    }


def written(name: str) -> str:
    return json.dumps(dashboard(name), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [name for name in DASHBOARDS if not (path := FOLDER / f"{name}.json").is_file() or path.read_text() != written(name)]
    for name in stale:
        print(f"helm/specdec/dashboards/{name}.json is out of date" if check else f"wrote {name}.json", file=sys.stderr)
        if not check:
            FOLDER.mkdir(parents=True, exist_ok=True)
            (FOLDER / f"{name}.json").write_text(written(name))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

"""The metrics that exist, in one table: kind, unit, description, label keys, buckets. Knows no SDK.

Every label has a small closed set of values: outcomes, reasons, phases, states, pools, positions up to a named maximum, our own gRPC
methods. Sessions, requests and token ids never become labels; addresses do in one gauge only, up to a named maximum. Names, units and
histograms of `gen_ai.*` and `rpc.*` follow OpenTelemetry's semantic conventions; buckets are extended below 10 ms, where tokens of this
system live.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PER_TOKEN = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
COUNTS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0, 24.0, 32.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)


class Kind(enum.Enum):
    COUNTER = "counter"
    UP_DOWN = "up_down"  # a level moved by +1 and -1
    GAUGE = "gauge"  # a level read by a callback at scrape time
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    kind: Kind
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(unit: str, description: str, *labels: str) -> Metric:
    return Metric(Kind.COUNTER, unit, description, labels)


def _gauge(unit: str, description: str, *labels: str) -> Metric:
    return Metric(Kind.GAUGE, unit, description, labels)


def _histogram(unit: str, description: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(Kind.HISTOGRAM, unit, description, labels, buckets)


_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name")
_RPC = ("rpc.system.name", "rpc.method", "rpc.status_code", "error.type")

METRICS: dict[str, Metric] = {
    "specdec.requests.running": _gauge("{request}", "Generations in progress."),
    "specdec.requests.waiting": _gauge("{request}", "Generations admitted and not yet started."),
    "specdec.requests.refused": _counter("{request}", "Requests refused at admission.", "reason"),
    "specdec.rounds": _counter("{round}", "Rounds that ended with a result."),
    "specdec.decided.tokens": _counter("{token}", "Decided tokens by origin: accepted, corrected, bonus, plain.", "origin"),
    "specdec.delivered.tokens": _counter("{token}", "Tokens handed to clients."),
    "specdec.discarded.tokens": _counter("{token}", "Tokens decided behind a stop: neither delivered nor billed."),
    "specdec.draft.rounds": _counter("{round}", "Rounds with a block."),
    "specdec.draft.length": _histogram("{token}", "Verified proposals of a round with a block.", COUNTS),
    "specdec.draft.tokens": _counter("{token}", "Proposed tokens that were verified."),
    "specdec.accepted.tokens": _counter("{token}", "Proposed tokens that were kept."),
    "specdec.accepted.tokens.per_position": _counter("{token}", "Kept tokens by slot of the block, from 0.", "position"),
    "specdec.acceptance.length": _histogram("{token}", "Kept proposals of a round with a block.", COUNTS),
    "specdec.lookahead.rounds": _counter(
        "{round}",
        "Rounds that wanted speculation, by what the lookahead had when the commit came: hit, late, forced, ngram, miss.",
        "outcome",
    ),
    "specdec.lookahead.stale": _counter("{proposal}", "Proposals whose prefix no longer was one."),
    "specdec.proposals.rejected": _counter("{proposal}", "Proposals that could not be used: malformed, unknown ids.", "reason"),
    "specdec.draftless.rounds": _counter("{round}", "Rounds without a block, by why.", "reason"),
    "specdec.draft.proposed_tokens": _counter("{token}", "Tokens a draft produced, verified or not."),
    "specdec.draft.wasted_tokens": _counter("{token}", "Drafted tokens that no target verified."),
    "specdec.draft.branch_tokens": _counter(
        "{token}",
        "Tokens a draft produced behind guesses of how a block ends: correction, bonus, or late; used or wasted.",
        "guess",
        "outcome",
    ),
    "specdec.draft.grafts": _counter("{round}", "Rounds that ended as a draft had guessed, apart from blocks accepted whole."),
    "specdec.round.duration": _histogram(
        "s", "Time of a round by phase: queue, engine, sample (a part of engine), wire, wait, text.", SECONDS, "phase"
    ),
    "specdec.step.duration": _histogram("s", "Engine steps.", SECONDS),
    "specdec.step.age": _gauge("s", "For how long the engine step that runs has been running; 0 = none runs."),
    "specdec.batch.size": _histogram("{row}", "Rows of an engine step.", ROWS),
    "specdec.target.batch.size": _histogram("{row}", "Rows of the targets' steps that had answers for this orchestrator.", ROWS),
    "specdec.queue.duration": _histogram("s", "Time an item waited before its engine step.", SECONDS),
    "specdec.kv_cache.utilization": _gauge("1", "Share of the KV room in use."),
    "specdec.prefix_cache.tokens": _gauge("{token}", "KV room that only the prefix cache holds; it counts as free."),
    "specdec.prefix_cache.asked_tokens": _counter("{token}", "Committed tokens that sessions began with and might have found in KV."),
    "specdec.prefix_cache.hit_tokens": _counter("{token}", "Those among them that were in KV already."),
    "specdec.memory": _gauge(
        "By",
        "Memory of an engine by kind: weights; kv (room for keys and values), kv_used (booked of it); on a GPU device, device_peak.",
        "kind",
    ),
    "specdec.sessions": _gauge("{session}", "Sessions held."),
    "specdec.pool.endpoints": _gauge(
        "{endpoint}",
        "Known replicas by state: up, ejected, probing (no longer ejected, not yet proven), leaving (takes no session any more), down.",
        "pool",
        "state",
    ),
    "specdec.discovery.failures": _counter(
        "{lookup}",
        "Look-ups of replicas that failed, by why: error, timeout, empty, gone, denied, port, malformed, defect.",
        "pool",
        "reason",
    ),
    "specdec.discovery.age": _gauge("s", "Age of the oldest answer that a pool's membership depends on.", "pool"),
    "specdec.pool.ejections": _counter("{ejection}", "Times a replica was shut out for a while, by why.", "pool", "reason"),
    "specdec.scaling.load": _gauge(
        "1",
        "Load of a pool in replicas' worth, by signal: queue, kv of targets; needed, late of drafts. All orchestrators say the same.",
        "pool",
        "pool_name",
        "signal",
    ),
    "specdec.scaling.waiting": _gauge("{call}", "Calls that wait since no replica of a pool can take them.", "pool", "pool_name"),
    "specdec.scaling.silent": _counter("{answer}", "Times that another orchestrator did not say how many of its calls wait."),
    "specdec.spec_enabled": _gauge("1", "1 while a draft can be used, 0 while targets decide alone."),
    "specdec.spec_wanted": _gauge("1", "1 where SPECDEC_DRAFTS names a draft, 0 where targets are to decide alone."),
    "specdec.pool.sessions": _gauge("{session}", "Sessions placed by this orchestrator, by replica.", "pool", "replica"),
    "specdec.session.placements": _counter(
        "{session}", "Replicas given to sessions, by why: prefer (its prompt is there), prefix (its beginning is), load.", "pool", "reason"
    ),
    "specdec.session.handovers": _counter("{session}", "Sessions that left a replica alive: draining, hungry, slow.", "pool", "reason"),
    "specdec.session.replacements": _counter("{session}", "Sessions moved to another replica.", "reason", "fingerprint"),
    "gen_ai.server.request.duration": _histogram("s", "Time of a generation.", SECONDS, *_GEN_AI, "error.type"),
    "gen_ai.server.time_to_first_token": _histogram("s", "Time to the first token.", SECONDS, *_GEN_AI),
    "gen_ai.server.time_per_output_token": _histogram("s", "Time per token after the first.", PER_TOKEN, *_GEN_AI),
    "specdec.calls.refused": _counter("{call}", "Calls refused before they began, by why: token, identity, limit.", "reason"),
    "specdec.tls.certificate.expires": _gauge("s", "When the certificate in use expires, Unix time."),
    "specdec.ready": _gauge("1", "1 while the process takes work, 0 while it starts, drains or has nobody to do the work."),
    "specdec.telemetry.spans_exported": _counter("{span}", "Spans that the collector took."),
    "specdec.telemetry.spans_dropped": _counter(
        "{span}", "Spans that were lost, by why: queue (too many waited), collector (it did not take them), end (of the process).", "reason"
    ),
    "specdec.telemetry.log_lines_left_out": _counter("{line}", "Log lines that repeated themselves too often to be written."),
    "specdec.telemetry.series_left_out": _counter("{sample}", "Samples whose labels were new when an instrument held all it may."),
    "rpc.server.call.duration": _histogram("s", "Time of an incoming call.", SECONDS, *_RPC),
    "rpc.client.call.duration": _histogram("s", "Time of a call to a replica; a stream's is its life.", SECONDS, *_RPC),
}

GEN_AI_LABELS = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "specdec"}

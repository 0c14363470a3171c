"""Names of the settings of every service, and of its gRPC services.

Services cannot import each other, and each must tell another's name (ignored: one environment often serves a whole pod or machine)
from a misspelt one (refused). A test holds this table equal to the dataclasses.
"""

from __future__ import annotations

COMMON = frozenset({
    "HOST", "PORT", "METRICS_PORT", "HEALTH_PORT", "LOG_LEVEL", "CPU_AFFINITY", "NICE", "PRE_DRAIN_MS", "DRAIN_MS", "OTLP_ENDPOINT",
    "OTLP_SAMPLE_RATIO", "OTLP_METRICS_MS",
    "PARENT_PIPE", "DIE_WITH_PARENT",
    "TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA", "ALLOWED_IDENTITIES", "REFLECTION",
})  # fmt: skip

SETTINGS: dict[str, frozenset[str]] = {
    "target": COMMON | {
        "SIM",
        "MODEL", "DTYPE", "ENGINE_PATH", "DEVICE", "THREADS", "KV_TOKENS", "MAX_SESSIONS", "MAX_STEP_ROWS", "SELF_TEST", "HUNG_STEP_MS",
        "RESERVE_TOKENS", "LEASE_MS", "MAX_UNREAD_RESULTS", "MAX_RUN_AHEAD", "PREFIX_CACHE", "MAX_NUM_SPECULATIVE_TOKENS",
        "SCALING_SMOOTHING_MS",
    },
    "draft": COMMON | {
        "SIM",
        "MODEL", "DTYPE", "ENGINE_PATH", "DEVICE", "THREADS", "KV_TOKENS", "MAX_SESSIONS", "MAX_STEP_ROWS", "SELF_TEST", "HUNG_STEP_MS",
        "BUDGET_TOKENS", "MAX_NUM_SPECULATIVE_TOKENS", "LOOKAHEAD_FLOOR", "SPECULATIVE_FANOUT", "BRANCH_FLOOR",
        "SCALING_SMOOTHING_MS",
    },
    "orchestrator": COMMON | {
        "TLS_CA", "TLS_CLIENT_CERT", "TLS_CLIENT_KEY", "TLS_SERVER_NAME", "TOKENS_FILE", "ALLOW_INSECURE_TOKENS",
        "CLIENT_REQUESTS_PER_S", "CLIENT_MAX_OPEN", "SHOW_METRICS",
        "TARGETS", "DRAFTS", "TOKENIZER", "NUM_SPECULATIVE_TOKENS", "REJECTION_SAMPLE_METHOD", "DRAFT_SAMPLE_METHOD",
        "MAX_RUNNING", "MAX_WAITING", "MAX_WAITING_TOKENS", "MAX_WAIT_MS", "PRIORITY_AGE_MS", "MAX_UNREAD_MS",
        "SCALING_QUEUE_MS", "SCALER_PORT", "PEERS",
        "MAX_GRACE_MS", "STEP_DEADLINE_MS", "PLACEMENT_WAIT_MS", "MAX_EJECTION_MS", "PROMPT_LOOKUP_MIN",
        "TRACE_CONTENT", "MAX_RUN_AHEAD", "AHEAD", "ENABLE_ADAPTIVE_VERIFICATION", "DISCOVERY_POLL_MS", "DISCOVERY_KEEP_MS",
    },
}  # fmt: skip

# What the commands that dial read, and no service.
CLIENT = frozenset({"TOKEN_FILE"})

GRPC_SERVICES: dict[str, tuple[str, ...]] = {
    "target": ("specdec.v1.TargetService",),
    "draft": ("specdec.v1.DraftService",),
    "orchestrator": ("specdec.v1.GenerationService",),
}


def known_elsewhere() -> frozenset[str]:
    """Names that some service or command of ours knows."""
    return CLIENT.union(*SETTINGS.values())

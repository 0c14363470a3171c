"""Values that no installation should be made of, each with the key that helm must name when it refuses them."""

from __future__ import annotations

from typing import Any

from tests.helm.programs import Values


def at(key: str, value: Any) -> Values:
    """Values with one key of the form a.b.c."""
    for part in reversed(key.split(".")):
        value = {part: value}
    values: Values = value
    return values


# What one key says by itself: names, types, bounds, choices, forms.
ALONE: list[tuple[str, Any]] = [
    ("orchestratr", {}),
    ("orchestrator.replica", 2),
    ("orchestrator.replicas", "two"),
    ("orchestrator.replicas", -1),
    ("orchestrator.replicas", 1.5),
    ("orchestrator.config.maxRuning", 3),
    ("orchestrator.config.maxRunning", 0),
    ("orchestrator.config.maxRunning", 1_000_000),
    ("orchestrator.config.host", "0.0.0.0"),
    ("orchestrator.config.targets", ["a:1"]),
    ("orchestrator.config.rejectionSampleMethod", "lenient"),
    ("orchestrator.config.ahead", "yes"),
    ("orchestrator.config.maxGraceMs", "5ms"),
    ("orchestrator.autoscaling.minReplicas", 0),
    ("orchestrator.service.type", "Ingress"),
    ("orchestrator.service.port", 70_000),
    ("orchestrator.podDisruptionBudget.maxUnavailable", "half"),
    ("orchestrator.resources.limits.memory", "2 GB"),
    ("orchestrator.resources.memory", "2Gi"),
    ("orchestrator.tokenizer.source", "s3"),
    ("target.config.kvTokens", 1),
    ("target.config.budgetTokens", 8),
    ("target.config.dtype", "fp16"),
    ("target.config.cpuAffinity", [-1]),
    ("target.pools.Large", {}),
    ("target.pools.a-name-that-is-much-too-long", {}),
    ("target.pools.large.config.kvTokens", "many"),
    ("target.pools.large.serviceAccount", {"name": "x"}),
    ("target.pools", ["large"]),
    ("target.model.source", "s3"),
    ("target.model.hf.repository", "SmolLM2"),
    ("target.model.hf.token", "secret"),
    ("target.model.hostPath.path", "models"),
    ("target.model.pvc.claimName", "Big_Disk"),
    ("target.autoscaling.type", "vpa"),
    ("target.autoscaling.minReplicas", -1),
    ("target.autoscaling.thresholds.queue", 0),
    ("target.autoscaling.thresholds.late", 0.5),
    ("target.autoscaling.keda.trigger", "cron"),
    ("target.autoscaling.keda.pollingInterval", 0),
    ("target.shm.sizeLimit", "1 GB"),
    ("target.probes.readiness.timeoutSeconds", 1),
    ("target.probes.startup.failureThreshold", 100),
    ("target.loadSeconds", 0),
    ("target.extraEnv", [{"name": "A", "vlue": "b"}]),
    ("draft.config.leaseMs", 1000),
    ("draft.config.lookaheadFloor", 2),
    ("draft.gpu.count", -1),
    ("draft.gpu.resourceName", "gpu"),
    ("draft.autoscaling.thresholds.kv", 0.5),
    ("draft.zones", "a"),
    ("image.slim.digest", "sha256:abc"),
    ("image.model.pullPolicy", "Sometimes"),
    ("image.model.repository", "https://ghcr.io/specdec"),
    ("imagePullSecrets", [{"name": "registry"}]),
    ("commonLabels.team", 7),
    ("network.listenAddress", "127.0.0.1"),
    ("network.ipFamilies", ["IPv5"]),
    ("discovery.type", "consul"),
    ("discovery.extraTargets", ["nowhere"]),
    ("networkPolicy.clients", [{"pod": {}}]),
    ("networkPolicy.egress.restrict", "true"),
    ("tls.front.issuerRef.nam", "authority"),
    ("tls.certManager.duration", "90 days"),
    ("auth.existingSecretKey", "a/b"),
    ("telemetry.otlpEndpoint", "collector:4317"),
    ("podMonitor.enabled", "maybe"),
    ("podMonitor.interval", 15),
    ("tests.maxTokens", 0),
]

TLS = {"enabled": True}
PREFERS = {"preferredDuringSchedulingIgnoredDuringExecution": []}
# What two keys say together: the key that has to change, and the values.
TOGETHER: list[tuple[str, Values]] = [
    ("target.terminationGracePeriodSeconds", at("target.terminationGracePeriodSeconds", 10)),
    (
        "orchestrator.terminationGracePeriodSeconds",
        at("orchestrator", {"terminationGracePeriodSeconds": 60, "config": {"drainMs": 90_000}}),
    ),
    ("target.autoscaling.minReplicas", at("target.autoscaling", {"type": "keda", "minReplicas": 5, "maxReplicas": 2})),
    ("target.autoscaling.minReplicas", at("target.autoscaling", {"type": "hpa", "minReplicas": 0})),
    ("draft.pools.near.autoscaling", at("draft.pools.near.autoscaling", {"type": "hpa", "minReplicas": 0})),
    ("target.autoscaling.keda.prometheus.serverAddress", at("target.autoscaling", {"type": "keda", "keda": {"trigger": "prometheus"}})),
    ("target.pools", at("target.pools", {})),
    ("discovery.extraTargets", at("discovery.extraTargets", [f"dns:///t{i}:1" for i in range(16)])),
    ("discovery.extraDrafts", at("discovery.extraDrafts", [f"a=kubernetes:///d{i}:grpc" for i in range(16)])),
    ("target.model.pvc.claimName", at("target.model.source", "pvc")),
    ("target.model.hostPath.path", at("target.model.source", "hostPath")),
    ("draft.model.image.reference", at("draft.model.source", "image")),
    ("draft.model.hf.repository", at("draft.model.hf.repository", "")),
    ("draft.model.source", at("draft.model.source", "")),
    ("orchestrator.tokenizer.pvc.claimName", at("orchestrator.tokenizer.source", "pvc")),
    ("tls.front", at("tls.front", TLS)),
    ("tls.internal", at("tls.internal", TLS)),
    ("tls.internal", at("tls.internal", {**TLS, "poolsSecret": "pools"})),
    ("tls.front.clientCertificates", at("tls.front", {**TLS, "existingSecret": "x", "allowedIdentities": ["a"]})),
    ("auth.allowInsecure", at("auth.existingSecret", "tokens")),
    ("target.zones", at("target", {"zones": ["a"], "affinity": {"nodeAffinity": PREFERS}})),
    ("target.shm.sizeLimit", at("target.shm.sizeLimit", "64Gi")),
    ("target.probes.readiness", at("target.probes.readiness", {"periodSeconds": 30, "failureThreshold": 5})),
    ("target.config.dtype", at("target", {"gpu": {"count": 1}, "config": {"dtype": "int8"}})),
    ("target.config.maxStepRows", at("target.config", {"maxStepRows": 8, "maxNumSpeculativeTokens": 16})),
    ("orchestrator.config.draftSampleMethod", at("orchestrator.config", {"draftSampleMethod": "probabilistic"})),
    ("target.extraEnv", at("target.extraEnv", [{"name": "SPECDEC_PORT", "value": "1"}])),
    ("target.progressDeadlineSeconds", at("target.progressDeadlineSeconds", 60)),
    ("grpcRoute.parentRefs", at("grpcRoute.enabled", True)),
    ("target.replicas", at("target.replicas", None)),
    ("tls.front", at("tls.front", None)),
    ("draft.autoscaling.keda.fallback.replicas", at("draft.autoscaling.keda.fallback.replicas", None)),
    ("target.extraVolumes", at("target.extraVolumes", [{"name": "model", "emptyDir": {}}])),
    ("orchestrator.tokenizer.source", at("target.pools.a.model", {"source": "pvc", "pvc": {"claimName": "weights"}})),
    ("fullnameOverride", at("fullnameOverride", "1st")),
    ("fullnameOverride", at("fullnameOverride", "a.b")),
]

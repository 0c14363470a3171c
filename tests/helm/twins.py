"""Renders in which something is wrong: for every check the mistakes that it is there for. A check that lets one pass is no check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.helm.objects import Object, Pod, Render

Breaks = Callable[[Render], Any]


@dataclass(frozen=True)
class Twin:
    check: str
    scene: str
    told: str  # a part of what the check must say
    breaks: Breaks

    def __str__(self) -> str:
        return f"{self.check}: {self.told}"


def pod(render: Render, component: str, pool: str = "") -> Pod:
    return next(found for found in render.of(component) if found.labels.get("specdec.io/pool", "") == pool or not pool)


def first(render: Render, kind: str, part: str = "") -> Object:
    return next(found for found in render.kind(kind) if part in found["metadata"]["name"])


def in_pod(component: str, change: Callable[[Pod], Any]) -> Breaks:
    return lambda render: change(pod(render, component))


def in_main(component: str, change: Callable[[Object], Any]) -> Breaks:
    return lambda render: change(pod(render, component).main)


def in_spec(component: str, **changes: Any) -> Breaks:
    return lambda render: pod(render, component).owner["spec"].update(changes)


def in_probe(component: str, probe: str, **changes: Any) -> Breaks:
    return lambda render: pod(render, component).main[probe].update(changes)


def in_first(kind: str, change: Callable[[Object], Any], part: str = "") -> Breaks:
    return lambda render: change(first(render, kind, part))


def set_env(component: str, name: str, value: str | None) -> Breaks:
    """Another value; None = the variable is not there."""

    def change(render: Render) -> None:
        main = pod(render, component).main
        main["env"] = [entry for entry in main["env"] if entry["name"] != name]
        if value is not None:
            main["env"].append({"name": name, "value": value})

    return change


def mount(component: str, path: str, **changes: Any) -> Breaks:
    def change(render: Render) -> None:
        next(m for m in pod(render, component).main["volumeMounts"] if m["mountPath"] == path).update(changes)

    return change


def volume(component: str, path: str, pool: str = "") -> Callable[[Render], Object]:
    """The volume that is mounted there."""

    def find(render: Render) -> Object:
        chosen = pod(render, component, pool)
        name = next(m["name"] for m in chosen.main["volumeMounts"] if m["mountPath"] == path)
        return next(v for v in chosen.spec["volumes"] if v["name"] == name)

    return find


def remove(kind: str, part: str = "") -> Breaks:
    return lambda render: render.objects.remove(first(render, kind, part))


def service_port(part: str, **changes: Any) -> Breaks:
    return lambda render: next(p for p in first(render, "Service", part)["spec"]["ports"] if p["name"] == "grpc").update(changes)


def security(component: str, **changes: Any) -> Breaks:
    return lambda render: pod(render, component).main["securityContext"].update(changes)


def policy(part: str, direction: str, *rules: Object) -> Breaks:
    """More is let through."""

    def change(render: Render) -> None:
        spec = first(render, "NetworkPolicy", part)["spec"]
        spec[direction] = [*(spec.get(direction) or []), *rules]

    return change


def triggers(**metadata: Any) -> Breaks:
    return in_first("ScaledObject", lambda found: found["spec"]["triggers"][0]["metadata"].update(metadata), "-target-")


ANYBODY: Object = {}
D, CLOSED, KEDA, PROM, HPA = "defaults", "closed", "keda external", "keda prometheus", "hpa"

TWINS = [
    # Names that must agree.
    Twin("labels", D, "lacks the label", in_first("Deployment", lambda d: d["metadata"]["labels"].pop("app.kubernetes.io/instance"))),
    Twin("labels", D, "may refuse", in_first("Service", lambda s: s["metadata"].update(name="a" * 64))),
    Twin("labels", D, "the label x is", in_first("Service", lambda s: s["metadata"]["labels"].update(x="a b"))),
    Twin("labels", D, "is there 2 times", lambda r: r.objects.append(dict(first(r, "Service")))),
    Twin("labels", D, "lack the label specdec.io/pool", in_pod("draft", lambda p: p.labels.pop("specdec.io/pool"))),
    Twin("labels", D, "no target is rendered", remove("Deployment", "-target-")),
    Twin("selectors", D, "does not select its own", in_pod("target", lambda p: p.labels.update({"specdec.io/pool": "other"}))),
    Twin(
        "selectors",
        "pools",
        "also finds the pods",
        in_pod("draft", lambda p: p.owner["spec"]["selector"]["matchLabels"].pop("specdec.io/pool")),
    ),
    Twin(
        "selectors", D, "selects no pod", in_first("Service", lambda s: s["spec"]["selector"].update({"specdec.io/pool": "x"}), "-draft-")
    ),
    Twin(
        "selectors", D, "mixes components", in_first("Service", lambda s: s["spec"].update(selector={"app.kubernetes.io/instance": "demo"}))
    ),
    Twin("selectors", D, "another release", in_first("Service", lambda s: s["spec"]["selector"].pop("app.kubernetes.io/instance"))),
    Twin(
        "selectors",
        D,
        "an upgrade changes",
        in_pod("draft", lambda p: p.owner["spec"]["selector"]["matchLabels"].update({"app.kubernetes.io/version": "0.1.0"})),
    ),
    Twin("ports", D, "SPECDEC_PORT is 1", set_env("draft", "SPECDEC_PORT", "1")),
    Twin("ports", D, "SPECDEC_HEALTH_PORT is -1", set_env("target", "SPECDEC_HEALTH_PORT", None)),
    Twin("ports", D, "not reached from outside", set_env("target", "SPECDEC_HOST", None)),
    Twin("ports", D, "has no port named", service_port("-draft-", targetPort="rpc")),
    Twin("ports", D, "must be the pod's", service_port("-draft-", port=80)),
    Twin("ports", D, "has the appProtocol http", service_port("-orchestrator", appProtocol="http")),
    Twin("ports", D, "two ports have one number", in_main("draft", lambda c: c["ports"].append({"name": "more", "containerPort": 50053}))),
    Twin("ports", "monitored", "has no port m", in_first("PodMonitor", lambda m: m["spec"]["podMetricsEndpoints"][0].update(port="m"))),
    Twin("addresses", D, "there is no Service", set_env("orchestrator", "SPECDEC_TARGETS", "default=dns:///other:50052")),
    Twin("addresses", D, "leads to no pod", set_env("orchestrator", "SPECDEC_DRAFTS", "")),
    Twin("addresses", D, "has its port grpc", set_env("orchestrator", "SPECDEC_DRAFTS", "dns:///demo-specdec-draft-default:50052")),
    Twin("addresses", D, "that are no draft", set_env("orchestrator", "SPECDEC_DRAFTS", "dns:///demo-specdec-target-default:50053")),
    Twin("addresses", D, "hides the replicas", in_first("Service", lambda s: s["spec"].pop("clusterIP"), "-target-")),
    Twin("addresses", D, "form of an entry", set_env("orchestrator", "SPECDEC_DRAFTS", "dns:/demo")),
    Twin("references", D, "is mounted and no volume", mount("target", "/tmp", name="nowhere")),
    Twin(
        "references", D, "two volumes at /tmp", in_main("draft", lambda c: c["volumeMounts"].append({"name": "tmp", "mountPath": "/tmp"}))
    ),
    Twin("references", D, "is mounted nowhere", in_pod("draft", lambda p: p.spec["volumes"].append({"name": "x", "emptyDir": {}}))),
    Twin("references", D, "default account", in_pod("draft", lambda p: p.spec.pop("serviceAccountName"))),
    Twin("references", "secrets", "lies in no volume", set_env("target", "SPECDEC_TLS_CERT", "/etc/tls.crt")),
    Twin("unknown_names", "watched endpoints", "there is no Role", in_first("RoleBinding", lambda b: b["roleRef"].update(name="x"))),
    Twin("unknown_names", "watched endpoints", "no pod runs as", in_first("RoleBinding", lambda b: b["subjects"][0].update(name="x"))),
    Twin(
        "unknown_names",
        D,
        "its component is",
        in_first("Deployment", lambda d: d["metadata"]["labels"].update({"app.kubernetes.io/component": "x"})),
    ),
    # Pods.
    Twin("restricted", D, "is privileged", security("target", privileged=True)),
    Twin("restricted", D, "allowPrivilegeEscalation", security("target", allowPrivilegeEscalation=None)),
    Twin("restricted", D, "keeps capabilities", security("draft", capabilities={"drop": ["NET_RAW"]})),
    Twin("restricted", D, "adds capabilities", security("draft", capabilities={"drop": ["ALL"], "add": ["SYS_NICE"]})),
    Twin("restricted", D, "may run as root", security("draft", runAsUser=0)),
    Twin("restricted", D, "no seccomp profile", security("orchestrator", seccompProfile={"type": "Unconfined"})),
    Twin("restricted", D, "hostNetwork", in_pod("target", lambda p: p.spec.update(hostNetwork=True))),
    Twin("restricted", D, "is a hostPath", in_pod("target", lambda p: p.spec["volumes"].append({"name": "x", "hostPath": {"path": "/"}}))),
    Twin("restricted", D, "port of the host", in_main("target", lambda c: c["ports"][0].update(hostPort=80))),
    Twin("restricted", D, "sysctls", in_pod("target", lambda p: p.spec["securityContext"].update(sysctls=[{"name": "a", "value": "b"}]))),
    Twin("restricted", D, "seLinuxOptions", security("target", seLinuxOptions={"type": "spc_t"})),
    Twin("restricted", D, "procMount", security("target", procMount="Unmasked")),
    Twin("restricted", D, "appArmorProfile", security("target", appArmorProfile={"type": "Unconfined"})),
    Twin("restricted", D, "names a host", in_probe("target", "livenessProbe", httpGet={"host": "example.com", "port": 80})),
    Twin("restricted", D, "Pod/demo", lambda r: first(r, "Pod")["spec"]["containers"][0].pop("securityContext")),
    Twin("writable", D, "can write to its image", security("target", readOnlyRootFilesystem=False)),
    Twin("writable", D, "has no sizeLimit", lambda r: volume("target", "/tmp")(r)["emptyDir"].pop("sizeLimit")),
    Twin("writable", D, "nothing is mounted at /tmp", mount("draft", "/tmp", mountPath="/var/tmp")),
    Twin("writable", "secrets", "is not mounted readOnly", lambda r: [m.pop("readOnly", 0) for m in pod(r, "target").main["volumeMounts"]]),
    Twin("resources", D, "needs requests", in_main("draft", lambda c: c["resources"].pop("limits"))),
    Twin("resources", D, "asks for more memory", in_main("draft", lambda c: c["resources"]["requests"].update(memory="1Ti"))),
    Twin("resources", "one gpu", "differs between", in_main("draft", lambda c: c["resources"]["requests"].update({"nvidia.com/gpu": 2}))),
    Twin(
        "shared_memory", "pools", "is not a volume in memory", lambda r: volume("target", "/dev/shm", "large")(r)["emptyDir"].pop("medium")
    ),
    Twin(
        "shared_memory", "pools", "more than half", lambda r: volume("target", "/dev/shm", "large")(r)["emptyDir"].update(sizeLimit="5Gi")
    ),
    Twin("offline", D, "HF_HUB_OFFLINE", set_env("target", "HF_HUB_OFFLINE", None)),
    Twin("offline", D, "is no path", set_env("draft", "SPECDEC_MODEL", "HuggingFaceTB/SmolLM2-135M")),
    Twin("commands", D, "not python -m", in_main("target", lambda c: c.update(command=["sh", "-c", "python -m target_service"], args=[]))),
    Twin("commands", D, "has the image", in_main("target", lambda c: c.update(image="ghcr.io/specdec/specdec-model"))),
    Twin("commands", D, "has the image", in_main("target", lambda c: c.update(image="ghcr.io/specdec/specdec-model:latest"))),
    Twin("commands", D, "a token of the API server", in_pod("draft", lambda p: p.spec.update(automountServiceAccountToken=True))),
    Twin("commands", "watched endpoints", "no token", in_pod("orchestrator", lambda p: p.spec.update(automountServiceAccountToken=False))),
    # Life.
    Twin("probes", D, "there is no startupProbe", in_main("target", lambda c: c.pop("startupProbe"))),
    Twin(
        "probes",
        D,
        "asks for 'liveness', not for 'readiness'",
        in_probe("target", "readinessProbe", grpc={"port": 50050, "service": "liveness"}),
    ),
    Twin("probes", D, "asks at 50052", in_probe("target", "livenessProbe", grpc={"port": 50052, "service": "liveness"})),
    Twin("probes", D, "waits 1 s", in_main("draft", lambda c: c["readinessProbe"].pop("timeoutSeconds"))),
    Twin("probes", D, "longer than its period", in_probe("draft", "livenessProbe", timeoutSeconds=30)),
    Twin("probes", D, "initialDelaySeconds", in_probe("draft", "livenessProbe", initialDelaySeconds=300)),
    Twin("probes", D, "stays ready for", in_probe("draft", "readinessProbe", failureThreshold=10000)),
    Twin("probes", D, "s to load, less than", in_probe("target", "startupProbe", failureThreshold=3)),
    Twin("grace", D, "terminationGracePeriodSeconds is 30", in_pod("orchestrator", lambda p: p.spec.pop("terminationGracePeriodSeconds"))),
    Twin("grace", D, "its end takes up to", set_env("target", "SPECDEC_DRAIN_MS", "600000")),
    Twin("grace", D, "its end takes up to", in_main("draft", lambda c: c.update(lifecycle={"preStop": {"sleep": {"seconds": 300}}}))),
    Twin("rollout", "one gpu", "has GPUs and surges", in_spec("target", strategy={"type": "RollingUpdate"})),
    Twin("rollout", "many gpus", "has GPUs and surges", in_spec("draft", strategy={"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}})),
    Twin("rollout", D, "can replace no pod", in_spec("target", strategy={"rollingUpdate": {"maxSurge": 0, "maxUnavailable": "0%"}})),
    Twin("rollout", D, "no progressDeadlineSeconds", in_pod("target", lambda p: p.owner["spec"].pop("progressDeadlineSeconds"))),
    Twin("rollout", D, "is over before the startupProbe", in_spec("target", progressDeadlineSeconds=60)),
    Twin("rollout", D, "is over before that of a target", in_spec("orchestrator", progressDeadlineSeconds=660)),
    Twin("disruption", "many", "no PodDisruptionBudget", remove("PodDisruptionBudget", "-target-")),
    Twin("disruption", "many", "nothing to keep", in_spec("target", replicas=1)),
    Twin("disruption", "many", "lets no pod go", in_first("PodDisruptionBudget", lambda b: b["spec"].update(maxUnavailable=0))),
    Twin("disruption", "many", "hold up a drain", in_first("PodDisruptionBudget", lambda b: b["spec"].pop("unhealthyPodEvictionPolicy"))),
    Twin("disruption", "many", "has 2 budgets", lambda r: r.objects.append(first(r, "PodDisruptionBudget"))),
    # Scaling.
    Twin("replicas", HPA, "a scaler and spec.replicas", in_spec("target", replicas=2)),
    Twin("replicas", D, "neither a scaler nor", in_pod("draft", lambda p: p.owner["spec"].pop("replicas"))),
    Twin("replicas", KEDA, "has 2 scalers", lambda r: r.objects.append(first(r, "ScaledObject"))),
    Twin(
        "bounds", HPA, "there is no Deployment", in_first("HorizontalPodAutoscaler", lambda h: h["spec"]["scaleTargetRef"].update(name="x"))
    ),
    Twin("bounds", HPA, "between None", in_first("HorizontalPodAutoscaler", lambda h: h["spec"].update(minReplicas=None))),
    Twin("bounds", HPA, "goes to zero", in_first("HorizontalPodAutoscaler", lambda h: h["spec"].update(minReplicas=0))),
    Twin("bounds", KEDA, "between 9 and", in_first("ScaledObject", lambda s: s["spec"].update(minReplicaCount=9))),
    Twin(
        "bounds",
        HPA,
        "not extensions/v1",
        in_first("HorizontalPodAutoscaler", lambda h: h["spec"]["scaleTargetRef"].update(apiVersion="extensions/v1")),
    ),
    Twin("triggers", PROM, "not a string", triggers(threshold=0.8)),
    Twin("triggers", PROM, "would count as zero", triggers(ignoreNullValues="true")),
    Twin("triggers", PROM, "no longer a word", triggers(metricName="x")),
    Twin("triggers", KEDA, "is no Service", triggers(scalerAddress="other.models:50054")),
    Twin(
        "triggers",
        KEDA,
        "has no namespace",
        lambda r: triggers(scalerAddress=f"{r.find('Service', 'demo-specdec-orchestrator-peers')['metadata']['name']}:50054")(r),
    ),  # type: ignore[index]
    Twin("triggers", KEDA, "is not demo", triggers(pool="draft")),
    Twin("triggers", KEDA, "belongs to no target", triggers(late="0.5")),
    Twin("triggers", KEDA, "knows a pool", set_env("orchestrator", "SPECDEC_DRAFTS", "other=dns:///demo-specdec-draft-default:50053")),
    Twin("triggers", KEDA, "the fallback of", in_first("ScaledObject", lambda s: s["spec"].update(fallback={"replicas": 99}))),
    Twin(
        "behaviour",
        HPA,
        "scales down after 0 s",
        in_first("HorizontalPodAutoscaler", lambda h: h["spec"].update(behavior={"scaleDown": {"stabilizationWindowSeconds": 0}})),
    ),
    # Settings.
    Twin("variables", D, "is set twice", in_main("draft", lambda c: c["env"].append({"name": "SPECDEC_PORT", "value": "50053"}))),
    Twin("variables", D, "not a string", in_main("draft", lambda c: c["env"][0].update(value=1))),
    Twin("variables", D, "is no setting of a target", set_env("target", "SPECDEC_BUDGET_TOKENS", "8")),
    Twin("variables", D, "an address of every Service", in_pod("target", lambda p: p.spec.update(enableServiceLinks=True))),
    Twin("values", D, "must be", set_env("target", "SPECDEC_KV_TOKENS", "1")),
    Twin("values", D, "SPECDEC_MODEL is required", set_env("draft", "SPECDEC_MODEL", None)),
    Twin("values", D, "whole number", set_env("draft", "SPECDEC_KV_TOKENS", "1e+06")),
    # Network.
    Twin("network", CLOSED, "is open, no policy selects it", remove("NetworkPolicy", "-draft")),
    Twin("network", CLOSED, "at 50052/TCP", policy("-target", "ingress", {"ports": [{"port": "grpc"}]})),
    Twin("network", CLOSED, "can reach Deployment/demo-specdec-target", policy("-target", "ingress", ANYBODY)),
    Twin("network", CLOSED, "another pod of the namespace can reach", policy("-draft", "ingress", {"from": [{"podSelector": {}}]})),
    Twin("network", CLOSED, "a pod of another namespace can reach", policy("-draft", "ingress", {"from": [{"namespaceSelector": {}}]})),
    Twin("network", CLOSED, "the internet can reach", policy("-draft", "ingress", {"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]})),
    Twin("network", CLOSED, "can reach the internet", policy("-draft", "egress", {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]})),
    Twin("network", CLOSED, "can reach the API server", policy("-orchestrator", "egress", {"ports": [{"port": 443, "endPort": 6443}]})),
    Twin("network", CLOSED, "cannot reach", in_first("NetworkPolicy", lambda p: p["spec"].update(egress=[]), "-orchestrator")),
    Twin("network", CLOSED, "cannot reach", in_first("NetworkPolicy", lambda p: p["spec"].update(ingress=[]), "-target")),
    Twin("network", CLOSED, "cannot reach the cluster's DNS", in_first("NetworkPolicy", lambda p: p["spec"].update(egress=[]), "-target")),
    Twin("one_per_component", CLOSED, "draft has no NetworkPolicy", remove("NetworkPolicy", "-draft")),
]

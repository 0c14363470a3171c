"""The installations that every check looks at: the chart's own examples, and what differs from them in one way each."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from tests.helm.objects import Render, ci_files, render
from tests.helm.programs import RELEASE, Values


@dataclass(frozen=True)
class Scene:
    """Values, on top of files of the ci folder. `waived`: problems that the user asked for, by a part of their text."""

    values: Values = field(default_factory=dict)
    files: tuple[str, ...] = ()
    release: str = RELEASE
    waived: tuple[str, ...] = ()
    kubernetes: str = "1.37"
    since: int = 29  # the oldest Kubernetes 1.x that knows what is asked for


def keda(trigger: str, **more: Any) -> Values:
    prometheus = {"serverAddress": "http://prometheus.monitoring:9090"} if trigger == "prometheus" else {}
    return {"autoscaling": {"type": "keda", "keda": {"trigger": trigger, "prometheus": prometheus}, **more}}


GPU = {"gpu": {"count": 1}, "config": {"dtype": "bfloat16"}}
ISSUER = {"name": "authority", "kind": "Issuer"}
PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
KEDA = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
CLIENTS = {"podSelector": {"matchLabels": {"calls": "specdec"}}}
CLOSED = {"enabled": True, "clients": [CLIENTS], "metrics": [PROMETHEUS], "scaler": [KEDA], "egress": {"restrict": True}}
SPANS = {"otlpEndpoint": "http://collector.observability:4317"}
POOLS = {
    "target": {
        "pools": {
            "small": {"replicas": 3},
            "large": {"gpu": {"count": 4}, "zones": ["a", "b"], "config": {"kvTokens": 65536}, "shm": {"sizeLimit": "2Gi"}},
        }
    },
    "draft": {"pools": {"near": {"zones": ["a"]}, "far": {"replicas": 2, "config": {"threads": 4}}}},
}
MOUNTED = {"target": {"model": {"source": "pvc", "pvc": {"claimName": "weights"}}}, "draft": {"model": {"source": "pvc", "path": "draft"}}}
MOUNTED["draft"]["model"]["pvc"] = {"claimName": "weights"}

_OWN: dict[str, Scene] = {
    "defaults": Scene(),
    "one of each": Scene({"orchestrator": {"replicas": 1}}),
    "many": Scene({"orchestrator": {"replicas": 3}, "target": {"replicas": 4}, "draft": {"replicas": 4}}),
    "no draft": Scene({"draft": {"pools": {}}}),
    "pools": Scene(POOLS),
    "one gpu": Scene({"target": GPU, "draft": GPU}),
    "many gpus": Scene({"target": {**GPU, "replicas": 4}, "draft": {**GPU, "replicas": 4}}),
    "keda external": Scene({"target": keda("external"), "draft": keda("external", minReplicas=0)}),
    "keda prometheus": Scene({"target": keda("prometheus"), "draft": keda("prometheus", minReplicas=2)}),
    "hpa": Scene({"orchestrator": {"autoscaling": {"type": "hpa"}}, "target": {"autoscaling": {"type": "hpa", "minReplicas": 2}}}),
    "from zero": Scene({"target": keda("external", minReplicas=0)}),
    "scaled orchestrator": Scene({"orchestrator": {"autoscaling": {"type": "keda"}}}),
    "watched endpoints": Scene({"discovery": {"type": "kubernetes"}}),
    "closed": Scene({**MOUNTED, "networkPolicy": CLOSED, "target": MOUNTED["target"] | keda("external")}),
    "closed and watched": Scene({**MOUNTED, "networkPolicy": CLOSED, "discovery": {"type": "kubernetes"}, "telemetry": SPANS}),
    "closed with a hub": Scene({"networkPolicy": CLOSED}),
    "watched elsewhere": Scene(
        {"networkPolicy": CLOSED, "discovery": {"extraTargets": ["default=kubernetes://elsewhere/targets:grpc"]}},
        waived=("there is no Service targets",),
    ),
    "monitored": Scene({"podMonitor": {"enabled": "on"}, "telemetry": SPANS}),
    "mounted models": Scene(MOUNTED),
    "one model of the node": Scene(
        {"target": {"model": {"source": "hostPath", "hostPath": {"path": "/models/target"}}}}, waived=("model is a hostPath",)
    ),
    "model images": Scene(
        {part: {"model": {"source": "image", "image": {"reference": f"ghcr.io/some/{part}:1"}}} for part in ("target", "draft")},
        waived=("is a image",),
        since=31,
    ),
    "secrets": Scene(
        {
            "auth": {"existingSecret": "tokens"},
            "tls": {
                "front": {"enabled": True, "existingSecret": "front", "clientCertificates": True, "allowedIdentities": ["a.example"]},
                "internal": {"enabled": True, "orchestratorSecret": "caller", "poolsSecret": "pools", "serverName": "pools.example"},
            },
        }
    ),
    "tokens behind a gateway": Scene({"auth": {"existingSecret": "tokens", "allowInsecure": True}}),
    "certificates": Scene(
        {
            "tls": {
                "front": {"enabled": True, "issuerRef": ISSUER, "dnsNames": ["specdec.example"]},
                "internal": {"enabled": True, "issuerRef": ISSUER},
            }
        }
    ),
    "route": Scene({"grpcRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["specdec.example"]}}),
    "six": Scene({"network": {"listenAddress": "::", "ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv6", "IPv4"]}}),
    "long name": Scene(POOLS, release="a" + "b" * 51 + "c"),
    "oldest Kubernetes": Scene(kubernetes="1.29"),
    "same name": Scene({}, release="specdec"),
    "for nobody else": Scene(
        {
            "auth": {"existingSecret": "tokens"},
            "tls": {"front": {"enabled": True, "issuerRef": ISSUER}, "internal": {"enabled": True, "issuerRef": ISSUER}},
            "target": {**GPU, **MOUNTED["target"], **keda("external"), "pools": {"h100": {}}},
            "draft": {**GPU, **MOUNTED["draft"], **keda("external", minReplicas=0), "pools": {"l4": {}}},
        },
        release="specdec",
    ),
}
WAIVED = {
    "everything-values.yaml": ("ConfigMap/notes lacks the label", "target.other-cluster.example.com")
}  # the user's own, and elsewhere
SCENES: dict[str, Scene] = _OWN | {file: Scene(files=(file,), waived=WAIVED.get(file, ())) for file in ci_files()}


@functools.cache
def scene(name: str, kubernetes: str = "") -> Render:
    """What helm makes of a scene, for its own or another version of Kubernetes; rendered once. Not to be changed."""
    chosen = SCENES[name]
    return render(chosen.values, *chosen.files, release=chosen.release, kubernetes=kubernetes or chosen.kubernetes)

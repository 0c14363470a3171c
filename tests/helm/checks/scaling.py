"""Scalers: they own the count of replicas, and their target and bounds make sense."""

from __future__ import annotations

import json
from typing import Any

from tests.helm.objects import Object, Render

THRESHOLDS = {"target": {"queue", "kv"}, "draft": {"needed", "late"}}


def replicas(render: Render) -> list[str]:
    """F163: with a scaler no spec.replicas, which an upgrade would fight over; without one it is there."""
    found = []
    scaled = [scaler["spec"]["scaleTargetRef"]["name"] for scaler in _scalers(render)]
    for pod in render.services:
        has = "replicas" in pod.owner["spec"]
        count = scaled.count(pod.owner["metadata"]["name"])
        if count and has:
            found.append(f"{pod.name} has a scaler and spec.replicas")
        if not count and not has:
            found.append(f"{pod.name} has neither a scaler nor spec.replicas")
        if count > 1:
            found.append(f"{pod.name} has {count} scalers")
    return found


def bounds(render: Render) -> list[str]:
    """F164: a scaler scales an object that exists, between bounds that are numbers and in order."""
    found = []
    for scaler in _scalers(render):
        spec, name = scaler["spec"], f"{scaler['kind']}/{scaler['metadata']['name']}"
        target = spec["scaleTargetRef"]
        owner = render.find(target.get("kind", "Deployment"), target["name"])
        if owner is None:
            found.append(f"{name}: there is no {target.get('kind', 'Deployment')} {target['name']}")
        elif target.get("apiVersion", "apps/v1") != owner["apiVersion"]:
            found.append(f"{name}: {target['name']} is {owner['apiVersion']}, not {target.get('apiVersion')}")
        low, high = (spec.get("minReplicas"), spec.get("maxReplicas"))
        if scaler["kind"] == "ScaledObject":
            low, high = (spec.get("minReplicaCount"), spec.get("maxReplicaCount"))
        if not isinstance(low, int) or not isinstance(high, int) or not 0 <= low <= high or high < 1:
            found.append(f"{name}: between {low} and {high} replicas")
        if low == 0 and scaler["kind"] != "ScaledObject":
            found.append(f"{name}: goes to zero, from which it cannot come back")
    return found


def triggers(render: Render) -> list[str]:
    """KEDA's ways to fail in silence: an empty series is no zero, thresholds are strings, a scaler that is gone leaves a count."""
    found = []
    for scaler in render.kind("ScaledObject"):
        spec, name = scaler["spec"], f"ScaledObject/{scaler['metadata']['name']}"
        for trigger in spec["triggers"]:
            metadata = trigger["metadata"]
            found += [f"{name}: {key} is {value!r}, not a string" for key, value in metadata.items() if not isinstance(value, str)]
            if "metricName" in metadata:
                found.append(f"{name}: metricName is no longer a word of KEDA")
            if trigger["type"] == "prometheus" and metadata.get("ignoreNullValues") != "false":
                found.append(f"{name}: a query without an answer would count as zero")
            if trigger["type"].startswith("external"):
                found += [f"{name}: {problem}" for problem in _external_problems(render, scaler, metadata)]
        fallback = spec.get("fallback")  # without one the pool stays as it is
        low, high = spec.get("minReplicaCount", 0), spec.get("maxReplicaCount", 100)
        if fallback is not None and not low <= fallback.get("replicas", -1) <= high:
            found.append(f"{name}: the fallback of {fallback.get('replicas')} replicas is not between {low} and {high}")
    return found


def _external_problems(render: Render, scaler: Object, metadata: dict[str, Any]) -> list[str]:
    found = []
    host, _, port = str(metadata.get("scalerAddress", "")).partition(":")
    service = render.find("Service", host.split(".")[0])
    if service is None or port not in [str(told["port"]) for told in service["spec"]["ports"]]:
        found.append(f"scalerAddress {metadata.get('scalerAddress')} is no Service of this release")
    elif "." not in host:
        found.append(f"scalerAddress {host} has no namespace, and KEDA lives in another one")
    elif not all("scaler" in pod.ports for pod in render.selected(service["spec"].get("selector"))):
        found.append(f"scalerAddress {host} leads to pods without a port scaler")
    kind, pool = metadata.get("pool"), metadata.get("poolName")
    target = scaler["spec"]["scaleTargetRef"]["name"]
    if kind not in THRESHOLDS or not target.endswith(f"-{kind}-{pool}"):
        found.append(f"pool {kind}, poolName {pool} is not {target}")
    found += [f"the threshold {name} belongs to no {kind}" for name in _thresholds(metadata) - THRESHOLDS.get(str(kind), set())]
    for entry in (entry for pod in render.of("orchestrator") for entry in _entries(pod.env, str(kind))):
        if (entry.partition("=")[0] if "=" in entry else "default") == pool:
            break
    else:
        found.append(f"no orchestrator knows a pool of {kind}s called {pool}")
    return found


def _thresholds(metadata: dict[str, Any]) -> set[str]:
    return set(metadata) & {name for names in THRESHOLDS.values() for name in names}


def _entries(env: dict[str, str], kind: str) -> list[str]:
    return env.get(f"SPECDEC_{kind.upper()}S", "").split(",")


def _scalers(render: Render) -> list[Object]:
    return render.kind("HorizontalPodAutoscaler", "ScaledObject")


def behaviour(render: Render) -> list[str]:
    """Scaling down is slow enough for sessions to leave: the window is never shorter than a drain."""
    found = []
    for scaler in _scalers(render):
        spec = scaler["spec"]
        told = spec.get("behavior") or spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {}).get("behavior") or {}
        window = told.get("scaleDown", {}).get("stabilizationWindowSeconds", 300)
        if window < 60:
            name = f"{scaler['kind']}/{scaler['metadata']['name']}"
            found.append(f"{name}: scales down after {window} s: {json.dumps(told.get('scaleDown', {}))}")
    return found


CHECKS: tuple[Any, ...] = (replicas, bounds, triggers, behaviour)

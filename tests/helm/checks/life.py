"""Pods that start, are probed, are replaced and end."""

from __future__ import annotations

import re
from typing import Any

from specdec.runtime.names import GRPC_SERVICES
from tests.helm.objects import Object, Pod, Render

PROBES = {"livenessProbe": "liveness", "readinessProbe": "readiness"}
LEAST_TIMEOUT_S = 3
MOST_READY_S = 60  # a pod that is no longer ready is out of rotation by then
LEAST_START_S = {"orchestrator": 60, "target": 600, "draft": 300}  # what the documentation says that loading may take
EXIT_S = 6  # telemetry's last words, and the interpreter's end


def _seconds(probe: Object) -> int:
    """Longest time from a fault to the probe's verdict."""
    return int(probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3) + probe.get("timeoutSeconds", 1))


def probes(render: Render) -> list[str]:
    """F167, F168, F169: time to load, no verdict on one slow answer, and different questions for readiness and liveness."""
    found = []
    for pod in render.services:
        # Liveness holds while a model is loaded, so a start is over when the service itself is served.
        own = GRPC_SERVICES[pod.component][0]
        for name, service in {**PROBES, "startupProbe": own}.items():
            if name == "readinessProbe" and pod.component == "orchestrator" and _from_nothing(render):
                # `readiness` is off without a target, and then no call would come that makes one start.
                service = service if pod.env.get("SPECDEC_TARGETS_FROM_ZERO") == "true" else own
            probe = pod.main.get(name)
            if probe is None:
                found.append(f"{pod.name}: there is no {name}")
                continue
            asked = probe.get("grpc", {})
            if asked.get("service") != service:
                found.append(f"{pod.name}: {name} asks for {asked.get('service')!r}, not for {service!r}")
            if asked.get("port") != pod.ports.get("health"):
                found.append(f"{pod.name}: {name} asks at {asked.get('port')}, health is at {pod.ports.get('health')}")
            if probe.get("timeoutSeconds", 1) < LEAST_TIMEOUT_S:
                found.append(f"{pod.name}: {name} waits {probe.get('timeoutSeconds', 1)} s, less than {LEAST_TIMEOUT_S}")
            if probe.get("timeoutSeconds", 1) > probe.get("periodSeconds", 10):
                found.append(f"{pod.name}: {name} waits longer than its period")
            if probe.get("initialDelaySeconds"):
                found.append(f"{pod.name}: {name} has an initialDelaySeconds, which startupProbe is for")
        if _seconds(pod.main.get("readinessProbe", {})) >= MOST_READY_S:
            found.append(f"{pod.name}: a pod that fails stays ready for {_seconds(pod.main['readinessProbe'])} s")
        start = pod.main.get("startupProbe", {})
        given = start.get("periodSeconds", 10) * start.get("failureThreshold", 3)
        if given < LEAST_START_S[pod.component]:
            found.append(f"{pod.name}: startupProbe gives {given} s to load, less than {LEAST_START_S[pod.component]}")
    return found


def _from_nothing(render: Render) -> bool:
    return all(least_replicas(render, pod) == 0 for pod in render.of("target"))


def grace(render: Render) -> list[str]:
    """The kubelet kills nothing that still drains."""
    found = []
    for pod in render.services:
        before = _pause(pod.main.get("lifecycle", {}).get("preStop", {}))
        drain = (int(pod.env.get("SPECDEC_DRAIN_MS", 10_000)) + int(pod.env.get("SPECDEC_PRE_DRAIN_MS", 300))) / 1000
        given = pod.spec.get("terminationGracePeriodSeconds", 30)
        if given < before + drain + EXIT_S:
            found.append(f"{pod.name}: terminationGracePeriodSeconds is {given}, its end takes up to {before + drain + EXIT_S:g} s")
    return found


def _pause(hook: Object) -> float:
    """Seconds that a preStop hook waits, by `sleep` or by a command."""
    if "exec" in hook:
        told = re.fullmatch(r"import time; time.sleep\(([0-9.]+)\)", hook["exec"]["command"][-1])
        return float(told[1]) if told else float("inf")
    return float(hook.get("sleep", {}).get("seconds", 0))


def rollout(render: Render) -> list[str]:
    """F165: a pod that waits for the device of the one it replaces never starts; a rollout that is stuck says so."""
    found = []
    for pod in render.services:
        spec = pod.owner["spec"]
        if pod.owner["kind"] != "Deployment":
            continue
        if not spec.get("progressDeadlineSeconds"):
            found.append(f"{pod.name}: no progressDeadlineSeconds")
        elif spec["progressDeadlineSeconds"] <= _start_seconds(pod):
            found.append(f"{pod.name}: progressDeadlineSeconds is over before the startupProbe is")
        elif pod.component == "orchestrator" and any(  # no orchestrator is ready before a target is
            spec["progressDeadlineSeconds"] <= target.owner["spec"].get("progressDeadlineSeconds", 0) for target in render.of("target")
        ):
            found.append(f"{pod.name}: progressDeadlineSeconds is over before that of a target")
        strategy = spec.get("strategy", {})
        rolling = strategy.get("rollingUpdate", {})
        surge, away = rolling.get("maxSurge", "25%"), rolling.get("maxUnavailable", "25%")
        if strategy.get("type", "RollingUpdate") == "RollingUpdate":
            if pod.has_gpu and (_none(surge) is False or _none(away)):
                found.append(f"{pod.name}: has GPUs and surges by {surge}, maxUnavailable is {away}")
            if _none(surge) and _none(away):
                found.append(f"{pod.name}: can replace no pod")
    return found


def _start_seconds(pod: Pod) -> int:
    probe = pod.main.get("startupProbe", {})
    return int(probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3))


def _none(amount: int | str) -> bool:
    return str(amount) in ("0", "0%")


def disruption(render: Render) -> list[str]:
    """A budget where there are several replicas, none where it would hold up a node's drain for ever."""
    found = []
    for pod in render.services:
        budgets = [b for b in render.kind("PodDisruptionBudget") if pod in render.selected(b["spec"]["selector"].get("matchLabels"))]
        least = least_replicas(render, pod)
        if len(budgets) > 1:
            found.append(f"{pod.name} has {len(budgets)} budgets, so that nothing may evict its pods")
        if least > 1 and not budgets:
            found.append(f"{pod.name} has {least} replicas and no PodDisruptionBudget")
        for budget in budgets:
            spec, name = budget["spec"], f"PodDisruptionBudget/{budget['metadata']['name']}"
            if pod.owner["spec"].get("replicas") == 1:
                found.append(f"{name}: {pod.name} has one replica, so that there is nothing to keep")
            must_stay = str(spec.get("minAvailable", 0))
            if _none(spec.get("maxUnavailable", 1)) or must_stay == "100%" or (must_stay.isdigit() and 0 < least <= int(must_stay)):
                found.append(f"{name} lets no pod go")
            if spec.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
                found.append(f"{name}: pods that never become ready hold up a drain")
    return found


def least_replicas(render: Render, pod: Pod) -> int:
    """How few replicas a workload can have while all is well."""
    for scaler in render.kind("HorizontalPodAutoscaler", "ScaledObject"):
        if scaler["spec"]["scaleTargetRef"]["name"] == pod.owner["metadata"]["name"]:
            return int(
                scaler["spec"].get("minReplicas", scaler["spec"].get("minReplicaCount", 0 if scaler["kind"] == "ScaledObject" else 1))
            )
    return int(pod.owner["spec"].get("replicas", 1))


CHECKS: tuple[Any, ...] = (probes, grace, rollout, disruption)

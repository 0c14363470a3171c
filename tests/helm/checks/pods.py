"""Pods: what they may do, what they may write, what they ask of a node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.helm.objects import Object, Pod, Render

RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
HANDLERS = ("livenessProbe", "readinessProbe", "startupProbe")
UNITS = {"": 1.0, "m": 1e-3} | {letter: 1000.0 ** (i + 1) for i, letter in enumerate("kMGTPE")}
UNITS |= {f"{letter}i": 1024.0 ** (i + 1) for i, letter in enumerate("KMGTPE")}
USER = 10001
MODULES = {"orchestrator": "orchestrator", "target": "target_service", "draft": "draft_service"}


def quantity(text: str | int | float) -> float:
    """Kubernetes' way to write an amount. Raises ValueError."""
    found = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(text))
    if found is None or found[2] not in UNITS:
        raise ValueError(f"{text!r} is no quantity")
    return float(found[1]) * UNITS[found[2]]


def restricted(render: Render) -> list[str]:
    """The profile `restricted` of Pod Security, for every pod. https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    return [f"{pod.name}: {problem}" for pod in render.pods for problem in (*_pod_problems(pod), *_container_problems(pod))]


def _pod_problems(pod: Pod) -> Iterator[str]:
    spec, context = pod.spec, pod.spec.get("securityContext", {})
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"{name} is on"
    for volume in spec.get("volumes", []):
        for kind in set(volume) - {"name"} - RESTRICTED_VOLUMES:
            yield f"volume {volume['name']} is a {kind}"
    if context.get("sysctls"):
        yield "sysctls are set"
    yield from _context_problems("the pod", context)


def _container_problems(pod: Pod) -> Iterator[str]:
    shared = pod.spec.get("securityContext", {})
    for container in pod.containers:
        name, own = container["name"], container.get("securityContext", {})
        merged: Object = {**shared, **own}
        yield from _context_problems(name, own)
        if own.get("privileged"):
            yield f"{name} is privileged"
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{name}: allowPrivilegeEscalation is not off"
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            yield f"{name} keeps capabilities"
        if set(own.get("capabilities", {}).get("add", [])) - {"NET_BIND_SERVICE"}:
            yield f"{name} adds capabilities"
        if own.get("procMount", "Default") != "Default":
            yield f"{name}: procMount"
        if merged.get("runAsNonRoot") is not True or merged.get("runAsUser") == 0:
            yield f"{name} may run as root"
        if merged.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{name} has no seccomp profile"
        if any(port.get("hostPort") for port in container.get("ports", [])):
            yield f"{name} takes a port of the host"
        handlers = [container.get(handler, {}) for handler in HANDLERS] + list(container.get("lifecycle", {}).values())
        if any("host" in handler.get(kind, {}) for handler in handlers for kind in ("httpGet", "tcpSocket")):
            yield f"{name}: a probe or hook names a host"


def _context_problems(name: str, context: Object) -> Iterator[str]:
    linux = context.get("seLinuxOptions", {})
    if linux.get("type", "") not in SELINUX_TYPES or linux.get("user") or linux.get("role"):
        yield f"{name}: seLinuxOptions"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield f"{name}: hostProcess"
    if context.get("appArmorProfile", {}).get("type", "RuntimeDefault") == "Unconfined":
        yield f"{name}: appArmorProfile"


def writable(render: Render) -> list[str]:
    """A service writes to bounded scratch volumes alone: not to its image, its model or anything else that is mounted."""
    found = []
    for pod in render.pods:
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        for container in pod.containers:
            merged: Object = {**pod.spec.get("securityContext", {}), **container.get("securityContext", {})}
            if merged.get("readOnlyRootFilesystem") is not True:
                found.append(f"{pod.name}: {container['name']} can write to its image")
            for mount in container.get("volumeMounts", []):
                volume = volumes.get(mount["name"], {})
                before = container in pod.spec.get("initContainers", [])
                if not mount.get("readOnly") and not before and "emptyDir" not in volume:
                    found.append(f"{pod.name}: {mount['mountPath']} is not mounted readOnly")
                if not mount.get("readOnly") and not before and "sizeLimit" not in volume.get("emptyDir", {"sizeLimit": 0}):
                    found.append(f"{pod.name}: {volume['name']} has no sizeLimit")
        if pod in render.services and not any(mount["mountPath"] == "/tmp" for mount in pod.main.get("volumeMounts", [])):
            found.append(f"{pod.name}: nothing is mounted at /tmp")
    return found


def resources(render: Render) -> list[str]:
    """Every container says what it needs and what it may take; devices are asked for as Kubernetes wants them: requests = limits."""
    found = []
    for pod in render.pods:
        for container in pod.containers:
            asked, most = (container.get("resources", {}).get(part, {}) for part in ("requests", "limits"))
            name = f"{pod.name}: {container['name']}"
            if "cpu" not in asked or "memory" not in asked or "memory" not in most:
                found.append(f"{name} needs requests of cpu and memory, and a limit of memory")
                continue
            for resource in set(asked) & set(most):
                if quantity(asked[resource]) > quantity(most[resource]):
                    found.append(f"{name} asks for more {resource} than its limit")
            for device in (resource for resource in {*asked, *most} if "/" in resource):
                if asked.get(device, most.get(device)) != most.get(device):
                    found.append(f"{name}: {device} differs between requests and limits")
    return found


def shared_memory(render: Render) -> list[str]:
    """F172: what lies at /dev/shm is memory, bounded, and leaves room within the limit of memory, against which it counts."""
    found = []
    for pod in render.services:
        volumes = {volume["name"]: volume["emptyDir"] for volume in pod.spec.get("volumes", []) if volume.get("emptyDir")}
        places = {mount["mountPath"]: volumes.get(mount["name"], {}) for mount in pod.main.get("volumeMounts", [])}
        if places.get("/dev/shm", {"medium": "Memory"}).get("medium") != "Memory":
            found.append(f"{pod.name}: /dev/shm is not a volume in memory")
        in_memory = [volume for volume in volumes.values() if volume.get("medium") == "Memory"]
        if any("sizeLimit" not in volume for volume in in_memory):
            found.append(f"{pod.name}: a volume in memory has no sizeLimit")
        limit = pod.main.get("resources", {}).get("limits", {}).get("memory", "0")
        if sum(quantity(volume.get("sizeLimit", "0")) for volume in in_memory) > quantity(limit) / 2:
            found.append(f"{pod.name}: volumes in memory take more than half of the limit of memory, {limit}")
    return found


def offline(render: Render) -> list[str]:
    """F173: a service that loads a model from a folder asks no hub, in no pod of a running release."""
    found = []
    for pod in render.services:
        if pod.env.get("HF_HUB_OFFLINE") != "1":
            found.append(f"{pod.name}: HF_HUB_OFFLINE is {pod.env.get('HF_HUB_OFFLINE')!r}")
        for name in ("SPECDEC_MODEL", "SPECDEC_TOKENIZER"):
            if name in pod.env and not pod.env[name].startswith("/"):
                found.append(f"{pod.name}: {name}={pod.env[name]} is no path")
    return found


def commands(render: Render) -> list[str]:
    """A service is started without a shell, so that it gets SIGTERM; its image is named whole and never by a tag that moves."""
    found = []
    for pod in render.services:
        module = MODULES[pod.component]
        command = [*pod.main.get("command", []), *pod.main.get("args", [])]
        if command != ["python", "-m", module]:
            found.append(f"{pod.name}: runs {command}, not python -m {module}")
    for pod in render.pods:
        has_token = pod.spec.get("automountServiceAccountToken", True) is not False
        if has_token != _needs_api(pod):
            words = "carries a token of the API server that it does not need" if has_token else "watches endpoints and has no token"
            found.append(f"{pod.name}: {words}")
        for container in pod.containers:
            image = container.get("image", "")
            last = image.rsplit("/", 1)[-1]
            if not re.fullmatch(r"[a-z0-9][a-z0-9.:/_-]*(:[\w][\w.-]*|@sha256:[0-9a-f]{64})", image) or last.endswith(":latest"):
                found.append(f"{pod.name}: {container['name']} has the image {image!r}")
    return found


def _needs_api(pod: Pod) -> bool:
    return any("kubernetes://" in value for value in pod.env.values())


CHECKS: tuple[Any, ...] = (restricted, writable, resources, shared_memory, offline, commands)

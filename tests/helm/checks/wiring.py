"""Names that must agree: labels and selectors, ports, addresses, volumes and what refers to them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.helm.objects import COMPONENT, COMPONENTS, POOL, WORKLOADS, Object, Pod, Render, fits

STANDARD = {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "version", "managed-by")}
PORT_OF = {"orchestrator": 50051, "target": 50052, "draft": 50053}
DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
ENTRY = re.compile(r"(?:[a-z0-9-]+=)?(?:(?P<scheme>dns|kubernetes)://(?P<authority>[^/]*)/)?(?P<host>[^/:]+):(?P<port>[^/:]+)")
FOLDERS = ("MODEL", "TOKENIZER")
FILES = ("TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA", "TLS_CA", "TLS_CLIENT_CERT", "TLS_CLIENT_KEY", "TOKENS_FILE")


def labels(render: Render) -> list[str]:
    """Standard labels on every object and pod; a name once, and one that Kubernetes takes."""
    found = []
    for owner in render.objects:
        told, name = owner["metadata"], f"{owner['kind']}/{owner['metadata']['name']}"
        missing = STANDARD - {f"app.kubernetes.io/{part}" for part in ("component",)} - set(told.get("labels", {}))
        found += [f"{name} lacks the label {label}" for label in sorted(missing)]
        if len(told["name"]) > 63 or not DNS_NAME.fullmatch(told["name"]):
            found.append(f"{name}: a name of {len(told['name'])} characters that Kubernetes may refuse")
        found += [f"{name}: the label {key} is {value!r}" for key, value in told.get("labels", {}).items() if not _is_label(value)]
    for pod in render.services:
        missing = STANDARD - {"app.kubernetes.io/managed-by"} - set(pod.labels) | (
            {POOL} - set(pod.labels) if pod.component != "orchestrator" else set()
        )
        found += [f"the pods of {pod.name} lack the label {label}" for label in sorted(missing)]
    names = Counter((owner["kind"], owner["metadata"].get("namespace"), owner["metadata"]["name"]) for owner in render.objects)
    found += [f"{kind}/{name} is there {count} times" for (kind, _, name), count in names.items() if count > 1]
    found += [f"no {component} is rendered" for component in ("orchestrator", "target") if not render.of(component)]
    return found


def _is_label(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?", value) is not None


def selectors(render: Render) -> list[str]:
    """Whatever selects pods finds pods, and those of one component; no two workloads own the same pod."""
    found = []
    for pod in render.services:
        selector = pod.owner["spec"]["selector"]["matchLabels"]
        if not fits(selector, pod.labels):
            found.append(f"{pod.name} does not select its own pods")
        owners = [other.name for other in render.services if fits(selector, other.labels)]
        if owners != [pod.name]:
            found.append(f"the selector of {pod.name} also finds the pods of {', '.join(owners)}")
        if "app.kubernetes.io/version" in selector or "helm.sh/chart" in selector:
            found.append(f"{pod.name} selects by a label that an upgrade changes")
    for name, selector in _other_selectors(render):
        chosen = [pod for pod in render.pods if selector and fits(selector, pod.labels)]  # that of `helm test` has a policy, too
        if not chosen:
            found.append(f"{name} selects no pod")
        elif "app.kubernetes.io/instance" not in selector:
            found.append(f"{name} also selects the pods of another release")
    for service in render.kind("Service"):
        if len({pod.component for pod in render.selected(service["spec"].get("selector"))}) > 1:
            found.append(f"Service/{service['metadata']['name']} mixes components")
    return found


def _other_selectors(render: Render) -> Iterator[tuple[str, dict[str, str]]]:
    """Name and labels of everything, save workloads, that selects pods of this release."""
    for owner in render.objects:
        name, spec = f"{owner['kind']}/{owner['metadata']['name']}", owner.get("spec") or {}
        if owner["kind"] == "Service":
            yield name, spec.get("selector") or {}
        elif owner["kind"] in ("PodDisruptionBudget", "PodMonitor"):
            yield name, spec["selector"].get("matchLabels") or {}
        elif owner["kind"] == "NetworkPolicy":
            yield name, spec["podSelector"].get("matchLabels") or {}
    for pod in render.services:
        for constraint in pod.spec.get("topologySpreadConstraints", []):
            yield f"{pod.name}, topologySpreadConstraints", constraint["labelSelector"].get("matchLabels") or {}


def ports(render: Render) -> list[str]:
    """A port has one name and number in the container, its settings, its Services and its scraper."""
    found = []
    for pod in render.services:
        env = pod.env
        wanted = {
            "grpc": "SPECDEC_PORT",
            "metrics": "SPECDEC_METRICS_PORT",
            "health": "SPECDEC_HEALTH_PORT",
            "scaler": "SPECDEC_SCALER_PORT",
        }
        for name, variable in wanted.items():
            told, open_ = env.get(variable, "-1"), pod.ports.get(name)
            if (open_ is None) != (told == "-1") or (open_ is not None and str(open_) != told):
                found.append(f"{pod.name}: the port {name} is {open_} and {variable} is {told}")
        if pod.ports.get("grpc") != PORT_OF[pod.component]:
            found.append(f"{pod.name}: the port grpc is {pod.ports.get('grpc')}, not {PORT_OF[pod.component]}")
        if len(set(pod.ports.values())) != len(pod.ports):
            found.append(f"{pod.name}: two ports have one number")
        if env.get("SPECDEC_HOST") not in ("0.0.0.0", "::"):
            found.append(f"{pod.name}: SPECDEC_HOST={env.get('SPECDEC_HOST')} is not reached from outside the pod")
    for service in render.kind("Service"):
        name = f"Service/{service['metadata']['name']}"
        for port in service["spec"]["ports"]:
            for pod in render.selected(service["spec"].get("selector")):
                if port.get("targetPort") not in pod.ports:
                    found.append(f"{name}: {pod.name} has no port named {port.get('targetPort')}")
                elif service["spec"].get("clusterIP") == "None" and pod.ports[port["targetPort"]] != port["port"]:
                    found.append(f"{name} has no address of its own, so its port {port['port']} must be the pod's")
            front = service["spec"].get("clusterIP") != "None"
            secure = any("SPECDEC_TLS_CERT" in pod.env for pod in render.of("orchestrator"))
            if front and port["name"] == "grpc" and port.get("appProtocol") != (None if secure else "kubernetes.io/h2c"):
                found.append(f"{name}: the port grpc has the appProtocol {port.get('appProtocol')}")
    for monitor in render.kind("PodMonitor"):
        for pod in render.selected(monitor["spec"]["selector"].get("matchLabels")):
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                if endpoint.get("port") not in pod.ports:
                    found.append(f"PodMonitor/{monitor['metadata']['name']}: {pod.name} has no port {endpoint.get('port')}")
    return found


def addresses(render: Render) -> list[str]:
    """Every address that a service is told is a Service of this release that leads to pods of the right component and port."""
    found = []
    wanted = {"SPECDEC_TARGETS": ("target", "grpc"), "SPECDEC_DRAFTS": ("draft", "grpc"), "SPECDEC_PEERS": ("orchestrator", "scaler")}
    for pod in render.of("orchestrator"):
        for variable, (component, port_name) in wanted.items():
            entries = [entry for entry in pod.env.get(variable, "").split(",") if entry]
            reached = set()
            for entry in entries:
                problem, pods_ = _leads_to(render, entry, component, port_name)
                found += [f"{pod.name}: {variable}, {entry!r}: {problem}"] if problem else []
                reached |= {other.name for other in pods_}
            forgotten = {other.name for other in render.of(component)} - reached
            if forgotten and (variable != "SPECDEC_PEERS" or "scaler" in pod.ports):
                found.append(f"{pod.name}: {variable} leads to no pod of {', '.join(sorted(forgotten))}")
    return found


def _leads_to(render: Render, entry: str, component: str, port_name: str) -> tuple[str, list[Pod]]:
    match = ENTRY.fullmatch(entry)
    if match is None:
        return "is not in the form of an entry", []
    name = match["host"].split(".")[0]
    service = render.find("Service", name)
    if service is None:
        return f"there is no Service {name}", []
    chosen = render.selected(service["spec"].get("selector"))
    if service["spec"].get("clusterIP") != "None":
        return "is not a headless Service, so that it hides the replicas", chosen
    if any(pod.component != component for pod in chosen):
        return f"leads to pods that are no {component}", chosen
    for pod in chosen:
        if match["port"] not in (port_name, str(pod.ports.get(port_name))):
            return f"{pod.name} has its port {port_name} at {pod.ports.get(port_name)}", chosen
    return "", chosen


def references(render: Render) -> list[str]:
    """What a pod mounts is a volume of it; what a volume, a variable or a pod names is rendered or given by the user; paths are mounted."""
    found = []
    for pod in render.pods:
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
        for container in pod.containers:
            mounts = [mount["name"] for mount in container.get("volumeMounts", [])]
            found += [f"{pod.name}: {mount} is mounted and no volume" for mount in mounts if mount not in volumes]
            places = Counter(mount["mountPath"] for mount in container.get("volumeMounts", []))
            found += [f"{pod.name}: two volumes at {place}" for place, count in places.items() if count > 1]
        used = {mount["name"] for container in pod.containers for mount in container.get("volumeMounts", [])}
        found += [f"{pod.name}: the volume {name} is mounted nowhere" for name in sorted(volumes - used)]
        account = pod.spec.get("serviceAccountName", "default")
        if pod in render.services and account == "default":
            found.append(f"{pod.name}: runs under the namespace's default account")
    for pod in render.services:
        places = {mount["mountPath"].rstrip("/"): mount["name"] for mount in pod.main.get("volumeMounts", [])}
        kinds = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        for name in (*FOLDERS, *FILES):
            path = pod.env.get(f"SPECDEC_{name}", "")
            place = next((place for place in sorted(places, reverse=True) if path == place or path.startswith(f"{place}/")), None)
            if path and name in FILES and place is None:
                found.append(f"{pod.name}: SPECDEC_{name}={path} lies in no volume")
            elif path and place and name in FILES and path.removeprefix(f"{place}/") not in _keys(kinds[places[place]], path, place):
                found.append(f"{pod.name}: SPECDEC_{name}={path} is not a key that its volume shows")
    return found


def _keys(volume: Object, path: str, place: str) -> set[str]:
    """File names that a volume shows; the asked one where it does not say."""
    parts = [volume, *volume.get("projected", {}).get("sources", [])]
    shown = [item["path"] for part in parts for kind in ("secret", "configMap") for item in (part.get(kind) or {}).get("items", [])]
    return set(shown) or {path.removeprefix(f"{place}/")}


def unknown_names(render: Render) -> list[str]:
    """Accounts, roles and routes lead to objects of this render."""
    found = []
    for binding in render.kind("RoleBinding", "ClusterRoleBinding"):
        role = binding["roleRef"]
        if render.find(role["kind"], role["name"]) is None:
            found.append(f"{binding['kind']}/{binding['metadata']['name']}: there is no {role['kind']} {role['name']}")
        used = {pod.spec.get("serviceAccountName") for pod in render.pods}
        found += [
            f"{binding['kind']}/{binding['metadata']['name']}: no pod runs as {subject['name']}"
            for subject in binding["subjects"]
            if subject["name"] not in used
        ]
    for route in render.kind("GRPCRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                service = render.find("Service", backend["name"])
                if service is None or backend["port"] not in [port["port"] for port in service["spec"]["ports"]]:
                    found.append(f"GRPCRoute/{route['metadata']['name']}: there is no Service {backend['name']} with {backend['port']}")
    for workload in render.kind(*WORKLOADS):
        component = workload["metadata"].get("labels", {}).get(COMPONENT)
        if component not in COMPONENTS:
            found.append(f"{workload['kind']}/{workload['metadata']['name']}: its component is {component}")
    return found


CHECKS: tuple[Any, ...] = (labels, selectors, ports, addresses, references, unknown_names)

"""Who may speak to whom: the policies of a render, evaluated as Kubernetes does it, against what the services need.

Traffic passes when the policies of the sender let it out and those of the receiver let it in; a pod that no policy of a direction
selects is open in that direction. https://kubernetes.io/docs/concepts/services-networking/network-policies/
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.helm.objects import COMPONENTS, Object, Pod, Render
from tests.helm.programs import NAMESPACE

API_SERVERS = (("10.96.0.1", 443), ("172.18.0.2", 6443))
POD_IP = "10.244.0.9"  # of every pod: they live in private ranges
ANYWHERE_PORTS = (22, 80, 443, 6443, 8080)


@dataclass(frozen=True)
class Party:
    """Somebody at one end of a connection: a pod, or an address outside the cluster."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = NAMESPACE
    ip: str = ""
    ports: dict[str, int] = field(default_factory=dict)


NEIGHBOUR = Party("another pod of the namespace", {"app": "other"})
OUTSIDER = Party("a pod of another namespace", {"app": "other"}, "elsewhere")
WORLD = Party("the internet", ip="203.0.113.7")
DNS = Party("the cluster's DNS", {"k8s-app": "kube-dns"}, "kube-system")
API = [Party("the API server", ip=ip) for ip, _ in API_SERVERS]


def network(render: Render) -> list[str]:
    """Each connection that the services need is let through, and none of those that they must not have."""
    policies = render.kind("NetworkPolicy")
    if not policies:
        return []
    found = []
    parties = {pod.name: Party(pod.name, pod.labels, ports=pod.ports) for pod in render.services}
    for pod in render.services:
        for direction in ("Ingress", "Egress"):
            if not any(_applies(policy, pod.labels, direction) for policy in policies):
                found.append(f"{pod.name}: {direction.lower()} is open, no policy selects it")
    for source, target, port, protocol in _needed(render, parties):
        if not passes(policies, source, target, port, protocol):
            found.append(f"{source.name} cannot reach {target.name} at {port}/{protocol}")
    for source, target, port, protocol in _unwanted(render, parties):
        if passes(policies, source, target, port, protocol):
            found.append(f"{source.name} can reach {target.name} at {port}/{protocol}")
    return found


Flow = tuple[Party, Party, int, str]


def _needed(render: Render, parties: dict[str, Party]) -> Iterator[Flow]:
    for pod in render.services:
        me = parties[pod.name]
        yield from ((me, DNS, 53, protocol) for protocol in ("UDP", "TCP"))
        if endpoint := re.fullmatch(r"https?://([^:/]+):(\d+)/?.*", pod.env.get("SPECDEC_OTLP_ENDPOINT", "")):
            host = endpoint[1].split(".")
            collector = Party("the collector of spans", {}, host[1] if len(host) > 1 else NAMESPACE)
            yield me, collector, int(endpoint[2]), "TCP"
        if _downloads(pod):
            yield me, WORLD, 443, "TCP"
    for pod in render.of("orchestrator"):
        me = parties[pod.name]
        for other in (*render.of("target"), *render.of("draft")):
            yield me, parties[other.name], other.ports["grpc"], "TCP"
        if "scaler" in pod.ports:
            yield me, me, pod.ports["scaler"], "TCP"
        if _asks_the_api(pod):
            yield from ((me, server, port, "TCP") for server, (_, port) in zip(API, API_SERVERS, strict=True))


def _unwanted(render: Render, parties: dict[str, Party]) -> Iterator[Flow]:
    orchestrators = [parties[pod.name] for pod in render.of("orchestrator")]
    models = [pod for pod in render.services if pod.component != "orchestrator"]
    strangers = [NEIGHBOUR, OUTSIDER, WORLD, *(parties[pod.name] for pod in models)]
    for pod in models:
        me = parties[pod.name]
        yield from ((source, me, pod.ports["grpc"], "TCP") for source in strangers)
        servers = zip(API, API_SERVERS, strict=True)
        yield from ((me, server, port, "TCP") for server, (_, port) in servers if not (_downloads(pod) and port == 443))
    for pod in render.services:
        me = parties[pod.name]
        yield from (
            (source, me, port, "TCP") for source in (*strangers, *orchestrators) for port in (pod.ports.get("health", 0), 9) if port
        )
        yield from ((source, me, pod.ports["metrics"], "TCP") for source in (WORLD, *orchestrators) if "metrics" in pod.ports)
        allowed = (443 if _downloads(pod) else 0, *(port for _, port in API_SERVERS if _asks_the_api(pod)))
        yield from ((me, WORLD, port, "TCP") for port in ANYWHERE_PORTS if port not in allowed)
        yield from ((me, OUTSIDER, port, "TCP") for port in ANYWHERE_PORTS if not _asks_the_api(pod))
    for pod in render.of("orchestrator"):
        if "scaler" in pod.ports:
            yield from ((source, parties[pod.name], pod.ports["scaler"], "TCP") for source in strangers)
        if not _asks_the_api(pod):
            servers = zip(API, API_SERVERS, strict=True)
            me = parties[pod.name]
            yield from ((me, server, port, "TCP") for server, (_, port) in servers if not (_downloads(pod) and port == 443))


def _downloads(pod: Pod) -> bool:
    return any(container["name"] == "download" for container in pod.spec.get("initContainers", []))


def _asks_the_api(pod: Pod) -> bool:
    return any("kubernetes://" in pod.env.get(f"SPECDEC_{name}", "") for name in ("TARGETS", "DRAFTS", "PEERS"))


def passes(policies: list[Object], source: Party, target: Party, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection from `source` to `port` of `target` is let through."""
    inside = {party.name for party in (source, target) if not party.ip and party.namespace == NAMESPACE}
    out = source.name not in inside or _open(policies, source, "Egress", target, target, port, protocol)
    into = target.name not in inside or _open(policies, target, "Ingress", source, target, port, protocol)
    return out and into


def _open(policies: list[Object], me: Party, direction: str, other: Party, target: Party, port: int, protocol: str) -> bool:
    mine = [policy for policy in policies if _applies(policy, me.labels, direction)]
    peers = "from" if direction == "Ingress" else "to"
    rules = [rule for policy in mine for rule in policy["spec"].get(direction.lower()) or []]
    return not mine or any(_any_peer(rule.get(peers), other) and _any_port(rule.get("ports"), target, port, protocol) for rule in rules)


def _applies(policy: Object, labels: dict[str, str], direction: str) -> bool:
    spec = policy["spec"]
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]
    return direction in types and _chosen(spec.get("podSelector") or {}, labels)


def _any_peer(peers: list[Object] | None, party: Party) -> bool:
    return not peers or any(_is_peer(peer, party) for peer in peers)


def _is_peer(peer: Object, party: Party) -> bool:
    if "ipBlock" in peer:
        block, ip = peer["ipBlock"], ipaddress.ip_address(party.ip or POD_IP)
        return ip in ipaddress.ip_network(block["cidr"]) and not any(ip in ipaddress.ip_network(but) for but in block.get("except", []))
    if party.ip:
        return False
    if "namespaceSelector" in peer:
        if not _chosen(peer["namespaceSelector"] or {}, {"kubernetes.io/metadata.name": party.namespace}):
            return False
    elif party.namespace != NAMESPACE:
        return False
    return _chosen(peer.get("podSelector") or {}, party.labels)


def _chosen(selector: Object, labels: dict[str, str]) -> bool:
    """A label selector with both kinds of terms."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for term in selector.get("matchExpressions") or []:
        value, wanted = labels.get(term["key"]), term.get("values", [])
        kept = {
            "In": value in wanted,
            "NotIn": value not in wanted,
            "Exists": term["key"] in labels,
            "DoesNotExist": term["key"] not in labels,
        }
        if not kept[term["operator"]]:
            return False
    return True


def _any_port(ports: list[Object] | None, target: Party, port: int, protocol: str) -> bool:
    if not ports:
        return True
    for told in ports:
        first = told.get("port")
        number = target.ports.get(first) if isinstance(first, str) else first
        if told.get("protocol", "TCP") == protocol and (number is None and first is None or _between(number, told.get("endPort"), port)):
            return True
    return False


def _between(first: int | None, last: int | None, port: int) -> bool:
    return first is not None and first <= port <= (last or first)


def one_per_component(render: Render) -> list[str]:
    """Policies come for all components or for none: a pool that is forgotten is open to everybody."""
    policies = render.kind("NetworkPolicy")
    covered = {pod.component for pod in render.services for policy in policies if _applies(policy, pod.labels, "Ingress")}
    there = {pod.component for pod in render.services}
    return [f"{component} has no NetworkPolicy" for component in COMPONENTS if policies and component in there - covered]


CHECKS: tuple[Any, ...] = (network, one_per_component)

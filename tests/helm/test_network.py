"""Who gets through the policies, whose certificate names whom, who is scraped and who is routed to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.checks.network import API, API_SERVERS, DNS, NEIGHBOUR, OUTSIDER, WORLD, Party, network, passes
from tests.helm.objects import COMPONENT, POOL, Object, Render, parse, render
from tests.helm.programs import HELM_3, HELM_4, NAMESPACE, Values, template
from tests.helm.scenes import ISSUER, keda

SCRAPER = Party("Prometheus", {"app.kubernetes.io/name": "prometheus"}, "monitoring")
OPERATOR = Party("KEDA", {"app": "keda-operator"}, "keda")
ON = {"networkPolicy": {"enabled": True}}
LOCAL = {part: {"model": {"source": "pvc", "pvc": {"claimName": "models"}}} for part in ("target", "draft")}
MIRROR = Party("the mirror", {"app": "mirror"}, "mirrors")


class Net:
    def __init__(self, values: Values, **more: Any) -> None:
        self.render = render({**ON, **values, "networkPolicy": {**ON["networkPolicy"], **values.get("networkPolicy", {})}}, **more)
        self.policies = self.render.kind("NetworkPolicy")
        self.parties = {pod.component: Party(pod.component, pod.labels, ports=pod.ports) for pod in self.render.services}
        self.parties["test"] = Party("test", {**self.parties["orchestrator"].labels, COMPONENT: "test"})

    def passes(self, source: Party | str, target: Party | str, port: int, protocol: str = "TCP") -> bool:
        first, second = (self.parties[one] if isinstance(one, str) else one for one in (source, target))
        return passes(self.policies, first, second, port, protocol)


def test_by_default_anybody_calls_and_nobody_does_more() -> None:
    net = Net({"target": keda("external"), "draft": LOCAL["draft"]})
    for who in (NEIGHBOUR, OUTSIDER, WORLD, "test"):
        assert net.passes(who, "orchestrator", 50051)
        assert not any(net.passes(who, component, port) for component in ("target", "draft") for port in (50052, 50053, 50050, 9464))
    assert all(net.passes(SCRAPER, component, 9464) for component in ("orchestrator", "target", "draft"))
    assert not any(net.passes(SCRAPER, "orchestrator", port) for port in (50050, 50054))
    assert net.passes(OPERATOR, "orchestrator", 50054) and not net.passes(OUTSIDER, "orchestrator", 50054)
    assert net.passes("orchestrator", "orchestrator", 50054) and not net.passes("orchestrator", "orchestrator", 50051)
    assert net.passes("test", "orchestrator", 50050) and not net.passes(NEIGHBOUR, "orchestrator", 50050)
    assert not net.passes("target", "draft", 50053) and not net.passes("draft", "target", 50052)


def test_clients_callers_and_those_who_ask_for_health_are_named() -> None:
    named = {who: Party(who, {"is": who}) for who in ("client", "sibling", "balancer")}
    client, sibling, balancer = ([{"podSelector": {"matchLabels": {"is": who}}}] for who in named)
    net = Net({"networkPolicy": {"clients": client, "orchestrators": sibling, "health": balancer, "metrics": [], "scaler": []}})
    for who, party in named.items():
        for component, port in {"orchestrator": 50051, "target": 50052, "draft": 50053}.items():
            assert net.passes(party, component, port) == (who == ("client" if component == "orchestrator" else "sibling"))
            assert net.passes(party, component, 50050) == (who == "balancer")
            assert not net.passes(party, component, 9464)
    assert net.passes("test", "orchestrator", 50051) and not net.passes(WORLD, "orchestrator", 50051)
    assert not any(net.passes(SCRAPER, component, 9464) for component in ("orchestrator", "target", "draft"))
    assert net.passes("orchestrator", "target", 50052) and net.passes("orchestrator", "draft", 50053)


def test_without_tests_their_pod_has_no_way_in() -> None:
    net = Net({"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"a": "b"}}}]}, "tests": {"enabled": False}})
    assert not net.passes("test", "orchestrator", 50051) and not net.passes("test", "orchestrator", 50050)


@pytest.mark.parametrize("component", ["orchestrator", "target", "draft"])
def test_the_hub_is_reached_by_those_who_download(component: str) -> None:
    here = Net(LOCAL)
    assert not here.passes(component, WORLD, 443)
    hub = Net({"target": {"model": {"source": "hf", "hf": {"repository": "some/model"}}}})
    assert hub.passes(component, WORLD, 443) and not hub.passes(component, WORLD, 80)
    assert not any(
        hub.passes(component, Party("inside", ip=ip), 443) for ip in ("10.0.0.1", "169.254.169.254", "192.168.1.1", "172.20.0.1")
    )
    models = {part: {"model": {"source": "hf", "hf": {"repository": "some/model"}}} for part in ("target", "draft")}
    for part in models.values():
        part["model"]["hf"] |= {"endpoint": "http://mirror.mirrors.svc:8080"}  # type: ignore[operator]
    mirrored = Net(models)
    assert mirrored.passes(component, MIRROR, 8080) and not mirrored.passes(component, MIRROR, 443)
    assert not mirrored.passes(component, WORLD, 443) and not mirrored.passes(component, OUTSIDER, 8080)


def test_what_lies_outside_the_release_is_reached_at_its_port() -> None:
    more = {"extraTargets": ["large=dns:///target.example.com:7000", "kubernetes://mirrors/target:grpc"], "extraDrafts": ["10.1.2.3:7001"]}
    net = Net({**LOCAL, "discovery": more})
    assert net.passes("orchestrator", WORLD, 7000) and net.passes("orchestrator", Party("a draft", ip="10.1.2.3"), 7001)
    assert net.passes("orchestrator", MIRROR, 7002) and not net.passes("orchestrator", OUTSIDER, 7002)
    assert all(net.passes("orchestrator", server, port) for server, (_, port) in zip(API, API_SERVERS, strict=True))
    assert not any(net.passes(component, WORLD, 7000) for component in ("target", "draft"))


@pytest.mark.parametrize(
    ("endpoint", "collector", "port"),
    [
        ("http://collector:4317", Party("c", {}, NAMESPACE), 4317),
        ("http://collector.mirrors:4317", MIRROR, 4317),
        ("https://collector.mirrors.svc.cluster.local", MIRROR, 443),
        ("https://otlp.vendor.example:8443", WORLD, 8443),
        ("http://203.0.113.7:4317", WORLD, 4317),
    ],
)
def test_the_collector_of_spans_is_reached(endpoint: str, collector: Party, port: int) -> None:
    net = Net({**LOCAL, "telemetry": {"otlpEndpoint": endpoint}})
    assert all(net.passes(component, collector, port) for component in ("orchestrator", "target", "draft"))
    assert not net.passes("target", collector, port + 1)


def test_what_is_added_and_what_is_lifted() -> None:
    allowed = Net({**LOCAL, "networkPolicy": {"egress": {"allow": [{"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}]}}})
    assert allowed.passes("target", WORLD, 22) and not allowed.passes("target", OUTSIDER, 22)
    lifted = Net({**LOCAL, "networkPolicy": {"egress": {"restrict": False}}})
    assert lifted.passes("target", WORLD, 22) and not lifted.passes(WORLD, "target", 50052)
    other_dns = Net({**LOCAL, "networkPolicy": {"egress": {"dns": [{"ipBlock": {"cidr": "10.0.0.10/32"}}]}}})
    assert other_dns.passes("draft", Party("dns", ip="10.0.0.10"), 53, "UDP") and not other_dns.passes("draft", DNS, 53, "UDP")
    assert render().kind("NetworkPolicy") == []


@pytest.mark.parametrize("key", ["dns", "hub", "apiServer"])
def test_an_empty_list_that_would_mean_everybody_is_refused(key: str) -> None:
    for version in (HELM_3, HELM_4):
        done = template({"networkPolicy": {"egress": {key: []}}}, version=version)
        assert done.returncode != 0 and f"networkPolicy.egress.{key}" in done.stderr.replace("/", ".")


def certificates(found: Render) -> dict[str, Object]:
    return {one["spec"]["secretName"]: one["spec"] for one in found.kind("Certificate")}


def test_certificates_carry_the_names_that_are_expected() -> None:
    found = render({"tls": {"internal": {"enabled": True, "issuerRef": ISSUER, "allowedIdentities": ["other.orchestrators"]}}})
    made = certificates(found)
    mounted = {
        pod.component: next(v["secret"]["secretName"] for v in pod.spec["volumes"] if v["name"] == "internal") for pod in found.services
    }
    (front,), pools = found.of("orchestrator"), [*found.of("target"), *found.of("draft")]
    assert set(mounted.values()) == made.keys() and len(made) == 2
    shown, expected = made[mounted["orchestrator"]], made[mounted["target"]]
    assert mounted["target"] == mounted["draft"]
    assert expected["dnsNames"] == [front.env["SPECDEC_TLS_SERVER_NAME"]] and "server auth" in expected["usages"]
    for pod in pools:
        assert pod.env["SPECDEC_ALLOWED_IDENTITIES"].split(",") == [*shown["dnsNames"], "other.orchestrators"]
    assert "client auth" in shown["usages"] and "server auth" not in shown["usages"]
    assert all(one["issuerRef"] == {**ISSUER, "group": "cert-manager.io"} for one in made.values())


def test_the_front_certificate_carries_the_names_by_which_it_is_dialled() -> None:
    found = render(
        {"tls": {"front": {"enabled": True, "issuerRef": {"name": "public", "kind": "ClusterIssuer"}, "dnsNames": ["llm.example"]}}}
    )
    ((_, made),) = certificates(found).items()
    (pod,) = found.of("orchestrator")
    service = next(s["metadata"]["name"] for s in found.kind("Service") if s["spec"].get("clusterIP") != "None")
    assert {service, f"{service}.{NAMESPACE}", f"{service}.{NAMESPACE}.svc", "llm.example"} <= set(made["dnsNames"])
    assert made["secretName"] in [v["secret"]["secretName"] for v in pod.spec["volumes"] if "secret" in v]
    own = {"existingSecret": "mine"}
    assert certificates(render({"tls": {"front": {"enabled": True, **own}}})) == {}


@pytest.mark.parametrize(("told", "known", "there"), [
    ("auto", False, False), ("auto", True, True), ("on", False, True), (True, False, True), ("off", True, False), (False, True, False),
])  # fmt: skip
def test_pods_are_scraped_where_somebody_scrapes(told: str | bool, known: bool, there: bool) -> None:
    more = ["--api-versions", "monitoring.coreos.com/v1/PodMonitor"] if known else []
    for version in (HELM_3, HELM_4):
        done = template({"podMonitor": {"enabled": told}}, version=version, more=more)
        assert done.returncode == 0, done.stderr
        monitors = parse(done.stdout).kind("PodMonitor")
        assert len(monitors) == there
    if there:
        (term,) = monitors[0]["spec"]["selector"]["matchExpressions"]
        assert term["values"] == ["orchestrator", "target", "draft"]
        assert monitors[0]["spec"]["podTargetLabels"] == [f"app.kubernetes.io/{part}" for part in ("instance", "component")] + [POOL], (
            "the first is what hpa.matchLabels can tell two releases of a namespace by"
        )
        assert monitors[0]["spec"]["podMetricsEndpoints"] == [
            {"port": "metrics", "path": "/metrics", "interval": "15s", "scrapeTimeout": "10s"}
        ]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"podMonitor": {"interval": "15s", "scrapeTimeout": "16s"}}, "podMonitor.scrapeTimeout: not more than podMonitor.interval, 15s"),
        ({"podMonitor": {"interval": "1m", "scrapeTimeout": "1m30s"}}, "podMonitor.scrapeTimeout"),
        (
            {"tls": {"certManager": {"duration": "24h", "renewBefore": "24h"}}},
            "tls.certManager.renewBefore: less than tls.certManager.duration",
        ),
        ({"podMonitor": {"interval": "1m30s", "scrapeTimeout": "90000ms"}}, ""),
    ],
)
def test_times_that_an_operator_would_refuse(values: Values, told: str) -> None:
    done = template(values)
    assert (done.returncode != 0) == bool(told) and told in done.stderr, done.stderr


def test_a_route_leads_to_the_service_that_clients_call() -> None:
    gateway = {"name": "gateway", "namespace": "gateway", "sectionName": "grpc"}
    route = {"enabled": True, "parentRefs": [gateway], "hostnames": ["llm.example"], "annotations": {"a": "b"}}
    found = render({"grpcRoute": route, "orchestrator": {"service": {"port": 443}}})
    (made,) = found.kind("GRPCRoute")
    (backend,) = made["spec"]["rules"][0]["backendRefs"]
    service = found.find("Service", backend["name"])
    assert service is not None and backend["port"] in [port["port"] for port in service["spec"]["ports"]] == [443]
    assert made["spec"]["parentRefs"] == [gateway] and made["spec"]["hostnames"] == ["llm.example"]
    assert made["metadata"]["annotations"] == {"a": "b"}


def test_a_namespace_that_denies_by_default_keeps_nobody_from_what_is_needed() -> None:
    """Others forbid everything there, and the chart's policies alone let through: services, KEDA, Prometheus and the pod of `helm test`."""
    net = Net({**LOCAL, "target": LOCAL["target"] | keda("external"), "discovery": {"type": "kubernetes"}})
    denied = {"spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}}
    net.policies = [*net.policies, {**net.policies[0], **denied}]
    assert network(Render([*net.render.objects, net.policies[-1]])) == []
    assert net.passes("test", DNS, 53, "UDP") and net.passes("test", DNS, 53)
    assert all(net.passes("test", "orchestrator", port) for port in (50051, 50050))
    assert not any(net.passes("test", *to) for to in (("orchestrator", 50054), ("target", 50052), (WORLD, 443)))
    assert net.passes(SCRAPER, "target", 9464) and net.passes(OPERATOR, "orchestrator", 50054)
    assert not net.passes(NEIGHBOUR, "test", 80)


def test_logs_of_helm_test_outlive_it() -> None:
    """`helm test --logs` reads them after the pod has ended; helm 3.17 to 4.0 had then deleted one that is told to go on success."""
    (pod,) = (pod for pod in render().pods if pod.owner["kind"] == "Pod")
    assert pod.metadata["annotations"]["helm.sh/hook-delete-policy"] == "before-hook-creation"

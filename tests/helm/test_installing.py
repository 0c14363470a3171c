"""What somebody meets who installs the chart: downloads through a proxy, pools for another release, the chart as a part of another."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from tests.helm.checks.network import API_SERVERS, Party, passes
from tests.helm.objects import Render, parse, render
from tests.helm.programs import CHART, HELM_3, HELM_4, NAMESPACE, Values, helm, template
from tests.helm.scenes import MOUNTED
from tests.tools import ROOT

ELSEWHERE = "drafts"


def test_a_download_goes_through_a_proxy_with_an_authority_of_its_own() -> None:
    """The variables are the download's alone."""
    hub = {
        "endpoint": "https://hub.example.com",
        "existingSecret": "hub",
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}, {"name": "SSL_CERT_FILE", "value": "/etc/hub/ca.crt"}],
        "extraVolumeMounts": [{"name": "hub-ca", "mountPath": "/etc/hub", "readOnly": True}],
    }
    volume = [{"name": "hub-ca", "configMap": {"name": "hub-ca"}}]
    found = render({"orchestrator": {"extraVolumes": volume}, "target": {"model": {"hf": hub}, "extraVolumes": volume}})
    for component in ("orchestrator", "target"):
        (pod,) = found.of(component)
        (download,) = pod.spec["initContainers"]
        told = {entry["name"]: entry.get("value") for entry in download["env"]}
        assert told["HTTPS_PROXY"] == "http://proxy:3128" and told["SSL_CERT_FILE"] == "/etc/hub/ca.crt" and "HF_TOKEN" in told
        assert {mount["mountPath"] for mount in download["volumeMounts"]} == {"/model", "/tmp", "/etc/hub"}
        assert "HTTPS_PROXY" not in pod.env and len(pod.main["volumeMounts"]) == 2
    (draft,) = found.of("draft")
    assert "HTTPS_PROXY" not in str(draft.spec)


def test_the_values_for_a_machine_of_ones_own_render() -> None:
    """Those of docs/kubernetes.md, with the images that `make images` makes and kind loads; nothing is downloaded or pulled anew."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    found = render(yaml.safe_load(text.partition("<<'EOF'\n")[2].partition("EOF\n")[0]))
    loaded = set(re.search(r"kind load docker-image (.*)", text)[1].split())  # type: ignore[index]
    assert {pod.main["image"] for pod in found.services} == loaded
    for pod in found.services:
        assert pod.main["imagePullPolicy"] == "IfNotPresent" and "initContainers" not in pod.spec
        (model,) = (volume for volume in pod.spec["volumes"] if volume["name"] == "model")
        assert model["hostPath"] == {"path": "/models", "type": "Directory"}


def test_what_the_test_asks_arrives_as_it_was_written() -> None:
    (pod,) = (pod for pod in render({"tests": {"prompt": 'Grüße "$(HOME)"'}}).pods if pod.component == "test")
    assert '--prompt=Grüße "$$(HOME)"' in pod.main["command"], "Kubernetes makes one $ of two"


def test_drafts_alone_serve_the_orchestrators_of_another_release() -> None:
    """Two releases in two namespaces, with policies and TLS: who dials whom by which name, and who is let in."""
    tls = {"internal": {"enabled": True, "issuerRef": {"name": "authority", "kind": "ClusterIssuer"}, "serverName": "pools.specdec"}}
    callers = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}}
    theirs: Values = {
        "orchestrator": {"replicas": 0},
        "target": {"pools": {}},
        "draft": {**MOUNTED["draft"], "pools": {"l4": {"replicas": 2}}},
        "networkPolicy": {"enabled": True, "orchestrators": [callers]},
        "tls": {"internal": {**tls["internal"], "allowedIdentities": ["demo-specdec-orchestrator.models"]}},
    }
    done = template(theirs, release="far", more=["--namespace", ELSEWHERE])
    assert done.returncode == 0, done.stderr
    pools = parse(done.stdout)
    assert [pod.owner["spec"]["replicas"] for pod in pools.of("orchestrator")] == [0] and not pools.of("target")
    assert all(pod.component != "test" for pod in pools.pods)
    (draft,) = pools.of("draft")
    (service,) = (found for found in pools.kind("Service") if found["spec"]["selector"].get("specdec.io/pool"))
    entry = f"far=kubernetes://{ELSEWHERE}/{service['metadata']['name']}:grpc"
    watching = {"type": "kubernetes", "extraDrafts": [entry]}
    ours = render({**MOUNTED, "discovery": watching, "networkPolicy": {"enabled": True}, "tls": tls})
    (front,) = ours.of("orchestrator")
    assert front.env["SPECDEC_DRAFTS"].endswith(entry)
    assert front.env["SPECDEC_TLS_SERVER_NAME"] == "pools.specdec" and names(pools, "-pools-tls") == ["pools.specdec"]
    (identity,) = names(ours, "demo-specdec-orchestrator-tls")
    assert identity in draft.env["SPECDEC_ALLOWED_IDENTITIES"].split(",")
    policies = ours.kind("NetworkPolicy") + pools.kind("NetworkPolicy")
    caller = Party("orchestrator", front.labels, NAMESPACE, ports=front.ports)
    assert passes(policies, caller, Party("draft", draft.labels, ELSEWHERE, ports=draft.ports), 50053)
    assert all(passes(policies, caller, Party("API server", ip=ip), port) for ip, port in API_SERVERS)
    (role,) = (found for found in ours.kind("Role") if found["metadata"]["namespace"] == ELSEWHERE)
    (binding,) = (found for found in ours.kind("RoleBinding") if found["metadata"]["namespace"] == ELSEWHERE)
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": front.spec["serviceAccountName"], "namespace": NAMESPACE}]


def names(found: Render, ending: str) -> list[str]:
    return [name for one in found.kind("Certificate") if one["metadata"]["name"].endswith(ending) for name in one["spec"]["dnsNames"]]


def test_it_is_a_part_of_another_chart(tmp_path: Path) -> None:
    """Twice, under two names, one of them switched off by its condition; the parent has values of its own under `global`."""
    dependencies = [{"name": "specdec", "alias": alias, "version": "*", "condition": f"{alias}.enabled"} for alias in ("small", "large")]
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "specdec").symlink_to(CHART)
    (tmp_path / "Chart.yaml").write_text(json.dumps({"apiVersion": "v2", "name": "all", "version": "1.0.0", "dependencies": dependencies}))
    for version in (HELM_3, HELM_4):
        for both in (True, False):
            values = {"global": {"team": "serving"}, "small": {"enabled": True}, "large": {"enabled": both}}
            done = helm("template", "demo", str(tmp_path), "-f", "-", version=version, stdin=json.dumps(values))
            assert done.returncode == 0, done.stderr
            found = parse(done.stdout)
            assert len(found.services) == (6 if both else 3)
            assert len({(one["kind"], one["metadata"]["name"]) for one in found.objects}) == len(found.objects)
            for service in found.kind("Service"):
                assert len({pod.labels["app.kubernetes.io/name"] for pod in found.selected(service["spec"]["selector"])}) == 1


def test_a_pool_of_another_file_is_left_out_by_null(tmp_path: Path) -> None:
    """The values of all environments, and those of one that lacks a pool."""
    files = [tmp_path / "all.yaml", tmp_path / "one.yaml"]
    files[0].write_text(json.dumps({"draft": {"pools": {"near": {"replicas": 2}, "far": {}}}}))
    files[1].write_text(json.dumps({"draft": {"pools": {"far": None}}}))
    for version in (HELM_3, HELM_4):
        done = template(None, files, version=version)
        assert done.returncode == 0, done.stderr
        found = parse(done.stdout)
        assert [pod.labels["specdec.io/pool"] for pod in found.of("draft")] == ["near"]
        assert found.of("orchestrator")[0].env["SPECDEC_DRAFTS"] == "near=dns:///demo-specdec-draft-near:50053"


def test_the_notes_tell_of_what_the_policies_may_keep_out_and_of_what_a_gateway_must_do() -> None:
    hubs = {"target": "https://hub.example.com:8443", "draft": "http://mirror.mirrors:8080"}
    values = {part: {"model": {"hf": {"endpoint": endpoint}}} for part, endpoint in hubs.items()}
    more: Values = {
        "networkPolicy": {"enabled": True},
        "grpcRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
        "tls": {"front": {"enabled": True, "existingSecret": "front"}},
    }
    done = helm("install", "demo", str(CHART), "--dry-run=client", "-f", "-", stdin=json.dumps({**values, **more}))
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert notes.count("https://hub.example.com:8443 at a public address only") == 1 and "mirrors:8080 at" not in notes
    assert "add a BackendTLSPolicy" in notes
    plain = helm("install", "demo", str(CHART), "--dry-run=client").stdout.partition("NOTES:")[2]
    assert "public address" not in plain and "BackendTLSPolicy" not in plain

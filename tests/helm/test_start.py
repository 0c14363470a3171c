"""The services, started with the very variables that the chart gives them: only addresses and paths are this machine's, and the CPU.

Mutual TLS inside, TLS and tokens in front, both pools scaled by KEDA. Certificates are made from the render's Certificate objects, as
cert-manager makes them: these names, these usages, no subject.

The release is called `specdec`, so that what Kubernetes adds for each Service of a namespace (SPECDEC_TARGET_DEFAULT_PORT=tcp://…) looks
like settings of ours. The chart turns that off; somebody else's manifest may not.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client import SyncClient
from specdec.client.credentials import Credentials
from specdec.errors import Unauthenticated, Unavailable
from specdec.runtime.settings import PREFIX
from specdec.terms import SamplingParams
from specdec.v1 import externalscaler_pb2 as pb
from specdec.v1 import externalscaler_pb2_grpc, target_pb2, target_pb2_grpc
from tests.certificates import Authority
from tests.e2e.stack import Process, start, wait_ready
from tests.helm.checks.pods import MODULES
from tests.helm.objects import Pod, Render
from tests.helm.scenes import scene
from tests.tiny import save_tiny
from tests.waiting import wait_until

SCENE = "for nobody else"
TOKEN = "a token that somebody has"
SERVING = health_pb2.HealthCheckResponse.SERVING


def service_links(render: Render) -> dict[str, str]:
    """What Kubernetes puts into every container of the namespace, for each Service that has an address."""
    found: dict[str, str] = {}
    for i, service in enumerate(render.kind("Service")):
        name, ip = service["metadata"]["name"].upper().replace("-", "_"), f"10.96.0.{i + 10}"
        found[f"{name}_SERVICE_HOST"] = ip
        for port in service["spec"]["ports"]:
            number, url = str(port["port"]), f"tcp://{ip}:{port['port']}"
            found |= {f"{name}_SERVICE_PORT": number, f"{name}_SERVICE_PORT_{port['name'].upper()}": number, f"{name}_PORT": url}
            found |= {f"{name}_PORT_{number}_TCP": url, f"{name}_PORT_{number}_TCP_PROTO": "tcp"}
            found |= {f"{name}_PORT_{number}_TCP_PORT": number, f"{name}_PORT_{number}_TCP_ADDR": ip}
    return found


def variables(pod: Pod, render: Render, folder: Path, **here: str) -> tuple[dict[str, str], list[str]]:
    """Settings without their prefix, and the other variables as NAME=value. A mounted Secret is a folder of its name in `folder`."""
    secrets = {volume["name"]: folder / volume["secret"]["secretName"] for volume in pod.spec["volumes"] if "secret" in volume}
    every = service_links(render) | pod.env
    for mount in pod.main["volumeMounts"]:
        if mount["name"] in secrets:
            every = {name: value.replace(f"{mount['mountPath']}/", f"{secrets[mount['name']]}/") for name, value in every.items()}
    settings = {name.removeprefix(PREFIX): value for name, value in every.items() if name.startswith(PREFIX)}
    others = [f"{name}={value}" for name, value in every.items() if not name.startswith(PREFIX)]
    settings |= {"HOST": "127.0.0.1", "PORT": "0", "METRICS_PORT": "0", "HEALTH_PORT": "0"} | here
    return settings, others


class Release:
    """The three services of a render as processes of this machine."""

    def __init__(self, render: Render, model: Path, folder: Path) -> None:
        self.render, self.model, self.folder = render, model, folder
        self.processes: dict[str, Process] = {}
        self.authority = Authority(folder)
        for spec in (found["spec"] for found in render.kind("Certificate")):
            made = self.authority.issue(spec["secretName"], *spec["dnsNames"], usages=spec["usages"])
            self.secret(spec["secretName"], {"tls.crt": made.cert.read_bytes(), "tls.key": made.key.read_bytes(), "ca.crt": self.roots})
        self.secret("tokens", {"tokens": f"somebody:{hashlib.sha256(TOKEN.encode()).hexdigest()}\n".encode()})

    @property
    def roots(self) -> bytes:
        return self.authority.ca.read_bytes()

    def secret(self, name: str, files: dict[str, bytes]) -> None:
        (self.folder / name).mkdir()
        for file, content in files.items():
            (self.folder / name / file).write_bytes(content)
            (self.folder / name / file).chmod(0o440)

    def begin(self, component: str, **here: str) -> None:
        (pod,) = self.render.of(component)
        settings, others = variables(pod, self.render, self.folder, **here)
        self.processes[component] = start(component, MODULES[component], settings, self.folder, ["env", *others])

    def run(self) -> None:
        for component in ("target", "draft"):
            self.begin(component, MODEL=str(self.model), DEVICE="cpu", DTYPE="float32")
        for process in self.processes.values():
            wait_ready(process)
        (front,) = self.render.of("orchestrator")
        here = {
            f"{component}S".upper(): re.sub(r"dns:///[^,]+", self.processes[component].endpoint, front.env[f"SPECDEC_{component}S".upper()])
            for component in ("target", "draft")
        }
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.scaler = f"127.0.0.1:{free.getsockname()[1]}"
        here |= {"SCALER_PORT": self.scaler.rpartition(":")[2], "PEERS": self.scaler}
        self.begin("orchestrator", TOKENIZER=str(self.model), **here)
        wait_ready(self.processes["orchestrator"])

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    """A draft that is the target itself, so that its proposals are accepted."""
    with tempfile.TemporaryDirectory(prefix="specdec-test-") as name:
        release = Release(scene(SCENE), save_tiny(Path(name) / "tiny"), Path(name))
        try:
            release.run()
            yield release
        finally:
            release.stop()


def test_an_answer_comes_back(release: Release) -> None:
    """With speculation what comes without it, to a client that expects the name of the Service; the links of Kubernetes are told once and
    change nothing."""
    assert any(name.startswith("SPECDEC_TARGET_H100_PORT") for name in service_links(release.render)), "the links look like no setting"
    mine = Credentials(tls_ca=release.authority.ca, tls_server_name="specdec-orchestrator", token=TOKEN)
    with SyncClient(release.processes["orchestrator"].endpoint, mine) as client:
        sampling = SamplingParams(max_tokens=24, ignore_eos=True)
        plain = client.complete("the hat of the cat", sampling, seed=5, disable_spec_decode=True)

        def the_draft_speaks() -> bool:
            answer = client.complete("the hat of the cat", sampling, seed=5, enable_adaptive_verification=False)
            assert answer.token_ids == plain.token_ids and len(answer.token_ids) == 24
            return release.processes["draft"].metric("specdec_draft_proposed_tokens_total") > 0

        wait_until(the_draft_speaks, what="over TLS, by the one name of the pools")
    for process in release.processes.values():
        assert "ignored settings of other services and Kubernetes service links" in process.log_tail(1000)


def test_others_are_not_answered(release: Release) -> None:
    """Without a token, by a name that the certificate lacks, and the pools for whoever is no orchestrator of this release."""
    endpoint, ca = release.processes["orchestrator"].endpoint, release.authority.ca
    with SyncClient(endpoint, Credentials(tls_ca=ca, tls_server_name="specdec-orchestrator")) as client, pytest.raises(Unauthenticated):
        client.complete("the hat")
    misled = Credentials(tls_ca=ca, tls_server_name="specdec-pools.models", token=TOKEN)
    with SyncClient(endpoint, misled) as client, pytest.raises(Unavailable, match="certificate is refused"):
        client.complete("the hat")
    named = (("grpc.ssl_target_name_override", "specdec-pools.models"),)
    own = (release.folder / "specdec-orchestrator-tls").resolve()
    stranger = release.authority.issue("stranger", "stranger.models", usages=["client auth"])
    for cert, key, code in ((own / "tls.crt", own / "tls.key", None), (stranger.cert, stranger.key, grpc.StatusCode.PERMISSION_DENIED)):
        shown = grpc.ssl_channel_credentials(release.roots, key.read_bytes(), cert.read_bytes())
        with grpc.secure_channel(release.processes["target"].endpoint, shown, named) as channel:
            call = target_pb2_grpc.TargetServiceStub(channel).GetModelInfo.with_call
            try:
                call(target_pb2.TargetServiceGetModelInfoRequest(), timeout=30)
                assert code is None
            except grpc.RpcError as error:
                assert error.code() == code  # type: ignore[attr-defined]


def test_keda_is_answered_with_the_metadata_of_its_triggers(release: Release) -> None:
    """In plain text, whatever else speaks TLS: thresholds of the trigger come back in thousandths, and each has a value or none."""
    triggers = [trigger for scaled in release.render.kind("ScaledObject") for trigger in scaled["spec"]["triggers"]]
    assert {trigger["metadata"]["poolName"]: trigger["type"] for trigger in triggers} == {"h100": "external", "l4": "external-push"}
    with grpc.insecure_channel(release.scaler) as channel:
        stub = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        for told in (trigger["metadata"] for trigger in triggers):
            ref = pb.ScaledObjectRef(name="any", namespace="models", scaler_metadata=told)
            thresholds = [round(1000 * float(told[name])) for name in told if name not in ("scalerAddress", "pool", "poolName")]
            specs = {spec.metric_name: spec.target_size for spec in stub.GetMetricSpec(ref, timeout=10).metric_specs}
            assert sorted(specs.values()) == sorted(thresholds)
            for name in specs:
                asked = pb.GetMetricsRequest(scaled_object_ref=ref, metric_name=name)
                wait_until(lambda: load_is_known(stub, asked), what="UNAVAILABLE until the replicas have said their load")  # noqa: B023
                assert [value.metric_name for value in stub.GetMetrics(asked, timeout=10).metric_values] == [name]


def load_is_known(stub: externalscaler_pb2_grpc.ExternalScalerStub, asked: pb.GetMetricsRequest) -> bool:
    try:
        stub.GetMetrics(asked, timeout=10)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error  # type: ignore[attr-defined]
        return False
    return True


def test_probes_are_answered(release: Release) -> None:
    """Every probe of the chart asks a running service for a name that it knows, and hears SERVING."""
    for component, process in release.processes.items():
        (pod,) = release.render.of(component)
        ready = dict(part.split("=", 1) for part in process.log.with_suffix(".out").read_text().split() if "=" in part)
        with grpc.insecure_channel(f"127.0.0.1:{ready['health_port']}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                name = pod.main[probe]["grpc"]["service"]
                deadline = time.monotonic() + 30  # `readiness` is looked at once a second
                while stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status != SERVING:
                    assert time.monotonic() < deadline, (component, probe)
                    time.sleep(0.05)


def test_nothing_is_asked_of_a_hub(release: Release) -> None:
    """F173: the chart's variables are what the processes run under."""
    for process in release.processes.values():
        environment = Path(f"/proc/{process.popen.pid}/environ").read_bytes().decode().split("\0")
        assert "HF_HUB_OFFLINE=1" in environment and "HOME=/tmp" in environment
    assert os.environ.get("HF_HUB_OFFLINE") == "1"

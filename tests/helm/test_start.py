"""The services, started with the very variables that the chart gives them: only addresses and paths are this machine's.

The release is called `specdec`, so that what Kubernetes adds for each Service of a namespace (SPECDEC_TARGET_DEFAULT_PORT=tcp://…) looks
like settings of ours. The chart turns that off; somebody else's manifest may not.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client import SyncClient
from specdec.runtime.settings import PREFIX
from specdec.terms import SamplingParams
from tests.e2e.stack import Process, start, wait_ready
from tests.helm.checks.pods import MODULES
from tests.helm.objects import Pod, Render
from tests.helm.scenes import scene
from tests.tiny import save_tiny

SCENE = "same name"
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


def variables(pod: Pod, render: Render, **here: str) -> tuple[dict[str, str], list[str]]:
    """Settings without their prefix, and the other variables as NAME=value."""
    every = service_links(render) | pod.env
    settings = {name.removeprefix(PREFIX): value for name, value in every.items() if name.startswith(PREFIX)}
    others = [f"{name}={value}" for name, value in every.items() if not name.startswith(PREFIX)]
    settings |= {"HOST": "127.0.0.1", "PORT": "0", "METRICS_PORT": "0", "HEALTH_PORT": "0"} | here
    return settings, others


class Release:
    """The three services of a render as processes of this machine."""

    def __init__(self, render: Render, model: Path, folder: Path) -> None:
        self.render, self.model, self.folder = render, model, folder
        self.processes: dict[str, Process] = {}

    def begin(self, component: str, **here: str) -> None:
        (pod,) = self.render.of(component)
        settings, others = variables(pod, self.render, **here)
        self.processes[component] = start(component, MODULES[component], settings, self.folder, ["env", *others])

    def run(self) -> None:
        for component in ("target", "draft"):
            self.begin(component, MODEL=str(self.model))
        for process in self.processes.values():
            wait_ready(process)
        (front,) = self.render.of("orchestrator")
        here = {
            f"{component}S".upper(): re.sub(r"dns:///[^,]+", self.processes[component].endpoint, front.env[f"SPECDEC_{component}S".upper()])
            for component in ("target", "draft")
        }
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
    """With speculation what comes without it; the links of Kubernetes are told once and change nothing."""
    assert any(name.startswith("SPECDEC_TARGET_DEFAULT_PORT") for name in service_links(release.render)), "the links look like no setting"
    with SyncClient(release.processes["orchestrator"].endpoint) as client:
        sampling = SamplingParams(max_tokens=24, ignore_eos=True)
        plain = client.complete("the hat of the cat", sampling, seed=5, disable_spec_decode=True)
        answer = client.complete("the hat of the cat", sampling, seed=5)
    assert answer.token_ids == plain.token_ids and len(answer.token_ids) == 24
    for process in release.processes.values():
        assert "ignored settings of other services and Kubernetes service links" in process.log_tail(1000)


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

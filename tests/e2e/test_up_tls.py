"""`specdec up --tls`: one command makes a system that speaks mutual TLS throughout, and the other commands find what they need."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from specdec.bench.structured import main as structured
from specdec.cli import authority
from specdec.cli.main import main
from specdec.client import Credentials, SyncClient
from specdec.errors import Unavailable
from specdec.v1 import target_pb2, target_pb2_grpc
from tests.tiny import save_tiny

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
SETTINGS = {"SPECDEC_DTYPE": "float64", "SPECDEC_SELF_TEST": "false", "SPECDEC_MAX_NUM_SPECULATIVE_TOKENS": "8"}
ASK = ["--prompt", "once upon a time", "--max-tokens", "12", "--seed", "3"]


def specdec(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
    command = [sys.executable, "-m", "specdec.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment | SETTINGS, timeout=100)


def test_a_system_with_an_authority_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.cli.connection.CONNECT_S", 2.0)
    model, state = save_tiny(tmp_path / "model", seed=0), tmp_path / "state"
    there = ["--state", str(state)]
    try:
        done = specdec("up", "--detach", "--tls", *there, "--target-model", str(model), "--draft-model", str(model))
        assert done.returncode == 0, done.stderr
        tls, endpoint = state / "tls", (state / "endpoint").read_text().strip()
        assert not (tls / "ca.key").exists(), "nobody can sign more"
        assert all(stat.S_IMODE(key.stat().st_mode) == 0o600 for key in tls.glob("*.key")) and len(list(tls.glob("*.key"))) == 4

        assert main(["generate", *there, *ASK, "--json"]) == 0
        told = json.loads(capfd.readouterr().out)
        assert len(told["token_ids"]) == 12
        shown = authority.showing(tls)
        with SyncClient(endpoint, Credentials(**shown)) as client:
            assert client.get_model_info().draft_available
        assert main(["tokenize", *there, "--prompt", "x"]) == 0
        flags = [word for name, path in shown.items() for word in (f"--{name.replace('_', '-')}", str(path))]
        assert main(["top", "--once", "--interval", "0.1", "--endpoint", endpoint, *flags]) == 0
        assert "ROUNDS AT THE TARGETS" in capfd.readouterr().out
        (tmp_path / "prompts").write_text('{"kind": "x", "prompt": "once upon"}\n')
        few = ["--prompts", str(tmp_path / "prompts"), "--max-tokens", "16", "--repeats", "1"]
        assert structured(["--endpoint", f"127.0.0.1:1,{endpoint}", *few, *flags]) == 0, "several endpoints, with certificates"
        capfd.readouterr()

        assert main(["generate", "--endpoint", endpoint, *ASK]) == 2
        assert "the server speaks TLS, and this side does not" in capfd.readouterr().err
        with SyncClient(endpoint, Credentials(tls_ca=tls / "ca.crt")) as client, pytest.raises(Unavailable, match="asks for a certificate"):
            client.get_model_info()
        port = next(entry["port"] for entry in json.loads((state / "processes.json").read_text()) if entry["role"] == "target")
        own = grpc.ssl_channel_credentials(*(shown[name].read_bytes() for name in ("tls_ca", "tls_key", "tls_cert")))
        with grpc.secure_channel(f"127.0.0.1:{port}", own) as channel, pytest.raises(grpc.RpcError) as refused:
            target_pb2_grpc.TargetServiceStub(channel).GetModelInfo(target_pb2.TargetServiceGetModelInfoRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED, "a client is no orchestrator"  # type: ignore[attr-defined]
    finally:
        assert specdec("down", *there).returncode == 0
    assert not (state / "tls").exists()

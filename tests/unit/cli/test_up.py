"""`specdec up` and `down` with fake services: real processes, real signals, no model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import pids, up
from specdec.cli.checking import once
from specdec.cli.state import State
from tests.waiting import wait_until

COMMAND = [sys.executable, str(Path(__file__).with_name("fake_specdec.py"))]
pytestmark = [pytest.mark.unit, pytest.mark.timeout(180), pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prctl")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def specdec(model: Path, tmp_path: Path) -> Iterator[Run]:
    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        models = ["--target-model", str(model), "--draft-model", str(model)] if words[0] == "up" else []
        return subprocess.run([*COMMAND, *words, *models], capture_output=True, text=True, env={**os.environ, **environment}, timeout=100)

    yield run
    run("down", "--state", str(tmp_path / "state"))


def entries(state: Path) -> list[dict[str, Any]]:
    return list(json.loads((state / "processes.json").read_text()))


def processes(state: Path) -> list[pids.ProcessId]:
    return [pids.identify(entry["pid"]) for entry in entries(state)]


def test_up_detached_then_down(specdec: Run, tmp_path: Path) -> None:
    state = tmp_path / "state"
    cpu = str(min(os.sched_getaffinity(0)))
    flags = ["--detach", "--state", str(state), "--targets", "2", "--drafts", "1", "--num-speculative-tokens", "4"]
    done = specdec("up", *flags, "--pin", f"target={cpu},draft={cpu}")
    assert done.returncode == 0, done.stderr
    endpoint = (state / "endpoint").read_text().strip()
    assert f"endpoint={endpoint} " in done.stdout
    roles = [entry["role"] for entry in entries(state)]
    assert roles == ["target", "target", "draft", "orchestrator"]
    assert endpoint == f"127.0.0.1:{entries(state)[-1]['port']}"
    targets = ",".join(f"127.0.0.1:{entry['port']}" for entry in entries(state)[:2])
    assert f"targets {targets}" in (state / "orchestrator-0.log").read_text()
    niced = min(19, os.nice(0) + 10)  # these tests may run under `nice` themselves
    assert f"affinity [{cpu}] nice {niced} " in (state / "draft-0.log").read_text()
    again = specdec("up", "--detach", "--state", str(state))
    assert again.returncode == 2 and "specdec down" in again.stderr
    running = processes(state)
    assert all(process.alive for process in running)
    assert specdec("down", "--state", str(state)).returncode == 0
    assert not any(process.alive for process in running)
    assert not (state / "endpoint").exists() and not (state / "processes.json").exists()
    assert specdec("down", "--state", str(state)).returncode == 0


@pytest.mark.parametrize("how", [["--detach"], []], ids=["detached", "here"])
def test_settings_that_are_wrong_are_told_before_anything_starts(specdec: Run, tmp_path: Path, how: list[str]) -> None:
    """Each of them once, whoever of the three refuses it."""
    state = tmp_path / "state"
    wrong = {"SPECDEC_NICE": "x", "SPECDEC_NUM_SPECULATIVE_TOKENS": "many", "SPECDEC_TOKENISER": "t"}
    done = specdec("up", *how, "--state", str(state), **wrong, FAKE_CHECK="yes")
    assert done.returncode == 2 and "ready on" not in done.stderr
    assert sorted(line for line in done.stderr.splitlines() if line.startswith("  ")) == [
        "  SPECDEC_NICE='x': must be a whole number (how much to lower this process's priority)",
        "  SPECDEC_NUM_SPECULATIVE_TOKENS='many': must be a whole number (ignored)",
        "  SPECDEC_TOKENISER is not a setting; did you mean SPECDEC_TOKENIZER?",
    ]
    assert not (state / "target-0.log").exists() and not State(state).alive()


def test_what_several_services_say_of_one_variable_is_one_problem() -> None:
    unknown = "SPECDEC_MAX_RUNING is not a setting; did you mean SPECDEC_{}?"
    said = [
        unknown.format("MAX_RUN_AHEAD"),
        unknown.format("MAX_RUNNING"),
        unknown.format("MAX_SESSIONS"),
        "SPECDEC_A='x': no",
        "SPECDEC_A='x': no",
    ]
    assert once(said) == [unknown.format("MAX_RUNNING"), "SPECDEC_A='x': no"]


@pytest.mark.parametrize("module", ["orchestrator", "target_service", "draft_service"])
def test_each_service_checks_its_settings_without_a_model(module: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", f"{module}.settings"]
    environment = {**os.environ, "SPECDEC_DRAIN_MS": "soon", "SPECDEC_MODEL": "m", "SPECDEC_TOKENIZER": "t", "SPECDEC_TARGETS": "h:1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=50)
    assert done.returncode == 2 and "SPECDEC_DRAIN_MS='soon': must be a whole number" in done.stderr
    assert not {"torch", "transformers", "tokenizers"} & {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    del environment["SPECDEC_DRAIN_MS"]
    assert subprocess.run(command, capture_output=True, env=environment, timeout=50).returncode == 0


@pytest.mark.parametrize("role", ["draft", "orchestrator"])
def test_a_child_that_fails_at_start_is_told_with_its_last_lines(specdec: Run, tmp_path: Path, role: str) -> None:
    state = tmp_path / "state"
    done = specdec("up", "--detach", "--state", str(state), FAKE_FAIL=role)
    assert done.returncode == 2
    assert f"{role}-0 ended (exit code 1)" in done.stderr and "this fake was told to fail" in done.stderr
    assert not State(state).alive() and not (state / "endpoint").exists()


def test_kill_9_of_the_supervisor_ends_its_children(specdec: Run, tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert specdec("up", "--detach", "--state", str(state)).returncode == 0
    supervisor, children = State(state).processes()
    assert supervisor is not None and supervisor.alive and len(children) == 3
    supervisor.send(signal.SIGKILL)
    assert pids.wait_gone(children, 5.0) == []
    assert "nothing runs" in specdec("down", "--state", str(state)).stdout


@pytest.mark.parametrize("missing", ["SPECDEC_DIE_WITH_PARENT", "SPECDEC_PARENT_PIPE"])
def test_either_way_alone_ends_a_child(missing: str) -> None:
    """Each of the two cords holds by itself; without both the child lives on (the broken twin)."""
    script = f"""
import os, subprocess, sys
r, w = os.pipe()
env = dict(os.environ, SPECDEC_PARENT_PIPE=str(r), SPECDEC_DIE_WITH_PARENT="1")
env.pop({missing!r}, None)
if len(sys.argv) > 1: env.pop("SPECDEC_PARENT_PIPE", None); env.pop("SPECDEC_DIE_WITH_PARENT", None)
service = {str(Path(__file__).with_name("fake_service.py"))!r}
quiet = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
child = subprocess.Popen([sys.executable, service, "target"], env=env, pass_fds=(r,), **quiet)
assert child.stdout.readline().startswith("ready")
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    for words, survives in (([], False), (["no-cords"], True)):
        parent = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=30)
        child = pids.identify(int(parent.stdout))
        left = pids.wait_gone([child], 1.0 if survives else 5.0)
        child.send(signal.SIGKILL)
        assert bool(left) is survives


def told(state: Path) -> str:
    return (state / "up.log").read_text()


def test_a_child_that_ends_is_started_again_where_it_was(specdec: Run, tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert specdec("up", "--detach", "--state", str(state)).returncode == 0
    before, running = entries(state), processes(state)
    running[1].send(signal.SIGKILL)
    wait_until(lambda: "draft-0 is back on" in told(state))
    line = next(line for line in told(state).splitlines() if "ended" in line)
    assert f"draft-0 (pid {running[1].pid}) ended: killed by SIGKILL; starting it again in 0.0 s (1 of 3 in 300 s)" in line
    after = entries(state)
    assert [entry | {"pid": 0} for entry in after] == [entry | {"pid": 0} for entry in before]
    assert [a["pid"] == b["pid"] for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert {process.pid for process in State(state).processes()[1]} == {entry["pid"] for entry in after}
    assert (state / "draft-0.log").read_text().count("affinity") == 2  # what the one before said is still there
    running += processes(state)
    assert specdec("down", "--state", str(state)).returncode == 0
    assert not any(process.alive for process in running)


def test_a_listener_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`up 2>&1 | tee log` without its tee, or a terminal that was closed: a child that ends is told of, and started again."""
    written: list[str] = []

    class Gone:
        def write(self, text: str) -> None:
            written.append(text)
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    up.tell("draft-0 ended")
    assert written


def test_a_child_that_does_not_stay_up_ends_everything(specdec: Run, tmp_path: Path) -> None:
    state, now = tmp_path / "state", tmp_path / "now"
    assert specdec("up", "--detach", "--state", str(state), FAKE_DIES=f"draft:{now}").returncode == 0
    supervisor, children = State(state).processes()
    now.touch()
    assert supervisor is not None and pids.wait_gone([supervisor, *children], 30.0) == []
    assert "ended: exit code 1, draft: this fake was told to die; starting it again in" in told(state)
    assert "draft-0 ended 3 times within 300 s, the last time: exit code 1" in told(state)
    assert not (state / "endpoint").exists() and not (state / "processes.json").exists()


def test_down_while_a_child_is_being_started_again(specdec: Run, tmp_path: Path) -> None:
    state, seen, now = tmp_path / "state", tmp_path / "seen", tmp_path / "now"
    done = specdec("up", "--detach", "--state", str(state), FAKE_DIES=f"draft:{now}", FAKE_SLOW_AGAIN=f"draft:{seen}")
    assert done.returncode == 0, done.stderr
    supervisor, first = State(state).processes()
    now.touch()
    wait_until(lambda: "starting it again" in told(state))
    wait_until(lambda: len(entries(state)) == 3 and all(process.alive for process in processes(state)))
    late = processes(state)
    assert supervisor is not None
    assert specdec("down", "--state", str(state)).returncode == 0
    assert not any(process.alive for process in (supervisor, *first, *late))


def test_no_restart(specdec: Run, tmp_path: Path) -> None:
    state, now = tmp_path / "state", tmp_path / "now"
    assert specdec("up", "--detach", "--no-restart", "--state", str(state), FAKE_DIES=f"draft:{now}").returncode == 0
    now.touch()
    wait_until(lambda: "not started again" in told(state))
    assert "ended: exit code 1, draft: this fake was told to die" in told(state)
    target, orchestrator = processes(state)
    assert target.alive and orchestrator.alive
    orchestrator.send(signal.SIGKILL)  # without a front door nothing is left to serve
    assert pids.wait_gone([target], 10.0) == []


def test_a_port_in_use_is_told_before_anything_starts(specdec: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = specdec("up", "--port", str(port))
    assert done.returncode == 2 and f"--port: {port}: Address already in use" in done.stderr and "starting" not in done.stderr
    assert "0 to 65535" in specdec("up", "--port", "70000").stderr


def test_ctrl_c_stops_everything(model: Path) -> None:
    words = [*COMMAND, "up", "--target-model", str(model), "--draft-model", str(model)]
    up = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert up.stdout is not None and up.stderr is not None
    assert up.stdout.readline().startswith("ready role=system endpoint=127.0.0.1:")
    os.killpg(up.pid, signal.SIGINT)
    output, errors = up.communicate(timeout=20)
    assert up.returncode == 0 and "stopping" in errors
    children = [int(line.rpartition("pid ")[2]) for line in errors.splitlines() if " ready on " in line]
    assert len(children) == 3 and not any(pids.identify(pid).alive and pids.identify(pid).started for pid in children)


def test_ctrl_c_while_starting(model: Path) -> None:
    words = [*COMMAND, "up", "--target-model", str(model), "--draft-model", str(model)]
    environment = {**os.environ, "FAKE_SLOW": "target"}
    up = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert up.stderr is not None
    assert "starting" in up.stderr.readline()
    os.killpg(up.pid, signal.SIGINT)
    up.communicate(timeout=20)
    assert up.returncode == 130


def test_a_system_that_starts_is_known_and_goes_when_told(model: Path, specdec: Run, tmp_path: Path) -> None:
    """`up --detach` while models load. Its folder is taken, `down` ends it, and so does Ctrl-C, which reaches only the command."""
    state = tmp_path / "state"
    words = [*COMMAND, "up", "--detach", "--state", str(state), "--target-model", str(model), "--draft-model", str(model)]
    for end in ("down", "Ctrl-C"):
        up = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "FAKE_SLOW": "target"}, start_new_session=True)
        wait_until(lambda: (state / "draft-0.log").exists() and "affinity" in (state / "draft-0.log").read_text())
        supervisor, _ = State(state).processes()
        assert supervisor is not None and supervisor.alive and not (state / "endpoint").exists()
        again = specdec("up", "--detach", "--state", str(state))
        assert again.returncode == 2 and "a system runs or starts from" in again.stderr and supervisor.alive
        if end == "down":
            assert "stopped 1 process\n" in specdec("down", "--state", str(state)).stdout
        else:
            os.killpg(up.pid, signal.SIGINT)
        _, errors = up.communicate(timeout=60)
        assert up.returncode == (2 if end == "down" else 130)
        assert f"{state / 'up.log'} says how far it is" in errors and ("did not serve yet" in errors) is (end == "down")
        assert not supervisor.alive and not (state / "supervisor.json").exists()
        (state / "draft-0.log").unlink()


def test_a_state_folder_that_cannot_be_made_is_told(specdec: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = specdec("up", "--state", str(tmp_path / "file"))
    assert done.returncode == 2 and "--state: " in done.stderr and "File exists; name a folder" in done.stderr


def test_down_leaves_strangers_alone(tmp_path: Path) -> None:
    """The pid is right, the start time is not: somebody else's process by now."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        identity = pids.identify(stranger.pid)
        forged = pids.ProcessId(stranger.pid, identity.started - 1)
        State(tmp_path).write("127.0.0.1:1", [], forged, [forged])
        done = subprocess.run([*COMMAND, "down", "--state", str(tmp_path)], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0 and "nothing runs" in done.stdout
        assert stranger.poll() is None and not (tmp_path / "endpoint").exists()
    finally:
        stranger.kill()
        stranger.wait()


def test_down_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert subprocess.run([*COMMAND, "down", "--state", str(tmp_path / "no")], capture_output=True, timeout=30).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--tls"], "--tls: needs --state DIR"), (["--tls", "--detach", "--state", "STATE"], "--tls: needs the openssl program")],
)
def test_tls_needs_a_folder_and_openssl(specdec: Run, tmp_path: Path, words: list[str], said: str) -> None:
    done = specdec("up", *(word.replace("STATE", str(tmp_path / "state")) for word in words), PATH=str(tmp_path))
    log = tmp_path / "state" / "up.log"
    assert done.returncode == 2 and said in done.stderr + (log.read_text() if log.exists() else "")

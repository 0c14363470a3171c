"""`specdec advise`: what it reads, what it refuses, and what it says of a running service."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.cli.main import main
from tests.unit.bench.made_up import made_up
from tests.unit.bench.test_service_advice import METRICS

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "report.json").write_text(json.dumps(made_up()))
    return folder


@pytest.fixture
def metrics() -> Iterator[str]:
    class Told(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Told)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_of_a_result_and_what_if(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(result)]) == 0
    plain = capsys.readouterr().out
    assert plain.startswith("Speculation pays in") and "Set: " in plain and "modelled: target" not in plain
    assert main(["advise", str(result / "report.json"), "--rtt-ms", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["what_if"]["modelled"] and found["what_if"]["rtt_ms"] == 20.0 and found["what_if"]["best_k"] > 0
    assert main(["advise", str(result), str(result / "report.json")]) == 0
    assert capsys.readouterr().out.count("one <of> many, 2 cores\nSpeculation") == 2, "one a machine"
    assert main(["advise", "--target-step-ms", "30", "--draft-step-ms", "3", "--acceptance", "0.7"]) == 0
    assert "modelled" in capsys.readouterr().out


def test_of_a_running_service(endpoint: str, metrics: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--endpoint", endpoint, "--metrics", metrics]) == 0
    text = capsys.readouterr().out
    assert "1000 rounds, 80% of them with a block" in text and "may pay (modelled)" in text
    state = [{"role": "orchestrator", "pid": 1, "port": 2, "metrics_port": int(metrics.partition(":")[2])}]
    (tmp_path / "processes.json").write_text(json.dumps(state))
    (tmp_path / "endpoint").write_text(endpoint + "\n")
    assert main(["advise", "--state", str(tmp_path), "--acceptance", "0.9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["what_if"]["alphas"] == [0.9]
    assert main(["advise", "--endpoint", endpoint, "--metrics", f"draft={metrics}"]) == 2
    assert "orchestrator" in capsys.readouterr().err
    assert main(["advise", "--endpoint", endpoint, "--metrics", "127.0.0.1:1"]) == 2 and "--metrics HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "FILE|DIR"),
        (["/nowhere.json"], "no such file"),
        (["{folder}"], "has not ended"),
        (["{empty}"], "name a folder that `specdec bench --out` was given"),
        (["{other}"], "not a report"),
        (["{half}"], "or a part of one"),
        (["{folder}/runs.jsonl"], "name report.json"),
        (["{old}"], "format 1, this one reads"),
        (["{broken}", "--rtt-ms", "5"], "not a whole report"),
        (["{result}", "--endpoint", "127.0.0.1:1"], "not both"),
        (["--metrics", "127.0.0.1:1"], "--metrics: goes with --endpoint"),
        (["{unsure}", "--rtt-ms", "5"], "more --repeats"),
        (["{result}", "--acceptance", "1.2"], "--acceptance"),
        (["{result}", "--rtt-ms", "-1"], "--rtt-ms"),
        (["--target-step-ms", "0"], "--target-step-ms"),
        (["--draft-step-ms", "1"], "--target-step-ms"),
    ],
)
def test_refusals_name_what_is_wrong(
    words: list[str], named: str, result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text("{}")
    whole = json.loads((result / "report.json" if result.is_dir() else result).read_text())
    (tmp_path / "old.json").write_text(json.dumps(whole | {"format": 1}))
    (tmp_path / "broken.json").write_text(json.dumps(whole | {"cells": [{"name": "a"}]}))
    places = {"{old}": str(tmp_path / "old.json"), "{broken}": str(tmp_path / "broken.json")}
    (tmp_path / "half.json").write_text(json.dumps(whole)[:500])
    (tmp_path / "unsure.json").write_text(json.dumps(whole | {"cells": []}))
    (tmp_path / "runs.jsonl").write_text("{}\n{}\n")
    (tmp_path / "empty").mkdir()
    places |= {"{folder}": str(tmp_path), "{folder}/runs.jsonl": str(tmp_path / "runs.jsonl"), "{empty}": str(tmp_path / "empty")}
    places |= {f"{{{name}}}": str(tmp_path / f"{name}.json") for name in ("other", "half", "unsure")} | {"{result}": str(result)}
    assert main(["advise", *(places.get(word, word) for word in words)]) == 2
    assert named in capsys.readouterr().err

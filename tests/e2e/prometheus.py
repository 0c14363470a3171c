"""A real Prometheus over processes of a test, which sees them as pods of a release."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.tools import require_tool

START_S = 60.0


class Prometheus:
    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}/api/v1/query?"

    def query(self, text: str) -> list[float]:
        """Values of an instant query's series, now; empty = no answer."""
        with urllib.request.urlopen(self._base + urllib.parse.urlencode({"query": text}), timeout=10) as answer:
            told: dict[str, Any] = json.load(answer)
        assert told["status"] == "success" and told["data"]["resultType"] == "vector"
        return [float(series["value"][1]) for series in told["data"]["result"]]


@contextlib.contextmanager
def prometheus(folder: Path, port: int, pods: dict[str, int], namespace: str, interval: str = "500ms") -> Iterator[Prometheus]:
    """`pods`: by name, the port of their metrics. Skips by name where there is no Prometheus."""
    program = require_tool("prometheus")
    scraped = [{"targets": [f"127.0.0.1:{at}"], "labels": {"namespace": namespace, "pod": pod}} for pod, at in pods.items()]
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval},
        "scrape_configs": [{"job_name": "specdec", "static_configs": scraped}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    arguments = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}", "--log.level=warn"]
    with (folder / "prometheus.out").open("w") as out:
        process = subprocess.Popen([program, *arguments, f"--web.listen-address=127.0.0.1:{port}"], stdout=out, stderr=out)
    try:
        _wait(process, port, folder)
        yield Prometheus(port)
    finally:
        process.kill()
        process.wait(30)


def _wait(process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5):
            return
        time.sleep(0.05)
    raise AssertionError("Prometheus did not come up:\n" + "\n".join(_tail(folder / "prometheus.out")))


def _tail(path: Path) -> Sequence[str]:
    return path.read_text(errors="replace").splitlines()[-20:]

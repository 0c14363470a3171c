"""Callers of the metrics port that do not go on: threads and descriptors are bounded, and a scrape is answered beside them."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from specdec.runtime import scraped
from specdec.runtime.telemetry import Telemetry
from tests.waiting import wait_until

HALVES = (b"", b"GET /metrics HTTP/1.1\r\nHo", b"GET /metrics?" + b"a" * 70_000, b"POST /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\n")


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    telemetry = Telemetry("orchestrator", metrics_port=0)
    yield telemetry
    telemetry.close()


def threads() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def scrape(telemetry: Telemetry) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{telemetry.metrics_port}/metrics", timeout=10) as answer:
        return bytes(answer.read())


def test_who_does_not_go_on_makes_way(monkeypatch: pytest.MonkeyPatch, telemetry: Telemetry) -> None:
    monkeypatch.setattr(scraped._Handler, "timeout", 60)  # nobody is hung up on for being slow
    with contextlib.ExitStack() as stack:
        callers = []
        for i in range(4 * scraped.MAX_SCRAPES):
            callers.append(stack.enter_context(socket.create_connection(("127.0.0.1", telemetry.metrics_port), timeout=20)))
            with contextlib.suppress(OSError):
                callers[-1].sendall(HALVES[i % len(HALVES)])
        for silent in callers[: scraped.MAX_SCRAPES : len(HALVES)]:  # half of all go on, and end
            assert silent.recv(1) == b""
        wait_until(lambda: 0 < threads() <= scraped.MAX_SCRAPES, 10)
        assert b"target_info" in scrape(telemetry)
    wait_until(lambda: threads() == 0, 10)


def test_a_silent_caller_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, telemetry: Telemetry) -> None:
    assert scraped._Handler.timeout == scraped.READ_S
    monkeypatch.setattr(scraped._Handler, "timeout", 0.05)
    with socket.create_connection(("127.0.0.1", telemetry.metrics_port), timeout=10) as silent:
        assert silent.recv(1) == b""
    wait_until(lambda: threads() == 0, 10)

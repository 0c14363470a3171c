"""Every command that dials, where nobody answers: one line with the endpoint, the reason and what to look at; no words of gRPC's own."""

from __future__ import annotations

import argparse
import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from specdec.cli import connection
from specdec.cli.main import GROUPS, main
from specdec.client import Client, client_of, endpoints_of
from specdec.client import calls as client_calls
from specdec.errors import DeadlineExceeded, Unavailable
from specdec.runtime import diagnosis
from specdec.terms import SamplingParams

COMMANDS = {
    "generate": ["--prompt", "x"],
    "tokenize": ["--prompt", "x"],
    "detokenize": ["--token-ids", "[1]"],
    "top": ["--once", "--interval", "0.1"],
    "bench": [],
    "advise": [],
}
GRPCS = ("UNKNOWN", "UNAVAILABLE", "ipv4:", "ipv6:", "failed to connect", "errors resolving", "Deadline Exceeded")
REFUSED = "nobody answers (Connection refused); is the service up?"
UNKNOWN_NAME = "is it spelt right?"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_S", 0.1)
    monkeypatch.setattr(diagnosis, "PROBE_S", 0.2)
    monkeypatch.setattr(client_calls, "UNARY_TIMEOUT_S", 0.2)


@pytest.fixture
def nobody() -> Iterator[list[str]]:
    """Two endpoints where nobody listens: they are taken, so nobody else will."""
    with socket.socket() as one, socket.socket() as other:
        for taken in (one, other):
            taken.bind(("127.0.0.1", 0))
        yield [f"127.0.0.1:{taken.getsockname()[1]}" for taken in (one, other)]


def test_every_command_that_dials_is_here() -> None:
    dial = set()
    for group in GROUPS.values():
        for name, module in group.items():
            parser = argparse.ArgumentParser()
            module.add_arguments(parser)
            if any("--endpoint" in action.option_strings for action in parser._actions):
                dial.add(name)
    assert dial == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_nobody_answers(command: str, nobody: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for endpoint, reason in ((nobody[0], REFUSED), ("nohost.invalid:50051", UNKNOWN_NAME), (",".join(nobody), REFUSED)):
        assert main([command, "--endpoint", endpoint, *COMMANDS[command]]) == 2
        out, said = capsys.readouterr()
        assert not out and said.count("\n") == 1, said
        assert said.startswith(f"specdec {command}: ") and reason in said, said
        assert all(said.count(name) == 1 for name in endpoints_of(endpoint)[:1]), said
        assert not [words for words in GRPCS if words in said], said


@contextlib.contextmanager
def deaf() -> Iterator[str]:
    """Connections come about and nothing is ever said on them, as on a host that hangs."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@contextlib.contextmanager
def other_port() -> Iterator[str]:
    """Of HTTP/1, as a metrics port is."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_who_listens_and_is_not_it() -> None:
    with other_port() as endpoint:
        async with Client(endpoint) as client:
            with pytest.raises(Unavailable, match=f"^{endpoint}: takes connections and says nothing in gRPC .* is this the port of"):
                await client.wait_ready(0.2)
    with deaf() as endpoint:
        for _ in range(2):
            async with Client(endpoint) as client:
                with pytest.raises(Unavailable, match=f"^{endpoint}: nobody answers within 0.2 s; is the host up"):
                    await client.wait_ready(0.1)
                with pytest.raises(DeadlineExceeded, match=f"^{endpoint}: nobody answers within 0.2 s; is the host up"):
                    await client.get_model_info()


async def test_a_call_says_it_like_a_command(nobody: list[str]) -> None:
    async with Client(nobody[0]) as client:
        with pytest.raises(Unavailable, match=f"^{nobody[0]}: nobody answers"):
            await client.complete("x", SamplingParams(max_tokens=1))
    async with client_of(",".join(nobody * 4)) as several:
        with pytest.raises(Unavailable, match=r"^127.0.0.1:\d+: nobody answers .* … \(8 endpoints\)$"):
            await several.wait_ready(0.1)

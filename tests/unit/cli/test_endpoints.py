"""Orchestrators that tell what they count through their clients' endpoint: balancers, restarts, tokens, TLS, what cannot be added up."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from specdec.bench.endpoints import SAME, Endpoints, process_of
from specdec.cli.main import main
from specdec.client import Client, Credentials
from specdec.errors import InvalidRequest, Overloaded, PermissionDenied, Unauthenticated, Unavailable, Unsupported
from specdec.runtime.channels import server_options
from specdec.runtime.interceptor import CallInterceptor
from specdec.runtime.telemetry import Telemetry
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import generation_pb2_grpc
from tests.certificates import LOOPBACK, Authority
from tests.unit.runtime.secured import serving

pytestmark = pytest.mark.unit
OPEN = Credentials()


class Balanced(generation_pb2_grpc.GenerationServiceServicer):
    """One address; which process answers a call is `who`'s affair. An error is raised instead."""

    def __init__(self, who: Iterator[str | Exception]) -> None:
        self.who, self.calls = who, 0

    async def GetMetrics(self, request: Any, context: Any) -> pb.GetMetricsResponse:
        self.calls += 1
        process = next(self.who)
        if isinstance(process, Exception):
            raise process
        text = (
            f'target_info{{service_name="specdec-orchestrator",service_instance_id="{process}"}} 1.0\nspecdec_rounds_total {self.calls}.0\n'
        )
        return pb.GetMetricsResponse(text=text)


@contextlib.asynccontextmanager
async def listening(*servicers: Balanced | None) -> AsyncIterator[list[str]]:
    """None = a server that knows none of our calls."""
    servers, names = [], []
    for servicer in servicers:
        server = grpc.aio.server(interceptors=[CallInterceptor(Telemetry("orchestrator"))], options=server_options())
        if servicer is not None:
            generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
        names.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    try:
        yield names
    finally:
        for server in servers:
            await server.stop(0)


@contextlib.asynccontextmanager
async def opened(endpoints: str, credentials: Credentials = OPEN) -> AsyncIterator[Endpoints]:
    made = Endpoints(endpoints, credentials)
    try:
        yield made
    finally:
        await made.close()


async def test_a_balancer_of_calls_is_asked_until_the_same_process_answers() -> None:
    async with listening(Balanced(cycle("abc"))) as (name,), opened(name) as endpoints:
        looks = [await endpoints.look() for _ in range(5)]
    assert {process_of(look.samples[name] or {}) for look in looks} == {"a"} and not any(look.strange for look in looks)


async def test_another_process_is_a_stranger_once() -> None:
    servicer = Balanced(chain("a", repeat("b")))
    async with listening(servicer) as (name,), opened(name) as endpoints:
        first, second, third = [await endpoints.look() for _ in range(3)]
        assert [set(told.strange) for told in (first, second, third)] == [set(), {name}, set()]
        assert servicer.calls == 2 + SAME


async def test_a_balancer_that_never_comes_back_has_an_end() -> None:
    async with listening(Balanced(iter(map(str, range(1000))))) as (name,), opened(name) as endpoints:
        assert not (await endpoints.look()).strange and (await endpoints.look()).strange == {name}


async def test_what_cannot_be_added_up_is_refused() -> None:
    async with listening(Balanced(repeat("a")), Balanced(repeat("a")), Balanced(repeat("b"))) as names:
        async with opened(f"{names[0]},{names[2]}") as endpoints:
            assert all((await endpoints.look()).samples.values())
        async with opened(",".join(names)) as endpoints:
            with pytest.raises(InvalidRequest, match=f"--endpoint: {names[0]} and {names[1]} lead to the same orchestrator"):
                await endpoints.look()
    for words, said in (("a:1,a:1", "named twice"), ("a", "must be host:port"), ("", "must be host:port")):
        with pytest.raises(InvalidRequest, match=f"--endpoint: .*{said}"):
            Endpoints(words, OPEN)


@pytest.mark.parametrize("error", [Unavailable("it stops"), Overloaded("4096 calls run here", 1000)])
async def test_who_cannot_answer_is_away_and_says_why(error: Exception) -> None:
    async with listening(Balanced(repeat("a")), Balanced(chain("b", [error]))) as names, opened(",".join(names)) as endpoints:
        await endpoints.look()
        told = await endpoints.look()
        assert told.samples[names[0]] and told.samples[names[1]] is None and str(error) in told.reasons[names[1]]


async def test_what_asking_again_does_not_change_is_raised() -> None:
    async with listening(None, Balanced(repeat(PermissionDenied("not shown")))) as (old, denied):
        async with opened(old) as endpoints:
            with pytest.raises(Unsupported, match=f"GetMetrics: no orchestrator answers at {old}, or one that is older"):
                await endpoints.look()
        async with Client(old) as client:
            with pytest.raises(Unsupported, match=f"endpoint: {old} does not know this call: it is no orchestrator"):
                await client.get_model_info()
        async with opened(denied) as endpoints:
            with pytest.raises(PermissionDenied, match=f"{denied}: not shown"):
                await endpoints.look()


async def test_tokens_and_tls(tmp_path: Path) -> None:
    authority, path = Authority(tmp_path), tmp_path / "tokens"
    server = authority.issue("server", *LOOPBACK)
    path.write_text(f"alice:{hashlib.sha256(b'first').hexdigest()}\n")
    async with serving(tls_cert=server.cert, tls_key=server.key, tokens_file=path) as service:
        trusted = Credentials(tls_ca=authority.ca, token="first")
        async with opened(service.endpoint, trusted) as endpoints:
            assert (await endpoints.look()).samples[service.endpoint]
        async with opened(service.endpoint, Credentials(tls_ca=authority.ca)) as endpoints:
            with pytest.raises(Unauthenticated, match="asks for a token"):
                await endpoints.look()
        async with opened(service.endpoint) as endpoints:
            assert "TLS" in (await endpoints.look()).reasons[service.endpoint]


# ---------------------------------------------------------------- the commands


def test_top(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--interval", "0.1", "--endpoint", endpoint]) == 0
    out = capsys.readouterr().out
    for words in (
        "  on  ",
        "2.00",
        "ROUNDS AT THE TARGETS",
        "4.0   ",
        "25%",
        "NOT TOLD BY ORCHESTRATORS",
        "--metrics or --state",
        endpoint,
    ):
        assert words in out, out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    assert main(["top", "--once", "--interval", "0.1", "--endpoint", f"{endpoint},127.0.0.1:1"]) == 0
    assert "away" in capsys.readouterr().out
    assert main(["top", "--once", "--endpoint", "127.0.0.1:1"]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_advise(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--endpoint", endpoint]) == 0
    out = capsys.readouterr().out
    assert "1000 rounds" in out and "had 4.0 rows" in out
    assert main(["advise", "--endpoint", endpoint, "--seconds", "0.01"]) == 0
    assert "only 0 rounds" in capsys.readouterr().out
    assert main(["advise", "--endpoint", f"{endpoint},127.0.0.1:1"]) == 2, "a sum without one of them is another sum"
    assert "127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["top --once --interval 0.1", "advise"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (lambda there: ["--endpoint", "nonsense"], "--endpoint: must be host:port"),
        (lambda there: ["--endpoint", there, "--token-file", "/nowhere"], "/nowhere"),
        (lambda there: ["--endpoint", there, "--tls-ca", "/nowhere"], "--tls-ca"),
        (lambda there: ["--endpoint", f"{there},{there}"], "named twice"),
    ],
)
def test_what_is_wrong_is_said(
    command: str, words: Callable[[str], list[str]], said: str, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), *words(endpoint)]) == 2
    assert said in capsys.readouterr().err

"""All three services as processes under mutual TLS, identities and tokens: the same text, and nothing of it in what they write."""

from __future__ import annotations

import asyncio
import hashlib
import http.server
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.cli.main import main
from specdec.client import Client, Completion, Credentials
from specdec.errors import SpecdecError, Unauthenticated, Unavailable
from specdec.terms import SamplingParams
from tests.certificates import LOOPBACK, Authority, Files
from tests.e2e.drafts import FLOAT64
from tests.e2e.stack import Process, Stack, running, start, wait_ready
from tests.tiny import save_tiny

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
MARKER = "xylophone-quartz"
TOKEN = "0123456789abcdef-the-token"
ODD_IDS = (17, 93, 41, 88, 23, 71)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=40)


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes spans and keeps their bytes."""

    bodies: list[bytes] = []

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@dataclass
class Secured:
    stack: Stack
    authority: Authority
    client: Files
    tokens: Path
    orchestrator: Files
    collector: str
    extra: list[Process] = field(default_factory=list)

    @property
    def credentials(self) -> Credentials:
        return Credentials(tls_ca=self.authority.ca, tls_cert=self.client.cert, tls_key=self.client.key, token=TOKEN)

    def more(self, **settings: str) -> Process:
        """One more orchestrator over the same pools."""
        base = {"TOKENIZER": str(self.stack.target_model), "TARGETS": self.stack.targets[0].endpoint, "DRAFTS": ""}
        self.extra.append(wait_ready(start("orchestrator", "orchestrator", {**base, **settings}, self.stack.folder)))
        return self.extra[-1]


def serve(files: Files, authority: Authority) -> dict[str, str]:
    return {"TLS_CERT": str(files.cert), "TLS_KEY": str(files.key), "TLS_CLIENT_CA": str(authority.ca)}


def dial(files: Files, authority: Authority) -> dict[str, str]:
    return {"TLS_CA": str(authority.ca), "TLS_CLIENT_CERT": str(files.cert), "TLS_CLIENT_KEY": str(files.key)}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """The model of `questioned`, behind every protection there is, writing all it has to say."""
    folder = tmp_path_factory.mktemp("secured")
    model = save_tiny(folder / "tiny", seed=0, window=256)
    authority = Authority(folder)
    pool, orchestrator = authority.issue("pool", *LOOPBACK), authority.issue("orchestrator", "orchestrator.specdec", *LOOPBACK)
    client, tokens = authority.issue("client", "client.example"), folder / "tokens"
    tokens.write_text(f"alice:{hashlib.sha256(TOKEN.encode()).hexdigest()}\n")
    spans = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=spans.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{spans.server_port}"
    common = {"LOG_LEVEL": "debug", "OTLP_ENDPOINT": url}
    pools = {**FLOAT64, **common, **serve(pool, authority), "ALLOWED_IDENTITIES": "orchestrator.specdec"}
    front = {**common, **serve(orchestrator, authority), **dial(orchestrator, authority), "TOKENS_FILE": str(tokens)}
    with running(model, model, target=pools, draft=pools, orchestrator=front) as stack:
        made = Secured(stack, authority, client, tokens, orchestrator, url)
        try:
            yield made
        finally:
            for process in made.extra:
                process.kill()
            spans.shutdown()
            spans.server_close()


async def texts(endpoint: str, credentials: Credentials) -> list[Completion]:
    async with Client(endpoint, credentials) as client:
        while not (await client.get_model_info()).draft_available:
            await asyncio.sleep(0.02)
        asks = [client.complete(f"{MARKER} {i}", SAMPLING, seed=i, num_speculative_tokens=k) for i in range(4) for k in (0, 3)]
        return await asyncio.gather(*asks)


def test_the_text_is_that_of_plain_text_services(secured: Secured, questioned: Stack) -> None:
    plain = asyncio.run(texts(questioned.endpoint, Credentials()))
    got = asyncio.run(texts(secured.stack.endpoint, secured.credentials))
    assert [(a.token_ids, a.text) for a in got] == [(a.token_ids, a.text) for a in plain]
    assert sum(a.finished.speculative.num_draft_tokens for a in got if a.finished) > 0


def test_the_command_line(secured: Secured, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.cli.connection.CONNECT_S", 0.5)
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    say = ["generate", "--endpoint", secured.stack.endpoint, "--prompt", MARKER, "--max-tokens", "4", "--seed", "1"]
    tls = ["--tls-ca", str(secured.authority.ca), "--tls-cert", str(secured.client.cert), "--tls-key", str(secured.client.key)]
    assert main([*say, *tls, "--token-file", str(token)]) == 0 and capfd.readouterr().out
    for flags, words in (
        ([], "the server speaks TLS, and this side does not: name its authority with --tls-ca FILE (SPECDEC_TLS_CA)"),
        (tls[:2], "the server asks for a certificate: give --tls-cert FILE"),
        (tls, "this service asks for a token; send the header"),
        ([*tls, "--token-file", str(tmp_path / "none")], "--token-file: "),
    ):
        assert main([*say, *flags]) == 2
        assert words in capfd.readouterr().err
    for command in (["top", "--once"], ["advise"]):  # callers with tokens may be strangers to each other
        assert main([*command, "--endpoint", secured.stack.endpoint, *tls, "--token-file", str(token)]) == 2
        assert "set SPECDEC_SHOW_METRICS=true on the orchestrator" in capfd.readouterr().err


@pytest.mark.parametrize("dialled", ["plain text", "another identity"])
def test_an_orchestrator_that_the_pools_refuse_says_why(secured: Secured, dialled: str) -> None:
    settings = {} if dialled == "plain text" else dial(secured.client, secured.authority)
    words = "the server speaks TLS" if not settings else "(client.example) are not among SPECDEC_ALLOWED_IDENTITIES"
    process = secured.more(**settings)
    deadline = time.monotonic() + 30
    while words not in process.log.read_text():
        assert time.monotonic() < deadline, process.log_tail()
        time.sleep(0.05)


def test_a_stranger_reaches_no_service(secured: Secured) -> None:
    for process in (*secured.stack.targets, *secured.stack.drafts, *secured.stack.orchestrators):
        with grpc.insecure_channel(process.endpoint) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_nothing_of_a_request_is_written_down(secured: Secured) -> None:
    """At the most talkative level: prompts, answers, ids, stop strings, tokens; in logs, spans, metrics and refusals."""
    asyncio.run(_everything(secured))
    deadline = time.monotonic() + 20
    while b"chat" not in b"".join(Collector.bodies) and time.monotonic() < deadline:
        time.sleep(0.05)  # spans travel once a second
    processes = (*secured.stack.targets, *secured.stack.drafts, *secured.stack.orchestrators)
    written = {path.name: path.read_text(errors="replace") for path in secured.stack.folder.iterdir() if path.is_file()}
    written["spans"] = b"".join(Collector.bodies).decode(errors="replace")
    written["metrics"] = "".join(name for process in processes for name in process.metrics())
    assert len(written["spans"]) > 100 and all('"level": "debug"' in written[p.log.name] for p in processes)
    pairs = [f"{a}{between}{b}" for a, b in zip(ODD_IDS, ODD_IDS[1:], strict=False) for between in (", ", ",", " ")]
    for where, text in written.items():
        for secret in (MARKER, MARKER.encode().hex(), "xylophone", TOKEN, hashlib.sha256(TOKEN.encode()).hexdigest()):
            assert secret not in text, (where, secret)
        assert sum(pair in text for pair in pairs) < 2, where  # one may be chance


async def _everything(secured: Secured) -> None:
    async with Client(secured.stack.endpoint, secured.credentials) as client:
        header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await client.complete(MARKER, SAMPLING, seed=1, stop=(f"{MARKER} stop",), traceparent=header)
        await client.complete([{"role": "user", "content": MARKER}], SAMPLING, seed=1)
        await client.complete(ODD_IDS, SAMPLING, seed=1, output_token_ids=ODD_IDS)
        await client.tokenize(MARKER)
        await client.detokenize(ODD_IDS)
        for wrong in ({"sampling": SamplingParams(temperature=-1)}, {"model": "other"}, {"json_schema": f'{{"type": "{MARKER}"'}):
            sampling = wrong.pop("sampling", SAMPLING)
            try:
                await client.complete(MARKER, sampling, **wrong)  # type: ignore[arg-type]
            except SpecdecError as error:
                assert TOKEN not in str(error) and ("json_schema" in wrong or MARKER not in str(error))
            else:
                raise AssertionError(wrong)
    for nobody in (Credentials(), replace(secured.credentials, token=f"{TOKEN}x")):
        async with Client(secured.stack.endpoint, nobody) as client:
            with pytest.raises((Unauthenticated, Unavailable)):
                await client.complete(MARKER, SAMPLING)

"""TLS on loopback, with certificates made here: who gets in, who does not and what it is told, and what happens when files change."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from specdec.client import Client, Credentials, Delta
from specdec.errors import InvalidRequest, PermissionDenied, Unavailable
from specdec.runtime import watched
from specdec.runtime.listening import check
from specdec.runtime.security import FrontSettings
from specdec.runtime.settings import SettingsError, load
from tests import scraped
from tests.certificates import DAY, LOOPBACK, Authority, Files
from tests.unit.runtime.secured import Secured, serving

SPIFFE = "spiffe://cluster/ns/default/sa/orchestrator"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def server(authority: Authority) -> Files:
    return authority.issue("server", *LOOPBACK)


@pytest.fixture(scope="module")
def orchestrator(authority: Authority) -> Files:
    return authority.issue("orchestrator", "orchestrator.specdec", SPIFFE)


def credentials(authority: Authority, own: Files | None = None, **more: Any) -> Credentials:
    files: dict[str, Any] = {} if own is None else {"tls_cert": own.cert, "tls_key": own.key}
    return Credentials(tls_ca=authority.ca, **files, **more)


# ---------------------------------------------------------------- settings and files

RULES = {
    "SPECDEC_TLS_CERT=c": "SPECDEC_TLS_KEY is missing: SPECDEC_TLS_CERT is set",
    "SPECDEC_TLS_KEY=k": "SPECDEC_TLS_CERT is missing: SPECDEC_TLS_KEY is set",
    "SPECDEC_TLS_CLIENT_CA=c": "SPECDEC_TLS_CERT is missing: SPECDEC_TLS_CLIENT_CA is set",
    "SPECDEC_ALLOWED_IDENTITIES=a": "SPECDEC_TLS_CLIENT_CA is missing: SPECDEC_ALLOWED_IDENTITIES",
    "SPECDEC_TLS_CA=a SPECDEC_TLS_CLIENT_CERT=c": "SPECDEC_TLS_CLIENT_KEY is missing",
    "SPECDEC_TLS_CLIENT_CERT=c SPECDEC_TLS_CLIENT_KEY=k": "SPECDEC_TLS_CA is missing",
    "SPECDEC_TLS_SERVER_NAME=n": "SPECDEC_TLS_CA is missing",
    "SPECDEC_TOKENS_FILE=t SPECDEC_HOST=0.0.0.0": "SPECDEC_TOKENS_FILE without TLS on 0.0.0.0",
    "SPECDEC_TOKENS_FILE=t SPECDEC_HOST=": "SPECDEC_TOKENS_FILE without TLS on all addresses",
}


@pytest.mark.parametrize("given", RULES)
def test_settings_that_need_each_other(given: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(FrontSettings, dict(pair.split("=") for pair in given.split()))
    assert RULES[given] in str(caught.value)


@pytest.mark.parametrize("more", ["SPECDEC_HOST=::1", "SPECDEC_HOST=0.0.0.0 SPECDEC_ALLOW_INSECURE_TOKENS=true"])
def test_tokens_without_tls_where_that_is_meant(more: str) -> None:
    load(FrontSettings, {"SPECDEC_TOKENS_FILE": "t"} | dict(pair.split("=") for pair in more.split()))


def test_files_that_cannot_be_used_are_named(folder: Path, authority: Authority, server: Files, orchestrator: Files) -> None:
    garbage, empty = folder / "garbage", folder / "empty"
    garbage.write_bytes(b"\x30\x82\x00")
    empty.write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    cases: list[tuple[dict[str, Path], str]] = [
        ({"tls_cert": folder / "none", "tls_key": server.key}, r"SPECDEC_TLS_CERT: .*none cannot be read: No such file"),
        ({"tls_cert": garbage, "tls_key": server.key}, r"SPECDEC_TLS_CERT: .*garbage is not a PEM file"),
        ({"tls_cert": empty, "tls_key": server.key}, r"SPECDEC_TLS_CERT: .*empty holds a certificate that cannot be read"),
        ({"tls_cert": server.key, "tls_key": server.key}, r"SPECDEC_TLS_CERT: .* holds no certificate"),
        ({"tls_cert": server.cert, "tls_key": orchestrator.key}, r"SPECDEC_TLS_CERT: .* does not belong to the key of SPECDEC_TLS_KEY"),
        ({"tls_cert": server.cert, "tls_key": server.cert}, r"SPECDEC_TLS_KEY: .* cannot be used"),
        ({"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": garbage}, r"SPECDEC_TLS_CLIENT_CA: .* not a PEM file"),
        ({"tls_ca": folder / "none"}, r"SPECDEC_TLS_CA: .* cannot be read"),
        (
            {"tls_ca": authority.ca, "tls_client_cert": server.cert, "tls_client_key": orchestrator.key},
            r"SPECDEC_TLS_CLIENT_CERT: .* does not belong to the key of SPECDEC_TLS_CLIENT_KEY",
        ),
        ({"tokens_file": folder / "none"}, r"SPECDEC_TOKENS_FILE: .* cannot be read"),
    ]
    for given, problem in cases:
        with pytest.raises(SettingsError, match=problem):
            check(FrontSettings(**given))  # type: ignore[arg-type]
    check(FrontSettings(tls_cert=server.cert, tls_key=server.key, tls_client_ca=authority.ca, tls_ca=authority.ca))


# ---------------------------------------------------------------- who gets in, and what the others are told


async def test_who_gets_in(folder: Path, authority: Authority, server: Files, orchestrator: Files) -> None:
    stranger = Authority(folder, "stranger")
    async with serving(tls_cert=server.cert, tls_key=server.key, tls_client_ca=authority.ca) as service:

        async def told(given: Credentials) -> str:
            error = await service.ask(given)
            assert error is None or isinstance(error, Unavailable), error
            return "" if error is None else str(error)

        assert await told(credentials(authority, orchestrator)) == ""
        for given, words in (
            (Credentials(), "the server speaks TLS, and this side does not: name its authority with --tls-ca FILE"),
            (credentials(authority), "the server asks for a certificate: give --tls-cert FILE and --tls-key FILE"),
            (credentials(stranger, orchestrator), "the server's certificate is refused: unable to get local issuer certificate"),
            (credentials(authority, stranger.issue("other", "orchestrator.specdec")), "the server does not accept this side's certificate"),
            (credentials(authority, orchestrator, tls_server_name="target.specdec"), "Hostname mismatch"),
            (credentials(authority, authority.issue("old", SPIFFE, valid=-DAY)), "the server does not accept this side's certificate"),
        ):
            assert words in await told(given), words
        assert service.calls == 1


async def test_tls_where_there_is_none(authority: Authority) -> None:
    async with serving() as service:
        assert await service.ask() is None
        error = await service.ask(credentials(authority))
        assert isinstance(error, Unavailable) and "the server does not speak TLS, and this side does" in str(error)


async def test_nobody_there_is_not_blamed_on_tls(authority: Authority, unused_tcp_port_factory: Any) -> None:
    for given in (Credentials(), credentials(authority)):
        async with Client(f"127.0.0.1:{unused_tcp_port_factory()}", given) as client:
            with pytest.raises(Unavailable, match=r"127.0.0.1:\d+: nobody answers \(Connection refused\); is the service up\?"):
                await client.wait_ready(0.05)


async def test_an_expired_certificate_is_a_warning_here_and_a_refusal_there(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    expired = authority.issue("expired", *LOOPBACK, valid=-DAY)
    async with serving(tls_cert=expired.cert, tls_key=expired.key) as service:
        assert [r.levelname for r in caplog.records if "the certificate expired" in r.message] == ["WARNING"]
        error = await service.ask(credentials(authority))
        assert isinstance(error, Unavailable) and "certificate has expired" in str(error)


async def test_a_name_for_a_service_that_is_dialled_by_address(authority: Authority) -> None:
    named = authority.issue("named", "targets.specdec")
    async with serving(tls_cert=named.cert, tls_key=named.key) as service:
        assert await service.ask(credentials(authority, tls_server_name="targets.specdec")) is None
        assert "mismatch" in str(await service.ask(credentials(authority)))


@pytest.mark.parametrize("allowed", ["orchestrator.specdec", SPIFFE])
async def test_only_allowed_identities_call(authority: Authority, server: Files, orchestrator: Files, allowed: str) -> None:
    mutual = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": authority.ca}
    async with serving(**mutual, allowed_identities=("else", allowed), measured=True) as service:
        assert await service.ask(credentials(authority, orchestrator)) is None
        error = await service.ask(credentials(authority, server))  # of the same authority, under other names
        assert isinstance(error, PermissionDenied)
        assert "certificate: its names (localhost) are not among SPECDEC_ALLOWED_IDENTITIES" in str(error)
        nameless = await service.ask(credentials(authority, authority.issue(allowed.replace("/", "_"))))  # the common name is no identity
        assert isinstance(nameless, PermissionDenied) and "its names (none)" in str(nameless)
        assert service.calls == 1
        scraped = await asyncio.to_thread(scrape, service)
        assert 'specdec_calls_refused_total{reason="identity"} 2.0' in scraped


def scrape(service: Secured) -> str:
    return scraped.page(service.telemetry.metrics_port)


@pytest.mark.parametrize(
    "given, remedy",
    [
        ({"tls_cert": Path("c")}, "--tls-key: is missing"),
        ({"tls_server_name": "n"}, "--tls-ca: is missing"),
        ({"tls_ca": Path("none")}, "--tls-ca: none cannot be read"),
    ],
)
async def test_a_client_that_makes_no_sense(given: dict[str, Any], remedy: str) -> None:
    async with Client("127.0.0.1:1", Credentials(**given)) as client:
        with pytest.raises(InvalidRequest, match=remedy):
            await client.get_model_info()


async def test_a_token_does_not_leave_the_machine_in_plain_text() -> None:
    async with Client("example.org:1", Credentials(token="secret")) as client:
        with pytest.raises(InvalidRequest, match="--token-file: the token would travel to example.org in plain text"):
            await client.get_model_info()
    assert "secret" not in repr(Credentials(token="secret"))


# ---------------------------------------------------------------- files that change


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.runtime.listening.REREAD_S", 0.02)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def streaming(service: Secured, given: Credentials) -> AsyncIterator[Any]:
    """A call under way; awaiting what it yields makes the service say one token more."""
    async with Client(service.endpoint, given) as client, contextlib.aclosing(client.generate([1])) as events:

        async def one_more() -> None:
            service.more.put_nowait(True)
            assert isinstance(await anext(events), Delta)

        yield one_more


async def test_certificates_change_under_a_running_stream(folder: Path, server: Files) -> None:
    """Both sides move to another authority; new connections need it, the stream that stands does not notice."""
    old, new = Authority(folder, "old-ca"), Authority(folder, "new-ca")
    live, ca = old.issue("live", *LOOPBACK), folder / "live-ca.pem"
    ca.write_bytes(old.ca.read_bytes())
    mine, theirs = old.issue("mine", "me"), new.issue("theirs", "me")
    before, after = credentials(old, mine), credentials(new, theirs)
    async with serving(tls_cert=live.cert, tls_key=live.key, tls_client_ca=ca, measured=True) as service:
        async with streaming(service, before) as one_more:
            await one_more()
            assert await service.ask(after) is not None
            live.replace(new.issue("next", *LOOPBACK, valid=2 * DAY))
            ca.write_bytes(new.ca.read_bytes())

            async def changed() -> bool:
                return await service.ask(after) is None

            await until(changed)
            assert isinstance(await service.ask(before), Unavailable)
            await one_more()
        expires = next(
            float(s.split()[1])
            for s in (await asyncio.to_thread(scrape, service)).splitlines()
            if s.startswith("specdec_tls_certificate_expires")
        )
        assert abs(expires - (datetime.datetime.now().timestamp() + 2 * 86_400)) < 120


async def test_a_half_written_pair_changes_nothing(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    live, fresh = authority.issue("half", *LOOPBACK), authority.issue("fresh", "fresh.specdec")
    old, new = credentials(authority), credentials(authority, tls_server_name="fresh.specdec")
    caplog.set_level(logging.INFO)

    def lines(word: str) -> list[str]:
        return [r.getMessage() for r in caplog.records if word in r.getMessage()]

    async with serving(tls_cert=live.cert, tls_key=live.key) as service:
        assert await service.ask(old) is None
        live.cert.write_bytes(fresh.cert.read_bytes())

        async def told() -> bool:
            return bool(lines("the last good one stays in use"))

        await until(told)
        await asyncio.sleep(5 * 0.02)  # more looks at the same trouble
        assert await service.ask(old) is None
        assert len(lines("the last good one stays in use")) == 1 and "does not belong to the key" in caplog.text
        live.key.unlink()  # and now one of them is gone for a while
        assert await service.ask(old) is None
        live.key.write_bytes(fresh.key.read_bytes())

        async def changed() -> bool:
            return await service.ask(new) is None

        await until(changed)
        assert lines("certificate: read again") and "PRIVATE" not in caplog.text


async def test_a_mounted_secret_is_swapped_by_its_link(tmp_path: Path, authority: Authority) -> None:
    """As the kubelet does it: files are links into ..data, itself a link to a folder with a date, replaced in one moment."""

    def fill(name: str, files: Files) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tls.crt").write_bytes(files.cert.read_bytes())
        (tmp_path / name / "tls.key").write_bytes(files.key.read_bytes())
        (tmp_path / "..next").symlink_to(name)
        (tmp_path / "..next").rename(tmp_path / "..data")

    fill("..1", authority.issue("first", *LOOPBACK))
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    async with serving(tls_cert=tmp_path / "tls.crt", tls_key=tmp_path / "tls.key") as service:
        fill("..2", authority.issue("second", "second.specdec"))

        async def changed() -> bool:
            return await service.ask(credentials(authority, tls_server_name="second.specdec")) is None

        await until(changed)


def test_a_change_within_one_tick_of_the_clock_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same size, same inode, same time: what a coarse clock makes of two writes in a row."""
    import os

    path = tmp_path / "file"
    path.write_text("one")
    stamp = path.stat()
    seen = watched.Watched("file", [path], path.read_text)
    path.write_text("two")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    seen.refresh()
    assert seen.value == "two"
    reads: list[int] = []
    old = watched.Watched("file", [path], lambda: reads.append(1))  # type: ignore[func-returns-value]
    os.utime(path, ns=(0, 10**9))
    for _ in range(5):
        old.refresh()
    assert len(reads) == 2  # once to begin with, once for the change, and no more when it is at rest

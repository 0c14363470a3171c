"""What a service listens with: TLS or plain text, its files read again when they change, and the guard of its calls."""

from __future__ import annotations

import asyncio
import logging
import sys

import grpc
import grpc.aio

from specdec.errors import SpecdecError
from specdec.runtime.guard import Guard
from specdec.runtime.limits import Limits
from specdec.runtime.security import CLIENT_NAMES, DialSettings, FrontSettings
from specdec.runtime.settings import CommonSettings, SettingsError, load
from specdec.runtime.telemetry import Telemetry
from specdec.runtime.tls import ServerTls, read_pair
from specdec.runtime.tokens import Tokens, read_tokens
from specdec.runtime.watched import REREAD_S, Watched

log = logging.getLogger(__name__)


class Listening:
    """Reads the files at once: blocking, before the event loop has other work. Raises SettingsError naming the setting."""

    def __init__(self, settings: CommonSettings, telemetry: Telemetry) -> None:
        self._tokens: Watched[Tokens] | None = None
        limits: Limits | None = None
        try:
            self._tls = _server_tls(settings)
            if isinstance(settings, FrontSettings):
                self._tokens = _tokens(settings)
                if settings.client_requests_per_s or settings.client_max_open:
                    limits = Limits(settings.client_requests_per_s, settings.client_max_open)
        except ValueError as error:
            raise SettingsError(f"settings:\n  {error}") from error
        self.guard = Guard(telemetry, settings.allowed_identities, self._tokens, limits)
        if (tls := self._tls) is not None:
            telemetry.gauge("specdec.tls.certificate.expires", lambda: tls.expires)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """The port that was bound. Raises RuntimeError when it is taken."""
        if self._tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self._tls.credentials())

    async def watch(self) -> None:
        """Until cancelled: reads changed files, off the loop."""
        if self._tls is None and self._tokens is None:
            return
        while True:
            await asyncio.sleep(REREAD_S)
            try:
                await asyncio.to_thread(self._refresh)
            except Exception:  # a defect must not end the one task that would notice the next certificate
                log.exception("changed files could not be read")

    def _refresh(self) -> None:
        if self._tls is not None:
            self._tls.refresh()
        if self._tokens is not None:
            self._tokens.refresh()


def joined(host: str, port: int) -> str:
    """host:port as gRPC takes it: an IPv6 address stands in brackets there, and nowhere else."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def check(settings: CommonSettings) -> None:
    """Everything that can be wrong with the files, before the process does anything else. Raises SpecdecError."""
    try:
        if settings.tls_cert is not None and settings.tls_key is not None:
            read_pair(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        if isinstance(settings, FrontSettings):
            _tokens(settings)
        if isinstance(settings, DialSettings) and settings.client_tls is not None:
            settings.client_tls.read(CLIENT_NAMES)
    except ValueError as error:
        raise SettingsError(f"settings:\n  {error}") from error


def checked(role: str, cls: type[CommonSettings]) -> int:
    """What `python -m SERVICE.settings` does: exit code 0 where the environment makes sense, else 2 and what is wrong."""
    try:
        check(load(cls))
    except SpecdecError as error:
        print(f"{role}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _server_tls(settings: CommonSettings) -> ServerTls | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return ServerTls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def _tokens(settings: FrontSettings) -> Watched[Tokens] | None:
    path = settings.tokens_file
    return None if path is None else Watched("SPECDEC_TOKENS_FILE", [path], lambda: read_tokens(path))

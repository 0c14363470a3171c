"""Certificates of both ends of a hop: what the files must be, and the gRPC credentials that come of them.

A server reads its files again every second (watched.py) and gives each new connection the newest good pair, so certificates are replaced
without a restart; connections that stand keep theirs. A client reads its files at each dial. Nothing is logged of a file but its name.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from specdec.runtime.der import validity
from specdec.runtime.files import read_bounded
from specdec.runtime.watched import Watched

MAX_PEM_BYTES = 1 << 20  # of one file
_END = "-----END CERTIFICATE-----"
Names = tuple[str, str, str]  # what the user calls the files of authorities, certificate and key
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pair:
    """A private key, its certificate chain and the authorities that callers' certificates must come from, as PEM."""

    key: bytes
    chain: bytes
    client_ca: bytes | None
    expires: int  # Unix time, of the first of the chain to expire


def read_pair(cert: Path, key: Path, client_ca: Path | None) -> Pair:
    """Raises ValueError naming the setting: not readable, no PEM, not a pair."""
    chain, private = _pem("SPECDEC_TLS_CERT", cert), _pem("SPECDEC_TLS_KEY", key)
    roots = None if client_ca is None else _pem("SPECDEC_TLS_CLIENT_CA", client_ca)
    expires = min(dates[1] for dates in _dates("SPECDEC_TLS_CERT", cert, chain))
    if roots is not None:
        _dates("SPECDEC_TLS_CLIENT_CA", client_ca, roots)
    _check_match("SPECDEC_TLS_CERT", cert, "SPECDEC_TLS_KEY", key)
    return Pair(private, chain, roots, expires)


class ServerTls:
    """What a listening port needs. Raises ValueError at the start; later trouble is logged and the last good pair stays."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        paths = [path for path in (cert, key, client_ca) if path is not None]
        self._pair = Watched("certificate", paths, lambda: read_pair(cert, key, client_ca))
        self._told = 0
        self._mutual = client_ca is not None
        self._warn()

    @property
    def expires(self) -> int:
        """Unix time at which the certificate in use, or one of its chain, expires."""
        return self._pair.value.expires

    def refresh(self) -> None:
        self._pair.refresh()
        self._warn()

    def credentials(self) -> grpc.ServerCredentials:
        given = self._pair.value

        def newest() -> Any:
            """For each new connection, on a thread of gRPC's."""
            nonlocal given
            if self._pair.value is given:
                return None  # no change
            given = self._pair.value
            return _configuration(given)

        return grpc.dynamic_ssl_server_credentials(_configuration(given), newest, self._mutual)

    def _warn(self) -> None:
        """Once per certificate. Callers will refuse it, and say so; a server that stops would only hide why."""
        if self.expires < time.time() and self._told != self.expires:
            self._told = self.expires
            log.warning("the certificate expired: callers refuse it", extra={"expired": time.strftime("%F %TZ", time.gmtime(self.expires))})


@dataclass(frozen=True, slots=True)
class ClientTls:
    """What a dialling end needs. `ca` None = the authorities that gRPC ships. `cert` and `key` go together, for mutual TLS.
    `server_name` = the name that the server's certificate must carry, where it is not the host that is dialled."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.ca, self.cert, self.key) if path is not None]

    def read(self, names: Names) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Authorities, key and chain, as gRPC takes them. Raises ValueError with the one of `names` that is at fault."""
        ca_name, cert_name, key_name = names
        roots = None if self.ca is None else _pem(ca_name, self.ca)
        if roots is not None:
            _dates(ca_name, self.ca, roots)
        if self.cert is None or self.key is None:
            return roots, None, None
        chain, private = _pem(cert_name, self.cert), _pem(key_name, self.key)
        _dates(cert_name, self.cert, chain)
        _check_match(cert_name, self.cert, key_name, self.key)
        return roots, private, chain

    def context(self) -> ssl.SSLContext:
        """The same for the standard library, which tells in words why a handshake failed."""
        context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
        if self.cert is not None and self.key is not None:
            context.load_cert_chain(self.cert, self.key, _no_password)
        return context


class Dialler:
    """For those who dial again and again: each channel gets the newest good files. Raises ValueError at the start."""

    def __init__(self, tls: ClientTls, names: Names) -> None:
        self.tls = tls
        self._files = Watched("certificate for dialling", tls.paths, lambda: tls.read(names))

    def credentials(self) -> grpc.ChannelCredentials:
        """Blocking: reads changed files."""
        self._files.refresh()
        return grpc.ssl_channel_credentials(*self._files.value)


def pair_problems(name: str, cert: Path | None, key_name: str, key: Path | None) -> list[str]:
    if (cert is None) == (key is None):
        return []
    given, missing = (name, key_name) if key is None else (key_name, name)
    return [f"{missing} is missing: {given} is set, and a certificate and its key go together"]


def _configuration(pair: Pair) -> Any:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], pair.client_ca)


def _pem(name: str, path: Path) -> bytes:
    content = read_bounded(name, path, MAX_PEM_BYTES, "MAX_PEM_BYTES; give a PEM file")
    if b"-----BEGIN " not in content:
        raise ValueError(f"{name}: {path} is not a PEM file (no line with -----BEGIN)")
    return content


def _dates(name: str, path: Path | None, pem: bytes) -> list[tuple[int, int]]:
    """First and last second of every certificate of a file."""
    pieces = pem.decode("utf-8", "replace").split(_END)[:-1]
    try:
        found = [validity(ssl.PEM_cert_to_DER_cert(piece[piece.rindex("-----BEGIN CERTIFICATE-----") :] + _END)) for piece in pieces]
    except ValueError as error:
        raise ValueError(f"{name}: {path} holds a certificate that cannot be read: {error}") from error
    if not found:
        raise ValueError(f"{name}: {path} holds no certificate (-----BEGIN CERTIFICATE----- … {_END})")
    return found


def _check_match(cert_name: str, cert: Path, key_name: str, key: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, _no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH" or error.reason == "KEY_TYPE_MISMATCH":
            raise ValueError(f"{cert_name}: {cert} does not belong to the key of {key_name}, {key}") from error
        raise ValueError(f"{key_name}: {key} cannot be used with {cert_name}: {error.reason or error}") from error
    except OSError as error:
        raise ValueError(f"{key_name}: {key} cannot be read: {error.strerror or error}") from error


_no_password: Callable[[], str] = lambda: ""  # noqa: E731 - an encrypted key must not ask the terminal

"""Settings that only some services have: how the orchestrator dials the pools, and what it asks of clients. See docs/operations.md."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from specdec.runtime.settings import CommonSettings, setting
from specdec.runtime.tls import ClientTls, Dialler, pair_problems

CLIENT_NAMES = ("SPECDEC_TLS_CA", "SPECDEC_TLS_CLIENT_CERT", "SPECDEC_TLS_CLIENT_KEY")


@dataclass(frozen=True, kw_only=True)
class DialSettings(CommonSettings):
    """Of a service that dials others. TLS is spoken as soon as `tls_ca` is set."""

    tls_ca: Path | None = setting(None, doc="PEM file of the authorities of the services dialled; set = dial with TLS")
    tls_client_cert: Path | None = setting(None, doc="PEM certificate chain shown to the services dialled; needs tls_client_key")
    tls_client_key: Path | None = setting(None, doc="PEM private key of tls_client_cert")
    tls_server_name: str = setting("", doc="name that the certificates of the services dialled carry, where it is not their host")

    @property
    def dialler(self) -> Dialler | None:
        """Reads the files; raises ValueError. None = plain text."""
        return None if (tls := self.client_tls) is None else Dialler(tls, CLIENT_NAMES)

    @property
    def client_tls(self) -> ClientTls | None:
        if self.tls_ca is None:
            return None
        return ClientTls(self.tls_ca, self.tls_client_cert, self.tls_client_key, self.tls_server_name)

    def problems(self) -> list[str]:
        found = super().problems()
        found += pair_problems("SPECDEC_TLS_CLIENT_CERT", self.tls_client_cert, "SPECDEC_TLS_CLIENT_KEY", self.tls_client_key)
        if self.tls_ca is None and (self.tls_client_cert is not None or self.tls_client_key is not None or self.tls_server_name):
            found.append("SPECDEC_TLS_CA is missing: it turns on TLS, which the other SPECDEC_TLS_CLIENT_… and …_SERVER_NAME need")
        return found


@dataclass(frozen=True, kw_only=True)
class FrontSettings(DialSettings):
    """Of the service that clients call."""

    tokens_file: Path | None = setting(None, doc="file of `name:sha256 of the token` lines; set = clients must send one of these tokens")
    allow_insecure_tokens: bool = setting(
        False, doc="accept tokens without TLS on other addresses than loopback: anybody on the way reads them"
    )
    client_requests_per_s: float = setting(
        0.0, low=0, high=1e6, doc="calls a second of one client, by token, certificate or address; 0 = any"
    )
    client_max_open: int = setting(0, low=0, high=1_000_000, doc="calls of one client that are open at once; 0 = any")
    show_metrics: bool | None = setting(
        None,
        doc="tell clients this service's load and counts (GetMetrics, `specdec top --endpoint`); empty = where they need neither a token "
        "nor a certificate",
    )

    @property
    def shows_metrics(self) -> bool:
        """Clients that are told apart may be strangers to each other: there somebody has to allow it."""
        return self.tokens_file is None and self.tls_client_ca is None if self.show_metrics is None else self.show_metrics

    def problems(self) -> list[str]:
        found = super().problems()
        if self.tokens_file is not None and self.tls_cert is None and not (is_loopback(self.host) or self.allow_insecure_tokens):
            found.append(
                f"SPECDEC_TOKENS_FILE without TLS on {self.host or 'all addresses'}: anybody on the way could read the tokens; set"
                " SPECDEC_TLS_CERT and SPECDEC_TLS_KEY, or SPECDEC_HOST=127.0.0.1, or SPECDEC_ALLOW_INSECURE_TOKENS=true"
                " where something in front speaks TLS"
            )
        return found


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

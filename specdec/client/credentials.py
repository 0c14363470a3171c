"""What a client shows to the service it calls, and what it asks of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import grpc

from specdec.errors import InvalidRequest
from specdec.runtime.security import is_loopback
from specdec.runtime.tls import ClientTls, pair_problems
from specdec.runtime.tokens import read_token

FLAGS = ("--tls-ca", "--tls-cert", "--tls-key")


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """`tls_ca`, a PEM file of authorities, turns TLS on; `tls_cert` and `tls_key` are this client's own, for mutual TLS; the server's
    certificate must carry `tls_server_name`, empty = the host that is dialled. `token_file` is read again at each call, the other files
    when the connection is made. A token is not sent to another machine without TLS unless `allow_insecure_token`."""

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_server_name: str = ""
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    allow_insecure_token: bool = False

    @property
    def tls(self) -> ClientTls | None:
        return None if self.tls_ca is None else ClientTls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)

    def check(self, endpoint: str) -> None:
        """Raises InvalidRequest naming the flag."""
        problems = pair_problems("--tls-cert", self.tls_cert, "--tls-key", self.tls_key)
        if self.tls_ca is None and (self.tls_cert is not None or self.tls_server_name):
            problems.append("--tls-ca is missing: it turns on TLS, which --tls-cert and --tls-server-name need")
        if problems:
            name, _, remedy = problems[0].partition(" ")
            raise InvalidRequest(name, remedy)
        host = endpoint.rpartition(":")[0].rpartition("/")[2]
        if (self.token or self.token_file) and self.tls_ca is None and not (is_loopback(host) or self.allow_insecure_token):
            raise InvalidRequest("--token-file", f"the token would travel to {host} in plain text; give --tls-ca FILE (SPECDEC_TLS_CA)")

    def channel(self) -> grpc.ChannelCredentials | None:
        """Reads the files. Raises InvalidRequest naming the flag; None = plain text."""
        if (tls := self.tls) is None:
            return None
        try:
            return grpc.ssl_channel_credentials(*tls.read(FLAGS))
        except ValueError as error:
            name, _, remedy = str(error).partition(": ")
            raise InvalidRequest(name, remedy) from error

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The header of each call. Raises InvalidRequest."""
        if not self.token and self.token_file is None:
            return ()
        try:
            token = self.token if self.token_file is None else read_token("--token-file", self.token_file)
        except ValueError as error:
            name, _, remedy = str(error).partition(": ")
            raise InvalidRequest(name, remedy) from error
        return (("authorization", f"Bearer {token}"),)


OPEN = Credentials()  # plain text, no token

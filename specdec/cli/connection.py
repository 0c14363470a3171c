"""How a command reaches a service: endpoint, TLS, token. The one place for every command that dials."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import InvalidRequest
from specdec.runtime.settings import from_environment

if TYPE_CHECKING:  # gRPC is loaded when it is needed: `--help` should not wait for it
    from specdec.client import Credentials

CONNECT_S = 3.0
# flag → (variable, what it stands for, help)
FLAGS = {
    "--tls-ca": ("SPECDEC_TLS_CA", "FILE", "speak TLS; PEM file of the authorities behind the service's certificate"),
    "--tls-cert": ("SPECDEC_TLS_CLIENT_CERT", "FILE", "own certificate, where the service asks for one; needs --tls-key"),
    "--tls-key": ("SPECDEC_TLS_CLIENT_KEY", "FILE", "private key of --tls-cert"),
    "--tls-server-name": ("SPECDEC_TLS_SERVER_NAME", "NAME", "name in the service's certificate, where it is not the host"),
    "--token-file": ("SPECDEC_TOKEN_FILE", "FILE", "file with the token that the service asks for"),
}


def add_arguments(parser: argparse.ArgumentParser, endpoint_help: str = "the orchestrator", required: bool = True) -> None:
    group = parser.add_argument_group("connection")
    group.add_argument("--endpoint", required=required, metavar="HOST:PORT[,…]", help=f"{endpoint_help}; of several the next takes over")
    add_credentials(group)


def add_credentials(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    for flag, (variable, metavar, words) in FLAGS.items():
        group.add_argument(flag, metavar=metavar, help=f"{words} (or {variable})")


def credentials_of(arguments: argparse.Namespace) -> Credentials:
    """Of flags, else of the environment."""
    from specdec.client import Credentials

    said = {
        flag: getattr(arguments, flag[2:].replace("-", "_"), None) or from_environment(variable) for flag, (variable, _, _) in FLAGS.items()
    }
    files = {flag[2:].replace("-", "_"): Path(value) for flag, value in said.items() if value and flag != "--tls-server-name"}
    return Credentials(**files, tls_server_name=said["--tls-server-name"])  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def connected(endpoint: str, arguments: argparse.Namespace) -> AsyncIterator[Any]:
    """A client with an open connection: of one orchestrator, or of several as FailoverClient uses them. Raises InvalidRequest and
    Unavailable."""
    from specdec.client import client_of

    try:
        made = client_of(endpoint, credentials_of(arguments))
    except InvalidRequest as error:
        if error.field != "endpoint":
            raise
        raise InvalidRequest("--endpoint", error.remedy) from None
    async with made as client:
        await client.wait_ready(CONNECT_S)
        yield client

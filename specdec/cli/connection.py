"""How a command reaches a service: endpoint, TLS, token. The one place for every command that dials."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli import authority
from specdec.cli.state import State
from specdec.errors import InvalidRequest
from specdec.runtime.dial_flags import add_credentials, credential_fields

if TYPE_CHECKING:  # gRPC is loaded when it is needed: `--help` should not wait for it
    from specdec.client import Credentials

CONNECT_S = 3.0
__all__ = ["CONNECT_S", "add_arguments", "add_credentials", "connected", "credentials_of", "endpoint_of"]


def add_arguments(parser: argparse.ArgumentParser, endpoint_help: str = "the orchestrator") -> None:
    group = parser.add_argument_group("connection")
    group.add_argument("--endpoint", metavar="HOST:PORT[,…]", help=f"{endpoint_help}; of several the next takes over")
    group.add_argument("--state", type=Path, metavar="DIR", help="folder of `specdec up`: its endpoint, and with --tls its certificates")
    add_credentials(group)


def endpoint_of(arguments: argparse.Namespace) -> str:
    """Of the flag, else of the state folder. Raises InvalidRequest."""
    if arguments.endpoint is not None:
        return str(arguments.endpoint)
    if arguments.state is None:
        raise InvalidRequest("--endpoint", "is missing: host:port of an orchestrator, or --state DIR of a running `specdec up`")
    return State(arguments.state).endpoint()


def credentials_of(arguments: argparse.Namespace) -> Credentials:
    """Of flags, else of the environment, else of the state folder."""
    from specdec.client import Credentials

    fields = credential_fields(arguments)
    if not any(name.startswith("tls") for name in fields) and (state := getattr(arguments, "state", None)) is not None:
        fields |= authority.showing(State(state).tls)
    return Credentials(**fields)


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

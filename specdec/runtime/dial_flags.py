"""Flags of whatever dials a service: TLS and token, or the variables that stand for them. Light: `--help` should not wait for gRPC."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from specdec.runtime.settings import from_environment

# flag → (variable, what it stands for, help)
FLAGS = {
    "--tls-ca": ("SPECDEC_TLS_CA", "FILE", "speak TLS; PEM file of the authorities behind the service's certificate"),
    "--tls-cert": ("SPECDEC_TLS_CLIENT_CERT", "FILE", "own certificate, where the service asks for one; needs --tls-key"),
    "--tls-key": ("SPECDEC_TLS_CLIENT_KEY", "FILE", "private key of --tls-cert"),
    "--tls-server-name": ("SPECDEC_TLS_SERVER_NAME", "NAME", "name in the service's certificate, where it is not the host"),
    "--token-file": ("SPECDEC_TOKEN_FILE", "FILE", "file with the token that the service asks for"),
}


def add_credentials(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    for flag, (variable, metavar, words) in FLAGS.items():
        group.add_argument(flag, metavar=metavar, help=f"{words} (or {variable})")


def credential_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of specdec.client.Credentials that flags, else the environment, name."""
    fields: dict[str, Any] = {}
    for flag, (variable, metavar, _) in FLAGS.items():
        name = flag[2:].replace("-", "_")
        if said := getattr(arguments, name, None) or from_environment(variable):
            fields[name] = Path(said) if metavar == "FILE" else said
    return fields

"""Entries of SPECDEC_TARGETS and SPECDEC_DRAFTS: an address, or a name with a record per replica. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_NAMES = 16  # of one pool: each is asked for by itself
_HOST = r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s/:\[\]]+)"
_ADDRESS = re.compile(_HOST + r":(?P<port>\d{1,5})")
_NAME = re.compile(r"dns:(///)?" + _HOST + r":(?P<port>\d{1,5})")
SHAPE = "host:port, or dns:///name:port for a replica per record of the name"


@dataclass(frozen=True, slots=True)
class Name:
    """A DNS name; each of its A and AAAA records is a replica that listens on `port`."""

    host: str
    port: int


def parse(entries: Iterable[str]) -> tuple[list[str], list[Name]]:
    """Addresses and names, each once, in order. Entries must have no problem."""
    addresses, names = dict[str, None](), dict[Name, None]()
    for entry in entries:
        if found := _NAME.fullmatch(entry):
            names[Name(found["host"], int(found["port"]))] = None
        else:
            addresses[entry] = None
    return list(addresses), list(names)


def problem_of(entry: str) -> str:
    """What is wrong with it; empty = nothing."""
    found = _NAME.fullmatch(entry) or _ADDRESS.fullmatch(entry)
    if found is None or not 0 < int(found["port"]) < 65536:
        return f"{entry!r} is not {SHAPE}"
    return ""


def too_many(entries: Iterable[str]) -> str:
    """Whether there are more names than one pool may have; empty = no."""
    count = len({entry for entry in entries if _NAME.fullmatch(entry)})
    return f"{count} names, at most {MAX_NAMES} (MAX_NAMES)" if count > MAX_NAMES else ""


def address(host: str, port: int) -> str:
    """host:port of a numeric address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

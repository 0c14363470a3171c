"""Entries of SPECDEC_TARGETS and SPECDEC_DRAFTS: an address, a DNS name with a record per replica, or a Kubernetes Service. Each may have
the name of a pool in front: "large=dns:///target-large:50052". Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_NAMES = 16  # DNS names and Services of one setting: each is asked for by itself
DEFAULT_POOL = "default"
_HOST = r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s/:\[\]=]+)"
_ADDRESS = re.compile(_HOST + r":(?P<port>\d{1,5})")
_NAME = re.compile(r"dns:(///)?" + _HOST + r":(?P<port>\d{1,5})")
_SERVICE = re.compile(r"kubernetes://(?P<namespace>[^/:]*)/(?P<service>[^/:]+):(?P<port>[^/:]+)")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1123, as Kubernetes limits names of Services, namespaces and ports
LABEL = "1 to 63 of a-z, 0-9 and -, neither first nor last a -"
SHAPE = "host:port, dns:///name:port for a replica per record of the name, or kubernetes:///service:port for a replica per endpoint of it"


@dataclass(frozen=True, slots=True)
class Address:
    """One replica, host:port."""

    address: str
    pool_name: str = DEFAULT_POOL


@dataclass(frozen=True, slots=True)
class Name:
    """A DNS name; each of its A and AAAA records is a replica that listens on `port`."""

    host: str
    port: int
    pool_name: str = DEFAULT_POOL


@dataclass(frozen=True, slots=True)
class Service:
    """A Kubernetes Service; each of its endpoints is a replica. `namespace` empty = the one this process runs in; `port` = the number that
    the replicas listen on, or its name in the Service."""

    namespace: str
    service: str
    port: int | str
    pool_name: str = DEFAULT_POOL


Entry = Address | Name | Service


def parse(entry: str) -> Entry:
    """Raises ValueError with what is wrong and how to mend it."""
    pool, has_pool, what = entry.rpartition("=")
    if has_pool and not _LABEL.fullmatch(pool):
        raise ValueError(f"{entry!r}: the pool's name in front of = must be {LABEL}")
    pool = pool or DEFAULT_POOL
    if found := _SERVICE.fullmatch(what):
        return _service(entry, found, pool)
    named = _NAME.fullmatch(what)
    if (found := named or _ADDRESS.fullmatch(what)) is None or not (port := _port(found["port"])):
        raise ValueError(f"{entry!r} is not {SHAPE}")
    return Name(found["host"], port, pool) if named else Address(what, pool)


def _service(entry: str, found: re.Match[str], pool: str) -> Service:
    namespace, service, port = found["namespace"], found["service"], found["port"]
    for what, name in (("namespace", namespace or "own"), ("Service's name", service)):
        if not _LABEL.fullmatch(name):
            raise ValueError(f"{entry!r}: the {what} {name!r} must be {LABEL}")
    number = _port(port) if port.isdecimal() else 0
    if not number and (port.isdecimal() or not _LABEL.fullmatch(port)):
        raise ValueError(f"{entry!r}: the port {port!r} must be a number from 1 to 65535, or the port's name in the Service, {LABEL}")
    return Service(namespace, service, number or port, pool)


def _port(text: str) -> int:
    """0: none."""
    return int(text) if len(text) <= 5 and 0 < int(text) < 65536 else 0


def entries(texts: Iterable[str]) -> list[Entry]:
    """Each once, in order. Raises ValueError as `parse`."""
    return list(dict.fromkeys(map(parse, texts)))


def pool_names(texts: Iterable[str]) -> tuple[str, ...]:
    """Names of the pools that a setting's entries fill, sorted. Raises ValueError as `parse`."""
    return tuple(sorted({entry.pool_name for entry in entries(texts)}))


def problems(texts: Iterable[str]) -> list[str]:
    """What is wrong with a setting's entries."""
    found: list[Entry] = []
    wrong: list[str] = []
    for text in dict.fromkeys(texts):
        try:
            found.append(parse(text))
        except ValueError as error:
            wrong.append(str(error))
    asked = [entry for entry in dict.fromkeys(found) if not isinstance(entry, Address)]
    if len(asked) > MAX_NAMES:
        wrong.append(f"{len(asked)} names, at most {MAX_NAMES} (MAX_NAMES)")
    pools: dict[tuple[object, ...], str] = {}
    for entry in found:
        other = pools.setdefault(_place(entry), entry.pool_name)
        if other != entry.pool_name:
            wrong.append(f"{_shown(entry)} is in two pools, {other!r} and {entry.pool_name!r}: a replica is in one")
    return wrong


def _place(entry: Entry) -> tuple[object, ...]:
    match entry:
        case Address(address):
            return (address,)
        case Name(host, port):
            return "dns", host, port
        case Service(namespace, service, port):
            return "kubernetes", namespace, service, port


def _shown(entry: Entry) -> str:
    match entry:
        case Address(address):
            return address
        case Name(host, port):
            return f"dns:///{host}:{port}"
        case Service(namespace, service, port):
            return f"kubernetes://{namespace}/{service}:{port}"


def address(host: str, port: int) -> str:
    """host:port of a numeric address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""The EndpointSlices of one Service as replicas. Pure; takes the API's JSON as it is, since its own models refuse what servers send
(`endpoints: null`).

Rules
1. A list replaces all; an event changes one slice. An event that is not newer than the list is a replay of what the list knows better.
2. A replica is a pod, known by its uid, whichever slices it stands in; without a pod it is its address. It has one address: where there
   are several (two families of addresses) the one it had, else the IPv4 one.
3. Ready, or not said: it takes sessions. Terminating, whatever else is said: it finishes what it holds. Neither, or without an address (an
   evicted pod): it is none.
4. A named port is the one that the slice gives that name. A number stands for itself where a slice names no ports; else it must be among
   them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.discovery.names import Service, address
from orchestrator.discovery.source import Endpoint

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Seen:
    """One endpoint of one slice."""

    key: str
    uid: str
    address: str
    terminating: bool


@dataclass(frozen=True, slots=True)
class _Slice:
    seen: tuple[_Seen, ...]
    ports: tuple[str, ...] = ()  # what it names, where the one that is wanted is not among them


class Slices:
    """`read` and `event` raise KeyError, TypeError, ValueError or AttributeError for what is no slice; nothing has changed then."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._slices: dict[str, _Slice] = {}
        self._version = ""  # of the list
        self.endpoints: frozenset[Endpoint] = frozenset()

    @property
    def problem(self) -> tuple[str, str]:
        """Why there can be no replica: a word for the metric, and what to look at; both empty: no reason."""
        service = self._service.service
        if not self._slices:
            return (
                "empty",
                f"no EndpointSlice is labelled kubernetes.io/service-name={service}: is there such a Service here, with a selector?",
            )
        ports = sorted({port for known in self._slices.values() for port in known.ports})
        if ports and not self.endpoints:
            return "port", f"the Service {service} has no TCP port {self._service.port}, but {', '.join(ports)}"
        return "", ""

    def listed(self, slices: Iterable[Json], version: str) -> list[Exception]:
        """The full set, of a list. What is no slice is told and left out; who was known by its name stays."""
        found: dict[str, _Slice] = {}
        wrong: list[Exception] = []
        for one in slices:
            try:
                found[_name(one)] = self._read(one)
            except _BROKEN as error:
                wrong.append(error)
                name = _name_or_none(one)
                found |= {name: self._slices[name]} if name in self._slices else {}
        self._slices, self._version = found, version
        self._merge()
        return wrong

    def event(self, kind: str, what: Json) -> None:
        """Of a watch that goes on from the list. Kinds that say nothing of a slice change nothing."""
        if kind not in ("ADDED", "MODIFIED", "DELETED") or not _newer(_version(what), self._version):
            return
        if kind == "DELETED":
            self._slices.pop(_name(what), None)
        else:
            self._slices[_name(what)] = self._read(what)
        self._merge()

    def _read(self, what: Json) -> _Slice:
        found = [_seen(endpoint) for endpoint in what.get("endpoints") or ()]
        port, others = self._port(what.get("ports") or ())
        if not port:
            return _Slice((), others if any(found) else ())
        return _Slice(tuple(_Seen(e.key, e.uid, address(e.address, port), e.terminating) for e in found if e is not None))

    def _port(self, ports: Iterable[Json]) -> tuple[int, tuple[str, ...]]:
        """0: none, but those."""
        wanted = self._service.port
        tcp = [(str(port.get("name") or ""), port.get("port")) for port in ports if port.get("protocol") in (None, "TCP")]
        for name, number in tcp:
            if isinstance(wanted, int) and number in (wanted, None):
                return wanted, ()
            if name == wanted and number:
                return int(number), ()
        if isinstance(wanted, int) and not ports:
            return wanted, ()
        return 0, tuple(f"{name} {number}".strip() for name, number in tcp) or ("none",)

    def _merge(self) -> None:
        pods: dict[str, list[_Seen]] = {}
        for one in self._slices.values():
            for seen in one.seen:
                pods.setdefault(seen.key, []).append(seen)
        had = {endpoint.address for endpoint in self.endpoints}
        merged = []
        for pod in pods.values():
            where = min((seen.address for seen in pod), key=lambda a: (a not in had, a.startswith("["), a))
            merged.append(Endpoint(where, pod[0].uid, any(seen.terminating for seen in pod), self._service.pool_name))
        self.endpoints = frozenset(merged)


_BROKEN = (KeyError, TypeError, ValueError, AttributeError)


def _name(what: Json) -> str:
    return str(what["metadata"]["name"])


def _name_or_none(what: Any) -> str:
    try:
        return _name(what)
    except _BROKEN:
        return ""


def _version(what: Json) -> str:
    return str(what["metadata"].get("resourceVersion") or "")


def _newer(version: str, than: str) -> bool:
    """Versions are opaque unless both are numbers: then they are in order."""
    return not (version.isdecimal() and than.isdecimal()) or int(version) > int(than)


def _seen(endpoint: Json) -> _Seen | None:
    """None: no replica."""
    addresses, conditions = endpoint.get("addresses") or (), endpoint.get("conditions") or {}
    terminating = conditions.get("terminating") is True
    if not addresses or not addresses[0] or not (terminating or conditions.get("ready") is not False):
        return None
    uid = str((endpoint.get("targetRef") or {}).get("uid") or "")
    return _Seen(uid or str(addresses[0]), uid, str(addresses[0]), terminating)

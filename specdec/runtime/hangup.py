"""Hanging up on callers that do not read. A call whose client closed its window and lives on cannot be ended by gRPC's Python API: its
status waits behind the message that nobody takes, and with it the call's memory.

Rules
1. A call is open until its status is out, which may be long after its handler is through.
2. A call is stuck when its reader has exhausted somebody's patience: the handler's with a message, or ours with the status. It is stuck no
   more when what waited goes out after all.
3. A connection is hung up on when all its open calls are stuck: now, or when the last other one ends. So nobody is cut off who is served,
   which matters behind a proxy that puts many clients on one connection.
4. There is an end to that when MOST_STUCK calls are stuck, on all connections together: each has its place among the calls under way.
   Then the connection with most of them goes, and who is served there comes back on another one.
5. Hanging up is a shutdown of the socket: both ends see a connection that broke, and the calls end as if the client had gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ipaddress
import itertools
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote

STATUS_S = 10.0  # patience with the reader of a call whose handler is through
MOST_STUCK = 1024  # calls
EARLY_S = 0.001  # the loop counts in milliseconds
SWEEP_S = 0.25  # connections that are hung up on within this time share one look at the open sockets
log = logging.getLogger(__name__)
Endpoint = tuple[str, int]


@dataclass(eq=False, slots=True)
class OpenCall:
    """One call, from its beginning until its status is out."""

    peer: str
    hang_up: HangUp
    at_end: list[Callable[[], None]] = field(default_factory=list)
    aborted: BaseException | None = None  # what gRPC raised to end it
    waits: int = 0  # that have exhausted somebody's patience
    ended: bool = False
    _patient: dict[int, float] = field(default_factory=dict)  # waits by number: when the patience is exhausted, loop time
    _exhausted: set[int] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _timer: asyncio.TimerHandle | None = None  # one for all, moved when it fires: nearly all waits are over long before
    _timer_due: float = 0.0
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)  # asking again is a system call

    def wait(self, seconds: float) -> Callable[[], None]:
        """Something waits for the reader from here on. What is returned is called when it no longer does."""
        number = next(self._numbers)
        self._patient[number] = due = self._loop.time() + seconds
        if self._timer is None or due < self._timer_due:
            self._look_at(due)
        return partial(self._over_with, number)

    def _over_with(self, number: int) -> None:
        if self._patient.pop(number, None) is None and number in self._exhausted:
            self._exhausted.discard(number)
            self._count(-1)

    def _look_at(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_due = self._loop.call_at(due, self._look), due

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time() + EARLY_S
        if out := [number for number, due in self._patient.items() if due <= now]:
            for number in out:
                del self._patient[number]
            self._exhausted.update(out)
            self._count(len(out))
            self.hang_up.look(self.peer)
        if self._patient:
            self._look_at(min(self._patient.values()))

    def _count(self, more: int) -> None:
        before, self.waits = self.waits, self.waits + more
        if not self.ended:
            self.hang_up.counted(self.peer, bool(self.waits) - bool(before))

    def through(self) -> None:
        """The handler is through; only the status is to come."""
        self.wait(STATUS_S)

    def over(self) -> None:
        """The status is out, or the client is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._patient.clear()
        self.hang_up.counted(self.peer, -bool(self.waits))
        self.ended = True
        self.hang_up.closed(self)
        for act in self.at_end:
            act()
        if self.aborted is not None:  # gRPC keeps it, and with its traceback all that there was: a cycle for each refusal
            self.aborted.__traceback__ = self.aborted.__context__ = None
            self.aborted = None


current_call: contextvars.ContextVar[OpenCall | None] = contextvars.ContextVar("current_call", default=None)


def waits(seconds: float) -> Callable[[], None]:
    """From here on something waits for the reader of the call that is handled here, until what is returned is called; nothing does outside
    a call."""
    call = current_call.get()
    return _nothing if call is None else call.wait(seconds)


def _nothing() -> None:
    pass


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """The same around a block."""
    over = waits(seconds)
    try:
        yield
    finally:
        over()


class HangUp:
    """On the event loop. The table is as long as there are open calls, at most."""

    def __init__(self, cut: Callable[[set[str]], None] | None = None) -> None:
        """`cut` ends the connections of these peers, named as gRPC names them."""
        self._cut = cut or shut
        self._calls: dict[str, set[OpenCall]] = {}
        self._unread = Counter[str]()  # calls that are stuck, by peer
        self._num_unread = 0
        self._doomed: set[str] = set()
        self._sweep: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def opened(self, peer: str) -> OpenCall:
        call = OpenCall(peer, self)
        self._calls.setdefault(peer, set()).add(call)
        return call

    def closed(self, call: OpenCall) -> None:
        left = self._calls[call.peer]
        left.discard(call)
        if left:
            self.look(call.peer)
        else:
            del self._calls[call.peer]

    def counted(self, peer: str, more: int) -> None:
        """So many more calls of this connection are stuck."""
        self._num_unread += more
        self._unread[peer] += more
        if not self._unread[peer]:
            del self._unread[peer]

    def look(self, peer: str) -> None:
        """Something about the calls of this connection has changed."""
        if self._stuck(peer) or self._num_unread > MOST_STUCK:
            self._doomed.add(peer)
            if self._sweep is None:
                self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._hang_up)

    def _stuck(self, peer: str) -> bool:
        calls = self._calls.get(peer, ())
        return bool(calls) and all(call.waits for call in calls)

    def _hang_up(self) -> None:
        """What was read meanwhile, or has another call now, stays."""
        self._sweep = None
        doomed, self._doomed = self._doomed, set()
        peers = {peer for peer in doomed if self._stuck(peer)}
        if not peers and self._num_unread > MOST_STUCK:
            peers = {max(self._unread, key=lambda peer: self._unread[peer])}
        if peers:
            log.warning("nobody reads these connections; they are hung up on", extra={"peers": sorted(peers)[:8], "count": len(peers)})
            self._cut(peers)


def endpoint_of(peer: str) -> Endpoint | None:
    """(address, port) of gRPC's name of a peer: `ipv4:1.2.3.4:5`, `ipv6:%5B::1%5D:5`. None for what has none."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return _normal(host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") and port.isdecimal() else None


def shut(peers: set[str]) -> None:
    """Ends the connections, whoever holds their sockets. One that is not found has ended."""
    wanted = {endpoint_of(peer) for peer in peers} - {None}
    _shut(lambda one: _normal(*one.getpeername()[:2]) in wanted, socket.SHUT_RDWR)


def fall_silent(port: int) -> None:
    """Whoever is connected to this port of ours hears what was said until here, and then the end of the connection."""
    _shut(lambda one: bool(one.getpeername()) and one.getsockname()[1] == port, socket.SHUT_WR)


def stop_listening(port: int) -> None:
    """Nobody connects to this port of ours any more. gRPC cannot be asked for that alone, and complains about a listener that fails, so
    it is left with one that nobody knows. Its number is gRPC's until the server stops: only then may another file get it."""
    with socket.create_server(("127.0.0.1", 0)) as unknown:
        unknown.setblocking(False)  # gRPC may be about to accept somebody
        for number, one in _sockets():
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.getsockname()[1] == port:
                os.dup2(unknown.fileno(), number, inheritable=False)


def _shut(wanted: Callable[[socket.socket], bool], how: int) -> None:
    """`wanted` may raise OSError for sockets that are connected to nobody."""
    for _, one in _sockets():
        with contextlib.suppress(OSError):
            if wanted(one):
                one.shutdown(how)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Those of this process for the network."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError), _socket(int(name)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                yield int(name), one


def _socket(number: int) -> socket.socket:
    """Shares the connection of this file under a number of its own: gRPC may close that one, and another file get it, at any moment.
    Raises OSError for what is no socket."""
    own = os.dup(number)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def _normal(host: str, port: int) -> Endpoint | None:
    try:
        address: Any = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return str(getattr(address, "ipv4_mapped", None) or address), port

"""The proxy delays bytes and serialises nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specdec.bench.proxy import Proxy

pytestmark = pytest.mark.unit
DELAY_S = 0.05


@contextmanager
def echo() -> Iterator[str]:
    """Sends everything back until its peer has finished, then finishes as well."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    here, _ = listener.accept()
                except OSError:
                    return
                with here:
                    while piece := here.recv(65_536):
                        here.sendall(piece)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def through(delay_s: float) -> Iterator[socket.socket]:
    with echo() as address:
        proxy = Proxy(address, delay_s)
        proxy.start()
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as connection:
            yield connection
        proxy.close()


def read(connection: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count and (piece := connection.recv(65_536)):
        got += piece
    return got


def test_a_round_trip_takes_twice_the_delay() -> None:
    with through(DELAY_S) as connection:
        began = time.monotonic()
        connection.sendall(b"x")
        assert read(connection, 1) == b"x"
        assert 2 * DELAY_S <= time.monotonic() - began < 2 * DELAY_S + 1.0


def test_what_is_sent_while_something_is_on_the_wire_does_not_wait_for_it() -> None:
    """Twenty messages, one every few milliseconds, come back one after the other after one round trip. A proxy that slept before each
    would take twenty delays."""
    with through(DELAY_S) as connection:
        began = time.monotonic()
        for number in range(20):
            connection.sendall(bytes([number]) * 100)
            time.sleep(0.002)
        assert read(connection, 2000) == b"".join(bytes([number]) * 100 for number in range(20))
        assert time.monotonic() - began < 20 * DELAY_S


def test_many_bytes_arrive_in_order_and_the_end_arrives_behind_them() -> None:
    sent = bytes(range(256)) * 8192
    with through(0.005) as connection:
        sender = threading.Thread(target=lambda: (connection.sendall(sent), connection.shutdown(socket.SHUT_WR)))
        sender.start()
        assert read(connection, len(sent) + 1) == sent
        sender.join()


def test_nobody_behind_it_closes_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    proxy = Proxy(f"127.0.0.1:{port}", 0.0)
    proxy.start()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as connection:
        assert connection.recv(1) == b""
    proxy.close()

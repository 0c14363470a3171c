"""The Prometheus port: a thread per connection, as prometheus_client has it, and an end to both.

A scrape takes milliseconds. Whoever opens a connection and does not go on would keep a thread and a descriptor for ever, and with enough
of them the service could not dial its replicas any more: so there are READ_S between two reads, and of MAX_SCRAPES the oldest makes way.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MAX_SCRAPES = 32  # connections at once
READ_S = 5.0


class _Handler(WSGIRequestHandler):
    timeout = READ_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that http.server gives it
        """A scrape is not worth a line."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves `app` from a thread until `shutdown`. Raises OSError when the port cannot be had."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 4 * MAX_SCRAPES  # that the thread which accepts has not come to

    def __init__(self, host: str, port: int, app: Callable[..., Any]) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self._open: dict[Any, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)
        self.set_app(app)
        threading.Thread(target=self.serve_forever, name="metrics port", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > MAX_SCRAPES else None
            self._open.pop(oldest, None)
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away, or was too slow."""

"""A Kubernetes API server that knows EndpointSlices: lists and watches over HTTP, and everything that goes wrong with them.

It serves the slices that are `put`. What the next lists and watches do instead is put into `lists` and `watches`, a function each; those
below are some. `asked` says who asked for what, when."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "prod"
Json = dict[str, Any]


def endpoint(address: str, uid: str = "", **conditions: bool | None) -> Json:
    """`address` empty: it has none; `uid` empty: no pod. Without conditions it is ready."""
    made: Json = {
        "addresses": [address] if address else [],
        "conditions": conditions or {"ready": True, "serving": True, "terminating": False},
    }
    return made | ({"targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": f"pod-{uid}", "uid": uid}} if uid else {})


def slice_of(name: str, *endpoints: Json, service: str = "target", **ports: int) -> Json:
    """Without ports it has `grpc` 50052 and `metrics` 9464."""
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {"kubernetes.io/service-name": service}}
    named = [{"name": key, "protocol": "TCP", "port": port} for key, port in (ports or {"metrics": 9464, "grpc": 50052}).items()]
    return {"metadata": metadata, "addressType": "IPv4", "endpoints": list(endpoints) or None, "ports": named}


@dataclass(frozen=True)
class Asked:
    watch: bool
    version: str
    token: str
    at_s: float = field(default_factory=time.monotonic)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ApiServer  # type: ignore[assignment]

    def do_GET(self) -> None:
        with contextlib.suppress(OSError):
            if not self.server.closing:
                self._answer()
        self.close_connection |= self.server.closing

    def _answer(self) -> None:
        path, query = urlsplit(self.path).path, {key: value[0] for key, value in parse_qs(urlsplit(self.path).query).items()}
        self.version, self.selector = query.get("resourceVersion", ""), query.get("labelSelector", "").partition("=")
        self.for_s = float(query.get("timeoutSeconds", 3600)) * self.server.second_s
        watch, token = query.get("watch") == "true", self.headers.get("authorization", "")
        self.server.asked.append(Asked(watch, self.version, token))
        if path != f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices":
            self.refuse(403, "Forbidden")
        elif self.server.token and token.lower() != f"bearer {self.server.token}".lower():
            self.refuse(401, "Unauthorized")
        elif instead := (self.server.watches if watch else self.server.lists):
            instead.popleft()(self)
        else:
            self.watch() if watch else self.list()

    def has_label(self, what: Json) -> bool:
        return bool(what["metadata"]["labels"].get(self.selector[0]) == self.selector[2])

    def list(self) -> None:
        with self.server.changed:
            items = [one for one in self.server.slices.values() if self.has_label(one)]
            found = {"kind": "EndpointSliceList", "metadata": {"resourceVersion": str(self.server.version)}, "items": items}
        self.respond(200, json.dumps(found).encode())

    def watch(self, since: int | None = None) -> None:
        """From the version that was asked for, or from `since`."""
        server, ends = self.server, time.monotonic() + self.for_s
        self.told = int(self.version or 0) if since is None else since
        self.begin()
        while time.monotonic() < ends and not server.closing:
            with server.changed:
                server.changed.wait_for(lambda: server.version > self.told or server.closing, max(0.0, ends - time.monotonic()))
                events = [event for version, event in server.events if version > self.told and self.has_label(event["object"])]
                self.told = server.version
            for event in events:
                self.tell(event)
        self.end()

    def respond(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, code: int, reason: str) -> None:
        self.respond(code, json.dumps({"kind": "Status", "code": code, "reason": reason, "message": reason.lower()}).encode())

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def tell(self, event: Json) -> None:
        """In two chunks: an event is not a chunk."""
        line = json.dumps(event).encode() + b"\n"
        for part in filter(None, (line[:40], line[40:])):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()

    def end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        pass


class ApiServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, tls: tuple[Path, Path] | None = None) -> None:
        """`tls` = certificate and key."""
        super().__init__(("127.0.0.1", 0), Handler)
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.token = ""  # the only one that is accepted; empty = anybody
        self.second_s = 1.0  # by its clock, at the end of a watch
        self.version = 1
        self.slices: dict[str, Json] = {}
        self.events: list[tuple[int, Json]] = []
        self.changed = threading.Condition()
        self.closing = False
        self.asked: list[Asked] = []
        self.lists: deque[Callable[[Handler], None]] = deque()
        self.watches: deque[Callable[[Handler], None]] = deque()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def put(self, what: Json) -> None:
        self._change("MODIFIED" if what["metadata"]["name"] in self.slices else "ADDED", what)

    def delete(self, name: str) -> None:
        self._change("DELETED", self.slices[name])

    def _change(self, kind: str, what: Json) -> None:
        with self.changed:
            self.version += 1
            what = {**what, "metadata": {**what["metadata"], "resourceVersion": str(self.version)}}
            self.slices = {name: one for name, one in self.slices.items() if name != what["metadata"]["name"]}
            self.slices |= {what["metadata"]["name"]: what} if kind != "DELETED" else {}
            self.events.append((self.version, {"type": kind, "object": what}))
            self.changed.notify_all()

    def count(self, *, watch: bool) -> int:
        return sum(asked.watch == watch for asked in self.asked)

    def kubeconfig(self, file: Path, **user: str) -> Path:
        """Of a user who is in NAMESPACE; `user` = how to know him."""
        cluster = {"server": f"http://127.0.0.1:{self.port}"}
        context = {"cluster": "c", "user": "u", "namespace": NAMESPACE}
        found = {"current-context": "x", "contexts": [{"name": "x", "context": context}], "clusters": [{"name": "c", "cluster": cluster}]}
        file.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **found, "users": [{"name": "u", "user": user}]}))
        return file

    @contextlib.contextmanager
    def serving(self) -> Iterator[ApiServer]:
        thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            with self.changed:
                self.closing = True
                self.changed.notify_all()
            self.shutdown()
            thread.join()
            self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone is no error."""


# --- what goes wrong --------------------------------------------------------------------------------------------------


def gone(handler: Handler) -> None:
    handler.refuse(410, "Expired")


def unwell(handler: Handler) -> None:
    handler.refuse(503, "ServiceUnavailable")


def gone_as_event(handler: Handler) -> None:
    handler.begin()
    handler.tell({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}})
    handler.end()


def half_open(handler: Handler) -> None:
    """Says that it will tell, and never does."""
    handler.begin()
    mute(handler)


def mute(handler: Handler) -> None:
    """Not even that."""
    while not handler.server.closing:
        time.sleep(0.01)


def reset(handler: Handler) -> None:
    """In the middle of an event."""
    handler.begin()
    handler.wfile.write(b'20\r\n{"type": "ADDED", "object": {"me\r\n')
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True


def dribble(handler: Handler) -> None:
    """A list that never ends, and never is silent."""
    handler.begin()
    while not handler.server.closing:
        handler.wfile.write(b"1\r\n \r\n")
        time.sleep(0.01)


def saying(*events: Json | bytes, since: int | None = None) -> Callable[[Handler], None]:
    """A watch that begins with these; bytes are a line that is none."""

    def watch(handler: Handler) -> None:
        plain, handler.begin = handler.begin, lambda: None  # type: ignore[method-assign]
        plain()
        for event in events:
            if isinstance(event, bytes):
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            else:
                handler.tell(event)
        handler.watch(since)

    return watch


BOOKMARK = {"type": "BOOKMARK", "object": {"kind": "EndpointSlice", "metadata": {"resourceVersion": "12746"}}}

"""The EndpointSlices of one Service at the API server, by the official client. Every method blocks, so call it from a thread. The client's
own Watch is not used: its models refuse slices that servers do send, and it begins again by itself from the versions of single objects."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from orchestrator.discovery.names import Service

MAX_BYTES = 16 << 20  # of a list, or of one event
CHUNK_BYTES = 1 << 16
MAX_TOLD = 400  # characters of a refusal
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

Json = dict[str, Any]


class Refused(Exception):
    """What was asked for was not given. `kind` = a word for the metric: gone, denied, timeout, error. `stale`: the credentials were not
    accepted; there may be newer ones."""

    def __init__(self, kind: str, what: str, stale: bool = False) -> None:
        super().__init__(what)
        self.kind, self.stale = kind, stale


class Cluster:
    """One set of credentials and connections. Calls wait for each other."""

    def __init__(self, service: Service, connect_s: float) -> None:
        """Reads the credentials. Raises Refused."""
        from kubernetes import client, config  # only where a Service is an entry: it takes a third of a second
        from urllib3 import exceptions

        self._timeouts, self._refusal = (TimeoutError, exceptions.TimeoutError), exceptions.NewConnectionError
        self._service, self._connect_s = service, connect_s
        configuration = client.Configuration()
        configuration.retries = False  # what follows a failure is decided here
        own = _configure(configuration, config)
        self._namespace = service.namespace or own
        self._client = client.ApiClient(configuration)
        self._ask: Any = client.DiscoveryV1Api(self._client).list_namespaced_endpoint_slice
        self._lock = threading.Lock()
        self._response: Any = None
        self._over = False  # hung up
        self._version = ""  # of the last list
        self._watch: Generator[Json, None, None] | None = None

    def listing(self, for_s: float) -> tuple[list[Json], str]:
        """All slices, and the version of that list; ends the watch. Raises Refused."""
        with self._lock:
            self._end_watch()
            ends = time.monotonic() + for_s
            body = bytearray()
            with self._opened(for_s) as response:
                for chunk in response.stream(CHUNK_BYTES):
                    body += chunk
                    if time.monotonic() > ends:
                        raise Refused("timeout", f"the list was not complete after {for_s:g} s")
                    if len(body) > MAX_BYTES:
                        raise Refused("error", f"the list is longer than {MAX_BYTES} bytes (MAX_BYTES)")
                found = json.loads(body)
                items, self._version = list(found["items"] or ()), str(found["metadata"].get("resourceVersion") or "")
            return items, self._version

    def event(self, for_s: float, silence_s: float) -> Json | None:
        """The next event of the watch that goes on from the last list; empty: what came is none; None: it has ended, after `for_s` by the
        server's clock. Begins it. Raises Refused, also when nothing is read for `silence_s`."""
        with self._lock:
            self._watch = self._watch or self._events(for_s, silence_s)
            event = next(self._watch, None)
            if event is None:
                self._watch = None
            return event

    def hang_up(self) -> None:
        """What blocks in a read ends soon. Returns at once; for good."""
        self._over = True  # before the look at the response: whoever opens one looks here behind it
        response = self._response
        with contextlib.suppress(Exception):  # it ends just now, or waits for the first byte and ends with that
            response.shutdown()
        threading.Thread(target=self._close, name="hang up on the API server", daemon=True).start()

    def _close(self) -> None:
        with self._lock:
            self._end_watch()
            self._client.rest_client.close()

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _events(self, for_s: float, silence_s: float) -> Generator[Json, None, None]:
        rest = b""
        with self._opened(silence_s, watch=True, resource_version=self._version, timeout_seconds=max(1, round(for_s))) as response:
            for chunk in response.stream(CHUNK_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    yield _event(line)
                if len(rest) > MAX_BYTES:
                    raise Refused("error", f"an event is longer than {MAX_BYTES} bytes (MAX_BYTES)")

    @contextlib.contextmanager
    def _opened(self, silence_s: float, **about: Any) -> Iterator[Any]:
        try:
            self._response = self._ask(
                self._namespace,
                label_selector=f"kubernetes.io/service-name={self._service.service}",
                _preload_content=False,
                _request_timeout=(self._connect_s, silence_s),
                **about,
            )
            with contextlib.closing(self._response):
                if self._over:
                    raise Refused("error", "hung up")
                yield self._response
        except Refused:
            raise
        except Exception as error:  # of the client, the connection, a file with a certificate, a helper that fetches tokens, JSON
            if status := getattr(error, "status", None):
                raise _refused(status, f"{status} {getattr(error, 'reason', '')}: {getattr(error, 'body', '')}"[:MAX_TOLD]) from error
            late = isinstance(error, self._timeouts) and not isinstance(error, self._refusal)  # a refused connection is called both
            raise Refused("timeout" if late else "error", f"{type(error).__name__}: {error}") from error
        finally:
            self._response = None


def _configure(configuration: Any, config: Any) -> str:
    """Where the API server is, and who asks: the pod's service account, else a kubeconfig. The namespace of both. Raises Refused."""
    try:
        config.load_incluster_config(client_configuration=configuration)
        return NAMESPACE_FILE.read_text().strip()
    except (config.ConfigException, OSError) as error:
        inside = error
    try:
        config.load_kube_config(client_configuration=configuration)
        return str(config.list_kube_config_contexts()[1]["context"].get("namespace") or "default")
    except Exception as error:  # the loader raises whatever comes of a file that is none
        what = f"no service account of a pod ({inside}), and no kubeconfig in KUBECONFIG or ~/.kube/config ({error})"
        raise Refused("error", what) from error


def _event(line: bytes) -> Json:
    """Raises Refused for the server's word that it cannot go on."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(event, dict):
        return {}
    if event.get("type") == "ERROR":
        status = event.get("object")
        status = status if isinstance(status, dict) else {}
        raise _refused(status.get("code"), f"{status.get('code')} {status.get('reason')}: {status.get('message')}")
    return event


def _refused(status: object, what: str) -> Refused:
    kind = "denied" if status in (401, 403) else "gone" if status == 410 else "error"
    return Refused(kind, what, stale=status == 401)

"""A TCP proxy that makes a connection longer: every byte arrives `delay` later, in order, and none waits for another.

    python -m specdec.bench.proxy --to HOST:PORT --delay-ms 0.5     # prints "ready role=proxy host=… port=… metrics_port=-1 pid=…"

Both directions are delayed, so a round trip takes twice the delay. Bytes are stamped when they arrive and written when their time has come:
what was sent together arrives together, as on a long wire of any width. Threads, not an event loop, whose timers are good to a millisecond.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import socket
import sys
import threading
import time

CHUNK_BYTES = 65_536
MAX_CHUNKS = 4096  # on the wire, each way; then the sender is held, as by a full window


class Proxy:
    """Serves from `start` until `close`. `delay_s` is one way; `port` 0 = any free one."""

    def __init__(self, to: str, delay_s: float, port: int = 0) -> None:
        host, _, to_port = to.rpartition(":")
        self._to, self._delay_s = (host, int(to_port)), delay_s
        self._listener = socket.create_server(("127.0.0.1", port))
        self._open: set[socket.socket] = set()
        self._closed = False

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        threading.Thread(target=self._accept, name="proxy-accept", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        for one in (self._listener, *list(self._open)):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            try:
                there = socket.create_connection(self._to, timeout=10)
            except OSError:
                here.close()
                continue
            there.settimeout(None)
            self._open |= {here, there}
            for one in (here, there):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink in ((here, there), (there, here)):
                wire: queue.Queue[tuple[float, bytes]] = queue.Queue(MAX_CHUNKS)
                threading.Thread(target=self._read, args=(source, wire), daemon=True).start()
                threading.Thread(target=self._write, args=(sink, wire), daemon=True).start()

    def _read(self, source: socket.socket, wire: queue.Queue[tuple[float, bytes]]) -> None:
        """An empty piece is the end of the direction; it travels as long as any other."""
        piece = b"."
        while piece:
            try:
                piece = source.recv(CHUNK_BYTES)
            except OSError:
                piece = b""
            wire.put((time.monotonic() + self._delay_s, piece))

    def _write(self, sink: socket.socket, wire: queue.Queue[tuple[float, bytes]]) -> None:
        broken = False
        while True:
            due, piece = wire.get()
            if (left := due - time.monotonic()) > 0:
                time.sleep(left)
            if not piece:
                break
            try:
                if not broken:
                    sink.sendall(piece)
            except OSError:  # nobody reads any more; what is on the wire is let go, so that the reader is not held
                broken = True
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m specdec.bench.proxy", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--to", required=True, metavar="HOST:PORT")
    parser.add_argument("--delay-ms", type=float, required=True, help="one way")
    args = parser.parse_args()
    proxy = Proxy(args.to, args.delay_ms / 1e3)
    proxy.start()
    print(f"ready role=proxy host=127.0.0.1 port={proxy.port} metrics_port=-1 pid={os.getpid()}", flush=True)
    sys.stdin.read()  # whoever started us holds the other end
    proxy.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a service's metrics port says. Blocking: not on the event loop of the service that answers."""

from __future__ import annotations

import urllib.request


def page(port: int, host: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def samples(port: int, host: str = "127.0.0.1") -> dict[str, float]:
    """`name{labels}` → value."""
    pairs = (line.rsplit(" ", 1) for line in page(port, host).splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def total(port: int, name: str, host: str = "127.0.0.1") -> float:
    """Sum over all labels of one metric."""
    return sum(value for key, value in samples(port, host).items() if key.split("{")[0] == name)

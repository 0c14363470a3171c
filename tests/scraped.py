"""What a service's metrics port says. Blocking: not on the event loop of the service that answers."""

from __future__ import annotations

import urllib.request


def page(port: int, host: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def parsed(text: str) -> dict[str, float]:
    """`name{labels}` → value."""
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def samples(port: int, host: str = "127.0.0.1") -> dict[str, float]:
    return parsed(page(port, host))


def summed(text: str, name: str) -> float:
    """Over all labels of one metric."""
    return sum(value for key, value in parsed(text).items() if key.split("{")[0] == name)


def total(port: int, name: str, host: str = "127.0.0.1") -> float:
    return summed(page(port, host), name)

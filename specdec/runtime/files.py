"""Small files that somebody else writes: read whole, up to a bound."""

from __future__ import annotations

from pathlib import Path


def read_bounded(name: str, path: Path, most_bytes: int, bound: str) -> bytes:
    """The content of the file that the setting `name` names. Raises ValueError naming setting, path and `bound`, never the content."""
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be read: {error.strerror}") from error
    if len(content) > most_bytes:
        raise ValueError(f"{name}: {path} is larger than {most_bytes} bytes ({bound})")
    return content

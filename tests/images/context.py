"""What goes to the builder: the files that .dockerignore lets through, as moby's pattern matcher decides it (the last match counts)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path


class Ignore:
    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        self._rules = [(_pattern(line.removeprefix("!")), line.startswith("!")) for line in lines if line and not line.startswith("#")]

    def passes(self, path: str) -> bool:
        """A path from the root of the tree, with /. A rule for a folder holds for what is in it."""
        parts = path.split("/")
        mine = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        through = True
        for pattern, again in self._rules:
            if any(pattern.fullmatch(one) for one in mine):
                through = again
        return through


def _pattern(line: str) -> re.Pattern[str]:
    written = re.escape(line.strip("/")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    return re.compile(written)


def files(root: Path, candidates: Iterator[str] | list[str]) -> list[str]:
    """Of the candidates, paths from `root`, those that go to the builder."""
    ignore = Ignore((root / ".dockerignore").read_text())
    return sorted(path for path in candidates if ignore.passes(path))


def export(root: Path, folder: Path, candidates: Iterator[str] | list[str]) -> list[str]:
    """Copies them to a folder; returns their paths."""
    found = files(root, candidates)
    for path in found:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, folder / path)
    return found

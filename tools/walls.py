"""Walls that import-linter cannot state: who may read the environment, who may see the telemetry SDK and
protobuf, and how long a file may be. It looks at the syntax tree, so an import inside a function counts.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("specdec", "draft_service", "target_service", "orchestrator")
GENERATED = ROOT / "specdec" / "v1"
MOST_LINES = 600


@dataclass(frozen=True)
class Wall:
    """Only `allowed` modules (or packages, with all inside) may use names that start with one of `names`."""

    names: tuple[str, ...]
    allowed: tuple[str, ...]
    why: str


WALLS = (
    Wall(
        names=("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"),
        allowed=("specdec.runtime.settings",),
        why="settings are read once, in one place, and handed down",
    ),
    Wall(
        names=("opentelemetry.sdk", "opentelemetry.exporter", "prometheus_client"),
        allowed=("specdec.runtime.telemetry", "specdec.runtime.instruments"),
        why="the telemetry seam is one file, and the one that counts for it",
    ),
    Wall(
        names=("google.protobuf", "specdec.v1"),
        allowed=(
            "specdec.wire",
            "specdec.status",
            "specdec.client",
            "specdec.bench.sim",
            "draft_service.servicer",
            "target_service.servicer",
            "orchestrator.peers",
            "orchestrator.fronts",
            "orchestrator.scaling.front",
            "orchestrator.scaling.siblings",
        ),
        why="the wire stops at the door; inside, the nouns of specdec.terms are used",
    ),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_inside(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, and of attributes of imported modules (os.environ)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.lineno, f"{node.value.id}.{node.attr}"


def complaints(path: Path) -> Iterator[str]:
    text = path.read_text()
    shown = path.relative_to(ROOT)
    if (lines := text.count("\n")) > MOST_LINES:
        yield f"{shown}: {lines} lines, more than {MOST_LINES}; the largest file matters more than the mean"
    if path.parent == ROOT / "tools":
        return
    module = module_name(path)
    for line, name in uses(ast.parse(text)):
        for wall in WALLS:
            if is_inside(name, wall.names) and not is_inside(module, wall.allowed):
                yield f"{shown}:{line}: {name} belongs to {', '.join(wall.allowed)}: {wall.why}"


def sources() -> Iterator[Path]:
    for package in (*PACKAGES, "tools"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.parent != GENERATED:
                yield path


if __name__ == "__main__":
    found = [complaint for path in sources() for complaint in complaints(path)]
    print("\n".join(found) or "walls hold")
    sys.exit(1 if found else 0)

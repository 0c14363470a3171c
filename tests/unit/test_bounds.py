"""docs/bounds.md says what the code does: every value, and a row for every bound."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from draft_service.settings import Settings as DraftSettings
from orchestrator.settings import OrchestratorSettings
from specdec.runtime.settings import CommonSettings
from target_service.settings import Settings as TargetSettings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "bounds.md").read_text()
ROLES = {
    "every service": CommonSettings,
    "the orchestrator": OrchestratorSettings,
    "the target": TargetSettings,
    "the draft": DraftSettings,
}
CELL = re.compile(r"`(?P<name>[A-Z][A-Z_]*)` (?:in `(?P<path>[a-z_/]+\.py)`|of (?P<role>every service|the \w+))")
VALUE = re.compile(r"([0-9][0-9,.]*)(?: (bytes|KiB|MiB|ms|s))?")
FACTORS = {"": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "ms": 1, "s": 1000}  # times in ms
SERVING = ("specdec", "orchestrator", "target_service", "draft_service")
ELSEWHERE = ("specdec/bench", "specdec/cli", "specdec/v1")  # whoever types a command waits for it
NO_BOUNDS = {  # what is called so and bounds no queue, message, wait or table
    ("specdec/terms/request.py", "MAX_SEED"),
    ("specdec/client/requests.py", "MAX_ID"),
    ("orchestrator/control/machine.py", "MAX_DEPTH"),
    ("orchestrator/control/machine.py", "MOST_PROBE_MS"),
    ("orchestrator/control/machine.py", "MOST_TRIES"),
    ("orchestrator/control/seat.py", "MOST_WAIT_MS"),
    ("orchestrator/control/survival.py", "MOST_SHIFT"),
    ("orchestrator/placement.py", "MOST_FULL"),
    ("orchestrator/scaling/metadata.py", "MOST_THRESHOLD"),
}


def rows() -> Iterator[tuple[str, str, str]]:
    """(what, value, where) of each row of each table."""
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith("| what "):
            what, value, where, _ = line.strip("| ").split(" | ")
            yield what, value, where


def in_code(where: str) -> tuple[str, float]:
    """(name, value) of a constant or of a setting's default; times in ms."""
    match = CELL.fullmatch(where)
    assert match, f"{where}: must be `NAME` in `file` or `SPECDEC_NAME` of a service"
    name = match["name"]
    if match["path"]:
        value = getattr(importlib.import_module(match["path"].removesuffix(".py").replace("/", ".")), name)
    else:
        held = {f"SPECDEC_{field.name.upper()}": field.default for field in fields(ROLES[match["role"]])}
        assert name in held, f"{name} is no setting of {match['role']}"
        value = held[name]
    return name, float(value) * (1000 if name.endswith("_S") and not name.endswith("_PER_S") else 1)


def wrong(what: str, value: str, where: str) -> str | None:
    """What of a row is not so."""
    match = VALUE.fullmatch(value)
    if not match:
        return f"{what}: {value} is no number with a unit"
    name, held = in_code(where)
    if match[2] in ("ms", "s") and not name.endswith(("_MS", "_S")):
        return f"{what}: {name} is no time"
    if float(match[1].replace(",", "")) * FACTORS[match[2] or ""] != pytest.approx(held):
        return f"{what}: {name} is {held:g}"
    return None


def test_what_the_page_says_is_what_the_code_has() -> None:
    assert [told for row in rows() if (told := wrong(*row))] == []


def test_a_wrong_row_is_seen() -> None:
    good = "4,096", "`MAX_CONCURRENT_CALLS` in `specdec/runtime/server.py`"
    assert wrong("calls", *good) is None
    for value in ("4,095", "4,096 s", "4 KiB and more", ""):
        assert wrong("calls", value, good[1])
    for where in ("`SPECDEC_MAX_SESSIONS` of the orchestrator", "MAX_CALLS"):
        with pytest.raises(AssertionError):
            wrong("calls", "1", where)


def told() -> set[tuple[str, str]]:
    """(file or service, name) of what has a row."""
    found = [CELL.fullmatch(where) for _, _, where in rows()]
    return {(match["path"] or match["role"], match["name"]) for match in found if match}


def test_each_row_is_told_once() -> None:
    assert len(told()) == len(list(rows()))


def constants() -> Iterator[tuple[str, str]]:
    for package in SERVING:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name.startswith(ELSEWHERE):
                continue
            for node in ast.parse(path.read_text()).body:
                left = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
                names = [inner.id for one in left for inner in ast.walk(one) if isinstance(inner, ast.Name)]
                yield from ((name, bound) for bound in names if re.match(r"(MAX|MOST)_", bound))


def settings() -> Iterator[tuple[str, str]]:
    common = {field.name for field in fields(CommonSettings)}
    for role, cls in ROLES.items():
        for field in fields(cls):
            if field.name.startswith("max_") and (field.name not in common or cls is CommonSettings):
                yield role, f"SPECDEC_{field.name.upper()}"


def test_every_bound_has_a_row() -> None:
    missing = sorted({*constants(), *settings()} - told() - NO_BOUNDS)
    assert not missing, f"docs/bounds.md lacks {missing}; say what happens there (or, in NO_BOUNDS of this test, that it bounds nothing)"

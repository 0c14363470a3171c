"""Markers and skip rules. Every test says which budget of time it lives on; the summary shows what each used."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
from pathlib import Path

import pytest

# Before torch is imported anywhere: small matrices on several threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing in a test may ask a model hub; without this a missing file becomes a long time-out.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell's background job ignores Ctrl-C, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # not on the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.tools import require_model  # noqa: E402

TESTS = Path(__file__).resolve().parent
# Of the tests, not of the clock: most run two at a time.
BUDGET_MINUTES = {"unit": 6, "pair": 6, "faults": 10, "parameters": 3, "chart": 3, "clients": 1}
MARKED_BY_FOLDER = {"unit": "unit", "scenarios": "unit", "helm": "chart"}
BUDGET = "budget"
PAIR_MODELS = ("smollm2-135m", "smollm2-draft")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-transcripts", action="store_true", help="write tests/scenarios/*.txt anew; review the change as a diff")


def budget_of(item: pytest.Item) -> str | None:
    return next((name for name in BUDGET_MINUTES if item.get_closest_marker(name)), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    homeless = []
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if budget_of(item) is None and folder in MARKED_BY_FOLDER:
            item.add_marker(MARKED_BY_FOLDER[folder])
        budget = budget_of(item)
        if budget is not None and not item.get_closest_marker("long"):
            item.user_properties.append((BUDGET, budget))  # travels with the report, also from another worker
        if budget is None:
            homeless.append(item.nodeid)
    if homeless:
        names = ", ".join(BUDGET_MINUTES)
        raise pytest.UsageError(f"these tests need one of the markers {names}:\n  " + "\n  ".join(homeless))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("pair"):
        for name in PAIR_MODELS:
            require_model(name)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for key, name in report.user_properties:
        if key == BUDGET:
            _seconds[str(name)] += report.duration


_seconds: collections.Counter[str] = collections.Counter()  # by budget; long tests use nobody's


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, seconds in _seconds.items():
        over = "  OVER BUDGET" if seconds > 60 * BUDGET_MINUTES[name] else ""
        terminalreporter.write_line(f"{name:8} {seconds:6.1f} s of {60 * BUDGET_MINUTES[name]} s{over}")

"""Whether the environment makes sense to every service of a system, before any of them loads a model for minutes."""

from __future__ import annotations

import difflib
import subprocess
from collections.abc import Iterable, Sequence

from specdec.cli.supervisor import START_TIMEOUT_S, Plan, environment_of
from specdec.runtime.settings import SettingsError

WRONG = 2  # a service's exit code for settings that are wrong
HINT = "; did you mean "


def check(plans: Sequence[Plan]) -> None:
    """One plan of each role, all at once. Raises SettingsError with the problems of all of them. Whatever else ends a check is left to the
    service itself to tell."""
    checks = [
        subprocess.Popen(
            plan.check_line(),
            env=environment_of(plan.settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for plan in plans
    ]
    said = []
    for one in checks:
        try:
            _, errors = one.communicate(timeout=START_TIMEOUT_S)
        except BaseException:
            for other in checks:
                other.kill()
                other.communicate()
            raise
        said += problems(errors) if one.returncode == WRONG else []
    if said:
        raise SettingsError("settings:\n  " + "\n  ".join(once(said)))


def problems(errors: str) -> list[str]:
    """Those that a service names, one a line; all that it says where it names none."""
    return [line.strip() for line in errors.splitlines() if line.startswith("  ")] or [errors.strip()]


def once(said: Iterable[str]) -> list[str]:
    """What several services say of one variable is one problem. Of an unknown name each knows another one that is like it: the likest."""
    told: dict[str, str] = {}
    for problem in said:
        name = problem.partition(" ")[0].partition("=")[0].rstrip(":")
        told[name] = max(told.get(name, problem), problem, key=lambda one: _likeness(name, one))
    return list(told.values())


def _likeness(name: str, problem: str) -> float:
    _, hint, other = problem.partition(HINT)
    return difflib.SequenceMatcher(None, name, other.rstrip("?")).ratio() if hint else 0.0

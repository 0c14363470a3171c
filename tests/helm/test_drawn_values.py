"""Whatever the schema lets pass either gives objects that agree and that Kubernetes takes, or is refused by a rule that names its keys."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings

from tests.helm.checks import CHECKS
from tests.helm.drawing import drawn_values, keys, leaves, placed
from tests.helm.objects import parse
from tests.helm.programs import Values, template
from tests.helm.test_kubernetes_schemas import CORE, SUPPORTED, problem

# The others speak of choices that a user may make otherwise: shorter loads, smaller limits, names elsewhere.
ALWAYS = ("labels", "selectors", "ports", "references", "unknown_names", "writable", "offline", "grace", "replicas", "variables", "values")
CHOSEN = ("runs under the namespace's default account",)  # where the user wants no account of its own
NULLS = 12
QUICK, LONG = 25, 500
REFUSED = re.compile(r"values of specdec that do not fit together:\n(  - [\w.-]+: .+\n?)+")


def check_one(values: Values) -> None:
    done = template(values)
    if done.returncode:
        assert REFUSED.search(done.stderr), f"{json.dumps(values)}\n{done.stderr}"
        return
    render = parse(done.stdout)
    told = [f"{name}: {found}" for name in ALWAYS for found in CHECKS[name](render)]
    told += [found for owner in render.objects if owner["apiVersion"] in CORE and (found := problem(owner, SUPPORTED[-1]))]
    assert [found for found in told if not any(choice in found for choice in CHOSEN)] == [], json.dumps(values)


@settings(max_examples=QUICK, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn_values())
def test_drawn_values_render_or_are_refused(values: Values) -> None:
    check_one(values)


@pytest.mark.long
@pytest.mark.timeout(900)
@settings(max_examples=LONG, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn_values())
def test_many_drawn_values_render_or_are_refused(values: Values) -> None:
    check_one(values)


@pytest.mark.parametrize("part", range(4), ids=lambda part: f"part {part}")
@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_key_may_be_null_or_is_refused(part: int) -> None:
    """Null takes a key and its default away; templates that count on it say so by its name."""
    for path in keys()[part::4]:
        check_one(placed(path, None))


def test_some_keys_may_be_null_or_are_refused() -> None:
    for path in keys()[:: len(keys()) // NULLS]:
        check_one(placed(path, None))
    assert template({"discovery": {"extraTargets": None, "extraDrafts": None}}).returncode == 0, "lists that rules look into"


def test_most_keys_can_be_drawn() -> None:
    assert len(leaves()) > 250
    assert {path[0] for path in leaves()} >= {"orchestrator", "target", "draft", "tls", "auth", "networkPolicy", "network", "podMonitor"}

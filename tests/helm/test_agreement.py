"""What must agree inside a render, for every scene; and for every check a render in which something is wrong, which it must refuse."""

from __future__ import annotations

import copy

import pytest

from tests.helm.checks import CHECKS, problems
from tests.helm.objects import Render
from tests.helm.scenes import SCENES, scene
from tests.helm.twins import TWINS, Twin


@pytest.mark.parametrize("name", SCENES)
def test_everything_agrees(name: str) -> None:
    found = problems(scene(name))
    assert [problem for problem in found if not any(part in problem for part in SCENES[name].waived)] == []
    assert all(any(part in problem for problem in found) for part in SCENES[name].waived)


@pytest.mark.parametrize("twin", TWINS, ids=str)
def test_what_is_wrong_is_seen(twin: Twin) -> None:
    broken = Render(copy.deepcopy(scene(twin.scene).objects))
    twin.breaks(broken)
    assert broken.objects != scene(twin.scene).objects, "the twin broke nothing"
    told = CHECKS[twin.check](broken)
    assert any(twin.told in problem for problem in told), told


def test_every_check_has_a_twin() -> None:
    assert {twin.check for twin in TWINS} == set(CHECKS)

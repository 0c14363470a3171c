"""What must hold in every render. A check takes a render and returns the problems that it found, each naming the object."""

from __future__ import annotations

from collections.abc import Callable

from tests.helm.checks import environment, life, network, pods, scaling, wiring
from tests.helm.objects import Render

Check = Callable[[Render], list[str]]
ROOMS = (wiring, pods, life, scaling, environment, network)
CHECKS: dict[str, Check] = {check.__name__: check for room in ROOMS for check in room.CHECKS}


def problems(render: Render) -> list[str]:
    """Everything that is wrong with a render: `check: problem`."""
    return [f"{name}: {problem}" for name, check in CHECKS.items() for problem in check(render)]

"""`python -m tests.e2e.whimsical`: an orchestrator whose sessions speculate, rest and go on as they like, at any commit."""

from __future__ import annotations

import random
import sys

from orchestrator.__main__ import build
from orchestrator.control import Desk
from orchestrator.events import Admitted
from orchestrator.pace import Pace
from orchestrator.settings import OrchestratorSettings
from specdec.runtime.server import serve
from tests.unit.orchestrator.test_whims import Whims

DRAW = random.Random(5)
pace = Desk.pace


def whimsical(self: Desk, request: Admitted, live: int) -> Pace:
    most = request.num_speculative_tokens
    return Whims(most, DRAW) if request.adaptive else pace(self, request, live)


if __name__ == "__main__":
    Desk.pace = whimsical  # type: ignore[method-assign]
    sys.exit(serve("orchestrator", OrchestratorSettings, build))

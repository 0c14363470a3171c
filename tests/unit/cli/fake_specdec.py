"""The `specdec` command with fake services behind it: same arguments."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from specdec.cli import main, restarts, supervisor, up

HERE = Path(__file__).resolve()


def command_line(plan: supervisor.Plan) -> tuple[str, ...]:
    return (sys.executable, str(HERE.with_name("fake_service.py")), plan.role)


def check_line(plan: supervisor.Plan) -> tuple[str, ...]:
    """They cost a fraction of a second, so only who wants them has them."""
    return (*command_line(plan), "--check") if "FAKE_CHECK" in os.environ else (sys.executable, "-SEc", "")


if __name__ == "__main__":
    supervisor.Plan.command_line = command_line  # type: ignore[method-assign]
    supervisor.Plan.check_line = check_line  # type: ignore[method-assign]
    restarts.BASE_S, restarts.MOST_ENDS = 0.05, 3
    up.DAEMON = (sys.executable, str(HERE))
    sys.exit(main.main())

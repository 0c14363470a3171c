"""What the base package leaves out, and the extra that brings it: an orchestrator, a client and most commands need none of it.

Imports none of it either, so that a process can say what is missing before it fails somewhere inside.
"""

from __future__ import annotations

import importlib.util
import sys

from specdec.errors import SpecdecError

EXTRAS: dict[str, tuple[str, ...]] = {
    "model": ("torch", "transformers", "safetensors"),
    "tools": ("matplotlib", "rich"),
}


class NotInstalled(SpecdecError):
    """The message names the module and the extra to install."""


def need(extra: str) -> None:
    """Raises NotInstalled where a module of the extra is missing."""
    for module in EXTRAS[extra]:
        if importlib.util.find_spec(module) is None:
            raise NotInstalled(_told(module, extra))


def need_or_leave(extra: str, role: str) -> None:
    """For the first lines of a service: ends the process with exit code 1 and one line."""
    try:
        need(extra)
    except NotInstalled as error:
        sys.exit(f"{role}: {error}")


def explained(error: ModuleNotFoundError) -> NotInstalled | None:
    """What an import that failed should have said; None where no extra brings that module."""
    module = (error.name or "").partition(".")[0]
    return next((NotInstalled(_told(module, extra)) for extra, modules in EXTRAS.items() if module in modules), None)


def _told(module: str, extra: str) -> str:
    return f"{module} is not installed here; pip install 'specdec[{extra}]'" + (
        ", or take the image specdec-model" if extra == "model" else ""
    )

"""Variables: each is a setting of the service that gets it, and the service takes its value."""

from __future__ import annotations

from collections import Counter
from typing import Any

from draft_service.settings import Settings as DraftSettings
from orchestrator.settings import OrchestratorSettings
from specdec.runtime import names
from specdec.runtime.settings import PREFIX, SettingsError, load
from target_service.settings import Settings as TargetSettings
from tests.helm.objects import Render

SETTINGS: dict[str, type[Any]] = {"orchestrator": OrchestratorSettings, "target": TargetSettings, "draft": DraftSettings}


def variables(render: Render) -> list[str]:
    """Set once, text, with a value or a source; a SPECDEC_ name is a setting of that very service."""
    found = []
    for pod in render.services:
        entries = pod.main.get("env", [])
        twice = [name for name, count in Counter(entry["name"] for entry in entries).items() if count > 1]
        found += [f"{pod.name}: {name} is set twice" for name in twice]
        for entry in entries:
            if "valueFrom" not in entry and not isinstance(entry.get("value"), str):
                found.append(f"{pod.name}: {entry['name']} is {entry.get('value')!r}, not a string")
            name = entry["name"].removeprefix(PREFIX)
            if entry["name"].startswith(PREFIX) and name not in names.SETTINGS[pod.component]:
                found.append(f"{pod.name}: {entry['name']} is no setting of a {pod.component}")
        if pod.spec.get("enableServiceLinks", True):
            found.append(f"{pod.name}: gets an address of every Service of the namespace as a variable")
    return found


def values(render: Render) -> list[str]:
    """A service of this version starts with these settings."""
    found = []
    for pod in render.services:
        try:
            load(SETTINGS[pod.component], {**pod.env, **{name: "/secret" for name in _from_secrets(pod.main)}})
        except SettingsError as error:
            found.append(f"{pod.name}: {error}")
    return found


def _from_secrets(container: dict[str, Any]) -> list[str]:
    return [entry["name"] for entry in container.get("env", []) if "valueFrom" in entry and entry["name"].startswith(PREFIX)]


CHECKS: tuple[Any, ...] = (variables, values)

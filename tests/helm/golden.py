"""What the chart renders, written down: the default release in full, a file per component, and a digest of every object of
every other scene that differs from it.

A change of a template shows as a diff of the files, and the table tells which installations it reaches. After a change:

    .venv/bin/python -m tests.helm.golden

which also writes the table of values in the chart's README anew.
"""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path

import yaml

from tests.helm.node_tools import write_table
from tests.helm.objects import COMPONENT, COMPONENTS, Object, Render
from tests.helm.programs import CHART
from tests.helm.scenes import SCENES, scene

FOLDER = Path(__file__).parent / "golden"
OF_A_RELEASE = ("helm.sh/chart", "app.kubernetes.io/version")  # differ with each version of the chart and tell nothing else
SHOWN = "defaults"


def without_version(found: Object) -> Object:
    """The object without labels that each release of the chart changes, and without files of the chart; images keep their tag."""
    found = copy.deepcopy(found)
    if found["kind"] == "PrometheusRule":
        found["spec"] = sorted(found["spec"])
    if found["kind"] == "ConfigMap":
        found["data"] = sorted(found["data"])
    templates = [found, (found.get("spec") or {}).get("template") or {}] if isinstance(found.get("spec"), dict) else [found]
    for part in templates:
        for label in OF_A_RELEASE:
            (part.get("metadata", {}).get("labels") or {}).pop(label, None)
    return found


def files() -> dict[str, str]:
    """File name → text."""
    shown = scene(SHOWN)
    written = {f"{component}.yaml": _yaml(shown, component) for component in COMPONENTS}
    return written | {"digests.txt": _table()}


def _yaml(render: Render, component: str) -> str:
    found = [without_version(o) for o in render.objects if o["metadata"].get("labels", {}).get(COMPONENT) == component]
    return yaml.safe_dump_all(sorted(found, key=_name), sort_keys=True, width=140)


def _table() -> str:
    """For each scene what it has beyond the default release, or made otherwise, and what it lacks of that."""
    lines, usual = [], _digests(scene(SHOWN))
    for name in SCENES:
        found = _digests(scene(name))
        lines.append(name)
        lines += [f"  {digest}  {what}" for what, digest in found.items() if name == SHOWN or usual.get(what) != digest]
        lines += [f"  without     {what}" for what in usual if what not in found]
    return "\n".join(lines) + "\n"


def _digests(render: Render) -> dict[str, str]:
    found = sorted(map(without_version, render.objects), key=_name)
    return {_name(o): hashlib.sha256(json.dumps(o, sort_keys=True).encode()).hexdigest()[:10] for o in found}


def _name(found: Object) -> str:
    return f"{found['kind']}/{found['metadata']['name']}"


def rewrite() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
    write_table(CHART / "README.md")


if __name__ == "__main__":
    rewrite()

"""The real helm, two versions of it: what it renders, parsed, and what it says."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.tools import ROOT, missing

CHART = ROOT / "helm" / "specdec"
NAMESPACE = "models"
RELEASE = "demo"
HELM_3, HELM_4 = "3.17.2", "4.3.1"
Values = dict[str, Any]
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@functools.cache
def folders() -> dict[str, str]:
    """Version of helm → folder of helm and kubectl; fetched the first time."""
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "helm.py")], capture_output=True, text=True, timeout=110)
    if done.returncode:
        missing(
            "helm", f"tools/helm.py fetches it and said: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.stdout}"
        )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def helm(*arguments: str, version: str = HELM_4, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """One command. Nothing of the user's own helm is read."""
    home = Path(folders()[version]) / "home"
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin", "HELM_NAMESPACE": NAMESPACE, "GOGC": "off"}  # a render is over before it pays
    program = str(Path(folders()[version]) / "helm")
    return subprocess.run([program, *arguments], input=stdin, env=env, capture_output=True, text=True, timeout=60)


def template(
    values: Values | None = None,
    files: Sequence[Path] = (),
    *,
    version: str = HELM_4,
    release: str = RELEASE,
    chart: Path = CHART,
    more: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """`helm template`: the files in order, then `values`."""
    arguments = ["template", release, str(chart), *(word for file in files for word in ("-f", str(file))), *more]
    if values is None:
        return helm(*arguments, version=version)
    return helm(*arguments, "-f", "-", version=version, stdin=json.dumps(values))

"""Programs from npm: the types of custom resources, and the writer of the table of values. Installed once from the lock."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.helm.objects import Object
from tests.helm.programs import CHART
from tests.npm import node_with

HERE = Path(__file__).parent / "node"


@functools.cache
def node() -> str:
    """Path of Node, with the packages of the lock beside check.js."""
    return node_with(HERE)


def custom_problems(objects: Sequence[Object]) -> list[list[str]]:
    """What is wrong with each custom resource, by its project's own types: unknown and missing fields, types, patterns, bounds."""
    lines = "\n".join(json.dumps(found) for found in objects)
    done = subprocess.run([node(), str(HERE / "check.js")], input=lines, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_table(readme: Path) -> None:
    """The section "Parameters" of `readme`, from the comments in values.yaml; AssertionError names a value without a comment."""
    script = HERE / "node_modules/@bitnami/readme-generator-for-helm/bin/index.js"
    values = CHART / "values.yaml"
    done = subprocess.run(
        [node(), str(script), "--values", str(values), "--readme", str(readme)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "ERROR" not in done.stdout, done.stdout + done.stderr

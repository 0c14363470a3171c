"""What an image needs, one requirement a line, from pyproject.toml: the base, and the extras named as arguments.

The versions come from requirements.lock, which pip takes as constraints. Apart from the wheel of specdec, so that a change of our code
leaves the image's large layer as it is. Standard library only.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Raises SystemExit for an extra that is not there."""
    project = tomllib.loads(pyproject.read_text())["project"]
    found: list[str] = list(project["dependencies"])
    for extra in extras:
        if extra not in project["optional-dependencies"]:
            sys.exit(f"{pyproject} has no extra {extra!r}, only: {', '.join(project['optional-dependencies'])}")
        found += project["optional-dependencies"][extra]
    return found


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])))

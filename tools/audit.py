"""What is installed, against what was decided: offline, in a second.

The lock pins every package exactly, what is installed is what the lock says, the lock satisfies pyproject.toml, and no package misses one
that it needs. With --vulnerabilities also what is known about the locked versions, by pip-audit, which asks a service on the network.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!_-]+)")
OWN = "specdec"


def pins(lock: str) -> tuple[dict[str, str], list[str]]:
    """Versions by name, and complaints about lines that pin nothing."""
    found: dict[str, str] = {}
    complaints = []
    for number, line in enumerate(lock.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = PIN.fullmatch(line.strip())
        if match is None:
            complaints.append(f"requirements.lock:{number}: {line!r} is not name==version; an address or a range is not a pin")
        elif (name := canonicalize_name(match[1])) in found:
            complaints.append(f"requirements.lock:{number}: {match[1]} is pinned twice")
        else:
            found[name] = match[2]
    return found, complaints


def wanted(pyproject: Mapping[str, object], locked: Mapping[str, str]) -> Iterator[str]:
    """What pyproject.toml asks for and the lock does not give."""
    project = pyproject["project"]
    assert isinstance(project, dict)
    extras = project["optional-dependencies"].values()
    for text in (*project["dependencies"], *(text for extra in extras for text in extra)):
        asked = Requirement(text)
        version = locked.get(canonicalize_name(asked.name))
        if version is None:
            yield f"pyproject.toml asks for {asked}, which requirements.lock does not hold; run make lock"
        elif not asked.specifier.contains(version, prereleases=True):
            yield f"pyproject.toml asks for {asked}, requirements.lock holds {version}; run make lock"


def different(locked: Mapping[str, str], installed: Mapping[str, str]) -> Iterator[str]:
    """`installed` versions may carry a label of the build (+cpu), which the lock leaves out."""
    for name, version in locked.items():
        if name not in installed:
            yield f"{name}=={version} is locked and not installed; run make setup"
        elif installed[name].partition("+")[0] != version:
            yield f"{name} {installed[name]} is installed, {version} is locked; run make setup"


def unmet(installed: Mapping[str, str]) -> Iterator[str]:
    """Packages that miss another one, or find a version that they do not work with."""
    for distribution in metadata.distributions():
        for text in distribution.requires or ():
            needed = Requirement(text)
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            version = installed.get(canonicalize_name(needed.name))
            if version is None or not needed.specifier.contains(version, prereleases=True):
                yield f"{distribution.name} needs {needed}, installed is {version or 'none'}"


def vulnerabilities() -> int:
    program = shutil.which("pip-audit")
    if program is None:
        print("pip-audit is not installed: pipx install pip-audit")
        return 1
    return subprocess.run([program, "--no-deps", "--disable-pip", "-r", ROOT / "requirements.lock"]).returncode


def main() -> int:
    locked, complaints = pins((ROOT / "requirements.lock").read_text())
    installed: dict[str, str] = {canonicalize_name(d.name): d.version for d in metadata.distributions()}
    complaints += wanted(tomllib.loads((ROOT / "pyproject.toml").read_text()), locked)
    complaints += [*different(locked, installed), *unmet(installed)]
    for name in sorted(installed.keys() - locked.keys() - {OWN, "pip"}):
        print(f"note: {name} {installed[name]} is installed and not locked: nothing here may need it")
    print("\n".join(complaints) or f"{len(locked)} dependencies are what was decided; known vulnerabilities: make audit (asks the network)")
    if complaints:
        return 1
    return vulnerabilities() if "--vulnerabilities" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())

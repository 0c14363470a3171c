"""Wheels made of what .venv has installed, so that pip can do what the Dockerfile says without a network, and in seconds."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name

LEFT_OUT = ("INSTALLER", "REQUESTED", "direct_url.json", "RECORD")


def needed(requirements: Iterable[str]) -> list[str]:
    """Names of the packages that the requirements mean, and of all that those need."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in found and not wanted.extras:
            continue
        found.add(name)
        for text in metadata.distribution(name).requires or ():
            further = Requirement(text)
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                waiting.append(further)
    return sorted(found)


def fill(folder: Path, names: Iterable[str]) -> None:
    """A wheel of each package, uncompressed. Programs beside it are made anew by pip from its entry points."""
    folder.mkdir(parents=True, exist_ok=True)
    supported = {str(tag): place for place, tag in enumerate(sys_tags())}
    for name in names:
        _pack(folder, metadata.distribution(name), supported)


def _pack(folder: Path, package: metadata.Distribution, supported: dict[str, int]) -> None:
    tags = [line.partition(":")[2].strip() for line in (package.read_text("WHEEL") or "").splitlines() if line.startswith("Tag:")]
    tag = min((tag for tag in tags if tag in supported), key=supported.__getitem__)
    stem = f"{canonicalize_name(package.metadata['Name']).replace('-', '_')}-{package.version}"
    rows = []
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as wheel:
        info = ""
        for path in package.files or ():
            if path.parts[0] == ".." or path.suffix == ".pyc":
                continue
            if path.parts[0].endswith(".dist-info"):
                info = path.parts[0]
                if path.name in LEFT_OUT:
                    continue
            wheel.write(str(path.locate()), _renamed(str(path), info, stem))
            rows.append(f"{_renamed(str(path), info, stem)},,")
        wheel.writestr(f"{stem}.dist-info/RECORD", "\n".join([*rows, f"{stem}.dist-info/RECORD,,"]) + "\n")


def _renamed(path: str, info: str, stem: str) -> str:
    """Older tools wrote the folder of metadata in other letters than the wheel's name has by today's rule."""
    return f"{stem}.dist-info{path[len(info) :]}" if info and path.startswith(info + "/") else path

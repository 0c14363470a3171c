"""Carries out a stage of the Dockerfile without a container engine: COPY copies, RUN runs its own words, on this machine's system as base.

An instruction, a flag or a system package that is not known here is an error: a step that nobody has tried does not get into an image.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.images.dockerfile import Dockerfile, Stage, Step, filled
from tests.images.sandbox import Sandbox
from tests.tools import require_tool

SAID_ELSEWHERE = ("LABEL", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD", "USER")  # nothing to do while building
APT = re.compile(r"apt-get update && apt-get install -y --no-install-recommends (?P<packages>[\w+. -]+) && rm -rf /var/lib/apt/lists/\*")
SYSTEM_PACKAGES = {"g++": "g++"}  # Debian's name → the program that stands for it here
CACHE = "type=cache,target=/root/.cache/pip"
LONGEST_RUN_S = 900


@dataclass(slots=True)
class Builder:
    """`outside`, `mounts`: what network and compiler are for this build, as variables and folders that each RUN gets as well."""

    dockerfile: Dockerfile
    context: Path
    folder: Path
    outside: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, Path] = field(default_factory=dict)
    built: dict[str, Path] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)

    def build(self, name: str) -> Path:
        """The tree of a stage."""
        if name in self.built:
            return self.built[name]
        stage = self.dockerfile.stages[name]
        tree = self.folder / name
        tree.mkdir(parents=True)
        if stage.base in self.dockerfile.stages:
            _linked(self.build(stage.base), tree)
        self._carry_out(stage, tree)
        self.built[name] = tree
        return tree

    def environment(self, name: str) -> dict[str, str]:
        return self.dockerfile.pairs(name, "ENV")

    def _carry_out(self, stage: Stage, tree: Path) -> None:
        environment = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin", "HOME": "/root"}
        environment |= self.environment(stage.base) if stage.base in self.dockerfile.stages else {}
        arguments: dict[str, str] = {}
        workdir = "/"
        for step in stage.steps:
            if step.word == "ARG":
                arguments |= {name: value or self.dockerfile.arguments.get(name, "") for name, value in step.pairs().items()}
            elif step.word == "ENV":
                environment |= {name: filled(value, arguments) for name, value in step.pairs().items()}
            elif step.word == "WORKDIR":
                workdir = step.rest
                (tree / workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif step.word == "COPY":
                self._copy(step, tree, workdir)
            elif step.word == "RUN":
                self._run(step, tree, workdir, environment | arguments)
            elif step.word not in SAID_ELSEWHERE:
                raise AssertionError(f"Dockerfile:{step.line}: nobody has tried {step.word}")

    def _copy(self, step: Step, tree: Path, workdir: str) -> None:
        unknown = step.flags.keys() - {"from"}
        assert not unknown, f"Dockerfile:{step.line}: nobody has tried COPY with {unknown}"
        *sources, target = step.rest.split()
        origin = self.build(step.flags["from"]) if "from" in step.flags else self.context
        into = tree / os.path.join(workdir, target).lstrip("/")
        for source in sources:
            found = origin / source.lstrip("/")
            assert found.exists(), f"Dockerfile:{step.line}: {source} does not go to the builder; see .dockerignore"
            if found.is_dir():
                into.mkdir(parents=True, exist_ok=True)
                _linked(found, into)
            else:
                place = into / found.name if target.endswith("/") or len(sources) > 1 else into
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, place)

    def _run(self, step: Step, tree: Path, workdir: str, environment: dict[str, str]) -> None:
        assert step.flags in ({}, {"mount": CACHE}), f"Dockerfile:{step.line}: nobody has tried RUN with {step.flags}"
        if packages := APT.fullmatch(step.rest):
            for package in packages["packages"].split():
                assert package in SYSTEM_PACKAGES, f"Dockerfile:{step.line}: nobody has tried the system's {package}"
                require_tool(SYSTEM_PACKAGES[package])
            return
        assert "apt-get" not in step.rest, f"Dockerfile:{step.line}: packages of the system are installed in one step of their own"
        words = ["sh", "-c", step.rest]
        command = Sandbox(tree, self.mounts).command(words, environment | dict(self.outside), workdir=workdir, writable=True)
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_RUN_S)
        assert done.returncode == 0, f"Dockerfile:{step.line}: {step.rest}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        self.ran.append(step.rest)


def _linked(source: Path, target: Path) -> None:
    """Merges a folder into another one; files are links to the same content, which nobody changes in place."""
    for folder, folders, names in os.walk(source):
        into = target / os.path.relpath(folder, source)
        into.mkdir(exist_ok=True)
        for name in [*names, *(one for one in folders if os.path.islink(os.path.join(folder, one)))]:
            place = into / name
            place.unlink(missing_ok=True)
            os.link(os.path.join(folder, name), place, follow_symlinks=False)
        folders[:] = [one for one in folders if not os.path.islink(os.path.join(folder, one))]

"""Reads a Dockerfile, as far as ours goes: an instruction that it does not know is an error, never passed over."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

WORDS = ("ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "LABEL", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD")
_PAIR = re.compile(r'([\w.]+)=("(?:[^"\\]|\\.)*"|\S*)')
_NAME = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Step:
    """`flags`: the leading `--name=value` words. `rest`: what follows them, its lines joined."""

    word: str
    flags: dict[str, str]
    rest: str
    line: int

    def pairs(self) -> dict[str, str]:
        """Of ENV, LABEL and ARG: name → value without quotes; the value of `ARG NAME` is empty."""
        if self.word == "ARG" and "=" not in self.rest:
            return {self.rest: ""}
        found = {name: value.strip('"') for name, value in _PAIR.findall(self.rest)}
        if not found:
            raise ValueError(f"Dockerfile:{self.line}: {self.word} {self.rest!r} is not name=value")
        return found

    def words(self) -> list[str]:
        """Of ENTRYPOINT and CMD. Raises ValueError where a shell would be between the container's end and the process."""
        if not self.rest.startswith("["):
            raise ValueError(f"Dockerfile:{self.line}: {self.word} is not in exec form")
        return [str(word) for word in json.loads(self.rest)]


@dataclass(slots=True)
class Stage:
    name: str
    base: str  # another stage's name, or an image as written
    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True)
class Dockerfile:
    arguments: dict[str, str]  # those before the first stage
    stages: dict[str, Stage]

    def line(self, name: str) -> list[Stage]:
        """The stage and what it is made from, oldest first."""
        stage = self.stages[name]
        return [*self.line(stage.base), stage] if stage.base in self.stages else [stage]

    def steps(self, name: str, word: str) -> list[Step]:
        """Of a stage and what it is made from, in order."""
        return [step for stage in self.line(name) for step in stage.steps if step.word == word]

    def pairs(self, name: str, word: str) -> dict[str, str]:
        """The last value of each name: environment, labels or build arguments of a stage."""
        return {key: value for step in self.steps(name, word) for key, value in step.pairs().items()}

    def process(self, name: str) -> tuple[list[str], list[str]]:
        """Entry point and command that a container of this stage starts."""
        return self.steps(name, "ENTRYPOINT")[-1].words(), self.steps(name, "CMD")[-1].words()


def read(path: Path) -> Dockerfile:
    found = Dockerfile({}, {})
    stage: Stage | None = None
    for step in _steps(path.read_text()):
        if step.word == "FROM":
            base, _, name = step.rest.partition(" AS ")
            stage = found.stages[name] = Stage(name, base)
        elif stage is not None:
            stage.steps.append(step)
        elif step.word == "ARG":
            found.arguments |= step.pairs()
        else:
            raise ValueError(f"Dockerfile:{step.line}: {step.word} before the first FROM")
    return found


def _steps(text: str) -> list[Step]:
    found = []
    pending, began = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        began = began if pending else number
        pending += line.strip().removesuffix("\\")
        if line.rstrip().endswith("\\"):
            continue
        found.append(_step(pending.strip(), began))
        pending = ""
    return found


def _step(line: str, number: int) -> Step:
    word, _, rest = line.partition(" ")
    if word not in WORDS:
        raise ValueError(f"Dockerfile:{number}: the tests do not know {word}")
    flags = {}
    while match := re.match(r"--([\w-]+)=(\S+)\s+", rest):
        flags[match[1]] = match[2]
        rest = rest[match.end() :]
    return Step(word, flags, rest.strip(), number)


def filled(text: str, values: dict[str, str]) -> str:
    """`${NAME}` by its value. Raises KeyError for a name that nobody declared."""
    return _NAME.sub(lambda match: values[match[1]], text)

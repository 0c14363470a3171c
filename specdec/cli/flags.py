"""Flags that set one field of a request each: how they are declared, read, and named when the service refuses what they say."""

from __future__ import annotations

import argparse
import enum
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import InvalidRequest, SpecdecError, Unsupported

Reader = Callable[[str, str], Any]  # flag, what was typed → value. Raises InvalidRequest naming the flag


@dataclass(frozen=True, slots=True)
class Flag:
    """`field` = the field it sets, as errors of the service name it. Flags with the same `instead_of` cannot be combined.

    `many`: may be given several times. `value`: the flag takes no argument and means this. `pair`: `--no-…` means the opposite.
    """

    name: str
    field: str
    help: str
    metavar: str | None = None
    read: Reader | None = None
    many: bool = False
    value: bool | None = None
    pair: bool = False
    instead_of: str = ""
    required: bool = False  # one of those with the same `instead_of` must be given

    @property
    def key(self) -> str:
        """Its place in what argparse returns."""
        return self.name.removeprefix("--").replace("-", "_")

    def add_to(self, group: Any) -> None:
        if self.pair:
            group.add_argument(self.name, action=argparse.BooleanOptionalAction, help=self.help)
        elif self.value is not None:
            group.add_argument(self.name, action="store_const", const=self.value, help=self.help)
        else:
            group.add_argument(self.name, action="append" if self.many else "store", metavar=self.metavar, help=self.help)

    def given(self, arguments: argparse.Namespace) -> Any:
        """What it says, read; None when it was not given. Raises InvalidRequest."""
        said = getattr(arguments, self.key)
        if said is None or self.read is None:
            return said
        return [self.read(self.name, one) for one in said] if self.many else self.read(self.name, said)


def add_groups(parser: argparse.ArgumentParser, groups: Mapping[str, Iterable[Flag]]) -> dict[str, Any]:
    """Declares the flags under their titles; returns the groups by title."""
    made: dict[str, Any] = {}
    for title, flags in groups.items():
        made[title] = group = parser.add_argument_group(title)
        exclusive: dict[str, Any] = {}
        for flag in flags:
            if flag.instead_of and flag.instead_of not in exclusive:
                exclusive[flag.instead_of] = group.add_mutually_exclusive_group(required=flag.required)
            flag.add_to(exclusive.get(flag.instead_of, group))
    return made


def named(error: SpecdecError, flags: Iterable[Flag], arguments: argparse.Namespace) -> SpecdecError:
    """The error in the words of the command line: where a field was refused that a flag set, the flag comes first."""
    if not isinstance(error, InvalidRequest | Unsupported):
        return error
    path = error.field + "."
    meant = [
        flag for flag in flags if path.replace("[", ".").startswith(flag.field + ".") and getattr(arguments, flag.key, None) is not None
    ]
    if not meant:
        return error
    flag = max(meant, key=lambda flag: len(flag.field))  # a field of a field: the one that says it more exactly
    return type(error)(flag.name if flag.key == error.field else f"{flag.name} ({error.field})", error.remedy)


# ---------------------------------------------------------------- readers


def text(flag: str, said: str) -> str:
    return said


def whole(flag: str, said: str) -> int:
    try:
        return int(said)
    except ValueError:
        raise InvalidRequest(flag, f"must be a whole number, got {said!r}") from None


def count(flag: str, said: str) -> int:
    if (value := whole(flag, said)) < 1:
        raise InvalidRequest(flag, f"must be a whole number from 1 on, got {value}")
    return value


def number(flag: str, said: str) -> float:
    try:
        return float(said)
    except ValueError:
        raise InvalidRequest(flag, f"must be a number, got {said!r}") from None


def one_of(names: type[enum.Enum]) -> Reader:
    def read(flag: str, said: str) -> enum.Enum:
        try:
            return names(said)
        except ValueError:
            raise InvalidRequest(flag, f"must be one of: {', '.join(name.value for name in names)}; got {said!r}") from None

    return read


def text_or_file(flag: str, said: str) -> str:
    """@FILE = the file's text, @- = standard input, anything else is meant as it is."""
    return read_file(flag, said[1:]) if said.startswith("@") else said


def read_file(flag: str, name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(flag, f"{name}: {getattr(error, 'strerror', None) or error}") from error


def parsed(flag: str, said: str, wanted: str, kind: type | tuple[type, ...]) -> Any:
    """JSON, in place or @FILE, of a kind. `wanted` = what would be accepted."""
    return _json(flag, text_or_file(flag, said), wanted, kind)


def _json(flag: str, written: str, wanted: str, kind: type | tuple[type, ...]) -> Any:
    try:
        value = json.loads(written)
    except ValueError as error:
        raise InvalidRequest(flag, f"must be {wanted} ({error})") from error
    if not isinstance(value, kind):
        raise InvalidRequest(flag, f"must be {wanted}")
    return value


def ids(flag: str, said: str) -> list[int]:
    values = parsed(flag, said, "a JSON list, e.g. [1, 2, 3]", list)
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 32 for i in values):
        raise InvalidRequest(flag, "must be a JSON list of whole numbers from 0 on")
    return list(values)


def some_ids(flag: str, said: str) -> tuple[int, ...]:
    return tuple(ids(flag, said))


def bias(flag: str, said: str) -> dict[int, float]:
    wanted = 'a JSON object of token ids and numbers, e.g. {"42": -100, "7": 1.5}'
    values = parsed(flag, said, wanted, dict)
    try:
        if any(isinstance(number, bool | str) for number in values.values()):
            raise ValueError
        return {ids(flag, f"[{key}]")[0]: float(number) for key, number in values.items()}
    except (ValueError, TypeError, IndexError, InvalidRequest):
        raise InvalidRequest(flag, f"must be {wanted}") from None


def turns(flag: str, said: str) -> list[dict[str, str]]:
    values = parsed(flag, said, 'a JSON list, e.g. [{"role": "user", "content": "…"}]', list)
    if not values or not all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in values):
        raise InvalidRequest(flag, 'each turn must be {"role": "…", "content": "…"}, and there must be one')
    return list(values)


def variable(flag: str, said: str) -> tuple[str, Any]:
    name, separator, value = said.partition("=")
    try:
        if name and separator:
            return name, json.loads(value)
    except ValueError:
        pass
    raise InvalidRequest(flag, f"must be NAME=JSON, e.g. enable_thinking=false or tone='\"dry\"', got {said!r}")


def schema(flag: str, said: str) -> str:
    """The text as it was written: the order of its keys is the order of the answer's."""
    written = text_or_file(flag, said)
    _json(flag, written, 'a JSON schema, e.g. {"type": "object"}, or @FILE', (dict, bool))
    return written


def options(said: Sequence[str]) -> list[str]:
    """The answers of a choice: several flags, or one JSON list of strings."""
    if len(said) == 1 and said[0].startswith(("[", "@")):
        values = parsed("--choice", said[0], 'an answer (and repeated), or a JSON list, e.g. ["yes", "no"]', list)
        if not values or not all(isinstance(value, str) for value in values):
            raise InvalidRequest("--choice", 'must be a JSON list of strings, e.g. ["yes", "no"]')
        return list(values)
    return list(said)

"""What is kept of a turn: raw times, ids, where each token came from, and what was seen beside it. One JSON object a turn. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.bench.experiment import Cell, Done, Turn
from specdec.bench.load import Answer
from specdec.terms import Origin

DIGITS = 5  # of seconds
LETTERS: dict[Origin | None, str] = {Origin.ACCEPTED: "A", Origin.CORRECTED: "C", Origin.BONUS: "B", Origin.PLAIN: "P", None: "?"}
ORIGINS = {letter: origin for origin, letter in LETTERS.items()}


@dataclass(frozen=True, slots=True)
class Said:
    """One answer. `arrivals` = (seconds since it was asked or due, tokens that came); `origins` a letter a token, see LETTERS; `text_hash`
    names the text; `stats` as the service told them; `error` = why there is no whole answer."""

    kind: str
    seed: int
    token_ids: tuple[int, ...]
    text_hash: str
    origins: str
    arrivals: tuple[tuple[float, int], ...]
    total_s: float
    stats: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    error: str = ""

    @property
    def first_s(self) -> float:
        return self.arrivals[0][0] if self.arrivals else self.total_s

    @property
    def behind_first(self) -> int:
        """Tokens behind the first arrival."""
        return sum(count for _, count in self.arrivals[1:])

    @property
    def decode_s(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1][0] - self.arrivals[0][0] if self.arrivals else 0.0

    def count(self, name: str) -> float:
        return float(self.stats.get(name, 0))


@dataclass(frozen=True, slots=True)
class Run:
    """One turn. `settings` in force, as the service told them; `seen` = phases and memory, empty where nobody looked."""

    turn: Turn
    seconds: float
    said: tuple[Said, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    seen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> tuple[Said, ...]:
        """Those that came whole."""
        return tuple(one for one in self.said if not one.error)

    @property
    def tokens(self) -> int:
        return sum(len(one.token_ids) for one in self.said)

    @property
    def rate(self) -> float:
        """Tokens a second of all streams together, prompts included in the time."""
        return self.tokens / self.seconds if self.seconds else 0.0


def run_of(done: Done) -> Run:
    said = tuple(_said(question.kind, question.seed, answer) for question, answer in zip(done.questions, done.slice.answers, strict=True))
    settings = next((answer.settings for answer in done.slice.answers if not answer.error), {})
    return Run(done.turn, round(done.slice.seconds, DIGITS), said, settings, done.seen)


def _said(kind: str, seed: int, answer: Answer) -> Said:
    return Said(
        kind,
        seed,
        answer.token_ids,
        hashlib.blake2b(answer.text.encode(), digest_size=8).hexdigest(),
        "".join(LETTERS.get(origin, "?") for origin in answer.origins),
        tuple((round(seconds, DIGITS), count) for seconds, count in answer.arrivals),
        round(answer.total_s, DIGITS),
        asdict(answer.stats),
        answer.prompt_tokens,
        answer.error,
    )


def to_json(run: Run) -> dict[str, Any]:
    cell = {name: value for name, value in asdict(run.turn.cell).items() if value is not None}
    answers = [{**asdict(one), "token_ids": list(one.token_ids)} for one in run.said]
    return {
        **cell, "repeat": run.turn.repeat, "way": run.turn.way, "seconds": run.seconds,
        "settings": dict(run.settings), "seen": dict(run.seen), "answers": answers,
    }  # fmt: skip


def from_json(told: Mapping[str, Any]) -> Run:
    """Raises KeyError, TypeError or ValueError for what is no run."""
    return Run(turn_of(told), float(told["seconds"]), tuple(_read(one) for one in told["answers"]), told["settings"], told["seen"])


def turn_of(told: Mapping[str, Any]) -> Turn:
    cell = {name: told[name] for name in ("concurrency", "temperature", "prompt_tokens", "max_tokens", "kind", "rate") if name in told}
    return Turn(Cell(**cell), int(told["repeat"]), str(told["way"]))


def _read(told: Mapping[str, Any]) -> Said:
    arrivals = tuple((float(seconds), int(count)) for seconds, count in told["arrivals"])
    return Said(**{**told, "token_ids": tuple(told["token_ids"]), "arrivals": arrivals})


def origins_of(said: Said) -> Sequence[Origin | None]:
    return [ORIGINS[letter] for letter in said.origins]

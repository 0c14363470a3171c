"""The same questions through one running service in several ways, in short turns.

A repeat asks one batch of questions in every cell (number of streams and temperature), each way in turn, the order rotating from repeat
to repeat, before the next repeat begins: a slow minute of the machine touches all ways, and every cell has something from the first
repeat on. A turn is the unit that is timed; report.py compares turns of the same cell and repeat in pairs.

    none    disable_spec_decode: the target alone
    fixed   a block of the same length every round: the service's own, or --num-speculative-tokens
    auto    enable_adaptive_verification: the service chooses the length, up to --num-speculative-tokens
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from specdec.bench.load import Question, Slice, ask_all
from specdec.client import Client, Options, Prompt
from specdec.errors import InvalidRequest, Unsupported
from specdec.terms import SamplingParams

NONE, FIXED, AUTO = "none", "fixed", "auto"
WAYS = (NONE, FIXED, AUTO)
WARM_UP_TOKENS = 8
DRAFT_S = 5.0


@dataclass(frozen=True, slots=True)
class Cell:
    concurrency: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.concurrency} stream{'s' if self.concurrency > 1 else ''}, T = {self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Turn:
    cell: Cell
    repeat: int
    way: str


@dataclass(frozen=True, slots=True)
class Done:
    turn: Turn
    questions: tuple[Question, ...]
    slice: Slice


@dataclass(frozen=True, slots=True)
class Experiment:
    """`batch` = questions of a turn, rounded up so that every stream has the same number. `num_speculative_tokens` None = the service's."""

    prompts: Sequence[tuple[str, Prompt]]
    ways: tuple[str, ...] = WAYS
    concurrencies: tuple[int, ...] = (1, 4, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    repeats: int = 5
    batch: int = 4
    sampling: SamplingParams = SamplingParams(max_tokens=128)
    num_speculative_tokens: int | None = None

    @property
    def cells(self) -> list[Cell]:
        return [Cell(streams, temperature) for temperature in self.temperatures for streams in self.concurrencies]

    @property
    def baseline(self) -> str:
        """What the others are compared with."""
        return NONE if NONE in self.ways else self.ways[0]

    def turns(self) -> Iterator[Turn]:
        for repeat in range(self.repeats):
            first = repeat % len(self.ways)
            for cell in self.cells:
                for way in (*self.ways[first:], *self.ways[:first]):
                    yield Turn(cell, repeat, way)

    def questions(self, turn: Turn) -> tuple[Question, ...]:
        """Equal for all ways of a cell and repeat; a repeat goes on in the list where the one before it ended."""
        count = math.ceil(max(self.batch, turn.cell.concurrency) / turn.cell.concurrency) * turn.cell.concurrency
        numbers = range(turn.repeat * count, (turn.repeat + 1) * count)
        return tuple(Question(*self.prompts[number % len(self.prompts)], seed=number) for number in numbers)

    def options(self, way: str) -> Options:
        k = self.num_speculative_tokens
        if way == NONE:
            return {"disable_spec_decode": True}
        return {"enable_adaptive_verification": way == AUTO, **({} if k is None else {"num_speculative_tokens": k})}

    def sampling_of(self, cell: Cell) -> SamplingParams:
        return replace(self.sampling, temperature=cell.temperature)


@dataclass(slots=True)
class Outcome:
    """Filled while the experiment runs, so that a part of it is worth something."""

    experiment: Experiment
    done: list[Done] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False


async def run(client: Client, outcome: Outcome, tell: Callable[[Turn, float | None], None]) -> None:
    """`tell` hears of every turn: before it with None, after it with its seconds. Ways that the service does not serve are left out."""
    experiment = outcome.experiment = await _served(client, outcome)
    for turn in experiment.turns():
        questions = experiment.questions(turn)
        tell(turn, None)
        asked = ask_all(client, questions, experiment.sampling_of(turn.cell), experiment.options(turn.way), turn.cell.concurrency)
        done = Done(turn, questions, await asked)
        outcome.done.append(done)
        tell(turn, done.slice.seconds)
    outcome.complete = True


async def _served(client: Client, outcome: Outcome) -> Experiment:
    """The experiment with those ways that the service accepts. Each is tried on short answers, which warms it up as well."""
    experiment = outcome.experiment
    if set(experiment.ways) - {NONE} and not await _draft_there(client):
        outcome.notes.append("the service has no draft: it can only propose what a text repeats")
    kept = []
    for way in experiment.ways:
        try:
            await _warm_up(client, experiment, way)
            kept.append(way)
        except Unsupported as error:
            outcome.notes.append(f"{way} is left out: the service answered that it does not serve it ({error})")
    if not kept:
        raise InvalidRequest("--compare", "the service serves none of these ways: " + ", ".join(experiment.ways))
    return replace(experiment, ways=tuple(kept))


async def _draft_there(client: Client) -> bool:
    """An orchestrator serves before its draft has connected, so it is given DRAFT_S."""
    deadline = time.monotonic() + DRAFT_S
    while not (there := (await client.get_model_info()).draft_available) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return there


async def _warm_up(client: Client, experiment: Experiment, way: str) -> None:
    most = max(experiment.concurrencies)
    questions = [Question(*experiment.prompts[number % len(experiment.prompts)], seed=number) for number in range(most)]
    for temperature in experiment.temperatures:
        short = replace(
            experiment.sampling, temperature=temperature, max_tokens=min(WARM_UP_TOKENS, experiment.sampling.max_tokens or WARM_UP_TOKENS)
        )
        await ask_all(client, questions, short, experiment.options(way), most)

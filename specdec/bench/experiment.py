"""The same questions through one running service in several ways, in short turns.

A repeat asks one batch of questions in every cell of the grid, each way in turn, the order rotating from repeat to repeat, before the next
repeat begins: a slow minute of the machine touches all ways, and every cell has something from the first repeat on. A turn is the unit that
is timed; report.py compares turns of the same cell and repeat in pairs.

    none    disable_spec_decode: the target alone
    fixed   a block of the same length every round: the service's own, or --num-speculative-tokens
    auto    enable_adaptive_verification: the service chooses the length, up to --num-speculative-tokens

A target that keeps prompts in its prefix cache would give a repeat's first way the slow prompts and the others the fast ones. So, with
`primed`, each question is asked for one token before a repeat's ways, and all of them find its prompt there.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.bench.arrivals import MAX_OPEN, poisson
from specdec.bench.load import Question, Slice, ask_all
from specdec.bench.prompts import as_text, lengthened, of_kind
from specdec.client import Client, Options, Prompt
from specdec.errors import InvalidRequest, Unavailable, Unsupported
from specdec.terms import SamplingParams

NONE, FIXED, AUTO = "none", "fixed", "auto"
WAYS = (NONE, FIXED, AUTO)
WARM_UP_TOKENS = 8
DRAFT_S = 5.0
AWAY_S, AWAY_PAUSE_S = 60.0, 2.0  # a turn is asked again for so long where nobody is there, so often
ALL_KINDS = "all"


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid. `rate` = questions a second of an open loop, None = a closed loop of `concurrency` streams; `prompt_tokens`
    None = prompts as they are; `max_tokens` None = the experiment's."""

    concurrency: int
    temperature: float
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    kind: str = ALL_KINDS
    rate: float | None = None

    @property
    def load(self) -> str:
        return f"{self.concurrency} stream{'s' if self.concurrency > 1 else ''}" if self.rate is None else f"{self.rate:g} questions/s"

    @property
    def shape(self) -> str:
        """All but the load."""
        parts = [f"T = {self.temperature:g}", *([] if self.kind == ALL_KINDS else [self.kind])]
        parts += [] if self.prompt_tokens is None else [f"prompts of {self.prompt_tokens}"]
        return ", ".join(parts + ([] if self.max_tokens is None else [f"answers up to {self.max_tokens}"]))

    def __str__(self) -> str:
        return f"{self.load}, {self.shape}"


@dataclass(frozen=True, slots=True)
class Turn:
    cell: Cell
    repeat: int
    way: str


@dataclass(frozen=True, slots=True)
class Done:
    """`seen` = what was looked at beside the answers (watch.py)."""

    turn: Turn
    questions: tuple[Question, ...]
    slice: Slice
    seen: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Experiment:
    """`batch` = questions of a turn, rounded up so that every stream has the same number. `num_speculative_tokens` None = the service's.
    `rates` not empty = an open loop in place of `concurrencies`."""

    prompts: Sequence[tuple[str, Prompt]]
    ways: tuple[str, ...] = WAYS
    concurrencies: tuple[int, ...] = (1, 4, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    repeats: int = 5
    batch: int = 4
    sampling: SamplingParams = SamplingParams(max_tokens=128)
    num_speculative_tokens: int | None = None
    kinds: tuple[str, ...] = (ALL_KINDS,)
    prompt_lengths: tuple[int | None, ...] = (None,)
    output_lengths: tuple[int | None, ...] = (None,)
    rates: tuple[float, ...] = ()
    primed: bool = False

    @property
    def cells(self) -> list[Cell]:
        closed: list[tuple[int, float | None]] = [(streams, None) for streams in self.concurrencies]
        loads = [(MAX_OPEN, rate) for rate in self.rates] or closed
        shapes = itertools.product(self.temperatures, self.kinds, self.prompt_lengths, self.output_lengths)
        return [Cell(streams, t, prompt, output, kind, rate) for t, kind, prompt, output in shapes for streams, rate in loads]

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

    def left(self, known: Container[Turn]) -> Iterator[Turn]:
        """Turns without those of repeats that are whole. Of a repeat that was cut short all ways are asked again: they are compared in
        pairs since they were asked next to each other."""
        for _, together in itertools.groupby(self.turns(), key=lambda turn: (turn.repeat, turn.cell)):
            ways = list(together)
            if not all(turn in known for turn in ways):
                yield from ways

    def questions(self, turn: Turn) -> tuple[Question, ...]:
        """Equal for all ways of a cell and repeat; a repeat goes on in the list where the one before it ended."""
        prompts = of_kind(self.prompts, turn.cell.kind)
        count = self.batch
        if turn.cell.rate is None:
            count = math.ceil(max(self.batch, turn.cell.concurrency) / turn.cell.concurrency) * turn.cell.concurrency
        numbers = range(turn.repeat * count, (turn.repeat + 1) * count)
        return tuple(Question(*prompts[number % len(prompts)], seed=number) for number in numbers)

    def due(self, turn: Turn) -> list[float]:
        """Of an open loop."""
        return [] if turn.cell.rate is None else poisson(turn.cell.rate, self.batch, turn.repeat)

    def options(self, way: str) -> Options:
        k = self.num_speculative_tokens
        if way == NONE:
            return {"disable_spec_decode": True}
        return {"enable_adaptive_verification": way == AUTO, **({} if k is None else {"num_speculative_tokens": k})}

    def sampling_of(self, cell: Cell) -> SamplingParams:
        return replace(self.sampling, temperature=cell.temperature, max_tokens=cell.max_tokens or self.sampling.max_tokens)


@dataclass(slots=True)
class Outcome:
    """Filled while the experiment runs, so that a part of it is worth something."""

    experiment: Experiment
    done: list[Done] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False


Tell = Callable[[Turn, float | None], None]
Keep = Callable[[Done], None]
Look = Callable[[], Awaitable[Mapping[str, Any]]]


async def run(
    client: Client, outcome: Outcome, tell: Tell, keep: Keep | None = None, known: Container[Turn] = (), look: Look | None = None
) -> None:
    """`tell` hears of every turn: before it with None, after it with its seconds. `keep` takes what a turn found, else `outcome` holds it.
    Repeats of a cell that are whole in `known` are not asked again; ways that the service does not serve are left out. `look` is called
    behind every turn."""
    experiment = outcome.experiment = await _served(client, outcome)
    asker = _Asker(client, experiment, outcome.notes)
    for turn in list(experiment.left(known)):
        questions = await asker.questions(turn)
        tell(turn, None)
        found = await asker.ask(turn, questions)
        done = Done(turn, questions, found, await look() if look is not None else {})
        if keep is None:
            outcome.done.append(done)
        else:
            keep(done)
        tell(turn, done.slice.seconds)
    outcome.complete = True


class _Asker:
    """Holds one cell's questions of one repeat."""

    def __init__(self, client: Client, experiment: Experiment, notes: list[str]) -> None:
        self._client, self._experiment, self._notes = client, experiment, notes
        self._ready: tuple[Cell, int] | None = None
        self._questions: tuple[Question, ...] = ()

    async def questions(self, turn: Turn) -> tuple[Question, ...]:
        if self._ready == (turn.cell, turn.repeat):
            return self._questions
        self._questions = self._experiment.questions(turn)
        if (tokens := turn.cell.prompt_tokens) is not None:
            prompts = [await lengthened(q.prompt, tokens, q.seed, self._count) for q in self._questions]
            self._questions = tuple(Question(q.kind, prompt, q.seed) for q, prompt in zip(self._questions, prompts, strict=True))
        if self._experiment.primed:
            one = replace(self._experiment.sampling_of(turn.cell), max_tokens=1)
            await ask_all(self._client, self._questions, one, self._experiment.options(NONE), turn.cell.concurrency, tolerant=True)
        self._ready = (turn.cell, turn.repeat)
        return self._questions

    async def ask(self, turn: Turn, questions: Sequence[Question]) -> Slice:
        """Asked again where nobody was there: a service that restarts should not end a night of measuring. Raises Unavailable."""
        sampling, options = self._experiment.sampling_of(turn.cell), self._experiment.options(turn.way)
        due, patience = self._experiment.due(turn), time.monotonic() + AWAY_S
        while True:
            try:
                return await ask_all(self._client, questions, sampling, options, turn.cell.concurrency, due, tolerant=True)
            except Unavailable as error:
                if time.monotonic() >= patience:
                    raise
                told = f"{turn.cell}, {turn.way}, repeat {turn.repeat + 1}: asked again, since nobody was there ({error})"[:200]
                self._notes += [told] if told not in self._notes else []
                await asyncio.sleep(AWAY_PAUSE_S)

    async def _count(self, prompt: Prompt) -> int:
        return len(await self._client.tokenize(prompt))  # type: ignore[arg-type]


async def _served(client: Client, outcome: Outcome) -> Experiment:
    """The experiment with those ways that the service accepts. Each is tried on short answers, which warms it up as well."""
    experiment = outcome.experiment
    if set(experiment.ways) - {NONE} and not await _draft_there(client):
        outcome.notes.append("the service has no draft: it can only propose what a text repeats")
    kept = []
    for way in experiment.ways:
        try:
            experiment = await _warmed_up(client, experiment, way, outcome.notes)
            kept.append(way)
        except Unsupported as error:
            outcome.notes.append(f"{way} is left out: the service answered that it does not serve it ({error})")
    if not kept:
        raise InvalidRequest("--compare", "the service serves none of these ways: " + ", ".join(experiment.ways))
    return replace(experiment, ways=tuple(kept))


async def _warmed_up(client: Client, experiment: Experiment, way: str, notes: list[str]) -> Experiment:
    """The experiment with prompts as the model takes them: one that was not trained to chat has no template for messages."""
    try:
        await _warm_up(client, experiment, way)
        return experiment
    except InvalidRequest as error:
        spoken = replace(experiment, prompts=[(kind, as_text(prompt)) for kind, prompt in experiment.prompts])
        if error.field != "messages" or spoken == experiment:
            raise
    notes.append("the model has no chat template: it is asked the text of the messages, without roles")
    await _warm_up(client, spoken, way)
    return spoken


async def _draft_there(client: Client) -> bool:
    """An orchestrator serves before its draft has connected, so it is given DRAFT_S."""
    deadline = time.monotonic() + DRAFT_S
    while not (there := (await client.get_model_info()).draft_available) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return there


async def _warm_up(client: Client, experiment: Experiment, way: str) -> None:
    most = max(experiment.concurrencies) if not experiment.rates else experiment.batch
    questions = [Question(*experiment.prompts[number % len(experiment.prompts)], seed=number) for number in range(most)]
    for temperature in experiment.temperatures:
        short = replace(
            experiment.sampling, temperature=temperature, max_tokens=min(WARM_UP_TOKENS, experiment.sampling.max_tokens or WARM_UP_TOKENS)
        )
        await ask_all(client, questions, short, experiment.options(way), most)

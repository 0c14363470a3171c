"""Where a round's time goes: one stream, with and without speculation, by the services' own metrics.

    python -m specdec.bench.rounds [--target-model DIR] [--draft-model DIR] [--max-tokens 96] [--temperature 0] [--json]

Starts a system of its own. Each way asks the prompts twice: for one token, then for all of them. The first is what prompts cost, and is
taken off, so that a mean is that of rounds that decode. Means per round in milliseconds:

    wire      from the Step's departure to its result, less queue and engine: both ways over gRPC, and both event loops; nothing for
              rounds that the target began by itself, whose way is beside the next one
    queue     in the target, before the engine step
    forward   the engine step, less the sampling in it
    sample    choosing the tokens of the round's rows, noise included
    wait      from a result to the next Step's departure: the orchestrator's turn, and what a miss waits for the draft
    rest      what the client sees beyond them: text, the way to it, and what overlaps with nothing else
    text      ids to characters and stop strings in the orchestrator, part of the rest
    draft     the draft's forward passes: beside the others, not behind them
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.bench.experiment import AUTO, FIXED, NONE, Experiment
from specdec.bench.load import PROMPTS, Question, Slice, ask_all, load_prompts
from specdec.bench.scrape import Samples, Total, added, added_to, scrape
from specdec.bench.system import DRAFT_MODEL, TARGET_MODEL, Models, Services, services
from specdec.bench.watch import ROUND, SOURCES
from specdec.client import Client
from specdec.errors import SpecdecError, Unsupported
from specdec.terms import SamplingParams

WAYS = (NONE, FIXED, AUTO)
BEHIND_EACH_OTHER = ("wire", "queue", "forward", "sample", "wait")
SHOWN = (*BEHIND_EACH_OTHER, "rest", "whole round", "text", "draft")


@dataclass(frozen=True, slots=True)
class Part:
    """What a set of questions added to each phase; None where the services do not tell it."""

    phases: Mapping[str, Total | None]
    rounds: float
    tokens: int
    decode_s: float  # from each answer's first token to its last


def mean_phases(whole: Part, first: Part) -> dict[str, float | None]:
    """Milliseconds a round of decoding, by the names in SHOWN: `whole` less `first`, which is the same for one token each. The client
    sees whole rounds between an answer's first arrival and its last."""
    rounds = max(1.0, whole.rounds - first.rounds)
    ms = {name: _per_round(whole.phases[name], first.phases[name], rounds) for name in SOURCES}
    engine, sample = ms.pop("engine"), ms["sample"]
    ms["forward"] = engine if engine is None or sample is None else engine - sample
    seen = 1e3 * whole.decode_s / rounds
    ms |= {"whole round": seen, "rest": seen - sum(ms[name] or 0.0 for name in BEHIND_EACH_OTHER)}
    return {name: ms[name] for name in SHOWN}


def _per_round(whole: Total | None, first: Total | None, rounds: float) -> float | None:
    return None if whole is None else 1e3 * (whole - (first or Total())).seconds / rounds


async def measure(running: Services, experiment: Experiment) -> tuple[dict[str, Any], list[str]]:
    """Figures by way, and notes on ways and phases that are not there."""
    found: dict[str, Any] = {}
    notes: list[str] = []
    async with Client(running.orchestrator.endpoint) as client:
        await client.wait_ready(10.0)
        questions = [Question(kind, prompt, seed) for seed, (kind, prompt) in enumerate(experiment.prompts)]
        for way in experiment.ways:
            try:
                first, _ = await _part(client, running, experiment, way, questions, 1)
                whole, answers = await _part(client, running, experiment, way, questions, experiment.sampling.max_tokens or 1)
            except Unsupported as error:
                notes.append(f"{way} is left out: the service does not serve it ({error})")
                continue
            tokens = max(1, whole.tokens - first.tokens)
            found[way] = {
                "ms_per_round": {name: value if value is None else round(value, 3) for name, value in mean_phases(whole, first).items()},
                "rounds": whole.rounds - first.rounds,
                "tokens_per_round": round(tokens / max(1.0, whole.rounds - first.rounds), 3),
                "ms_per_token": round(1e3 * whole.decode_s / tokens, 3),
                "answers": len(answers.answers),
            }
    for name in SHOWN:
        told = [figure["ms_per_round"] for figure in found.values()]
        if told and all(figure[name] is None for figure in told):
            notes.append(f"{name}: the {SOURCES.get(name, ('target',))[0]} does not tell it")
            continue
        for figure in told:  # a histogram appears with its first observation
            figure[name] = figure[name] or 0.0
    return found, notes


async def _part(
    client: Client, running: Services, experiment: Experiment, way: str, questions: Sequence[Question], max_tokens: int
) -> tuple[Part, Slice]:
    sampling = SamplingParams(temperature=experiment.temperatures[0], max_tokens=max_tokens, ignore_eos=True)
    before = await _look(running)
    answers = await ask_all(client, questions, sampling, experiment.options(way), 1)
    after = await _look(running)
    rounds = added(before["orchestrator"], after["orchestrator"], f"{ROUND}_count", phase="engine")
    decode_s = sum(a.arrivals[-1][0] - a.first_s for a in answers.answers if a.arrivals)
    return Part({name: _phase(before, after, name) for name in SOURCES}, rounds, answers.tokens, decode_s), answers


async def _look(running: Services) -> dict[str, Samples]:
    """Metrics are recorded a moment after what they tell of."""
    await asyncio.sleep(0.3)
    roles = dict.fromkeys(service.role for service in running.running)
    return {role: await scrape(running.of(role).metrics) for role in roles}


def _phase(before: Mapping[str, Samples], after: Mapping[str, Samples], name: str) -> Total | None:
    role, histogram, label = SOURCES[name]
    if role not in after:
        return None
    total = added_to(before[role], after[role], histogram, **({"phase": label} if label else {}))
    known = any(key[0] == f"{histogram}_count" and (not label or ("phase", label) in key[1]) for key in after[role])
    return total if known else None


def table(found: Mapping[str, Any]) -> str:
    titles = ["ms a round", *found]
    rows = [[name, *(_shown(figure["ms_per_round"][name]) for figure in found.values())] for name in SHOWN]
    rows += [["tokens a round", *(f"{figure['tokens_per_round']:.2f}" for figure in found.values())]]
    rows += [["ms a token", *(f"{figure['ms_per_token']:.2f}" for figure in found.values())]]
    return "\n".join("  ".join(cell.ljust(16) if i == 0 else cell.rjust(9) for i, cell in enumerate(row)) for row in [titles, *rows])


def _shown(value: float | None) -> str:
    return "not told" if value is None else f"{value:.2f}"


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """What the measurements with a system of their own share."""
    parser.add_argument("--target-model", type=Path, default=TARGET_MODEL)
    parser.add_argument("--draft-model", type=Path, default=DRAFT_MODEL)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-speculative-tokens", type=int, default=None, help="default: the service's")
    parser.add_argument("--json", action="store_true")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specdec.bench.rounds", description=__doc__.split("\n")[0] if __doc__ else "")
    add_model_flags(parser)
    parser.add_argument("--num-prompts", type=int, default=4, help="the first of the prompts (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        experiment = Experiment(
            prompts=load_prompts(args.prompts)[: args.num_prompts],
            ways=WAYS,
            temperatures=(args.temperature,),
            sampling=SamplingParams(max_tokens=args.max_tokens),
            num_speculative_tokens=args.num_speculative_tokens,
        )
        with services(Models(args.target_model, args.draft_model)) as running:
            found, notes = asyncio.run(measure(running, experiment))
    except SpecdecError as error:
        print(f"rounds: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"ways": found, "notes": notes}) if args.json else "\n".join([table(found), *(f"note: {note}" for note in notes)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

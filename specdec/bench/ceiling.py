"""What speculation could give with this draft on this machine, what it should give, and what it gives.

    python -m specdec.bench.ceiling [--target-model DIR] [--draft-model DIR] [--max-tokens 96] [--temperature 0] [--repeats 3] [--json]

Starts a system of its own and asks the prompts with `none` and `fixed` in turn, one stream. Where the tokens came from tells how often each
slot of a block was kept, of those blocks that judged it: alpha, and with it E, the tokens of a round whose draft is always ready. Then the
target's step is timed in this process with 1 and K + 1 rows, on the target's core, while another process keeps the draft's core busy.

    ceiling    E t(1) / t(K+1)
    expected   (h E + 1 - h)(t(1) + o) / (h t(K+1) + (1 - h) t(1) + o)     h: share of rounds with a block
                                                                         o: time of a plain token less t(1)
    reached    the ratio of time per token, with its 95 % interval over the repeats
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.bench import figures
from specdec.bench.experiment import FIXED, NONE, Done, Experiment, Outcome, run
from specdec.bench.load import load_prompts
from specdec.bench.rounds import add_model_flags
from specdec.bench.system import DRAFT_DTYPE, Models, default_pins, services
from specdec.client import Client
from specdec.errors import SpecdecError
from specdec.terms import SamplingParams


@dataclass(frozen=True, slots=True)
class Steps:
    """Milliseconds of a target's step, sampling included."""

    plain: float
    block: float


def summary(done: Sequence[Done], k: int, steps: Steps) -> dict[str, Any]:
    """`done` = turns of none and fixed, one stream; `k` = slots of a block."""
    speculative = [answer for one in done if one.turn.way == FIXED for answer in one.slice.answers]
    seen = [figures.rounds_seen(answer.origins) for answer in speculative]
    alphas = (figures.survival([one for rounds in seen for one in rounds]) + [0.0] * k)[:k]
    length = figures.expected_length(alphas)
    rounds = sum(answer.stats.num_rounds - 1 for answer in speculative)  # the first is the prompt's, and never has a block
    with_block = sum(answer.stats.num_spec_steps for answer in speculative)
    share = with_block / rounds if rounds else 0.0
    plain = _ms_per_token(done, NONE)
    host = max(0.0, statistics.fmean(plain.values()) - steps.plain)
    faster = _ms_per_token(done, FIXED)
    both = sorted(plain.keys() & faster.keys())
    reached = figures.ratio([plain[r] for r in both], [faster[r] for r in both])
    ceiling = figures.ceiling(length, steps.plain, steps.block)
    return {
        "k": k,
        "alpha": [round(alpha, 4) for alpha in alphas],
        "expected_length": round(length, 4),
        "share_of_rounds_with_a_block": round(share, 4),
        "hit_rate": round(statistics.fmean(answer.stats.hit_rate for answer in speculative), 4) if speculative else 0.0,
        "step_ms": {"1": round(steps.plain, 3), str(k + 1): round(steps.block, 3)},
        "host_ms": round(host, 3),
        "ceiling": round(ceiling, 4),
        "expected": round(figures.expected_gain(length, share, steps.plain, steps.block, host), 4),
        "reached": None if reached is None else round(reached.mean, 4),
        "interval": None if reached is None or reached.low is None else [round(reached.low, 4), round(reached.high or 0.0, 4)],
        "share_of_ceiling": None if reached is None else round(reached.mean / ceiling, 4),
    }


def _ms_per_token(done: Sequence[Done], way: str) -> dict[int, float]:
    """By repeat: decode time of all answers over their tokens behind the first arrival."""
    found = {}
    for one in done:
        answers = [answer for answer in one.slice.answers if answer.per_token_s is not None] if one.turn.way == way else []
        behind = sum(count for answer in answers for _, count in answer.arrivals[1:])
        if behind:
            found[one.turn.repeat] = 1e3 * sum(answer.arrivals[-1][0] - answer.first_s for answer in answers) / behind
    return found


def step_times(models: Models, k: int, temperature: float) -> Steps:
    """In this process, on the target's core; the draft's is busy with the draft's own steps, as when it serves."""
    from specdec.bench.step import run_bench_step  # torch comes with it

    pins = default_pins()
    with _pinned(pins.get("target", "")), _busy(models, pins.get("draft", "")):
        found = run_bench_step(models.target, [1, k + 1], sampling="t1" if temperature > 0 else "greedy")
    sampling = found["sampling_ms_per_row"]
    return Steps(found["rows"]["1"] + sampling, found["rows"][str(k + 1)] + (k + 1) * sampling)


@contextlib.contextmanager
def _pinned(core: str) -> Iterator[None]:
    before = os.sched_getaffinity(0) if core else set()
    if core:
        os.sched_setaffinity(0, {int(core)})
    try:
        yield
    finally:
        if core:
            os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _busy(models: Models, core: str) -> Iterator[None]:
    """Nothing, where there is no second core or no draft."""
    if not core or models.draft is None:
        yield
        return
    words = [sys.executable, "-m", "specdec.bench.ceiling", "--burn", str(models.draft), "--core", core]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield
        finally:
            process.kill()


def burn(model: Path, core: int) -> None:
    """Steps of the model, one row each, until this process is ended or has no parent."""
    from specdec.engine import EngineConfig, Segment, load_engine

    os.sched_setaffinity(0, {core})
    engine = load_engine(EngineConfig(model, dtype=DRAFT_DTYPE, self_test=False, kv_tokens=1024, reduced_head=True))
    slot = engine.kv.open()
    parent = os.getppid()
    print("burning", flush=True)
    while os.getppid() == parent:
        engine.forward([Segment(slot, engine.kv.length(slot), (5,), 0)])
        if engine.kv.length(slot) >= 256:
            engine.kv.truncate(slot, 128)


async def _ask(endpoint: str, experiment: Experiment) -> Outcome:
    outcome = Outcome(experiment)
    async with Client(endpoint) as client:
        await client.wait_ready(10.0)
        await run(client, outcome, lambda turn, seconds: None)
    return outcome


def measure(models: Models, experiment: Experiment) -> dict[str, Any]:
    with services(models) as running:
        outcome = asyncio.run(_ask(running.orchestrator.endpoint, experiment))
    settings = next(one.slice.answers[0].settings for one in outcome.done if one.turn.way == FIXED)
    k = int(settings["num_speculative_tokens"])
    return summary(outcome.done, k, step_times(models, k, experiment.temperatures[0])) | {"notes": outcome.notes}


def text(found: dict[str, Any]) -> str:
    steps = ", ".join(f"t({rows}) {ms:.2f} ms" for rows, ms in found["step_ms"].items())
    between = "" if found["interval"] is None else f"  (95 %: {found['interval'][0]:.2f} to {found['interval'][1]:.2f})"
    reached = "nothing was measured" if found["reached"] is None else f"{found['reached']:.2f}x{between}"
    share = "" if found["share_of_ceiling"] is None else f"\nof the ceiling   {100 * found['share_of_ceiling']:.0f} %"
    return (
        f"K                {found['k']}\n"
        f"alpha by slot    {', '.join(f'{alpha:.2f}' for alpha in found['alpha'])}\n"
        f"E                {found['expected_length']:.2f} tokens a round with a block\n"
        f"h                {found['share_of_rounds_with_a_block']:.2f} of rounds with a block, hits {found['hit_rate']:.2f}\n"
        f"steps            {steps}; beside them {found['host_ms']:.2f} ms a round\n"
        f"ceiling          {found['ceiling']:.2f}x\n"
        f"expected         {found['expected']:.2f}x\n"
        f"reached          {reached}{share}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specdec.bench.ceiling", description=__doc__.split("\n")[0] if __doc__ else "")
    add_model_flags(parser)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="prompts of a repeat (default: %(default)s)")
    parser.add_argument("--burn", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.burn is not None:
        burn(args.burn, args.core)
        return 0
    try:
        experiment = Experiment(
            prompts=load_prompts(args.prompts),
            ways=(NONE, FIXED),
            concurrencies=(1,),
            temperatures=(args.temperature,),
            repeats=args.repeats,
            batch=args.batch,
            sampling=SamplingParams(max_tokens=args.max_tokens, ignore_eos=True),
            num_speculative_tokens=args.num_speculative_tokens,
        )
        found = measure(Models(args.target_model, args.draft_model), experiment)
    except SpecdecError as error:
        print(f"ceiling: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found) if args.json else "\n".join([text(found), *(f"note: {note}" for note in found["notes"])]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

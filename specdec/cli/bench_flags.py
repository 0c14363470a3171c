"""Flags of `specdec bench` → what is to be measured. Refusals name the flag."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli import bench_sim, system
from specdec.cli.connection import add_credentials
from specdec.errors import InvalidRequest
from specdec.terms import SamplingParams

if TYPE_CHECKING:
    from specdec.bench.experiment import Experiment
    from specdec.bench.report import Asked

MOST = {
    "--concurrency": 1024, "--repeats": 10_000, "--batch": 10_000, "--max-tokens": 1 << 20, "--prompt-tokens": 1 << 20,
    "--num-speculative-tokens": 1024,
}  # fmt: skip
MOST_TURNS = 200_000


def _place(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must name a folder or a file")
    return Path(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoint", metavar="HOST:PORT", help="the orchestrator (default: a system of its own)")
    add_credentials(parser)
    grid = parser.add_argument_group("grid", "every combination is a cell")
    grid.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines with "prompt" or "messages" (default: twenty built in)')
    grid.add_argument("--kinds", default="all", metavar="KIND,…", help='"kind" in --prompts; all = mixed, each = one by one (default: all)')
    grid.add_argument("--prompt-tokens", metavar="N,…", help="make prompts so long, by notes in front (default: as they are)")
    grid.add_argument("--max-tokens", default="128", metavar="N,…", help="per answer (default: %(default)s)")
    grid.add_argument("--temperature", default="0,1", metavar="T,…", help="default: %(default)s")
    grid.add_argument("--concurrency", default="1,4,8", metavar="N,…", help="streams at once (default: %(default)s)")
    grid.add_argument("--arrivals", default="closed", metavar="HOW", help="closed = streams; poisson = at --rate, ready or not")
    grid.add_argument("--rate", metavar="R,…", help="questions a second, with --arrivals poisson")
    grid.add_argument("--compare", default="none,fixed,auto", metavar="WAY,…", help="default: %(default)s")
    how = parser.add_argument_group("measuring")
    how.add_argument("--repeats", type=int, default=5, metavar="N", help="pairs behind a ratio's interval (default: %(default)s)")
    how.add_argument("--batch", type=int, default=4, metavar="N", help="questions of a turn, at least one a stream (default: %(default)s)")
    how.add_argument("--ignore-eos", action="store_true", help="every answer has --max-tokens tokens")
    how.add_argument("--cold-prompts", action="store_true", help="a service that runs: do not ask each question once before its ways")
    how.add_argument("--state", type=Path, metavar="DIR", help="folder of `specdec up`: its endpoint and certificates, memory and metrics")
    how.add_argument("--metrics", metavar="ROLE=H:P,…", help="metrics ports to look at, e.g. orchestrator=10.0.0.1:9464,target=…,draft=…")
    judged = parser.add_argument_group("verdict")
    judged.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="goodput: first token within")
    judged.add_argument("--slo-itl-ms", type=float, metavar="MS", help="goodput: 95 %% of an answer's gaps between tokens within")
    judged.add_argument("--margin", type=float, default=0.03, metavar="M", help="ratios within 1 ± M are neutral (default: %(default)s)")
    parser.add_argument(
        "--out",
        type=_place,
        metavar="PATH",
        help="a folder: raw times as they come, report.json, .csv and .html; an interrupted sweep goes on there. NAME.json: one file",
    )
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object instead of tables")
    system.add_arguments(parser)
    bench_sim.add_arguments(parser)


def experiment(arguments: argparse.Namespace) -> Experiment:
    from specdec.bench import prompts as asked
    from specdec.bench.experiment import WAYS, Experiment

    ways = tuple(dict.fromkeys(part.strip() for part in arguments.compare.split(",")))
    if not set(ways) <= set(WAYS):
        raise InvalidRequest("--compare", f"must name some of {', '.join(WAYS)}, comma separated; got {arguments.compare!r}")
    temperatures = _numbers("--temperature", arguments.temperature, float)
    for flag, value in (("--repeats", arguments.repeats), ("--batch", arguments.batch)):
        _bounded(flag, value)
    concurrencies = _bounded_numbers("--concurrency", arguments.concurrency)
    outputs = _bounded_numbers("--max-tokens", str(arguments.max_tokens))
    if arguments.num_speculative_tokens is not None:
        _bounded("--num-speculative-tokens", arguments.num_speculative_tokens)
    for temperature in temperatures:
        try:
            SamplingParams(temperature=temperature).check(1 << 32)
        except InvalidRequest as error:
            raise InvalidRequest("--temperature", error.remedy) from None
    prompts = asked.load_prompts(arguments.prompts or asked.PROMPTS)
    kinds = (
        tuple(asked.kinds(prompts))
        if arguments.kinds == asked.EACH
        else tuple(dict.fromkeys(kind.strip() for kind in arguments.kinds.lower().split(",")))
    )
    for kind in kinds:
        asked.of_kind(prompts, kind)
    found = Experiment(
        prompts=prompts,
        ways=ways,
        concurrencies=concurrencies,
        temperatures=temperatures,
        repeats=arguments.repeats,
        batch=arguments.batch,
        sampling=SamplingParams(max_tokens=max(outputs), ignore_eos=arguments.ignore_eos),
        num_speculative_tokens=arguments.num_speculative_tokens,
        kinds=kinds,
        prompt_lengths=_bounded_numbers("--prompt-tokens", arguments.prompt_tokens) if arguments.prompt_tokens is not None else (None,),
        output_lengths=outputs if len(outputs) > 1 else (None,),
        rates=_rates(arguments),
        primed=(arguments.endpoint is not None or arguments.state is not None) and not arguments.cold_prompts,
    )
    turns = len(found.cells) * len(ways) * found.repeats
    if turns > MOST_TURNS:
        raise InvalidRequest(
            "--repeats", f"{len(found.cells)} cells, {len(ways)} ways and so many repeats are {turns} turns; at most {MOST_TURNS}"
        )
    return found


def asked(arguments: argparse.Namespace) -> Asked:
    from specdec.bench.report import Asked
    from specdec.bench.timings import Limits

    for flag, value in (("--slo-ttft-ms", arguments.slo_ttft_ms), ("--slo-itl-ms", arguments.slo_itl_ms)):
        if value is not None and not 0 < value < 1e9:
            raise InvalidRequest(flag, f"must be more than 0 ms, got {value:g}")
    if not 0 <= arguments.margin < 1:
        raise InvalidRequest("--margin", f"must be 0 to below 1, e.g. 0.03, got {arguments.margin:g}")
    return Asked(Limits(arguments.slo_ttft_ms, arguments.slo_itl_ms), arguments.margin)


def sweep(found: Experiment) -> dict[str, Any]:
    """What two parts of one sweep have in common. Not the number of repeats: more of them narrow the intervals."""
    from specdec.bench.prompts import fingerprint

    return {
        "prompts": fingerprint(found.prompts),
        "ways": list(found.ways),
        "concurrency": list(found.concurrencies),
        "rate": list(found.rates),
        "temperature": list(found.temperatures),
        "kinds": list(found.kinds),
        "prompt_tokens": list(found.prompt_lengths),
        "output_tokens": list(found.output_lengths),
        "max_tokens": found.sampling.max_tokens,
        "batch": found.batch,
        "ignore_eos": found.sampling.ignore_eos,
        "num_speculative_tokens": found.num_speculative_tokens,
        "primed": found.primed,
    }


def _rates(arguments: argparse.Namespace) -> tuple[float, ...]:
    from specdec.bench.arrivals import ARRIVALS, CLOSED, LEAST_RATE, MAX_RATE

    if arguments.arrivals not in ARRIVALS:
        raise InvalidRequest("--arrivals", f"must be one of {', '.join(ARRIVALS)}; got {arguments.arrivals!r}")
    if arguments.arrivals == CLOSED:
        if arguments.rate is not None:
            raise InvalidRequest("--rate", "goes with --arrivals poisson; a closed loop has --concurrency")
        return ()
    if arguments.rate is None:
        raise InvalidRequest("--rate", "is needed with --arrivals poisson: questions a second, e.g. 0.5,1,2")
    rates: tuple[float, ...] = _numbers("--rate", arguments.rate, float)
    if not all(LEAST_RATE <= rate <= MAX_RATE for rate in rates):
        raise InvalidRequest("--rate", f"must be {LEAST_RATE:g} to {MAX_RATE:g} questions a second, got {arguments.rate}")
    return rates


def _bounded_numbers(flag: str, said: str) -> tuple[int, ...]:
    values: tuple[int, ...] = _numbers(flag, said, int)
    for value in values:
        _bounded(flag, value)
    return values


def _bounded(flag: str, value: int) -> None:
    if not 1 <= value <= MOST[flag]:
        raise InvalidRequest(flag, f"must be 1 to {MOST[flag]}, got {value}")


def _numbers(flag: str, said: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(dict.fromkeys(kind(part) for part in said.split(",")))
    except ValueError:
        raise InvalidRequest(flag, f"must be numbers, comma separated, got {said!r}") from None

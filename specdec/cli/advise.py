"""`specdec advise`: what to set, and why, from a report, from a running service, or for hardware that is not there yet."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.connection import add_credentials, connected, credentials_of, endpoint_of
from specdec.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from specdec.bench.advice import Change
    from specdec.bench.endpoints import Endpoints
    from specdec.bench.scrape import Samples

HELP = "what to set, and why: from a benchmark or a running service"
DESCRIPTION = """\
Prints what `specdec bench --out` found in words: whether speculation pays, for what, what to set, and why. With --endpoint the counters of
a running service take the place of a benchmark: its orchestrators tell them (where SPECDEC_SHOW_METRICS lets clients see them), or the
metrics ports of --metrics or --state, which also know the drafts' steps. The flags of "what if" change what was measured, or stand alone,
and what follows from them is called modelled."""
MOST_SECONDS = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="*", type=Path, metavar="FILE|DIR", help="what `specdec bench --out` wrote, one a machine")
    parser.add_argument("--endpoint", metavar="HOST:PORT[,…]", help="the orchestrator of a running service; of several the sum")
    add_credentials(parser)
    parser.add_argument(
        "--metrics", metavar="[ROLE=]H:P,…", help="metrics port of the orchestrator, and of others, instead of asking the endpoint"
    )
    parser.add_argument("--state", type=Path, metavar="DIR", help="folder of `specdec up`: its endpoint and ports")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="S", help="look at so long a while (default: all since the start)")
    group = parser.add_argument_group("what if")
    group.add_argument("--rtt-ms", type=float, metavar="MS", help="round trip between orchestrator and pools")
    group.add_argument("--target-step-ms", type=float, metavar="MS", help="a target's step without blocks: a token for each session")
    group.add_argument("--draft-step-ms", type=float, metavar="MS", help="a draft's step")
    group.add_argument("--acceptance", type=float, metavar="A", help="chance that a proposal is kept, 0 to 1")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    change = _change(arguments)
    runs = arguments.endpoint is not None or arguments.state is not None
    _check_whom(arguments, runs, change)
    if runs:
        found = asyncio.run(_of_service(arguments, change))
    elif arguments.results:
        found = _of_reports([(path, _read(path)) for path in arguments.results], change)
    else:
        found = _of_nothing(change)
    print(json.dumps(found) if arguments.json else "\n".join(found["lines"]))
    return 0


def _check_whom(arguments: argparse.Namespace, runs: bool, change: Change) -> None:
    """Results, a running service, or neither and flags of "what if"; one of them."""
    if arguments.metrics is not None and not runs:
        raise InvalidRequest("--metrics", "goes with --endpoint HOST:PORT, the orchestrator whose metrics port it is")
    if arguments.results and runs:
        raise InvalidRequest("FILE|DIR", "name results, or a running service (--endpoint, --state), not both")
    if not (arguments.results or runs or change.any):
        raise InvalidRequest("FILE|DIR", "name a result of `specdec bench --out`, or --endpoint, or tell --target-step-ms and --acceptance")


def _change(arguments: argparse.Namespace) -> Change:
    from specdec.bench.advice import Change

    for flag in ("rtt_ms", "target_step_ms", "draft_step_ms"):
        value = getattr(arguments, flag)
        least = "more than 0" if flag == "target_step_ms" else "0 or more"
        if value is not None and not (0 < value < 1e7 or (value == 0 and flag != "target_step_ms")):
            raise InvalidRequest(f"--{flag.replace('_', '-')}", f"must be {least}, in ms, got {value:g}")
    if arguments.acceptance is not None and not 0 <= arguments.acceptance <= 1:
        raise InvalidRequest("--acceptance", f"must be 0 to 1, got {arguments.acceptance:g}")
    if not 0 <= arguments.seconds <= MOST_SECONDS:
        raise InvalidRequest("--seconds", f"must be 0 to {MOST_SECONDS:g}, got {arguments.seconds:g}")
    return Change(arguments.rtt_ms, arguments.target_step_ms, arguments.draft_step_ms, arguments.acceptance)


def _read(path: Path) -> dict[str, Any]:
    from specdec.bench.report import FORMAT

    file = path / "report.json" if path.is_dir() else path
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not {"summary", "cells", "settings"} <= found.keys():
            raise ValueError("not a report of specdec bench")
        if found.get("format") != FORMAT:
            told = f"written by another version (format {found.get('format')}, this one reads {FORMAT})"
            raise ValueError(f"{told}; the command of its sweep writes it anew")
        return found
    except FileNotFoundError as error:
        raise InvalidRequest("FILE|DIR", f"{file}: {_why_there_is_none(path)}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        told = (
            f"no report of specdec bench, or a part of one; name report.json or its folder. The command of a sweep writes it anew ({error})"
        )
        raise InvalidRequest("FILE|DIR", f"{file}: {told}") from error
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidRequest("FILE|DIR", f"{file}: {error}") from error


def _why_there_is_none(path: Path) -> str:
    if not path.is_dir():
        return "no such file"
    if (path / "runs.jsonl").exists():
        return "the sweep has not ended: run its command again, it goes on"
    return "no such file; name a folder that `specdec bench --out` was given"


def _of_reports(reports: list[tuple[Path, dict[str, Any]]], change: Change) -> dict[str, Any]:
    """Of one: what it says. Of several: each under its name and machine."""
    told = [_of_file(path, report, change) for path, report in reports]
    if len(told) == 1:
        return told[0]
    lines = []
    for (path, report), one in zip(reports, told, strict=True):
        machine = report.get("machine") or {}
        lines += [f"== {path}: {machine.get('processor', 'unknown machine')}, {machine.get('cores', '?')} cores", *one["lines"], ""]
    return {"lines": lines, "results": [{"result": str(path), **one} for (path, _), one in zip(reports, told, strict=True)]}


def _of_file(path: Path, report: dict[str, Any], change: Change) -> dict[str, Any]:
    try:
        return _of_report(report, change)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        told = f"{path}: is not a whole report of this version ({type(error).__name__}: {error})"
        raise InvalidRequest("FILE|DIR", f"{told}; the command of its sweep writes it anew") from error


def _of_report(report: dict[str, Any], change: Change) -> dict[str, Any]:
    from specdec.bench import advice

    found: dict[str, Any] = {"summary": report["summary"], "lines": advice.of_report(report)}
    if change.any:
        told = advice.setting_of(report)
        if told is None:
            told_too_little = "no cell tells what a round with a block costs, since too few had one; more --repeats of its sweep would tell"
            raise InvalidRequest("FILE|DIR", f"{told_too_little}. Without a result, --target-step-ms and --acceptance are enough")
        found["what_if"] = advice.what_if(change.of(told[1]))
        found["lines"] += ["", f"What if, from {told[0]}:", *advice.said(found["what_if"])]
    return found


def _of_nothing(change: Change) -> dict[str, Any]:
    from specdec.bench import advice
    from specdec.bench.whatif import Setting

    if change.target_step_ms is None or change.acceptance is None:
        raise InvalidRequest("--target-step-ms", "and --acceptance are needed where there is no measurement to begin with")
    modelled = advice.what_if(change.of(Setting(change.target_step_ms, 0.0, (change.acceptance,))))
    return {"what_if": modelled, "lines": advice.said(modelled)}


async def _of_service(arguments: argparse.Namespace, change: Change) -> dict[str, Any]:
    from specdec.bench import advice

    async with connected(endpoint_of(arguments), arguments) as client:
        info = await client.get_model_info()
    async with _looking(arguments) as look:
        before = await look() if arguments.seconds else {}
        await asyncio.sleep(arguments.seconds)
        told = advice.counters(before, await look())
    found = advice.of_service(told, info.draft_available, info.num_speculative_tokens, change)
    if change.any and found["what_if"]:
        found["lines"] += ["", "What if, from these counters:", *advice.said(found["what_if"])]
    return found


@contextlib.asynccontextmanager
async def _looking(arguments: argparse.Namespace) -> AsyncIterator[Callable[[], Awaitable[dict[str, Samples]]]]:
    """Of each look what is told by role."""
    from specdec.bench.endpoints import Endpoints

    if arguments.metrics is not None or arguments.state is not None:
        addresses = _addresses(arguments)
        yield lambda: _scraped(addresses)
        return
    endpoints = Endpoints(arguments.endpoint, credentials_of(arguments))
    try:
        yield lambda: _asked(endpoints)
    finally:
        await endpoints.close()


def _addresses(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """(role, host:port)."""
    from specdec.bench import watch

    if arguments.state is not None:
        return [(process.role, process.metrics) for process in watch.of_state(arguments.state) if process.metrics]
    named = ",".join(part if "=" in part else f"orchestrator={part}" for part in arguments.metrics.split(","))
    return [(process.role, process.metrics) for process in watch.of_metrics(named)]


async def _asked(endpoints: Endpoints) -> dict[str, Samples]:
    """All of the orchestrators, added up. Raises Unavailable for one that does not tell: a sum without it would be another one."""
    told = await endpoints.look()
    for name, samples in told.samples.items():
        if samples is None:
            raise Unavailable(f"{name}: {told.reasons[name]}")
        if name in told.strange:
            raise Unavailable(f"{name}: another orchestrator answers there than before; name one of them, e.g. through a port-forward")
    found: dict[Any, float] = {}
    for samples in told.samples.values():
        for key, value in (samples or {}).items():
            found[key] = found.get(key, 0.0) + value
    return {"orchestrator": found}


async def _scraped(addresses: list[tuple[str, str]]) -> dict[str, Samples]:
    """By role, all of its processes added up. Raises Unavailable."""
    from specdec.bench.scrape import scrape

    found: dict[str, dict[Any, float]] = {}
    for role, address in addresses:
        of_role = found.setdefault(role, {})
        try:
            told = await scrape(address)
        except Unavailable as error:
            raise Unavailable(f"{error}; name the orchestrator's metrics port: --metrics HOST:PORT, or leave it out") from error
        for key, value in told.items():
            of_role[key] = of_role.get(key, 0.0) + value
    if "orchestrator" not in found:
        raise InvalidRequest("--metrics", "the orchestrator's port is needed: --metrics orchestrator=host:port, or --state DIR")
    return dict(found)

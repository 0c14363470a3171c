"""`specdec demo`: the whole system on this machine, with and without speculation, side by side."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.bench.system import default_pins
from specdec.cli import paint, system
from specdec.cli.connection import credentials_of
from specdec.cli.supervisor import LOADING, Interrupted, Supervisor
from specdec.cli.system import System
from specdec.errors import InternalFault
from specdec.runtime.settings import no_color
from specdec.terms import SamplingParams

if TYPE_CHECKING:
    from specdec.cli.generate import TimedAnswer
    from specdec.client import Client, Delta

HELP = "see it work: three processes, four prompts, with and without speculation"
DESCRIPTION = """\
Starts a target, a draft and an orchestrator on loopback ports, streams four answers so that you see which tokens were accepted, then prints
how long they took with and without speculation, and whether the texts are the same. Stops everything. Exit code 1 if a text differs."""
KINDS = ("code", "json", "chat", "creative")
SEED = 7
PROMPTS = "prompts.jsonl"
CLEAR_LINE = "\r\x1b[K"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    system.add_arguments(parser)
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="per answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: %(default)s")


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: str
    messages: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Pair:
    """The same request with and without speculation."""

    prompt: Prompt
    speculative: TimedAnswer
    plain: TimedAnswer

    @property
    def identical(self) -> bool:
        return self.speculative.token_ids == self.plain.token_ids and self.speculative.text == self.plain.text


def run(arguments: argparse.Namespace) -> int:
    chosen = System(
        target_model=arguments.target_model.absolute(),
        draft_model=arguments.draft_model.absolute(),
        num_speculative_tokens=arguments.num_speculative_tokens,
        speculative_fanout=arguments.speculative_fanout,
        pins=default_pins(),
    )
    chosen.check()
    _sampling(arguments).check(1)  # before models are loaded
    colour = sys.stdout.isatty() and not no_color()
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="specdec-demo-") as logs,
        Supervisor(Path(logs), _teller(began, sys.stdout.isatty())) as supervisor,
    ):
        _say(paint.heading("Starting a target, a draft and an orchestrator", colour))
        _say(f"  target: {arguments.target_model}, draft: {arguments.draft_model}, {placed(chosen.pins)}")
        try:
            children = chosen.start(supervisor)
            with supervisor.interruptible():
                pairs = asyncio.run(_talk(children[-1].endpoint, chosen, arguments, colour))
        except (Interrupted, KeyboardInterrupt):
            _say("\nstopping")
            return 130
    _say("\n" + paint.heading("With and without speculation", colour))
    _say(asked(pairs, arguments.temperature))
    _say(summary(pairs))
    return 0 if all(pair.identical for pair in pairs) else 1


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)


def placed(pins: dict[str, str]) -> str:
    return "; ".join(f"{role} on core {cpu}" for role, cpu in pins.items()) or "all on one core: expect little"


def load_prompts() -> list[Prompt]:
    """The first prompt of each kind. A line: {"kind", "messages"} or {"kind", "prompt"}."""
    lines = (resources.files("specdec.bench") / PROMPTS).read_text(encoding="utf-8").splitlines()
    first: dict[str, Prompt] = {}
    for entry in map(json.loads, filter(str.strip, lines)):
        messages = entry.get("messages") or [{"role": "user", "content": entry["prompt"]}]
        first.setdefault(entry["kind"].lower(), Prompt(entry["kind"].lower(), messages))
    return [first[kind] for kind in KINDS if kind in first]


def asked(pairs: Sequence[Pair], temperature: float) -> str:
    """What the table is of, and where there is more: a ratio is that of its way of asking."""
    lengths = {pair.speculative.finished.settings.num_speculative_tokens for pair in pairs if pair.speculative.finished}
    block = f"every block of {max(lengths)}" if lengths else "blocks of one length"
    return (
        f"  one answer at a time, temperature {temperature:g}, {block}; `specdec up` starts the same system, and `specdec bench` measures\n"
        "  whether speculation pays: more prompts, several streams, and block lengths that the service chooses\n"
    )


def summary(pairs: Sequence[Pair]) -> str:
    rows = [["prompt", "tokens", "first token", "tokens/s with", "without", "ratio", "acceptance length", "identical"]]
    for pair in pairs:
        spec, plain = pair.speculative, pair.plain
        assert spec.finished is not None
        rows.append([
            pair.prompt.kind,
            str(len(spec.token_ids)),
            f"{1000 * (spec.ttft_s or spec.total_s):.0f} ms",
            f"{spec.tokens_per_s:.1f}",
            f"{plain.tokens_per_s:.1f}",
            f"{_ratio(pair):.2f}x",
            f"{spec.finished.speculative.mean_acceptance_length:.2f}",
            "yes" if pair.identical else "NO",
        ])  # fmt: skip
    mean = sum(map(_ratio, pairs)) / len(pairs)
    rows.append(["average", "", "", "", "", f"{mean:.2f}x", "", "yes" if all(p.identical for p in pairs) else "NO"])
    return paint.table(rows)


def _ratio(pair: Pair) -> float:
    return pair.speculative.tokens_per_s / pair.plain.tokens_per_s if pair.plain.tokens_per_s else 0.0


async def _talk(endpoint: str, chosen: System, arguments: argparse.Namespace, colour: bool) -> list[Pair]:
    from specdec.client import Client

    decode = _decoder(chosen.target_model)
    async with Client(endpoint, credentials_of(arguments)) as client:
        await client.wait_ready(10.0)
        await _wait_for_draft(client)
        prompts = load_prompts()
        warm = SamplingParams(temperature=0.0, max_tokens=8)
        for k in (None, 0):
            await client.complete(prompts[0].messages, warm, seed=SEED, num_speculative_tokens=k, enable_adaptive_verification=False)
        _say(paint.legend(colour))
        sampling = _sampling(arguments)
        return [await _pair(client, prompt, sampling, paint.Painter(decode, colour), colour) for prompt in prompts]


async def _pair(client: Client, prompt: Prompt, sampling: Any, painter: paint.Painter, colour: bool) -> Pair:
    from specdec.cli.generate import timed_answer

    def show(delta: Delta) -> None:
        print(painter.feed(delta.token_ids, delta.origins), end="", flush=True)

    _say("\n" + paint.heading(f"{prompt.kind}: {prompt.messages[-1]['content'].strip().splitlines()[0]}", colour))
    fixed = {"seed": SEED, "enable_adaptive_verification": False}  # a few answers are too short to learn what pays
    speculative = await timed_answer(client, prompt.messages, sampling, fixed, show)
    _say(painter.end())
    _say(paint.dim("… the same without speculation", colour))
    plain = await timed_answer(client, prompt.messages, sampling, {"seed": SEED, "num_speculative_tokens": 0})
    return Pair(prompt, speculative, plain)


async def _wait_for_draft(client: Client) -> None:
    """The orchestrator serves without a draft as well; a demo without one would show nothing."""
    for _ in range(100):
        if (await client.get_model_info()).draft_available:
            return
        await asyncio.sleep(0.1)
    raise InternalFault("the draft did not connect to the orchestrator within 10 s")


def _decoder(model: Path) -> Callable[[Sequence[int]], str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    return decode


def _teller(began: float, terminal: bool) -> Callable[[str], None]:
    """Progress; on a terminal the next line takes the place of one that says `loading`."""

    def tell(text: str) -> None:
        stays = not (terminal and text.startswith(LOADING))
        print(f"{CLEAR_LINE if terminal else ''}  {time.monotonic() - began:5.1f} s  {text}", end="\n" if stays else "", flush=True)

    return tell


def _say(text: str) -> None:
    print(text, flush=True)

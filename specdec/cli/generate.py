"""`specdec generate`: one or several answers from a running service."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from specdec.cli import connection, flags, request
from specdec.errors import ProtocolFault, SpecdecError

if TYPE_CHECKING:  # gRPC is loaded when it is needed: `--help` should not wait for it
    from specdec.client import Client, Delta, Event, Finished, Options, Prompt, Started
    from specdec.terms import SamplingParams

HELP = "answers from a running service"
USAGE = "specdec generate --endpoint HOST:PORT PROMPT [FLAG …]"
DESCRIPTION = """\
Sends one prompt to an orchestrator. Without --json the text streams to standard output as it is decided and a line of figures goes to
standard error; several answers come one after the other, each under a line on standard error. With --json one object is printed, for
several answers {"answers": […]}. What is not set takes the service's defaults. JSON can be read from a file: @FILE, @- = standard input.
Exit code 2 names a refused flag or field and what would be accepted, or says that nobody answers."""
SPECULATIVE_KEYS = (
    "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_draft_tokens",
    "num_accepted_draft_tokens", "num_spec_steps", "num_spec_tokens", "hit_rate",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGE
    connection.add_arguments(parser)
    groups = flags.add_groups(parser, request.GROUPS)
    groups["output"].add_argument("--json", action="store_true", help="one JSON object with ids, figures and statistics")


def run(arguments: argparse.Namespace) -> int:
    try:
        return asyncio.run(_run(arguments))
    except SpecdecError as error:
        raise flags.named(error, request.ALL, arguments) from error


async def _run(arguments: argparse.Namespace) -> int:
    from specdec.client import generate_request

    prompt, sampling, options = request.request_of(arguments)
    generate_request(prompt, sampling, **options)  # what the wire cannot carry is refused before anybody is asked
    answers = [TimedAnswer() for _ in range(options.get("n") or 1)]
    printer = None if arguments.json else Printer(answers)
    async with connection.connected(connection.endpoint_of(arguments), arguments) as client:
        try:
            await fill(answers, client, prompt, sampling, options, printer.show if printer else None)
        finally:
            if printer:
                printer.close()
    if arguments.json:
        reports = [report(answer, sampling) for answer in answers]
        print(json.dumps(reports[0] if len(reports) == 1 else {"answers": reports}, ensure_ascii=False))
    return 0


# ---------------------------------------------------------------- answers and their times


@dataclass(slots=True)
class TimedAnswer:
    """Seconds count from the moment the request is sent on an open connection."""

    deltas: list[Delta] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None
    ttft_s: float | None = None
    total_s: float = 0.0

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens_per_s(self) -> float:
        return len(self.token_ids) / self.total_s if self.total_s else 0.0

    def take(self, event: Event, now_s: float) -> None:
        from specdec.client import Delta, Started

        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Delta):
            if self.ttft_s is None and event.token_ids:
                self.ttft_s = now_s
            self.deltas.append(event)
        else:
            self.finished, self.total_s = event, now_s


async def fill(
    answers: list[TimedAnswer],
    client: Client,
    prompt: Prompt,
    sampling: SamplingParams,
    options: Options,
    show: Callable[[], None] | None = None,
) -> None:
    """Asks once for all of `answers`; `show` is called after every event."""
    began = time.perf_counter()
    async with contextlib.aclosing(client.generate(prompt, sampling, **options)) as events:
        async for event in events:
            if event.index >= len(answers):
                raise ProtocolFault(f"answer {event.index} came, {len(answers)} were asked for")
            answers[event.index].take(event, time.perf_counter() - began)
            if show is not None:
                show()


async def timed_answer(
    client: Client, prompt: Prompt, sampling: SamplingParams, options: dict[str, Any], show: Callable[[Delta], None] | None = None
) -> TimedAnswer:
    """One answer with its times; `show` gets every Delta as it comes."""
    answer, shown = TimedAnswer(), 0

    def show_new() -> None:
        nonlocal shown
        for delta in answer.deltas[shown:]:
            if show is not None:
                show(delta)
        shown = len(answer.deltas)

    await fill([answer], client, prompt, sampling, options, show_new)  # type: ignore[arg-type]
    return answer


# ---------------------------------------------------------------- what is printed


def report(answer: TimedAnswer, sampling: SamplingParams) -> dict[str, Any]:
    """The JSON contract. `logprobs` is null and `prompt_logprobs` is left out when they were not asked for."""
    started, finished = answer.started, answer.finished
    assert started is not None and finished is not None
    usage, speculative = asdict(finished.usage), asdict(finished.speculative)
    logprobs = [asdict(entry) for delta in answer.deltas for entry in delta.logprobs]
    prompt_logprobs = [asdict(entry) for delta in answer.deltas for entry in delta.prompt_logprobs]
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "logprobs": None if sampling.logprobs is None else logprobs,
        **({} if sampling.prompt_logprobs is None or started.index else {"prompt_logprobs": prompt_logprobs}),
        "seed": started.seed,
        "model": started.model,
        "finish_reason": finished.finish_reason.value,
        "usage": {key: usage[key] for key in ("prompt_tokens", "completion_tokens")},
        "timing": {"ttft_s": answer.ttft_s, "total_s": answer.total_s},
        "speculative": {key: speculative[key] for key in SPECULATIVE_KEYS},
    }


class Printer:
    """Text to standard output, words about it to standard error. Of several answers the first that is not complete streams; those behind
    it wait for their turn, so that the same request prints the same text in the same order."""

    def __init__(self, answers: list[TimedAnswer]) -> None:
        self._answers = answers
        self._turn = 0  # the answer that is printed
        self._begun = False  # whether it is announced
        self._deltas = 0  # printed ones of it
        self._inside = False  # whether a line of text waits for its end

    def show(self) -> None:
        """Prints what can be printed."""
        while self._turn < len(self._answers) and (answer := self._answers[self._turn]).started is not None:
            if not self._begun and len(self._answers) > 1:
                print(f"[answer {self._turn}]", file=sys.stderr, flush=True)
            self._begun = True
            for delta in answer.deltas[self._deltas :]:
                print(delta.text, end="", flush=True)
                self._inside = self._inside or bool(delta.text)
            self._deltas = len(answer.deltas)
            if answer.finished is None:
                return
            print(flush=True)
            print(_figures(answer), file=sys.stderr, flush=True)
            self._turn, self._begun, self._deltas, self._inside = self._turn + 1, False, 0, False

    def close(self) -> None:
        """Ends the line that a broken answer left, so that what follows stands on its own."""
        if self._inside:
            print(flush=True)


def _figures(answer: TimedAnswer) -> str:
    assert answer.finished is not None and answer.started is not None
    stats = answer.finished.speculative
    gain = f"mean acceptance length {stats.mean_acceptance_length:.2f}, hit rate {stats.hit_rate:.2f}"
    return (
        f"[{answer.finished.finish_reason.value}; {len(answer.token_ids)} tokens, {answer.tokens_per_s:.1f} tokens/s, first after "
        f"{1000 * (answer.ttft_s or answer.total_s):.0f} ms; "
        f"{gain if stats.num_draft_tokens else 'no round had a block'}; seed {answer.started.seed}]"
    )

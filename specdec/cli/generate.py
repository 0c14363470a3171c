"""`specdec generate`: one answer from a running service."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import InvalidRequest

if TYPE_CHECKING:  # gRPC is loaded when it is needed: `--help` should not wait for it
    from specdec.client import Client, Delta, Finished, Prompt, Started
    from specdec.terms import SamplingParams

HELP = "one answer from a running service"
DESCRIPTION = """\
Sends one prompt to an orchestrator. Without --json the text streams to standard output as it is decided and a line of figures goes to
standard error. What is not set takes the service's defaults. Exit code 2 names a refused field and what would be accepted, or says that
nobody answers."""
CONNECT_S = 3.0
SPECULATIVE_KEYS = (
    "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_draft_tokens",
    "num_accepted_draft_tokens", "num_spec_steps", "num_spec_tokens", "hit_rate",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoint", required=True, metavar="HOST:PORT", help="the orchestrator")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="raw text, no chat template")
    prompt.add_argument("--prompt-file", metavar="FILE", help="raw text from a file, - = standard input")
    prompt.add_argument("--messages", metavar="JSON", help='a chat: [{"role": "user", "content": "…"}]')
    prompt.add_argument("--token-ids", metavar="JSON", help="token ids, used as they are: [1, 2, 3]")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, metavar="N")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 = the likeliest token always")
    sampling.add_argument("--top-p", type=float, metavar="P")
    sampling.add_argument("--top-k", type=int, metavar="K")
    sampling.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    sampling.add_argument("--logprobs", type=int, metavar="N", help="log-probabilities of the tokens and of N alternatives")
    sampling.add_argument("--resume-ids", metavar="JSON", help="ids of this answer that were delivered already")
    speculation = parser.add_mutually_exclusive_group()
    speculation.add_argument("--num-speculative-tokens", type=int, metavar="K", help="proposed tokens per round")
    speculation.add_argument("--no-spec", action="store_true", help="the target alone; the same as K = 0")
    parser.add_argument("--json", action="store_true", help="one JSON object with ids, figures and statistics")


def run(arguments: argparse.Namespace) -> int:
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    from specdec.client import Client, generate_request

    if not arguments.endpoint.rpartition(":")[2].isdecimal():
        raise InvalidRequest("--endpoint", f"must be host:port, e.g. 127.0.0.1:50051, got {arguments.endpoint!r}")
    prompt, sampling, options = _prompt(arguments), _sampling(arguments), _options(arguments)
    generate_request(prompt, sampling, **options)  # what the wire cannot carry is refused before anybody is asked
    async with Client(arguments.endpoint) as client:
        await client.wait_ready(CONNECT_S)
        answer = await timed_answer(client, prompt, sampling, options, None if arguments.json else _print_piece)
    if arguments.json:
        print(json.dumps(report(answer, arguments.logprobs is not None), ensure_ascii=False))
    else:
        print(flush=True)
        print(_figures(answer), file=sys.stderr)
    return 0


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


async def timed_answer(
    client: Client, prompt: Prompt, sampling: SamplingParams, options: dict[str, Any], show: Any | None = None
) -> TimedAnswer:
    """One answer with its times; `show` gets every Delta as it comes."""
    from specdec.client import Delta, Finished, Started

    answer, began = TimedAnswer(), time.perf_counter()
    async with contextlib.aclosing(client.generate(prompt, sampling, **options)) as events:
        async for event in events:
            match event:
                case Started():
                    answer.started = event
                case Delta():
                    if answer.ttft_s is None and event.token_ids:
                        answer.ttft_s = time.perf_counter() - began
                    answer.deltas.append(event)
                    if show is not None:
                        show(event)
                case Finished():
                    answer.finished = event
    answer.total_s = time.perf_counter() - began
    return answer


def report(answer: TimedAnswer, with_logprobs: bool) -> dict[str, Any]:
    """The JSON contract."""
    started, finished = answer.started, answer.finished
    assert started is not None and finished is not None
    usage, speculative = asdict(finished.usage), asdict(finished.speculative)
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "logprobs": [asdict(entry) for delta in answer.deltas for entry in delta.logprobs] if with_logprobs else None,
        "seed": started.seed,
        "model": started.model,
        "finish_reason": finished.finish_reason.value,
        "usage": {key: usage[key] for key in ("prompt_tokens", "completion_tokens")},
        "timing": {"ttft_s": answer.ttft_s, "total_s": answer.total_s},
        "speculative": {key: speculative[key] for key in SPECULATIVE_KEYS},
    }


def _print_piece(delta: Delta) -> None:
    print(delta.text, end="", flush=True)


def _figures(answer: TimedAnswer) -> str:
    assert answer.finished is not None and answer.started is not None
    stats = answer.finished.speculative
    return (
        f"[{answer.finished.finish_reason.value}; {len(answer.token_ids)} tokens, {answer.tokens_per_s:.1f} tokens/s, first after "
        f"{1000 * (answer.ttft_s or answer.total_s):.0f} ms; mean acceptance length {stats.mean_acceptance_length:.2f}, "
        f"hit rate {stats.hit_rate:.2f}; seed {answer.started.seed}]"
    )


def _prompt(arguments: argparse.Namespace) -> Prompt:
    if arguments.prompt is not None:
        return str(arguments.prompt)
    if arguments.prompt_file is not None:
        return _read(arguments.prompt_file)
    if arguments.messages is not None:
        messages = _json("--messages", arguments.messages, '[{"role": "user", "content": "…"}]')
        if not all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in messages) or not messages:
            raise InvalidRequest("--messages", 'each turn must be {"role": "…", "content": "…"}')
        return list(messages)
    return _ids("--token-ids", arguments.token_ids)


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("--prompt-file", f"{name}: {error}") from error


def _ids(flag: str, text: str) -> list[int]:
    ids = _json(flag, text, "[1, 2, 3]")
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise InvalidRequest(flag, "must be a JSON list of whole numbers")
    return ids


def _json(flag: str, text: str, example: str) -> list[Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list):
        raise InvalidRequest(flag, f"must be a JSON list, e.g. {example}")
    return value


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
    from specdec.terms import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "logprobs")
    return SamplingParams(**{name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None})


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"seed": arguments.seed}
    if arguments.resume_ids is not None:
        options["output_token_ids"] = _ids("--resume-ids", arguments.resume_ids)
    options["num_speculative_tokens"] = 0 if arguments.no_spec else arguments.num_speculative_tokens
    return options

"""Plays a transcript against one Generation: an event per line, below it the commands that follow.

    # Why this matters
    start k=3 prompt=10,11 max_tokens=8
    ----
    place_target avoid=-
    ...

Lines before `----` are events, lines after it are what the machine said and are written by `--rewrite-transcripts`.
Proposals and results are written without lengths and hashes: `after=` names the committed length they continue (default: all of it),
`over=` tokens in flight that the proposal builds on.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Callable

from orchestrator import events as ev
from orchestrator.generation import Generation
from orchestrator.pace import FixedPace
from specdec import terms
from specdec.hashing import prefix_hash


class Player:
    def __init__(self) -> None:
        self.generation: Generation | None = None

    def play(self, line: str) -> list[str]:
        name, *words = line.split()
        arguments = dict(word.split("=", 1) for word in words)
        if name == "start":
            self.generation = _start(**arguments)
            commands = self.generation.begin()
        else:
            assert self.generation is not None, "the first line must be `start`"
            commands = self.generation.handle(_EVENTS[name](self.generation, **arguments))
        assert self.generation is not None
        return [*map(show, commands), f"= {self.generation.state.value}"]


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


def _start(
    prompt: str,
    k: str = "3",
    max_tokens: str = "100",
    window: str = "1000",
    output: str = "",
    method: str = "coupled",
    lookup: str = "0",
    max_block: str = "16",
    fork: str = "",
    prompt_logprobs: str = "",
    regex: str = "",
    penalty: str = "1",
    run_ahead: str = "0",
    ahead: str = "",
    waits: str = "",
) -> Generation:
    request = ev.Admitted(
        session_id="s",
        tokens=_ids(prompt) + _ids(output),
        prompt_length=len(_ids(prompt)),
        sampling=terms.SamplingParams(
            max_tokens=int(max_tokens),
            prompt_logprobs=int(prompt_logprobs) if prompt_logprobs else None,
            grammar=terms.Grammar(terms.GrammarForm.REGEX, regex) if regex else None,
            repetition_penalty=float(penalty),
        ),
        seed=7,
        window=int(window),
        num_speculative_tokens=int(k),
        max_block=int(max_block),
        rejection_method=terms.RejectionMethod(method),
        fork_session_id=fork,
    )
    pace = FixedPace(request.num_speculative_tokens, 50)
    pace.waits = bool(waits) or not int(run_ahead)
    return Generation(
        request,
        pace,
        step_deadline_ms=9000,
        placement_wait_ms=5000,
        prompt_lookup_min=int(lookup),
        max_run_ahead=int(run_ahead),
        ahead=bool(ahead),
    )


def _answered(g: Generation, outcome: terms.Outcome, epoch: str = "", round: str = "") -> ev.Event:  # noqa: A002
    return ev.Answered(terms.Answer("s", int(epoch or g.at.epoch), int(round or g.at.round), outcome))


def _result(
    g: Generation,
    tokens: str = "",
    verified: str = "",
    accepted: str = "0",
    finish: str = "",
    stop: str = "",
    forced: str = "",
    entries: str = "0",
    **at: str,
) -> ev.Event:
    """`verified` defaults to the whole block in flight, kv to all but the newest committed token; `entries` = log-probabilities of the
    prompt."""
    ids = _ids(tokens)
    result = terms.Result(
        prefix_length=len(g.committed),
        kv_length_after=len(g.committed) + len(ids) - 1,
        num_verified=int(verified) if verified else len(g.at.block.tokens),
        num_accepted=int(accepted),
        tokens=ids,
        forced=_ids(forced),
        prompt_logprobs=tuple(terms.TokenLogprobs(-float(i + 1)) for i in range(int(entries))),
        finish=terms.FinishReason(finish) if finish else None,
        stop_token_id=int(stop) if stop else None,
    )
    return _answered(g, result, **at)


def _proposal(
    g: Generation,
    tokens: str,
    after: str = "",
    over: str = "",
    epoch: str = "",
    hash: str = "",  # noqa: A002
    drawn: str = "",
) -> ev.Event:
    """`drawn`: each token comes with the distribution it was drawn from."""
    prefix = [*g.committed[: int(after) if after else None], *_ids(over)]
    value = int(hash) if hash else prefix_hash(prefix)
    ids = _ids(tokens)
    qs = tuple(terms.DraftDistribution((i, i + 1), struct.pack("<2f", 0.75, 0.25)) for i in ids) if drawn else ()
    return ev.Drafted(terms.Proposal("s", int(epoch or g.drafting.epoch), len(prefix), value, ids, distributions=qs))


_EVENTS: dict[str, Callable[..., ev.Event]] = {
    "target": lambda g, name: ev.TargetPlaced(name),
    "target_lost": lambda g: ev.TargetLost("gone"),
    "prefix_ready": lambda g, target="": ev.PrefixReady(target),
    "draft": lambda g, name, max_block="16": ev.DraftPlaced(name, int(max_block)),
    "draft_lost": lambda g: ev.DraftLost("gone"),
    "result": _result,
    "proposal": _proposal,
    "resync": lambda g, have="0": ev.Drafted(terms.Resync("s", g.drafting.epoch, int(have))),
    "refused": lambda g, retry="0": ev.Drafted(terms.Refused("s", g.drafting.epoch, "no", int(retry))),
    "prefix_needed": lambda g, have, **at: _answered(g, terms.PrefixNeeded(int(have)), **at),
    "unknown_session": lambda g, **at: _answered(g, terms.UnknownSession(), **at),
    "no_room": lambda g, retry="20", **at: _answered(g, terms.NoRoom(int(retry)), **at),
    "stale_epoch": lambda g, current, **at: _answered(g, terms.StaleEpoch(int(current)), **at),
    "stale_round": lambda g, current, **at: _answered(g, terms.StaleRound(int(current)), **at),
    "expired": lambda g, **at: _answered(g, terms.Expired(), **at),
    "failed": lambda g, code="13", **at: _answered(g, terms.Failed(int(code), "broken: it is"), **at),
    "closed": lambda g, **at: _answered(g, terms.Closed(), **at),
    "timer": lambda g, name: ev.TimerFired(ev.Timer(name)),
    "cancel": lambda g: ev.Cancelled(),
    "reader_behind": lambda g: ev.ReaderBehind(),
    "reader_caught_up": lambda g: ev.ReaderCaughtUp(),
}


def show(command: object) -> str:
    """One line per command. Hashes are left out: they follow from the tokens, which are shown."""
    if isinstance(command, ev.ToTarget):
        return f"to {command.target}: {_show_item(command.item)}"
    if isinstance(command, ev.ToDraft):
        return f"to {command.draft}: {_show_item(command.command)}"
    return _show_item(command)


_HIDDEN = {"session_id", "base_hash", "prefix_hash", "seed", "rejection_method", "draft_method", "traceparent", "priority"}
_SHORT = {"fork_session_id": "fork"}


def _show_item(item: object) -> str:
    assert dataclasses.is_dataclass(item)
    shown = [type(item).__name__]
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if isinstance(value, terms.SamplingParams):
            shown += _show_sampling(value)
            continue
        if field.name in _HIDDEN or value in (None, (), 0, ""):
            continue
        shown.append(f"{_SHORT.get(field.name, field.name)}={_show_value(value)}")
    return " ".join(shown)


def _show_sampling(sampling: terms.SamplingParams) -> list[str]:
    """What a transcript is about, where it is set."""
    shown = {
        "prompt_logprobs": sampling.prompt_logprobs,
        "regex": None if sampling.grammar is None else sampling.grammar.text,
        "penalty": None if sampling.repetition_penalty == 1.0 else sampling.repetition_penalty,
    }
    return [f"{name}={_show_value(value)}" for name, value in shown.items() if value is not None]


def _show_value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, terms.TokenLogprobs):
        return f"{value.logprob:g}"
    if isinstance(value, terms.DraftDistribution):
        return f"q{value.ids[0]}"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return ",".join(map(_show_value, value))
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Exception):
        return f"{type(value).__name__}({value})"
    if dataclasses.is_dataclass(value):
        return f"[{_show_item(value)}]"
    return str(value)


def replay(text: str) -> str:
    """The transcript as the machine plays it now."""
    player, out = Player(), []
    for block in text.strip().split("\n\n"):
        lines = block.split("\n")
        events = lines[: lines.index("----")] if "----" in lines else lines
        said: list[str] = []
        for line in events:
            if not line.startswith("#"):
                said += player.play(line)
        only_comments = all(line.startswith("#") for line in events)
        out.append("\n".join(events if only_comments else [*events, "----", *said]))
    return "\n\n".join(out) + "\n"

"""What comes back: the events of a stream, and whole answers made of them. Knows no connection."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specdec import terms, wire
from specdec.errors import ProtocolFault
from specdec.terms import FinishReason, ModelInfo, Origin, SamplingParams, TokenLogprobs
from specdec.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    discarded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SpeculativeStats:
    mean_acceptance_length: float = 0.0
    draft_acceptance_rate: float = 0.0
    acceptance_histogram: tuple[int, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_spec_steps: int = 0
    num_spec_tokens: int = 0
    hit_rate: float = 0.0
    num_rounds: int = 0
    num_replacements: int = 0


@dataclass(frozen=True, slots=True)
class EffectiveSettings:
    """What was in force, defaults filled in."""

    sampling: SamplingParams
    rejection_method: terms.RejectionMethod
    draft_method: terms.DraftMethod
    num_speculative_tokens: int
    enable_adaptive_verification: bool
    batch_invariant: bool
    numerics_fingerprint: str


@dataclass(frozen=True, slots=True)
class Started:
    """First event of an answer. `seed` repeats the text when it is given with the same request and n = 1."""

    request_id: str
    seed: int
    prompt_tokens: int
    model: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """Decided tokens and the text that became final; either may be empty. `origins` one per token, None where not told.

    `prompt_logprobs`: one entry per token of the prompt from the second on, when asked for, in the first Delta of answer 0.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    origins: tuple[Origin | None, ...] = ()
    index: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of an answer."""

    finish_reason: FinishReason
    stop_reason: str
    usage: Usage
    speculative: SpeculativeStats
    settings: EffectiveSettings
    index: int = 0


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `prompt_logprobs` as in Delta: those of the prompt, on answer 0."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    origins: tuple[Origin | None, ...]
    started: Started
    finished: Finished
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    info: ModelInfo
    draft_available: bool
    num_speculative_tokens: int


def event_from_wire(message: generation_pb2.GenerateResponse) -> Event:
    """Raises ProtocolFault for what is no event, or is broken."""
    kind = message.WhichOneof("event")
    if kind == "started":
        m = message.started
        return Started(m.request_id, m.seed, m.prompt_tokens, m.model, message.index)
    if kind == "delta":
        d = message.delta
        return Delta(
            token_ids=tuple(d.token_ids),
            text=d.text,
            logprobs=_logprobs(d.logprobs),
            origins=tuple(wire.origin_from_wire(origin) for origin in d.origins),
            index=message.index,
            prompt_logprobs=_logprobs(d.prompt_logprobs),
        )
    if kind == "finished":
        return _finished(message.finished, message.index)
    raise ProtocolFault("response: no event that is known here")


def completions_of(events: Iterable[Event], n: int) -> tuple[Completion, ...]:
    """The `n` answers of a stream that is over, in order of their index. Raises ProtocolFault when one lacks its first or last event."""
    started: dict[int, Started] = {}
    deltas: dict[int, list[Delta]] = {index: [] for index in range(n)}
    finished: dict[int, Finished] = {}
    for event in events:
        if isinstance(event, Started):
            started[event.index] = event
        elif isinstance(event, Finished):
            finished[event.index] = event
        else:
            deltas.setdefault(event.index, []).append(event)
    if not started.keys() == deltas.keys() == finished.keys() == set(range(n)):
        raise ProtocolFault(f"asked for {n} answer(s): first events of {sorted(started)}, last events of {sorted(finished)} came")
    return tuple(_completion(started[index], deltas[index], finished[index]) for index in range(n))


def _completion(started: Started, deltas: list[Delta], finished: Finished) -> Completion:
    return Completion(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        origins=tuple(origin for delta in deltas for origin in delta.origins),
        started=started,
        finished=finished,
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
    )


def _logprobs(entries: Iterable[Any]) -> tuple[TokenLogprobs, ...]:
    return tuple(wire.logprobs_from_wire(entry) for entry in entries)


def _finished(m: generation_pb2.Finished, index: int) -> Finished:
    reason = wire.finish_from_wire(m.finish_reason)
    if reason is None:
        raise ProtocolFault("finished: no reason given")
    rejection, draft = wire.methods_from_wire(m.settings.rejection_sample_method, m.settings.draft_sample_method)
    settings = EffectiveSettings(
        sampling=wire.sampling_from_wire(m.settings.sampling),
        rejection_method=rejection,
        draft_method=draft,
        num_speculative_tokens=m.settings.num_speculative_tokens,
        enable_adaptive_verification=m.settings.enable_adaptive_verification,
        batch_invariant=m.settings.batch_invariant,
        numerics_fingerprint=m.settings.numerics_fingerprint,
    )
    usage = Usage(**_fields(Usage, m.usage))
    return Finished(reason, m.stop_reason, usage, SpeculativeStats(**_fields(SpeculativeStats, m.speculative)), settings, index)


def _fields(cls: type, message: Any) -> dict[str, Any]:
    values = {f.name: getattr(message, f.name) for f in dataclasses.fields(cls)}
    return {name: value if isinstance(value, int | float) else tuple(value) for name, value in values.items()}

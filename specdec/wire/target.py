"""TargetService.Verify: steps, closes and continuations one way, answers and beats the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specdec import terms
from specdec.errors import InvalidRequest, ProtocolFault
from specdec.terms.record import record
from specdec.v1 import target_pb2
from specdec.wire.shared import (
    INVALID_ARGUMENT,
    MAX_ITEMS,
    MAX_MESSAGE_CHARS,
    bounded,
    counted,
    distribution_to_wire,
    distributions,
    draft_method_to_wire,
    finish_from_wire,
    finish_to_wire,
    ids,
    link_from_wire,
    logprobs_from_wire,
    logprobs_to_wire,
    methods_from_wire,
    name_from_wire,
    rejection_method_to_wire,
    sampling_from_wire,
    sampling_to_wire,
)

# ---------------------------------------------------------------- asking


def begin_to_wire(begin: terms.Begin) -> target_pb2.Begin:
    return target_pb2.Begin(
        prompt_length=begin.prompt_length,
        sampling=sampling_to_wire(begin.sampling),
        seed=begin.seed,
        rejection_sample_method=rejection_method_to_wire(begin.rejection_method),
        draft_sample_method=draft_method_to_wire(begin.draft_method),
        traceparent=begin.traceparent,
        priority=begin.priority,
        fork_session_id=begin.fork_session_id or None,
    )


def begin_from_wire(message: target_pb2.Begin) -> terms.Begin:
    rejection, draft = methods_from_wire(message.rejection_sample_method, message.draft_sample_method)
    return terms.Begin(
        prompt_length=counted(message.prompt_length, "begin.prompt_length"),
        sampling=sampling_from_wire(message.sampling),
        seed=message.seed,
        rejection_method=rejection,
        draft_method=draft,
        traceparent=message.traceparent,
        priority=message.priority,
        fork_session_id=name_from_wire(message.fork_session_id, "begin.fork_session_id") if message.HasField("fork_session_id") else "",
    )


def _step_fields(step: terms.Step) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "session_id": step.session_id,
        "epoch": step.epoch,
        "round": step.round,
        "base_length": step.base_length,
        "base_hash": step.base_hash,
        "tokens": step.tokens,
        "num_proposed": step.num_proposed,
        "run_ahead": step.run_ahead,
        "remaining_ms": step.remaining_ms,
    }
    if step.distributions:
        fields["distributions"] = [distribution_to_wire(q) for q in step.distributions]
    if step.begin is not None:
        fields["begin"] = begin_to_wire(step.begin)
    return fields


def step_to_wire(step: terms.Step) -> target_pb2.Step:
    return target_pb2.Step(**_step_fields(step))


def step_from_wire(message: target_pb2.Step) -> terms.Step:
    tokens = ids(message.tokens, "step.tokens")
    committed = len(tokens) - message.num_proposed
    if committed < 1:
        raise InvalidRequest("step.tokens", "must hold at least the newest committed token before the proposals")
    begin = begin_from_wire(message.begin) if message.HasField("begin") else None
    if begin is not None and begin.prompt_length > message.base_length + committed:
        raise InvalidRequest("begin.prompt_length", f"must not exceed the {message.base_length + committed} committed tokens")
    return terms.Step(
        session_id=name_from_wire(message.session_id, "step.session_id"),
        epoch=counted(message.epoch, "step.epoch"),
        round=counted(message.round, "step.round"),
        base_length=message.base_length,
        base_hash=message.base_hash,
        tokens=tokens,
        num_proposed=message.num_proposed,
        remaining_ms=message.remaining_ms,
        run_ahead=message.run_ahead,
        distributions=distributions(message.distributions, message.num_proposed, "step.distributions"),
        begin=begin,
    )


def close_to_wire(close: terms.Close) -> target_pb2.Close:
    return target_pb2.Close(session_id=close.session_id, epoch=close.epoch)


def close_from_wire(message: target_pb2.Close) -> terms.Close:
    return terms.Close(name_from_wire(message.session_id, "close.session_id"), counted(message.epoch, "close.epoch"))


def _ahead_fields(ahead: terms.Ahead) -> dict[str, Any]:
    return {
        "session_id": ahead.session_id,
        "epoch": ahead.epoch,
        "prefix_length": ahead.prefix_length,
        "prefix_hash": ahead.prefix_hash,
        "tokens": ahead.tokens,
    }


def ahead_to_wire(ahead: terms.Ahead) -> target_pb2.Ahead:
    return target_pb2.Ahead(**_ahead_fields(ahead))


def ahead_from_wire(message: target_pb2.Ahead) -> terms.Ahead:
    bounded(message.tokens, terms.MAX_AHEAD_TOKENS, "ahead.tokens", "MAX_AHEAD_TOKENS")
    if not message.tokens:
        raise InvalidRequest("ahead.tokens", "must hold at least one proposal")
    return terms.Ahead(
        session_id=name_from_wire(message.session_id, "ahead.session_id"),
        epoch=counted(message.epoch, "ahead.epoch"),
        prefix_length=counted(message.prefix_length, "ahead.prefix_length"),
        prefix_hash=message.prefix_hash,
        tokens=ids(message.tokens, "ahead.tokens"),
    )


def _item_fields(item: terms.VerifyItem) -> dict[str, Any]:
    """Of an item, built where it belongs: a message that is handed to another one is written and read once more for it."""
    if isinstance(item, terms.Step):
        return {"step": _step_fields(item)}
    if isinstance(item, terms.Ahead):
        return {"ahead": _ahead_fields(item)}
    return {"close": close_to_wire(item)}


def verify_item_to_wire(item: terms.VerifyItem) -> target_pb2.VerifyItem:
    return target_pb2.VerifyItem(**_item_fields(item))


def verify_item_from_wire(message: target_pb2.VerifyItem) -> terms.VerifyItem:
    kind = message.WhichOneof("item")
    if kind == "step":
        return step_from_wire(message.step)
    if kind == "close":
        return close_from_wire(message.close)
    if kind == "ahead":
        return ahead_from_wire(message.ahead)
    raise InvalidRequest("items", "an item must hold exactly one of: step, close, ahead")


@record(frozen=True, slots=True)
class VerifyRequest:
    """`rejected`: items that carry a readable address but cannot be served, with their answers ready to be sent back. `link` empty: the
    orchestrator does not say which of its connections this is."""

    orchestrator_id: str | None
    items: tuple[terms.VerifyItem, ...] = ()
    rejected: tuple[terms.Answer, ...] = ()
    link: str = ""


def verify_request_to_wire(
    items: Iterable[terms.VerifyItem], orchestrator_id: str | None = None, link: str = ""
) -> target_pb2.VerifyRequest:
    """With an `orchestrator_id`: the first message of a stream."""
    hello = None if orchestrator_id is None else target_pb2.Hello(orchestrator_id=orchestrator_id, link=link)
    return target_pb2.VerifyRequest(hello=hello, items=[_item_fields(item) for item in items])


def verify_request_from_wire(message: target_pb2.VerifyRequest) -> VerifyRequest:
    """One broken item does not take its neighbours' stream down: it is answered `failed`. Raises InvalidRequest when the message itself
    is broken or an item names no session."""
    bounded(message.items, MAX_ITEMS, "items", "MAX_ITEMS")
    hello = name_from_wire(message.hello.orchestrator_id, "hello.orchestrator_id") if message.HasField("hello") else None
    items: list[terms.VerifyItem] = []
    rejected: list[terms.Answer] = []
    for item in message.items:
        try:
            items.append(verify_item_from_wire(item))
        except InvalidRequest as error:
            kind = item.WhichOneof("item")
            inner = getattr(item, kind) if kind else None
            if inner is None or not inner.session_id or len(inner.session_id.encode()) > terms.MAX_ID_BYTES:
                raise
            failed = terms.Failed(INVALID_ARGUMENT, str(error)[:MAX_MESSAGE_CHARS], drop=False)
            rejected.append(terms.Answer(inner.session_id, inner.epoch, getattr(inner, "round", 0), failed))
    return VerifyRequest(hello, tuple(items), tuple(rejected), link_from_wire(message.hello.link, "hello.link"))


# ---------------------------------------------------------------- answering


def _result_fields(result: terms.Result) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prefix_length": result.prefix_length,
        "kv_length_after": result.kv_length_after,
        "num_verified": result.num_verified,
        "num_accepted": result.num_accepted,
        "tokens": result.tokens,
        "finish": finish_to_wire(result.finish),
        "stop_token_id": result.stop_token_id,
    }
    if result.logprobs:
        fields["logprobs"] = [logprobs_to_wire(entry) for entry in result.logprobs]
    if result.forced:
        fields["forced"] = result.forced
    if result.prompt_logprobs:
        fields["prompt_logprobs"] = [logprobs_to_wire(entry) for entry in result.prompt_logprobs]
    return fields


def _result_from_wire(message: target_pb2.Result) -> terms.Result:
    tokens = ids(message.tokens, "result.tokens")
    verified, accepted = message.num_verified, message.num_accepted
    if accepted > verified or accepted > len(tokens):
        raise ProtocolFault("result: num_accepted exceeds num_verified or the tokens present")
    logprobs, forced, prompt_logprobs = message.logprobs, message.forced, message.prompt_logprobs
    if logprobs and len(logprobs) != len(tokens):
        raise ProtocolFault(f"result: {len(tokens)} tokens with {len(logprobs)} logprobs")
    return terms.Result(
        message.prefix_length,
        message.kv_length_after,
        verified,
        accepted,
        tokens,
        logprobs=tuple(logprobs_from_wire(entry) for entry in logprobs) if logprobs else (),
        forced=tuple(forced) if forced else (),
        finish=finish_from_wire(message.finish) if message.finish else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        prompt_logprobs=tuple(logprobs_from_wire(entry) for entry in prompt_logprobs) if prompt_logprobs else (),
    )


def _failed_to_wire(failed: terms.Failed) -> target_pb2.Failed:
    return target_pb2.Failed(code=failed.code, message=failed.message[:MAX_MESSAGE_CHARS], drop=failed.drop)


# outcome term → (name in the oneof, to wire: the message or its fields, from wire)
_OUTCOMES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], terms.Outcome]]] = {
    terms.Result: ("result", _result_fields, _result_from_wire),
    terms.PrefixNeeded: (
        "prefix_needed",
        lambda o: target_pb2.PrefixNeeded(have=o.have),
        lambda m: terms.PrefixNeeded(m.have),
    ),
    terms.UnknownSession: (
        "unknown_session",
        lambda o: target_pb2.UnknownSession(),
        lambda m: terms.UnknownSession(),
    ),
    terms.NoRoom: (
        "no_room",
        lambda o: target_pb2.NoRoom(retry_after_ms=o.retry_after_ms),
        lambda m: terms.NoRoom(m.retry_after_ms),
    ),
    terms.StaleEpoch: (
        "stale_epoch",
        lambda o: target_pb2.StaleEpoch(current=o.current),
        lambda m: terms.StaleEpoch(m.current),
    ),
    terms.StaleRound: (
        "stale_round",
        lambda o: target_pb2.StaleRound(current=o.current),
        lambda m: terms.StaleRound(m.current),
    ),
    terms.Expired: ("expired", lambda o: target_pb2.Expired(), lambda m: terms.Expired()),
    terms.Failed: ("failed", _failed_to_wire, lambda m: terms.Failed(m.code, m.message, m.drop)),
    terms.Closed: ("closed", lambda o: target_pb2.Closed(), lambda m: terms.Closed()),
}
_OUTCOME_READERS = {name: read for name, _, read in _OUTCOMES.values()}


def _answer_fields(answer: terms.Answer) -> dict[str, Any]:
    name, write, _ = _OUTCOMES[type(answer.outcome)]
    return {
        "session_id": answer.session_id,
        "epoch": answer.epoch,
        "round": answer.round,
        "queue_us": answer.queue_us,
        name: write(answer.outcome),
    }


def answer_to_wire(answer: terms.Answer) -> target_pb2.VerifyAnswer:
    return target_pb2.VerifyAnswer(**_answer_fields(answer))


def answer_from_wire(message: target_pb2.VerifyAnswer) -> terms.Answer:
    kind = message.WhichOneof("outcome")
    if kind is None:
        raise ProtocolFault("answer: no outcome that is known here")
    outcome = _OUTCOME_READERS[kind](getattr(message, kind))
    return terms.Answer(message.session_id, message.epoch, message.round, outcome, message.queue_us)


@record(frozen=True, slots=True)
class VerifyResponse:
    """`rows` and `engine_us` are those of the engine step that finished the answers, 0 when there was none."""

    answers: tuple[terms.Answer, ...] = ()
    rows: int = 0
    engine_us: int = 0
    beat: terms.TargetBeat | None = None


def verify_response_to_wire(
    answers: Sequence[terms.Answer] = (), *, rows: int = 0, engine_us: int = 0, beat: terms.TargetBeat | None = None
) -> target_pb2.VerifyResponse:
    return target_pb2.VerifyResponse(
        answers=[_answer_fields(answer) for answer in answers],
        step=target_pb2.EngineStep(rows=rows, engine_us=engine_us) if rows else None,
        beat=None if beat is None else beat_to_wire(beat),
    )


def verify_response_from_wire(message: target_pb2.VerifyResponse) -> VerifyResponse:
    """Raises ProtocolFault when the target broke the rules; the stream cannot be trusted any further."""
    beat = beat_from_wire(message.beat) if message.HasField("beat") else None
    answers = tuple(answer_from_wire(answer) for answer in message.answers)
    return VerifyResponse(answers, message.step.rows, message.step.engine_us, beat)


def beat_to_wire(beat: terms.TargetBeat) -> target_pb2.Beat:
    return target_pb2.Beat(**{name: getattr(beat, name) for name in terms.TargetBeat.__dataclass_fields__})


def beat_from_wire(message: target_pb2.Beat) -> terms.TargetBeat:
    return terms.TargetBeat(**{name: getattr(message, name) for name in terms.TargetBeat.__dataclass_fields__})

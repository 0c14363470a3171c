"""Terms ⇄ protobuf: every message there and back, and presence (F20)."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import terms, wire
from specdec.errors import InvalidRequest
from specdec.v1 import common_pb2, draft_pb2, target_pb2

pytestmark = pytest.mark.unit

U32 = st.integers(0, 2**32 - 1)
COUNT = st.integers(1, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
NAME = st.text(min_size=1, max_size=32).filter(lambda s: 1 <= len(s.encode(errors="ignore")) <= 128)
IDS = st.lists(U32, max_size=9).map(tuple)
SOME_IDS = st.lists(U32, min_size=1, max_size=9).map(tuple)
F32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
F64 = st.floats(allow_nan=False, allow_infinity=False)
OPTIONAL_U32 = st.none() | U32

STARTS = st.none() | NAME
GRAMMARS = st.builds(
    terms.Grammar, st.sampled_from(sorted(set(terms.GrammarForm) - {terms.GrammarForm.CHOICE}, key=str)), NAME, start_after=STARTS
) | st.builds(terms.Grammar, st.just(terms.GrammarForm.CHOICE), options=st.lists(NAME, max_size=3).map(tuple), start_after=STARTS)
SAMPLING = st.builds(
    terms.SamplingParams,
    temperature=F64,
    top_k=U32,
    top_p=F64,
    min_p=F64,
    frequency_penalty=F64,
    presence_penalty=F64,
    repetition_penalty=F64,
    logit_bias=st.dictionaries(U32, F64, max_size=4),
    allowed_token_ids=IDS,
    banned_token_ids=IDS,
    max_tokens=OPTIONAL_U32,
    min_tokens=U32,
    ignore_eos=st.booleans(),
    stop_token_ids=IDS,
    logprobs=OPTIONAL_U32,
    prompt_logprobs=OPTIONAL_U32,
    grammar=st.none() | GRAMMARS,
)
METHODS = st.sampled_from([(r, d) for r, legal in terms.LEGAL_METHODS.items() for d in legal])
LOGPROBS = st.lists(st.tuples(U32, F32), max_size=3).flatmap(
    lambda tops: st.builds(terms.TokenLogprobs, F32, st.just(tuple(i for i, _ in tops)), st.just(tuple(value for _, value in tops)))
)


def dyadic(ids: list[int]) -> terms.DraftDistribution:
    """Probabilities 1/2, 1/4, …, with the last one repeated: sums to exactly 1 in float32."""
    probs = [2.0 ** -(i + 1) for i in range(len(ids) - 1)]
    probs.append(1.0 - sum(probs))
    return terms.DraftDistribution(tuple(ids), struct.pack(f"<{len(ids)}f", *probs))


Q = st.none() | st.lists(U32, min_size=1, max_size=6, unique=True).map(dyadic)


@st.composite
def begins(draw: st.DrawFn, committed: int) -> terms.Begin:
    rejection, draft = draw(METHODS)
    sampling, priority = draw(SAMPLING), draw(st.integers(-(2**31), 2**31 - 1))
    fork = draw(st.just("") | NAME)
    return terms.Begin(draw(st.integers(1, committed)), sampling, draw(U64), rejection, draft, draw(NAME), priority, fork)


@st.composite
def steps(draw: st.DrawFn) -> terms.Step:
    tokens = draw(SOME_IDS)
    num_proposed = draw(st.integers(0, len(tokens) - 1))
    base_length = draw(st.integers(0, 2**32 - 1))
    return terms.Step(
        session_id=draw(NAME),
        epoch=draw(COUNT),
        round=draw(COUNT),
        base_length=base_length,
        base_hash=draw(U64),
        tokens=tokens,
        num_proposed=num_proposed,
        remaining_ms=draw(U32),
        run_ahead=draw(U32),
        distributions=draw(st.just(()) | st.lists(Q, min_size=num_proposed, max_size=num_proposed).map(tuple)),
        begin=draw(st.none() | begins(len(tokens) - num_proposed)),
    )


@st.composite
def results(draw: st.DrawFn) -> terms.Result:
    tokens = draw(IDS)
    accepted = draw(st.integers(0, len(tokens)))
    entries = draw(st.just(()) | st.lists(LOGPROBS, min_size=len(tokens), max_size=len(tokens)).map(tuple))
    return terms.Result(
        draw(U32),
        draw(U32),
        draw(st.integers(accepted, 2**32 - 1)),
        accepted,
        tokens,
        entries,
        draw(IDS),
        draw(st.none() | st.sampled_from(terms.FinishReason)),
        draw(OPTIONAL_U32),
        draw(st.lists(LOGPROBS, max_size=3).map(tuple)),
    )


@st.composite
def opens(draw: st.DrawFn) -> terms.Open:
    rejection, draft = draw(METHODS)
    tokens = draw(SOME_IDS)
    length = draw(st.integers(1, len(tokens)))
    sampling, seed = draw(SAMPLING), draw(U64)
    return terms.Open(draw(NAME), draw(COUNT), tokens, length, sampling, seed, rejection, draft, draw(U32), draw(U32), draw(NAME))


@st.composite
def proposals(draw: st.DrawFn) -> terms.Proposal:
    tokens = draw(SOME_IDS)
    n = len(tokens)
    confidences = draw(st.just(()) | st.lists(st.floats(0, 1, width=32), min_size=n, max_size=n).map(tuple))
    distributions = draw(st.just(()) | st.lists(Q, min_size=n, max_size=n).map(tuple))
    return terms.Proposal(draw(NAME), draw(U32), draw(U32), draw(U64), tokens, confidences, distributions)


OUTCOMES = st.one_of(
    results(),
    st.builds(terms.PrefixNeeded, U32),
    st.just(terms.UnknownSession()),
    st.builds(terms.NoRoom, U32),
    st.builds(terms.StaleEpoch, U32),
    st.builds(terms.StaleRound, U32),
    st.just(terms.Expired()),
    st.builds(terms.Failed, U32, st.text(max_size=20), st.booleans()),
    st.just(terms.Closed()),
)
ANSWERS = st.builds(terms.Answer, NAME, U32, U32, OUTCOMES, U32)
SENTS = st.builds(terms.Sent, NAME, U32, U64, U32) | SOME_IDS.flatmap(
    lambda tokens: st.builds(terms.Sent, NAME, U32, U64, st.just(len(tokens)), st.just(tokens))
)
COMMANDS = st.one_of(
    opens(),
    SENTS,
    st.builds(terms.Commit, NAME, U32, U64, SOME_IDS),
    st.builds(terms.Pause, NAME),
    st.builds(terms.Resume, NAME),
    st.builds(terms.CloseDraft, NAME),
)
EVENTS = st.one_of(proposals(), st.builds(terms.Resync, NAME, U32, U32), st.builds(terms.Refused, NAME, U32, NAME, U32))
ITEMS = st.one_of(steps(), st.builds(terms.Close, NAME, COUNT), st.builds(terms.Ahead, NAME, COUNT, COUNT, U64, SOME_IDS))
INFOS = st.builds(terms.ModelInfo, NAME, U32, st.binary(max_size=9), IDS, U32, NAME, NAME, st.booleans(), NAME, U64, U32, U32)
PAIRS = {
    "sampling": (SAMPLING, wire.sampling_to_wire, wire.sampling_from_wire),
    "logprobs": (LOGPROBS, wire.logprobs_to_wire, wire.logprobs_from_wire),
    "model_info": (INFOS, wire.model_info_to_wire, wire.model_info_from_wire),
    "begin": (begins(9), wire.begin_to_wire, wire.begin_from_wire),
    "item": (ITEMS, wire.verify_item_to_wire, wire.verify_item_from_wire),
    "answer": (ANSWERS, wire.answer_to_wire, wire.answer_from_wire),
    "beat": (st.builds(terms.TargetBeat, U32, U32, U64, U64, U32, U32, st.booleans(), U32), wire.beat_to_wire, wire.beat_from_wire),
    "command": (COMMANDS, wire.draft_command_to_wire, wire.draft_command_from_wire),
    "event": (EVENTS, wire.draft_event_to_wire, wire.draft_event_from_wire),
    "load": (st.builds(terms.DraftLoad, F32, F32, U32, U64, U64, st.booleans()), wire.load_to_wire, wire.load_from_wire),
}


@pytest.mark.parametrize("pair", PAIRS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_there_and_back(pair: str, data: st.DataObject) -> None:
    """Through real bytes: what is read equals what was written."""
    strategy, write, read = PAIRS[pair]
    term: Any = data.draw(strategy)
    message = write(term)
    assert read(type(message).FromString(message.SerializeToString())) == term


def test_every_outcome_command_and_event_has_a_pair() -> None:
    from specdec.wire import draft, target

    assert set(target._OUTCOMES) == set(terms.Outcome.__args__)
    assert set(draft._COMMANDS) == set(terms.DraftCommand.__args__)
    assert set(draft._EVENTS) == set(terms.DraftEvent.__args__)
    assert {f.name for f in target_pb2.VerifyAnswer.DESCRIPTOR.oneofs[0].fields} == set(target._OUTCOME_READERS)
    assert {f.name for f in draft_pb2.DraftCommand.DESCRIPTOR.oneofs[0].fields} == set(draft._COMMAND_READERS)
    assert {f.name for f in draft_pb2.DraftEvent.DESCRIPTOR.oneofs[0].fields} == set(draft._EVENT_READERS)


def test_every_sampling_field_of_the_proto_is_read() -> None:
    declared = {f.name for f in common_pb2.SamplingParams.DESCRIPTOR.fields}
    assert declared == set(terms.SamplingParams.__dataclass_fields__)
    assert {f.name for f in common_pb2.Grammar.DESCRIPTOR.oneofs_by_name["form"].fields} == {form.value for form in terms.GrammarForm}


def test_groups() -> None:
    step = terms.Step("s", 1, 1, 0, 0, (1, 2), 1, 100)
    request = wire.verify_request_from_wire(wire.verify_request_to_wire([step, terms.Close("s", 1)], "me"))
    assert request == wire.VerifyRequest("me", (step, terms.Close("s", 1)))
    answer, beat = terms.Answer("s", 1, 1, terms.Expired()), terms.TargetBeat(1, 2, 3, 4, 5, 6)
    response = wire.verify_response_from_wire(wire.verify_response_to_wire([answer], rows=3, engine_us=7, beat=beat))
    assert response == wire.VerifyResponse((answer,), 3, 7, beat)
    commands = (terms.Pause("s"), terms.Resume("s"))
    assert wire.draft_request_from_wire(wire.draft_request_to_wire(commands)) == wire.DraftRequest(None, commands)
    load = terms.DraftLoad(0.5, 0.25, 1, 2, 3)
    assert wire.draft_response_from_wire(wire.draft_response_to_wire([], load)) == wire.DraftResponse((), load)


# ---------------------------------------------------------------- F20: presence


def varint_field(number: int, value: int) -> bytes:
    assert value < 128 and number < 128
    key = number << 3
    return (bytes([key]) if key < 128 else bytes([key & 0x7F | 0x80, key >> 7])) + bytes([value])


F20 = {
    "empty message": (b"", {}),
    "temperature 0": (b"\x09" + struct.pack("<d", 0.0), {"temperature": 0.0}),
    "top_k 0": (varint_field(2, 0), {"top_k": 0}),
    "top_p 0": (b"\x19" + struct.pack("<d", 0.0), {"top_p": 0.0}),
    "repetition_penalty 0": (b"\x39" + struct.pack("<d", 0.0), {"repetition_penalty": 0.0}),
    "max_tokens 0": (varint_field(11, 0), {"max_tokens": 0}),
    "min_tokens 0": (varint_field(12, 0), {"min_tokens": 0}),
    "ignore_eos false": (varint_field(13, 0), {"ignore_eos": False}),
    "logprobs 0": (varint_field(15, 0), {"logprobs": 0}),
    "logprobs 3": (varint_field(15, 3), {"logprobs": 3}),
    "a field from the future": (b"\xa2\x06\x01x", {}),
}


@pytest.mark.parametrize("case", F20)
def test_f20_unset_takes_the_default_and_explicit_zero_stays(case: str) -> None:
    raw, expected = F20[case]
    assert wire.sampling_from_wire(common_pb2.SamplingParams.FromString(raw)) == terms.SamplingParams(**expected)


def test_f20_the_broken_twins_are_caught() -> None:
    """Two readers seen elsewhere: unset taken as 0, and an explicit 0 overwritten by `x or default`."""
    names = [f.name for f in common_pb2.SamplingParams.DESCRIPTOR.fields if f.name in ("temperature", "top_k", "top_p", "min_tokens")]

    def zero(message: common_pb2.SamplingParams) -> terms.SamplingParams:
        return terms.SamplingParams(**{name: getattr(message, name) for name in names})

    def default(message: common_pb2.SamplingParams) -> terms.SamplingParams:
        plain = terms.SamplingParams()
        return terms.SamplingParams(**{name: getattr(message, name) or getattr(plain, name) for name in names})

    def wrong(read: Any) -> set[str]:
        cases = {case: F20[case] for case in ("empty message", "temperature 0", "top_p 0", "top_k 0")}
        return {c for c, (raw, want) in cases.items() if read(common_pb2.SamplingParams.FromString(raw)) != terms.SamplingParams(**want)}

    assert "empty message" in wrong(zero)
    assert {"temperature 0", "top_p 0"} <= wrong(default)
    assert wrong(wire.sampling_from_wire) == set()


def test_f20_no_sampling_message_at_all() -> None:
    begin = wire.begin_from_wire(target_pb2.Begin(prompt_length=1))
    assert begin.sampling == terms.SamplingParams()
    assert (begin.rejection_method, begin.draft_method) == (terms.RejectionMethod.COUPLED, terms.DraftMethod.GUMBEL)


@pytest.mark.parametrize("name", ["max_tokens", "top_p", "repetition_penalty"])
def test_f20_a_zero_that_makes_no_sense_is_named_not_replaced(name: str) -> None:
    params = wire.sampling_from_wire(common_pb2.SamplingParams(**{name: 0}))
    with pytest.raises(InvalidRequest) as caught:
        params.check(10)
    assert caught.value.field == f"sampling.{name}"


@pytest.mark.parametrize("start_after", [None, "", "<think>"])
def test_f20_where_a_grammar_begins_is_told_apart(start_after: str | None) -> None:
    grammar = terms.Grammar(terms.GrammarForm.REGEX, "a", start_after=start_after)
    message = wire.sampling_to_wire(terms.SamplingParams(grammar=grammar))
    assert message.grammar.HasField("start_after") == (start_after is not None)
    assert wire.sampling_from_wire(message).grammar == grammar


def test_methods() -> None:
    coupled, standard = terms.RejectionMethod
    assert wire.methods_from_wire(0, 0, standard) == (standard, terms.DraftMethod.PROBABILISTIC)
    assert wire.methods_from_wire(0, 0, standard, terms.DraftMethod.GREEDY) == (standard, terms.DraftMethod.GREEDY)
    assert wire.methods_from_wire(1, 0, standard, terms.DraftMethod.PROBABILISTIC) == (coupled, terms.DraftMethod.GUMBEL)
    with pytest.raises(InvalidRequest, match="probabilistic or greedy"):
        wire.methods_from_wire(2, 1)

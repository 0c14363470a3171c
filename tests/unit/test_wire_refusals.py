"""Protobuf → terms: structure that is refused, with the field's name; what stands beside it is served."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from specdec import terms, wire
from specdec.errors import InvalidRequest, ProtocolFault
from specdec.v1 import common_pb2, draft_pb2, target_pb2

pytestmark = pytest.mark.unit

STEP = {"session_id": "s", "epoch": 1, "round": 1, "tokens": [1, 2], "remaining_ms": 9}
BAD_STEPS = {
    "step.tokens": {"num_proposed": 2},
    "step.session_id": {"session_id": ""},
    "step.epoch": {"epoch": 0},
    "step.round": {"round": 0},
    "begin.prompt_length": {"begin": target_pb2.Begin(prompt_length=3)},
    "rejection_sample_method": {"begin": target_pb2.Begin(prompt_length=1, rejection_sample_method=9)},
    "draft_sample_method": {"begin": target_pb2.Begin(prompt_length=1, draft_sample_method=3)},
    "step.distributions": {"distributions": [common_pb2.DraftDistribution()]},
}


@pytest.mark.parametrize("field", BAD_STEPS)
def test_bad_step_names_the_field(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.step_from_wire(target_pb2.Step(**{**STEP, **BAD_STEPS[field]}))
    assert caught.value.field == field


def test_long_session_id_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="128 bytes"):
        wire.step_from_wire(target_pb2.Step(**{**STEP, "session_id": "é" * 65}))


AHEAD: dict[str, Any] = {"session_id": "s", "epoch": 1, "prefix_length": 1, "tokens": [3]}
BAD_AHEADS: dict[str, dict[str, Any]] = {
    "ahead.session_id": {"session_id": ""},
    "ahead.epoch": {"epoch": 0},
    "ahead.prefix_length": {"prefix_length": 0},
    "ahead.tokens": {"tokens": []},
}


@pytest.mark.parametrize("field", BAD_AHEADS)
def test_bad_ahead_names_the_field(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.ahead_from_wire(target_pb2.Ahead(**{**AHEAD, **BAD_AHEADS[field]}))
    assert caught.value.field == field


def test_a_long_ahead_names_its_limit() -> None:
    most = terms.MAX_AHEAD_TOKENS
    assert len(wire.ahead_from_wire(target_pb2.Ahead(**{**AHEAD, "tokens": [3] * most})).tokens) == most
    with pytest.raises(InvalidRequest, match=r"ahead\.tokens.*MAX_AHEAD_TOKENS"):
        wire.ahead_from_wire(target_pb2.Ahead(**{**AHEAD, "tokens": [3] * (most + 1)}))


def test_a_fork_names_a_session_or_nobody() -> None:
    assert wire.begin_from_wire(target_pb2.Begin(prompt_length=1)).fork_session_id == ""
    assert not wire.begin_to_wire(terms.Begin(1, terms.SamplingParams(), 7)).HasField("fork_session_id")
    for name in ("", "é" * 65):
        with pytest.raises(InvalidRequest) as caught:
            wire.begin_from_wire(target_pb2.Begin(prompt_length=1, fork_session_id=name))
        assert caught.value.field == "begin.fork_session_id"


def test_a_grammar_without_a_form_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="json_schema, regex, choice, ebnf") as caught:
        wire.sampling_from_wire(common_pb2.SamplingParams(grammar=common_pb2.Grammar(start_after="x")))
    assert caught.value.field == "sampling.grammar"


def test_missing_oneof_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="exactly one of"):
        wire.verify_request_from_wire(target_pb2.VerifyRequest(items=[target_pb2.VerifyItem()]))
    with pytest.raises(InvalidRequest, match="exactly one of"):
        wire.draft_command_from_wire(draft_pb2.DraftCommand())
    with pytest.raises(ProtocolFault):
        wire.answer_from_wire(target_pb2.VerifyAnswer(session_id="s"))


def test_too_many_items_names_the_limit() -> None:
    item = target_pb2.VerifyItem(close=target_pb2.Close(session_id="s", epoch=1))
    with pytest.raises(InvalidRequest, match="MAX_ITEMS"):
        wire.verify_request_from_wire(target_pb2.VerifyRequest(items=[item] * (wire.MAX_ITEMS + 1)))
    params = common_pb2.SamplingParams(stop_token_ids=range(wire.MAX_ID_LIST + 1))
    with pytest.raises(InvalidRequest, match=r"sampling\.stop_token_ids.*MAX_ID_LIST"):
        wire.sampling_from_wire(params)


def test_one_broken_item_is_answered_and_its_neighbours_are_served() -> None:
    good = wire.verify_item_to_wire(terms.Step("good", 1, 1, 0, 0, (1,), 0, 9))
    bad = target_pb2.VerifyItem(step=target_pb2.Step(**{**STEP, "session_id": "bad", "round": 4, "num_proposed": 7}))
    ahead = target_pb2.VerifyItem(ahead=target_pb2.Ahead(session_id="a", epoch=2))
    request = wire.verify_request_from_wire(target_pb2.VerifyRequest(items=[bad, good, ahead]))
    assert [item.session_id for item in request.items] == ["good"]
    (first, second) = request.rejected
    assert (first.session_id, first.round) == ("bad", 4)
    assert isinstance(first.outcome, terms.Failed) and first.outcome.code == 3 and "step.tokens" in first.outcome.message
    assert isinstance(second.outcome, terms.Failed) and (second.round, second.outcome.code) == (0, 3)


BAD_Q = {
    "length": common_pb2.DraftDistribution(ids=[1, 2], probs=struct.pack("<f", 1.0)),
    "nan": common_pb2.DraftDistribution(ids=[1], probs=struct.pack("<f", float("nan"))),
    "negative": common_pb2.DraftDistribution(ids=[1, 2], probs=struct.pack("<2f", -0.5, 1.5)),
    "infinite": common_pb2.DraftDistribution(ids=[1], probs=struct.pack("<f", float("inf"))),
    "sum": common_pb2.DraftDistribution(ids=[1], probs=struct.pack("<f", 0.5)),
    "no ids": common_pb2.DraftDistribution(probs=struct.pack("<f", 1.0)),
}


@pytest.mark.parametrize("case", BAD_Q)
def test_f51_a_broken_proposal_is_as_good_as_none(case: str) -> None:
    broken = draft_pb2.Proposal(session_id="s", epoch=1, tokens=[1], distributions=[BAD_Q[case]])
    fine = terms.Proposal("t", 1, 3, 5, (1,))
    message = draft_pb2.DraftResponse(
        events=[draft_pb2.DraftEvent(proposal=broken), draft_pb2.DraftEvent(), wire.draft_event_to_wire(fine)]
    )
    response = wire.draft_response_from_wire(message)
    assert response.events == (fine,) and len(response.faults) == 2


def test_f51_proposal_lists_that_do_not_fit() -> None:
    for proposal in (
        draft_pb2.Proposal(session_id="s"),
        draft_pb2.Proposal(session_id="s", tokens=[1], confidences=[0.5, 0.5]),
        draft_pb2.Proposal(session_id="s", tokens=[1], confidences=[float("nan")]),
    ):
        with pytest.raises(ProtocolFault):
            wire.draft_event_from_wire(draft_pb2.DraftEvent(proposal=proposal))


UNCARRIABLE: dict[str, Any] = {
    "max_tokens": -1,
    "temperature": "warm",
    "allowed_token_ids": (1, -1),
    "banned_token_ids": (2**40,),
    "stop_token_ids": ("</s>",),
    "logit_bias": {-1: 0.5},
    "grammar": terms.Grammar(terms.GrammarForm.REGEX, "\ud800"),
}


@pytest.mark.parametrize("name", UNCARRIABLE)
def test_a_parameter_that_the_wire_cannot_carry_is_named(name: str) -> None:
    """Whichever stands before and behind it."""
    with pytest.raises(InvalidRequest) as caught:
        wire.sampling_to_wire(terms.SamplingParams(**{name: UNCARRIABLE[name]}))
    assert caught.value.field == f"sampling.{name}"


def test_an_explicit_zero_is_carried() -> None:
    message = wire.sampling_to_wire(terms.SamplingParams(temperature=0.0, logprobs=0, stop_token_ids=(0,), logit_bias={0: 0.0}))
    assert message.HasField("temperature") and message.HasField("logprobs")
    assert list(message.stop_token_ids) == [0] and dict(message.logit_bias) == {0: 0.0}

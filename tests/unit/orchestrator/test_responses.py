"""A delta as a message: what is set, and what is not."""

from __future__ import annotations

import pytest

from orchestrator.answer import Delta
from orchestrator.fronts import responses
from specdec import terms
from specdec.v1 import generation_pb2 as pb

ENTRY = terms.TokenLogprobs(-0.5, (7, 8), (-0.25, -1.0))


@pytest.mark.parametrize("index", [0, 2])
def test_a_delta_without_anything_is_a_delta(index: int) -> None:
    """Its ids became text that is held back: clients switch on what a message has, and count its tokens."""
    read = pb.GenerateResponse.FromString(responses.delta(index, Delta()).SerializeToString())
    assert (read.index, read.WhichOneof(pb.GenerateResponse.DESCRIPTOR.oneofs[0].name)) == (index, "delta")
    assert read == pb.GenerateResponse(index=index, delta=pb.Delta())


def test_all_of_a_delta_arrives() -> None:
    entry = pb.GenerateResponse(index=1, delta=pb.Delta(token_ids=[5, 6], text="ab"))
    assert responses.delta(1, Delta((5, 6), "ab")) == entry
    both = (terms.Origin.ACCEPTED, terms.Origin.BONUS)
    told = responses.delta(1, Delta((5, 6), "ab", (ENTRY, terms.TokenLogprobs(-2.0)), both, (terms.TokenLogprobs(-3.0),) * 3)).delta
    assert [round(one.logprob, 6) for one in told.logprobs] == [-0.5, -2.0] and list(told.logprobs[0].top_ids) == [7, 8]
    assert [round(one.logprob, 6) for one in told.prompt_logprobs] == [-3.0] * 3
    assert len(told.origins) == 2 and len(set(told.origins)) == 2

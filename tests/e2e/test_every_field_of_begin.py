"""F16 at the target: every field of Begin has its effect, or is documented to have none on what is decided.

A field that is added to the proto and not to the table fails the first test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specdec.v1 import common_pb2, target_pb2
from tests.e2e.raw import Conversation, RawClient
from tests.e2e.stack import Stack
from tests.e2e.steps import PROMPT, answer, hello, item

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90)]
LENGTH = common_pb2.FINISH_REASON_LENGTH
STANDARD = {"rejection_sample_method": common_pb2.REJECTION_SAMPLE_METHOD_STANDARD}
WARM = {"temperature": 1.0}
ONE = b"\0\0\x80?"  # 1.0
Case = Callable[[Conversation], None]


@pytest.fixture
def verify(questioned: Stack) -> Iterator[Conversation]:
    method = "/specdec.v1.TargetService/Verify"
    with RawClient(questioned.targets[0].endpoint) as client, client.conversation(method, target_pb2.VerifyResponse) as stream:
        stream.say(hello())
        yield stream


def result(stream: Conversation, step: Any) -> Any:
    said = answer(stream, step)
    assert said.WhichOneof("outcome") == "result", said
    return said.result


_names = iter(range(1_000_000))


def begun(begin: dict[str, Any] | None = None, sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The first Step of a session that is like no other."""
    return item(begin=begin, sampling=sampling, session_id=f"s{next(_names)}", **fields)


def prompt_length(stream: Conversation) -> None:
    """What is behind it counts as output."""
    last = result(stream, begun({"prompt_length": 2}, {"max_tokens": 2}))
    assert len(last.tokens) == 1 and last.finish == LENGTH
    assert not result(stream, begun({"prompt_length": 3}, {"max_tokens": 2})).finish


def sampling(stream: Conversation) -> None:
    assert list(result(stream, begun(sampling={"allowed_token_ids": [5]})).tokens) == [5]
    assert list(result(stream, begun()).tokens) != [5]


def prompt_logprobs(stream: Conversation) -> None:
    """One per token of the prompt behind the first, in the first result of the epoch only."""
    step = begun(sampling={"prompt_logprobs": 2})
    first = result(stream, step)
    assert [len(entry.top_ids) for entry in first.prompt_logprobs] == [2] * (len(PROMPT) - 1)
    second = item([*PROMPT, *first.tokens], session_id=step.step.session_id, round=2)
    second.step.ClearField("begin")
    assert not result(stream, second).prompt_logprobs
    assert not result(stream, begun()).prompt_logprobs


def grammar(stream: Conversation) -> None:
    """What must follow is told with each result, so that it can be proposed at once."""
    first = result(stream, begun(sampling={"grammar": common_pb2.Grammar(regex="[0-9] cat")}))
    assert 18 <= first.tokens[0] < 28  # a digit
    assert list(first.forced) == [315]  # " cat"
    last = result(stream, begun(sampling={"grammar": common_pb2.Grammar(choice=common_pb2.Choice(options=["cat"]))}))
    assert list(last.tokens) == [279] and last.finish == common_pb2.FINISH_REASON_STOP and not last.HasField("stop_token_id")


def seed(stream: Conversation) -> None:
    tokens = [result(stream, begun({"seed": seed}, WARM)).tokens[0] for seed in (1, 1, 2, 3, 4, 5)]
    assert tokens[0] == tokens[1] and len(set(tokens)) > 2


def rejection_sample_method(stream: Conversation) -> None:
    """Distributions go with standard."""
    q = common_pb2.DraftDistribution(ids=[5], probs=ONE)
    with_q = {"tokens": [*PROMPT, 5], "num_proposed": 1, "distributions": [q], "sampling": WARM}
    assert result(stream, begun({**STANDARD, "draft_sample_method": 3}, **with_q)).num_verified == 1
    assert answer(stream, begun(**with_q)).failed.message.startswith("step.distributions")


def draft_sample_method(stream: Conversation) -> None:
    """Only what goes with the rejection method; a greedy draft's proposals are one-hot under either."""
    assert result(stream, begun({"draft_sample_method": common_pb2.DRAFT_SAMPLE_METHOD_GREEDY})).tokens
    probabilistic = common_pb2.DRAFT_SAMPLE_METHOD_PROBABILISTIC
    assert answer(stream, begun({"draft_sample_method": probabilistic})).failed.message.startswith("draft_sample_method")
    assert result(stream, begun({**STANDARD, "draft_sample_method": probabilistic})).tokens


def silent(**begin: Any) -> Case:
    """Decides nothing."""
    return lambda stream: same(result(stream, begun(begin, WARM)), result(stream, begun(sampling=WARM)))


def same(got: Any, want: Any) -> None:
    assert (got.tokens, got.finish, got.kv_length_after) == (want.tokens, want.finish, want.kv_length_after)


def fork_session_id(stream: Conversation) -> None:
    """Shares the prompt of a session it knows, ignores one that it does not; neither changes anything."""
    donor = begun(sampling=WARM)
    want = result(stream, donor)
    same(result(stream, begun({"fork_session_id": donor.step.session_id}, WARM)), want)
    same(result(stream, begun({"fork_session_id": "nobody"}, WARM)), want)
    longer = {"tokens": [*PROMPT, 13, 14], "sampling": WARM}
    same(
        result(stream, begun({"fork_session_id": donor.step.session_id, "prompt_length": 5}, **longer)),
        result(stream, begun({"prompt_length": 5}, **longer)),
    )


BEGIN: dict[str, Case] = {
    "prompt_length": prompt_length,
    "sampling": sampling,
    "seed": seed,
    "rejection_sample_method": rejection_sample_method,
    "draft_sample_method": draft_sample_method,
    "traceparent": silent(traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    "fork_session_id": fork_session_id,
    "priority": silent(priority=-3),
}
MORE: dict[str, Case] = {"sampling.prompt_logprobs": prompt_logprobs, "sampling.grammar": grammar}  # those that answer in own fields


def test_F16_no_field_is_forgotten() -> None:
    assert {field.name for field in target_pb2.Begin.DESCRIPTOR.fields} == BEGIN.keys()


@pytest.mark.parametrize("field", BEGIN | MORE)
def test_F16(verify: Conversation, field: str) -> None:
    (BEGIN | MORE)[field](verify)

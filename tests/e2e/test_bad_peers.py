"""An orchestrator that talks nonsense to a target or a draft: every item is answered for itself, naming the field; only what leaves a
stream without a meaning ends it. Sessions of a well-behaved orchestrator on the same processes do not notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specdec.hashing import prefix_hash
from specdec.v1 import common_pb2, draft_pb2, target_pb2
from specdec.v1 import generation_pb2 as pb
from tests.e2e.conftest import WINDOW
from tests.e2e.raw import Conversation, Neighbours, RawClient
from tests.e2e.stack import Stack
from tests.e2e.steps import COMPLETE, PROMPT, answer, hello, item

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90)]
VOCAB = 320
INVALID_ARGUMENT = 3


@pytest.fixture(scope="module")
def neighbours(questioned: Stack) -> Iterator[Neighbours]:
    requests = [
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[20 + i, 30, 40]), seed=i, sampling=common_pb2.SamplingParams(max_tokens=200, ignore_eos=True)
        )
        for i in range(2)
    ]
    with RawClient(questioned.endpoint) as client:
        wanted = [client.generate(request) for request in requests]
    with Neighbours(questioned.endpoint, requests, wanted) as neighbours:
        yield neighbours


@pytest.fixture(autouse=True)
def undisturbed(neighbours: Neighbours) -> Iterator[None]:
    with neighbours.undisturbed():
        yield


# ---------------------------------------------------------------- the target's Verify stream


@pytest.fixture
def verify(questioned: Stack) -> Iterator[Conversation]:
    method = "/specdec.v1.TargetService/Verify"
    with RawClient(questioned.targets[0].endpoint) as client, client.conversation(method, target_pb2.VerifyResponse) as stream:
        yield stream


def q_of(ids: list[int], probs: bytes) -> common_pb2.DraftDistribution:
    return common_pb2.DraftDistribution(ids=ids, probs=probs)


STANDARD = {"rejection_sample_method": 2, "draft_sample_method": 3}
ONE = b"\0\0\x80?"
BAD_STEPS: dict[str, tuple[Any, str]] = {
    "unknown id": (item([10, VOCAB, 12]), "step.tokens"),
    "id -1": (item([10, 2**32 - 1, 12]), "step.tokens"),
    "unknown proposal": (item([*PROMPT, VOCAB], num_proposed=1), "step.tokens"),
    "block too long": (item([*PROMPT, *[5] * 17], num_proposed=17), "step.num_proposed"),
    "more proposals than tokens": (item(PROMPT, num_proposed=4), "step.tokens"),
    "only proposals": (item(PROMPT, num_proposed=3), "step.tokens"),
    "no tokens": (item([]), "step.tokens"),
    "longer than the window": (item([5] * (WINDOW + 1)), "step.tokens"),
    "no round": (item(round=0), "step.round"),
    "round 2 first": (item(round=2), "step.round"),
    "no epoch": (item(epoch=0), "step.epoch"),
    "a base in the first step": (item(base_length=2), "step.base_length"),
    "a base of 2^32-1": (item(base_length=2**32 - 1), "step.tokens"),
    "no prompt": (item(begin={"prompt_length": 0}), "begin.prompt_length"),
    "a prompt longer than the tokens": (item(begin={"prompt_length": 4}), "begin.prompt_length"),
    "no max_tokens": (item(begin={"sampling": common_pb2.SamplingParams(temperature=1.0)}), "sampling.max_tokens"),
    "top_p": (item(sampling={"top_p": 2.0}), "sampling.top_p"),
    "NaN": (item(sampling={"temperature": float("nan")}), "sampling.temperature"),
    "unknown stop id": (item(sampling={"stop_token_ids": [VOCAB]}), "sampling.stop_token_ids"),
    "nothing to choose from": (item(sampling={"allowed_token_ids": [5], "banned_token_ids": [5]}), "sampling.allowed_token_ids"),
    "unknown method": (item(begin={"rejection_sample_method": 9}), "rejection_sample_method"),
    "methods that do not fit": (item(begin={"rejection_sample_method": 1, "draft_sample_method": 3}), "draft_sample_method"),
    "q under coupled": (item([*PROMPT, 5], num_proposed=1, distributions=[q_of([5], ONE)]), "step.distributions"),
    "q of another length": (
        item([*PROMPT, 5], num_proposed=1, begin=STANDARD, distributions=[q_of([5], ONE)] * 2),
        "step.distributions",
    ),
    "q of half a float": (
        item([*PROMPT, 5], num_proposed=1, begin=STANDARD, distributions=[q_of([5], ONE[:2])]),
        "step.distributions[0].probs",
    ),
    "q of an unknown id": (
        item([*PROMPT, 5], num_proposed=1, begin=STANDARD, distributions=[q_of([VOCAB], ONE)]),
        "step.distributions[0]",
    ),
    "half a regex": (item(sampling={"grammar": common_pb2.Grammar(regex="(a")}), "sampling.grammar.regex"),
    "a grammar of no form": (item(sampling={"grammar": common_pb2.Grammar()}), "sampling.grammar"),
    "a grammar nobody can speak": (item(sampling={"grammar": common_pb2.Grammar(regex="a"), "allowed_token_ids": [5]}), "sampling.grammar"),
    "too many alternatives of the prompt": (item(sampling={"prompt_logprobs": 21}), "sampling.prompt_logprobs"),
    "a fork of a long name": (item(begin={"fork_session_id": "x" * 129}), "begin.fork_session_id"),
    "an ahead of nothing": (target_pb2.VerifyItem(ahead=target_pb2.Ahead(session_id="s", epoch=1, prefix_length=3)), "ahead.tokens"),
    "an ahead of an unknown id": (
        target_pb2.VerifyItem(ahead=target_pb2.Ahead(session_id="s", epoch=1, prefix_length=3, tokens=[VOCAB])),
        "ahead.tokens",
    ),
    "a long traceparent": (item(begin={"traceparent": "x" * 200}), "begin.traceparent"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_F52_bad_steps(verify: Conversation, name: str) -> None:
    bad, field = BAD_STEPS[name]
    verify.say(hello())
    said = answer(verify, bad)
    assert said.WhichOneof("outcome") == "failed", said
    assert said.failed.code == INVALID_ARGUMENT
    assert said.failed.message.startswith(f"{field}: "), said.failed.message
    good = answer(verify, item())  # the stream and the session's name are as good as before
    assert (good.session_id, good.WhichOneof("outcome")) == ("s", "result")


def test_steps_that_are_answered_without_a_fault(verify: Conversation) -> None:
    verify.say(hello())
    headless = item()
    headless.step.ClearField("begin")
    assert answer(verify, headless).WhichOneof("outcome") == "unknown_session"
    assert answer(verify, item(remaining_ms=0)).WhichOneof("outcome") == "expired"
    assert answer(verify, target_pb2.VerifyItem(close=target_pb2.Close(session_id="nobody", epoch=7))).WhichOneof("outcome") == "closed"
    assert answer(verify, item(epoch=3)).WhichOneof("outcome") == "result"
    assert answer(verify, item(epoch=2)).stale_epoch.current == 3
    unfit = item([5], epoch=3, round=2, base_length=2, base_hash=77)
    unfit.step.ClearField("begin")
    assert answer(verify, unfit).prefix_needed.have == 0
    assert answer(verify, item(epoch=3, round=9)).failed.message.startswith("step.round: ")


def test_a_wrong_block_never_changes_the_text(verify: Conversation) -> None:
    """Greedy rounds with proposals of every kind, against the same rounds without any."""
    verify.say(hello())

    def decided(session: str, blocks: list[list[int]]) -> list[int]:
        tokens, kv = list(PROMPT), 0
        for round_, block in enumerate([*blocks, *[[]] * 20], start=1):
            names = {"session_id": session, "round": round_, "base_length": kv, "base_hash": prefix_hash(tokens[:kv])}
            step = item([*tokens[kv:], *block], num_proposed=len(block), **names)
            if round_ > 1:
                step.step.ClearField("begin")
            result = answer(verify, step).result
            tokens += result.tokens
            kv = result.kv_length_after
            if result.finish:
                break
        return tokens

    plain = decided("plain", [])
    right = plain[len(PROMPT) :]
    assert len(right) == 20
    wrong = [[0], [VOCAB - 1] * 16, right[:3] + [5, 5], [right[0]] * 8, [2, 2, 2], list(reversed(right))[:10]]
    assert decided("wrong", wrong) == plain


def message(*items: Any, **fields: Any) -> target_pb2.VerifyRequest:
    return target_pb2.VerifyRequest(items=items, **fields)


BAD_STREAMS: dict[str, tuple[list[Any], str, str]] = {
    "no hello": ([message(item())], "INVALID_ARGUMENT", "hello"),
    "two hellos": ([hello(), hello()], "INVALID_ARGUMENT", "hello"),
    "a hello without a name": ([message(hello=target_pb2.Hello())], "INVALID_ARGUMENT", "hello.orchestrator_id"),
    "a long name": ([message(hello=target_pb2.Hello(orchestrator_id="x" * 129))], "INVALID_ARGUMENT", "hello.orchestrator_id"),
    "an item of no kind": ([hello(), message(target_pb2.VerifyItem())], "INVALID_ARGUMENT", "items"),
    "an item of no session": ([hello(), message(item(session_id=""))], "INVALID_ARGUMENT", "step.session_id"),
    "a long session name": ([hello(), message(item(session_id="x" * 129))], "INVALID_ARGUMENT", "step.session_id"),
    "too many items": ([hello(), message(*[item()] * 1025)], "INVALID_ARGUMENT", "items"),
    "a close of no session": (
        [hello(), message(target_pb2.VerifyItem(close=target_pb2.Close(epoch=1)))],
        "INVALID_ARGUMENT",
        "close.session_id",
    ),
}


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_streams_without_a_meaning(verify: Conversation, name: str) -> None:
    messages, code, field = BAD_STREAMS[name]
    verify.say(*messages)
    ended, details = verify.end()
    assert (ended, details.partition(": ")[0]) == (code, field)


@pytest.mark.parametrize("first", [[], [hello()]], ids=["at once", "after hello"])
@pytest.mark.parametrize("content", [b"\xff" * 40, b"\x12\x05\x0a\x03\x0a\x01\xff"], ids=["garbage", "not UTF-8"])
def test_streams_of_garbage(verify: Conversation, first: list[Any], content: bytes) -> None:
    """Bytes that are no message end their own stream and nothing else."""
    verify.say(*first, content)
    code, details = verify.end()
    assert (code, details.partition(": ")[0]) == ("INVALID_ARGUMENT", "request")


def test_an_empty_stream_ends_well(verify: Conversation) -> None:
    verify.close()
    assert verify.end()[0] == "OK"


def test_hanging_up_frees_the_sessions(questioned: Stack) -> None:
    """A named stream that ends leaves its sessions for the lease; a hundred streams that come and go leave no stream behind."""
    with RawClient(questioned.targets[0].endpoint) as client:
        for i in range(100):
            with client.conversation("/specdec.v1.TargetService/Verify", target_pb2.VerifyResponse) as stream:
                stream.say(target_pb2.VerifyRequest(hello=target_pb2.Hello(orchestrator_id=f"brief {i}")))
                stream.hear()


# ---------------------------------------------------------------- the draft's stream


@pytest.fixture
def draft(questioned: Stack) -> Iterator[Conversation]:
    method = "/specdec.v1.DraftService/Draft"
    with RawClient(questioned.drafts[0].endpoint) as client, client.conversation(method, draft_pb2.DraftResponse) as stream:
        yield stream


NAMED = draft_pb2.DraftRequest(orchestrator_id="hostile")


def opened(tokens: list[int] | None = None, sampling: dict[str, Any] | None = None, **fields: Any) -> draft_pb2.DraftCommand:
    """A good Open, with changes."""
    params = common_pb2.SamplingParams(**{**COMPLETE, **(sampling or {})})
    values = {
        "session_id": "s",
        "epoch": 1,
        "prompt_length": 3,
        "sampling": params,
        "num_speculative_tokens": 3,
        "budget_tokens": 8,
        **fields,
    }
    return draft_pb2.DraftCommand(open=draft_pb2.Open(tokens=PROMPT if tokens is None else tokens, **values))


def event(stream: Conversation, *commands: Any) -> Any:
    """The next event; load reports are passed over."""
    stream.say(draft_pb2.DraftRequest(commands=commands))
    while True:
        if events := stream.hear().events:
            return events[0]


BAD_OPENS: dict[str, tuple[Any, str]] = {
    "unknown id": (opened([10, VOCAB, 12]), "open.tokens"),
    "id -1": (opened([10, 2**32 - 1, 12]), "open.tokens"),
    "no epoch": (opened(epoch=0), "open.epoch"),
    "no prompt": (opened(prompt_length=0), "open.prompt_length"),
    "a prompt longer than the tokens": (opened(prompt_length=4), "open.prompt_length"),
    "no tokens": (opened([], prompt_length=0), "open.prompt_length"),
    "block too long": (opened(num_speculative_tokens=65), "open.num_speculative_tokens"),
    "no block": (opened(num_speculative_tokens=0), "open.num_speculative_tokens"),
    "top_p": (opened(sampling={"top_p": 2.0}), "sampling.top_p"),
    "unknown stop id": (opened(sampling={"stop_token_ids": [VOCAB]}), "sampling.stop_token_ids"),
    "a grammar of no form": (opened(sampling={"grammar": common_pb2.Grammar()}), "sampling.grammar"),
    "unknown method": (opened(rejection_sample_method=9), "rejection_sample_method"),
    "methods that do not fit": (opened(rejection_sample_method=1, draft_sample_method=3), "draft_sample_method"),
}


@pytest.mark.parametrize("name", BAD_OPENS)
def test_F52_bad_opens(draft: Conversation, name: str) -> None:
    bad, field = BAD_OPENS[name]
    draft.say(NAMED)
    refused = event(draft, bad).refused
    assert (refused.session_id, refused.retry_after_ms) == ("s", 0)
    assert refused.reason.startswith(f"{field}: "), refused.reason
    assert len(event(draft, opened(epoch=2)).proposal.tokens) > 0  # the stream goes on, the name is free


def test_bad_commands_of_a_good_session(draft: Conversation) -> None:
    """Each costs the session, never the stream: begun again it drafts again."""
    hash_ = prefix_hash(PROMPT)
    sent = {"session_id": "s", "prefix_length": 3, "prefix_hash": hash_}
    commands = [
        (draft_pb2.DraftCommand(commit=draft_pb2.Commit(**sent, tokens=[VOCAB])), "commit.tokens"),
        (draft_pb2.DraftCommand(commit=draft_pb2.Commit(**sent)), "commit.tokens"),
        (draft_pb2.DraftCommand(sent=draft_pb2.Sent(**sent, num_proposed=99)), "sent.num_proposed"),
        (draft_pb2.DraftCommand(sent=draft_pb2.Sent(**sent, num_proposed=1, tokens=[VOCAB])), "sent.tokens"),
        (draft_pb2.DraftCommand(sent=draft_pb2.Sent(**sent, num_proposed=2, tokens=[5])), "sent.tokens"),
    ]
    draft.say(NAMED)
    for epoch, (bad, field) in enumerate(commands, start=1):
        assert event(draft, opened(epoch=epoch)).WhichOneof("event") == "proposal"
        assert event(draft, bad).refused.reason.startswith(f"{field}: ")


def test_commands_that_lost_the_thread(draft: Conversation) -> None:
    draft.say(NAMED)
    names = {"session_id": "s", "prefix_length": 3}
    assert event(draft, draft_pb2.DraftCommand(commit=draft_pb2.Commit(**names, prefix_hash=1, tokens=[5]))).WhichOneof("event") == "resync"
    assert event(draft, opened(epoch=1)).WhichOneof("event") == "proposal"
    assert event(draft, draft_pb2.DraftCommand(commit=draft_pb2.Commit(**names, prefix_hash=1, tokens=[5]))).resync.have == 3
    assert event(draft, opened(epoch=2)).WhichOneof("event") == "proposal"
    assert event(draft, opened(epoch=2)).refused.reason.startswith("epoch: ")


BAD_DRAFT_STREAMS: dict[str, tuple[list[Any], str]] = {
    "no name": ([draft_pb2.DraftRequest(commands=[opened()])], "orchestrator_id"),
    "two names": ([NAMED, NAMED], "orchestrator_id"),
    "an empty name": ([draft_pb2.DraftRequest(orchestrator_id="")], "orchestrator_id"),
    "a command of no kind": ([NAMED, draft_pb2.DraftRequest(commands=[draft_pb2.DraftCommand()])], "commands"),
    "a command of no session": ([NAMED, draft_pb2.DraftRequest(commands=[opened(session_id="")])], "open.session_id"),
    "too many commands": ([NAMED, draft_pb2.DraftRequest(commands=[opened()] * 1025)], "commands"),
}


@pytest.mark.parametrize("name", BAD_DRAFT_STREAMS)
def test_draft_streams_without_a_meaning(draft: Conversation, name: str) -> None:
    messages, field = BAD_DRAFT_STREAMS[name]
    draft.say(*messages)
    code, details = draft.end()
    assert (code, details.partition(": ")[0]) == ("INVALID_ARGUMENT", field)


@pytest.mark.parametrize("first", [[], [NAMED]], ids=["at once", "after the name"])
def test_draft_streams_of_garbage(draft: Conversation, first: list[Any]) -> None:
    draft.say(*first, b"\xff" * 40)
    code, details = draft.end()
    assert (code, details.partition(": ")[0]) == ("INVALID_ARGUMENT", "request")


def test_nobody_fell_over(questioned: Stack) -> None:
    """Last in this file: no process saw a defect in all that."""
    for process in (*questioned.targets, *questioned.drafts, *questioned.orchestrators):
        assert process.popen.poll() is None
        errors = [line for line in process.log.read_text().splitlines() if '"level": "error"' in line]
        assert not errors, errors[0]

"""Node with @grpc/grpc-js and the published proto files: a client that shares no code with us gets the same answers as ours."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.client import Completion, SyncClient
from specdec.terms import SamplingParams
from tests.e2e.ask import Ask, answers
from tests.e2e.stack import Stack
from tests.npm import node_with
from tests.tools import ROOT
from tests.waiting import wait_until

pytestmark = [pytest.mark.clients, pytest.mark.timeout(120)]
HERE = Path(__file__).parent / "node"
ODD_SEED = 2**53 + 1  # the first integer that a JavaScript number cannot hold
LARGE_SEED = 2**64 - 5
NUM_TOKENS = 40
Answers = list[dict[str, Any]]
RunJobs = Callable[[list[dict[str, Any]]], Answers]


@pytest.fixture(scope="module")
def node() -> str:
    return node_with(HERE)


@pytest.fixture(scope="module")
def ask_node(node: str, stack: Stack) -> RunJobs:
    def run(jobs: list[dict[str, Any]]) -> Answers:
        command = [node, str(HERE / "generate.js"), stack.endpoint, str(ROOT / "proto")]
        done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
        found: Answers = json.loads(done.stdout)
        return found

    return run


OK = {"code": 0, "name": "OK", "details": ""}


def same(got: dict[str, Any], want: Completion) -> None:
    """One answer, whichever of the stream's, is ours."""
    assert got["kinds"][0] == "started" and got["kinds"][-1] == "finished"
    assert set(got["kinds"][1:-1]) <= {"delta"}
    assert tuple(got["token_ids"]) == want.token_ids
    assert got["text"] == want.text
    for name in ("logprobs", "prompt_logprobs"):
        told = [(entry["logprob"], tuple(entry["top_ids"]), tuple(entry["top_logprobs"])) for entry in got[name]]
        assert told == [(entry.logprob, entry.top_ids, entry.top_logprobs) for entry in getattr(want, name)], name
    assert int(got["started"]["seed"]) == want.started.seed
    assert got["started"]["prompt_tokens"] == want.started.prompt_tokens
    assert got["finished"]["finish_reason"] == f"FINISH_REASON_{want.finished.finish_reason.name}"
    assert got["finished"]["stop_reason"] == want.finished.stop_reason
    assert got["finished"]["usage"]["completion_tokens"] == want.finished.usage.completion_tokens


def sampled(ids: list[int], seed: int, **sampling: Any) -> tuple[dict[str, Any], Ask]:
    """The same question for Node and for ours."""
    params = {"temperature": 1.0, "max_tokens": NUM_TOKENS, "logprobs": 3, **sampling}
    for_node = {"token_ids": {"ids": ids}, "sampling": params, "seed": str(seed), "num_speculative_tokens": 3}
    ours = Ask(ids, SamplingParams(**params), {"seed": seed, "num_speculative_tokens": 3})
    return {"request": for_node}, ours


def test_same_tokens_text_and_logprobs(ask_node: RunJobs, stack: Stack) -> None:
    """Greedy and sampled, seeds of 64 bits, streamed, all at once; the reference is ours alone without speculation."""
    pairs = [
        sampled([10, 11, 12], 0, temperature=0.0),
        sampled([10, 11, 12], ODD_SEED),
        sampled([10, 11, 12], ODD_SEED - 1),
        sampled(list(range(3, 70)), LARGE_SEED, top_k=5),
        sampled([200], 7, temperature=0.7, top_p=0.9, ignore_eos=True),
    ]
    for _, ask in pairs:
        ask.options["num_speculative_tokens"] = 0
    wanted = answers(stack.endpoint, [ask for _, ask in pairs], at_once=1)
    got = ask_node([job for job, _ in pairs])
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine["status"] == OK
        same(mine, theirs)
    assert got[1]["token_ids"] != got[2]["token_ids"], "the last bit of the seed was lost on the way"
    assert sum(answer["deltas"] for answer in got) > 10, "nothing was streamed"
    assert any("TOKEN_ORIGIN_ACCEPTED" in answer["origins"] for answer in got)
    assert all(len(answer["origins"]) == len(answer["token_ids"]) for answer in got)


def test_multi_byte_text(ask_node: RunJobs, stack: Stack) -> None:
    """Ids of single bytes, drawn at random: characters complete over several deltas, and some never do."""
    told = ask_node([{"method": "Tokenize", "request": {"text": "é日"}}])[0]["reply"]["token_ids"]
    assert len(told) == 5
    job, ask = sampled(told, 5, allowed_token_ids=told[:2])
    wide_job, wide = sampled(told, 6, allowed_token_ids=told)
    wanted = answers(stack.endpoint, [ask, wide])
    got = ask_node([job, wide_job])
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine["status"] == OK
        same(mine, theirs)
        whole = ask_node([{"method": "Detokenize", "request": {"token_ids": mine["token_ids"], "skip_special_tokens": True}}])
        assert mine["text"] == whole[0]["reply"]["text"]
    assert "é" in got[0]["text"]


def test_chat_and_text_prompts(ask_node: RunJobs, stack: Stack) -> None:
    chat = [{"role": "user", "content": "the hat of the cat"}]
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    wanted = answers(stack.endpoint, [Ask(chat, sampling), Ask("the hat", sampling)])
    params = {"temperature": 0.0, "max_tokens": 12}
    got = ask_node(
        [{"request": {"messages": {"messages": chat}, "sampling": params}}, {"request": {"text": "the hat", "sampling": params}}]
    )
    for mine, theirs in zip(got, wanted, strict=True):
        assert tuple(mine["token_ids"]) == theirs.token_ids
        assert mine["text"] == theirs.text
        assert mine["started"]["prompt_tokens"] == theirs.started.prompt_tokens


def test_several_answers_of_a_formal_language(ask_node: RunJobs, stack: Stack) -> None:
    """Two answers, a regular expression and the prompt's log-probabilities in one call; the second is a request with the told seed."""
    pattern, ids = "[a-f]{3,9}-[0-9]+", list(range(40, 60))
    params = {"max_tokens": 16, "logprobs": 2, "prompt_logprobs": 1}
    request = {"token_ids": {"ids": ids}, "sampling": {**params, "grammar": {"regex": pattern}}, "seed": str(ODD_SEED), "n": 2}
    (got,) = ask_node([{"request": request}])
    assert got["status"] == OK and [len(got["prompt_logprobs"]), len(got["others"])] == [len(ids) - 1, 1]
    with SyncClient(stack.endpoint) as client:
        wanted = client.completions(ids, SamplingParams(**params), regex=pattern, seed=ODD_SEED, n=2, disable_spec_decode=True)
        alone = client.complete(ids, SamplingParams(max_tokens=16), regex=pattern, seed=wanted[1].started.seed)
    for mine, theirs in zip((got, *got["others"]), wanted, strict=True):
        same(mine, theirs)
        assert re.fullmatch("[a-f]{3,9}(-[0-9]*)?", mine["text"]), mine["text"]
    assert got["text"] != got["others"][0]["text"] == alone.text


def test_a_drawn_seed_repeats_the_text(ask_node: RunJobs) -> None:
    request = {"token_ids": {"ids": [10, 11]}, "sampling": {"max_tokens": NUM_TOKENS, "ignore_eos": True}}
    first = ask_node([{"request": request}])[0]
    seed = first["started"]["seed"]
    assert isinstance(seed, str) and 0 <= int(seed) < 2**64
    again, other = ask_node([{"request": {**request, "seed": seed}}, {"request": {**request, "seed": str(int(seed) ^ 1)}}])
    assert again["token_ids"] == first["token_ids"] != other["token_ids"]


def test_model_info(ask_node: RunJobs) -> None:
    reply = ask_node([{"method": "GetModelInfo", "request": {}}])[0]["reply"]
    assert reply["info"]["vocab_size"] == 320 and reply["info"]["dtype"] == "float64"
    assert reply["draft_available"] is True


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"text": "a", "sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"text": "a", "sampling": {"top_p": 1.5}}, "sampling.top_p"),
        ({"token_ids": {"ids": [320]}}, "token_ids.ids"),
        ({}, "prompt"),
    ],
)
def test_errors(ask_node: RunJobs, request_: dict[str, Any], field: str) -> None:
    got = ask_node([{"request": request_}])[0]
    assert got["status"]["name"] == "INVALID_ARGUMENT"
    assert got["status"]["details"].startswith(f"{field}: ")
    assert got["kinds"] == []


def test_cancel(ask_node: RunJobs, stack: Stack) -> None:
    """A stream is dropped in the middle, another one goes on; both pools are free at once."""
    endless = {"token_ids": {"ids": [10, 11, 12]}, "sampling": {"max_tokens": 800, "ignore_eos": True}, "seed": "3"}
    job, ask = sampled([10, 11, 12], ODD_SEED)
    decided = stack.orchestrators[0].metric("specdec_decided_tokens_total")
    dropped, kept = ask_node([{"request": endless, "cancelAfter": 20}, job])
    assert dropped["status"]["name"] == "CANCELLED"
    assert 20 <= len(dropped["token_ids"]) < 800
    assert kept["status"] == OK
    same(kept, answers(stack.endpoint, [ask])[0])
    pools = (*stack.targets, *stack.drafts)
    wait_until(lambda: not any(process.metric("specdec_sessions") for process in pools), what="a cancelled stream holds its room")
    assert stack.orchestrators[0].metric("specdec_decided_tokens_total") - decided < 800, "it went on"

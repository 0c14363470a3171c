"""Cases from the field that need the whole path and are nobody else's: one test each, named after it. The reference has no speculation."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specdec.v1 import generation_pb2 as pb
from tests.e2e.drafts import FLOAT64, SPECULATING, EveryDraft
from tests.e2e.oracle import Oracle
from tests.e2e.parameters import Fields, request
from tests.e2e.raw import RawClient, Reply
from tests.e2e.seen import ask_all, seen
from tests.e2e.stack import running, wait_ready
from tests.tiny import save_tiny, tiny_tokenizer
from tests.waiting import wait_until

pytestmark = [pytest.mark.pair, pytest.mark.timeout(120)]
PROMPT = [10, 11, 12, 13, 11, 10]
BASE: Fields = {"token_ids": PROMPT, "seed": 7, "temperature": 1.0, "max_tokens": 32, "ignore_eos": True, "logprobs": 3}
OFF: Fields = {"disable_spec_decode": True}
IM_END, PERCENT = 2, 7
LETTERS = [tiny_tokenizer().token_to_id(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture(scope="module")
def clients(drafts: EveryDraft) -> Iterator[dict[str, RawClient]]:
    with contextlib.ExitStack() as stack:
        yield {kind: stack.enter_context(RawClient(process.endpoint)) for kind, process in drafts.orchestrators.items()}


def one(client: RawClient, **fields: Any) -> Reply:
    ((reply,),) = ask_all([(client, {**BASE, **fields})])
    assert (reply.code, reply.details) == ("OK", "")
    return reply


def same(got: Sequence[Reply], want: Sequence[Reply]) -> None:
    assert seen(BASE, got) == seen(BASE, want)


def accepted(reply: Reply) -> float:
    assert reply.finished is not None
    return reply.finished.speculative.draft_acceptance_rate


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, 320) for _ in range(draw.choice((1, 4, 9, 33)))] for _ in range(count)]


# ---------------------------------------------------------------- A: with and without are equal


@pytest.mark.long
@pytest.mark.timeout(900)
def test_F01_two_hundred_prompts_in_float64(clients: dict[str, RawClient]) -> None:
    asked: list[Fields] = [{**BASE, "temperature": 0.0, "token_ids": prompt} for prompt in prompts(200)]
    want = ask_all([(clients["none"], {**fields, **OFF}) for fields in asked])
    for kind in SPECULATING:
        for k in (1, 2, 4, 8):
            got = ask_all([(clients[kind], {**fields, "num_speculative_tokens": k}) for fields in asked])
            for mine, reference in zip(got, want, strict=True):
                same(mine, reference)


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def rounding(request: pytest.FixtureRequest, drafts: EveryDraft) -> Iterator[tuple[str, RawClient]]:
    """A target and a self-draft in a format that rounds."""
    model, dtype = drafts.stack.target_model, {"DTYPE": request.param}
    with running(model, model, target=dtype, draft=dtype) as stack, RawClient(stack.endpoint) as client:
        yield request.param, client


def test_F01_formats_that_round(rounding: tuple[str, RawClient]) -> None:
    """At the first difference the two best tokens are near each other; a batch-invariant engine has none."""
    dtype, client = rounding
    asked: list[Fields] = [{**BASE, "temperature": 0.0, "token_ids": prompt} for prompt in prompts(16)]
    want = ask_all([(client, {**fields, **OFF}) for fields in asked], at_once=1)
    for k in (4, 8):
        for fields, (got,), (reference,) in zip(
            asked, ask_all([(client, {**f, "num_speculative_tokens": k}) for f in asked]), want, strict=True
        ):
            assert reference.finished is not None
            if got.token_ids == reference.token_ids:
                continue
            assert not reference.finished.settings.batch_invariant
            at = next(i for i, (a, b) in enumerate(zip(got.token_ids, reference.token_ids, strict=True)) if a != b)
            best, second = Oracle(fields["token_ids"]).row([*fields["token_ids"], *reference.token_ids[:at]]).topk(2).values.tolist()
            assert (best - second) / abs(best) < {"float32": 1e-3, "bfloat16": 3e-2}[dtype]


# ---------------------------------------------------------------- B: penalties


@pytest.mark.parametrize("draft", ["self", "never"])
def test_F11_F12_a_penalty_has_its_whole_weight(clients: dict[str, RawClient], draft: str) -> None:
    """Long blocks weaken it no more than none do; its sign counts."""
    repeating: Fields = {"temperature": 0.0, "token_ids": LETTERS[:3] * 4, "allowed_token_ids": LETTERS[:9], "max_tokens": 64}
    texts = {}
    for penalty in (-2.0, 0.7, 2.0):
        got = one(clients[draft], **repeating, frequency_penalty=penalty, num_speculative_tokens=4)
        same([got], [one(clients["none"], **repeating, frequency_penalty=penalty, **OFF)])
        texts[penalty] = got.text
    assert len(set(texts.values())) == 3


def test_F15_the_draft_knows_the_penalties(clients: dict[str, RawClient]) -> None:
    """The same weights under the same penalties: everything is accepted, though the answer is another one than without."""
    repeating: Fields = {"temperature": 0.0, "token_ids": LETTERS[:3] * 8, "allowed_token_ids": LETTERS[:9], "max_tokens": 48}
    got = one(clients["self"], **repeating, repetition_penalty=1.3, num_speculative_tokens=4)
    same([got], [one(clients["none"], **repeating, repetition_penalty=1.3, **OFF)])
    assert got.token_ids != one(clients["none"], **repeating).token_ids
    own = [origin for origin in got.origins if origin == pb.TOKEN_ORIGIN_CORRECTED]
    assert len(own) < 8, "the draft's proposals hardly fit"  # a lookup in the text knows no penalties, and may be wrong


# ---------------------------------------------------------------- C: ends


def ended_by(folder: Path, token_id: int) -> Path:
    """A copy of the tiny model with another end-of-sequence id."""
    save_tiny(folder, seed=0)
    token = tiny_tokenizer().id_to_token(token_id)
    for name, change in (("config.json", {"eos_token_id": token_id}), ("tokenizer_config.json", {"eos_token": token})):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return folder


def test_F29_draft_and_target_end_by_different_ids(tmp_path: Path) -> None:
    """What ends a text for the draft is an ordinary token of the target: it is accepted, and drafting goes on behind it."""
    target, draft = ended_by(tmp_path / "target", PERCENT), ended_by(tmp_path / "draft", IM_END)
    with running(target, draft, target=FLOAT64, draft=FLOAT64) as stack, RawClient(stack.endpoint) as client:
        asked = {"ignore_eos": False, "logit_bias": {IM_END: 8.0}, "num_speculative_tokens": 4}
        got = one(client, **asked)
        same([got], [one(client, **{**asked, **OFF})])
        places = [i for i, token in enumerate(got.token_ids) if token == IM_END]
        assert 3 <= len(places) <= 20 and len(got.token_ids) == 32
        assert any(got.origins[i] == pb.TOKEN_ORIGIN_ACCEPTED for i in places)
        assert any(origin == pb.TOKEN_ORIGIN_ACCEPTED for origin in got.origins[places[0] + 1 :])
        ends = one(client, ignore_eos=False, logit_bias={PERCENT: 100.0}, num_speculative_tokens=4)
        assert ends.token_ids == [] and ends.finished is not None and ends.finished.stop_reason == str(PERCENT)


def test_F30_a_turn_that_ends_at_once(clients: dict[str, RawClient]) -> None:
    """Among eight others: its first token ends it, the turn after is the reference's."""
    others: list[Fields] = [{**BASE, "seed": i, "token_ids": [40 + i, 50], "max_tokens": 100} for i in range(8)]
    with ThreadPoolExecutor() as pool:
        running_on = pool.submit(ask_all, [(clients["self"], fields) for fields in others])
        chat = [*PROMPT, *one(clients["self"]).token_ids]
        empty = one(clients["self"], token_ids=chat, ignore_eos=False, logit_bias={IM_END: 100.0})
        third = one(clients["self"], token_ids=[*chat, 33])
    assert empty.token_ids == [] and empty.finished is not None and empty.finished.stop_reason == str(IM_END)
    same([third], [one(clients["none"], token_ids=[*chat, 33], **OFF)])
    for got, want in zip(running_on.result(), ask_all([(clients["none"], {**fields, **OFF}) for fields in others]), strict=True):
        same(got, want)


# ---------------------------------------------------------------- D: log-probabilities


def test_F33_log_probabilities_at_every_acceptance(clients: dict[str, RawClient]) -> None:
    """None, some and all proposals kept: the same three likeliest ids, the same numbers, near those of transformers."""
    oracle = Oracle(PROMPT)
    want = one(clients["none"], max_tokens=64, **OFF)
    for i, (token, told) in enumerate(zip(want.token_ids, want.logprobs, strict=True)):
        exact = oracle.logprobs([*PROMPT, *want.token_ids[:i]])
        assert told.top_ids == exact.topk(3).indices.tolist()
        assert told.logprob == pytest.approx(float(exact[token]), rel=1e-4)  # transformers' norms round to float32
    greedily = {"draft_sample_method": 2}  # right where the sampler takes the best token
    got = {
        "none": one(clients["never"], max_tokens=64, num_speculative_tokens=4, **greedily),
        "some": one(clients["self"], max_tokens=64, num_speculative_tokens=4, **greedily),
        "all": one(clients["self"], max_tokens=64, num_speculative_tokens=4),
    }
    for reply in got.values():
        assert (reply.token_ids, reply.logprobs) == (want.token_ids, want.logprobs)
    assert accepted(got["none"]) < 0.05 < accepted(got["some"]) < 0.9 < accepted(got["all"]) == 1.0


def test_F36_several_answers_to_a_slow_reader(drafts: EveryDraft, clients: dict[str, RawClient]) -> None:
    """What waits for it is merged, per answer, and nothing of it is lost."""
    fields = {**BASE, "n": 3, "max_tokens": 400, "logprobs": 20, "num_speculative_tokens": 4}
    (want,) = ask_all([(clients["self"], fields)])
    got = [Reply() for _ in range(3)]
    longest = 0
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
    with RawClient(drafts.endpoint("self"), small_window) as slow:
        for i, message in enumerate(slow.stream(request(fields))):
            got[message.index].take(message)
            longest = max(longest, len(message.delta.token_ids))
            if i == 3:
                wait_until(lambda: not drafts.stack.targets[0].metric("specdec_sessions"), 30)  # everything is decided
    assert longest > 16, "nothing was merged"
    same(got, want)


# ---------------------------------------------------------------- E: seeds


def test_F37_ten_repeats(clients: dict[str, RawClient]) -> None:
    """One seed, one text, whatever the block length."""
    replies = [reply for k in (0, 2, 4) for (reply,) in ask_all([(clients["self"], {**BASE, "num_speculative_tokens": k})] * 10)]
    assert len({(tuple(reply.token_ids), reply.text) for reply in replies}) == 1
    assert replies[0].token_ids != one(clients["self"], seed=8).token_ids


def test_F40_whatever_the_engines_did_before(drafts: EveryDraft) -> None:
    """A seeded text: alone, after a hundred others, among eight, after a restart of the draft."""
    draft = wait_ready(drafts.stack.begin_draft())
    with RawClient(drafts.stack.add_orchestrator(DRAFTS=draft.endpoint).endpoint) as client:
        texts = {"alone": one(client).text}
        others: list[Fields] = [{**BASE, "seed": i, "token_ids": [20 + i, 30], "max_tokens": 8} for i in range(100)]
        ask_all([(client, fields) for fields in others])
        texts["after others"] = one(client).text
        mixed = ask_all([(client, fields) for fields in (*others[:4], BASE, *others[4:7])])
        texts["among eight"] = mixed[4][0].text
        draft.kill()
        again = wait_ready(drafts.stack.begin_draft(PORT=str(draft.port)))
        texts["after a restart"] = one(client).text
        wait_until(lambda: accepted(one(client)) > 0, 20)
        texts["with the restarted draft"] = one(client).text
        again.kill()
        texts["with none"] = one(client).text
    assert len(set(texts.values())) == 1, texts


# ---------------------------------------------------------------- F, H: min_tokens, special tokens


def test_F47_min_tokens_does_not_stop_the_draft(clients: dict[str, RawClient]) -> None:
    wanted = {"ignore_eos": False, "logit_bias": {IM_END: 12.0}, "num_speculative_tokens": 4}
    assert len(one(clients["self"], **wanted).token_ids) < 8
    got = one(clients["self"], **wanted, min_tokens=32)
    assert len(got.token_ids) == 32 and got.finished is not None
    stats = got.finished.speculative
    assert stats.draft_acceptance_rate == 1.0 and stats.num_draft_tokens > 16


@pytest.mark.parametrize("shown", [False, True])
def test_F59_special_text_only_when_asked(clients: dict[str, RawClient], shown: bool) -> None:
    """Streamed in pieces, the text is that of all ids; the token that ended the answer is never part of it."""
    fields = {"allowed_token_ids": [0, 1, IM_END, *LETTERS], "ignore_eos": False, "logit_bias": {0: 5.0, 1: 5.0, IM_END: 4.0}}
    ends = 0
    for seed in range(6):
        reply = one(clients["self"], **fields, seed=seed, skip_special_tokens=not shown, num_speculative_tokens=4)
        detokenise = pb.DetokenizeRequest(token_ids=reply.token_ids, skip_special_tokens=not shown)
        assert reply.text == clients["self"].unary("Detokenize", detokenise, pb.DetokenizeResponse).text
        assert ("<|" in reply.text) == (shown and not {0, 1}.isdisjoint(reply.token_ids))
        assert "<|im_end|>" not in reply.text
        ends += reply.finished.stop_reason == str(IM_END)  # type: ignore[union-attr]
    assert ends


# ---------------------------------------------------------------- I: the draft's window


def test_F62_F63_the_drafts_window_is_shorter(drafts: EveryDraft, tmp_path: Path) -> None:
    """From its limit on there are no proposals for that session, no error, and its neighbours keep theirs."""
    draft = wait_ready(drafts.stack.begin_draft(MODEL=str(save_tiny(tmp_path / "short", seed=0, window=32))))
    asked: list[Fields] = [
        {**BASE, "token_ids": [10 + i for i in range(length)], "max_tokens": limit, "num_speculative_tokens": 4}
        for length, limit in ((20, 60), (31, 20), (32, 20), (40, 20), *[(4, 24)] * 5)
    ]
    with RawClient(drafts.stack.add_orchestrator(DRAFTS=draft.endpoint, PROMPT_LOOKUP_MIN="0").endpoint) as client:
        replies = ask_all([(client, fields) for fields in asked], at_once=len(asked))
        for got, want in zip(replies, ask_all([(client, {**fields, **OFF}) for fields in asked]), strict=True):
            same(got, want)
    for fields, (reply,) in zip(asked, replies, strict=True):
        window = max(0, 32 - len(fields["token_ids"]))
        assert pb.TOKEN_ORIGIN_ACCEPTED not in reply.origins[window + 1 :]
        assert (pb.TOKEN_ORIGIN_ACCEPTED in reply.origins) == (window > 2)
    draft.kill()


# ---------------------------------------------------------------- N: neighbours


def test_F95_alone_and_among_thirty_one(rounding: tuple[str, RawClient]) -> None:
    _, client = rounding
    others: list[Fields] = [{**BASE, "seed": i, "token_ids": prompt} for i, prompt in enumerate(prompts(31))]
    alone = one(client, num_speculative_tokens=4)
    assert alone.finished is not None
    crowd = ask_all([(client, fields) for fields in (*others[:16], {**BASE, "num_speculative_tokens": 4}, *others[16:])], at_once=32)
    assert alone.finished.settings.batch_invariant, "the test below would need a tolerance"
    same(crowd[16], [alone])


def test_F96_neighbours_of_other_content(rounding: tuple[str, RawClient]) -> None:
    """Two batches of one shape that share a row; then that row alone. Log-probabilities are compared bit for bit."""
    _, client = rounding
    first, second = (
        ask_all([(client, fields) for fields in (BASE, *({**BASE, "seed": seed, "token_ids": [seed + i] * 6} for i in range(3)))])
        for seed in (40, 140)
    )
    assert first[1][0].token_ids != second[1][0].token_ids
    same(first[0], second[0])
    same(first[0], [one(client)])


def test_F97_mixed_block_lengths(clients: dict[str, RawClient]) -> None:
    """Requests of block lengths 0, 4, 1, 2 join and leave; each has an alphabet of its own, and no foreign letter appears."""
    draw = random.Random(5)
    asked: list[Fields] = []
    for i in range(40):
        k, letters = (0, 4, 1, 2)[i % 4], LETTERS[i % 13 * 2 : i % 13 * 2 + 2]
        asked.append({**BASE, "seed": i, "allowed_token_ids": letters, "max_tokens": draw.randrange(1, 50), "num_speculative_tokens": k})
    draw.shuffle(asked)
    got = ask_all([(clients["self"], fields) for fields in asked], at_once=12)
    want = ask_all([(clients["none"], {**fields, **OFF}) for fields in asked])
    for fields, mine, reference in zip(asked, got, want, strict=True):
        assert set(mine[0].token_ids) <= set(fields["allowed_token_ids"])
        same(mine, reference)

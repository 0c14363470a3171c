"""For any parameters, prompts and blocks: a block decides what single steps decide, and each row is processed for the tokens before it."""

from __future__ import annotations

from functools import cache
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from specdec.acceptance import verify
from specdec.errors import InvalidRequest
from specdec.grammar import GrammarCompiler
from specdec.sampling import Sampler
from specdec.terms import FinishReason, Grammar, GrammarForm, RejectionMethod, SamplingParams
from tests.tiny import EOS_ID, TOKENIZER_VOCAB, tiny_tokenizer
from tests.unit import sampling_oracle as oracle
from tests.unit.acceptance_rig import EOS, PROMPT, Model
from tests.unit.statistics import chains

COUPLED, STANDARD = RejectionMethod.COUPLED, RejectionMethod.STANDARD
IDS = 12
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


class Recording(Sampler):
    """Keeps every processed row with the output it was processed for."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.seen: list[tuple[list[int], Any]] = []

    def adjusted(self, logits: Any, output: Any) -> Any:
        row = super().adjusted(logits, output)
        self.seen.append((list(output), row.copy()))
        return row


# ---------------------------------------------------------------------------- rows of a block, among other sessions


@st.composite
def sessions(draw: Any) -> list[dict[str, Any]]:
    ids = st.integers(0, IDS - 1)
    strength = st.sampled_from([-1.5, 0.0, 0.0, 0.7, 2.0])
    return draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "prompt": st.lists(ids, min_size=1, max_size=6),
                    "k": st.sampled_from([0, 1, 3]),
                    "flat": st.booleans(),
                    "params": st.builds(
                        SamplingParams,
                        frequency_penalty=strength,
                        presence_penalty=strength,
                        repetition_penalty=st.sampled_from([0.5, 1.0, 1.0, 1.7]),
                        min_tokens=st.integers(0, 9),
                        stop_token_ids=st.lists(ids, max_size=2).map(tuple),
                        ignore_eos=st.booleans(),
                    ),
                    "right": st.lists(st.booleans(), min_size=30, max_size=30),
                    "block": st.lists(ids, min_size=30, max_size=30),
                }
            ),
            min_size=1,
            max_size=4,
        )
    )


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW)
@given(sessions(), st.lists(st.integers(0, 3), min_size=4, max_size=14), st.randoms())
def test_f13_each_row_is_processed_for_the_tokens_before_it(batch, turns, shuffle):
    """F12, F13, F44, F46: K = 0, 1 and 3 in one batch, in any order; row i of a block equals process(output + block[:i]), bit for bit, and
    the ids that end a text are out on exactly the rows before min_tokens."""
    samplers = [Recording(s["params"], i, IDS, [EOS], s["prompt"]) for i, s in enumerate(batch)]
    outputs: list[list[int]] = [[] for _ in batch]
    for turn, who in enumerate(turns):
        i = who % len(batch)
        session, sampler, output = batch[i], samplers[i], outputs[i]
        rows = raw_rows(session, i, turn)
        block = self_drafted(session, i, turn, rows, output)
        sampler.seen.clear()
        verdict = verify(rows, block, (), sampler, output, COUPLED)
        assert len(sampler.seen) >= 1
        stops = {*session["params"].stop_token_ids, *(() if session["params"].ignore_eos else (EOS,))}
        for slot, (seen_output, row) in enumerate(sampler.seen):
            assert seen_output == output + block[:slot]
            expected = oracle.adjusted(rows[slot].numpy(), session["params"], stops, session["prompt"], seen_output, oracle.FREE)
            np.testing.assert_array_equal(row, expected)
            early = len(seen_output) < session["params"].min_tokens
            assert all(np.isneginf(row[stop]) == early for stop in stops)
        output += verdict.tokens
        if shuffle.random() < 0.2:  # evicted and resumed, with fewer tokens or as it was
            del output[shuffle.randint(0, len(output)) :]


def raw_rows(session: dict[str, Any], i: int, turn: int) -> torch.Tensor:
    draw = np.random.default_rng([i, turn])
    return torch.from_numpy(draw.standard_normal((session["k"] + 1, IDS)) * (0.0 if session["flat"] else 2.0))


def self_drafted(session: dict[str, Any], i: int, turn: int, rows: torch.Tensor, output: list[int]) -> list[int]:
    """Where `right` says so, what the target will decide; elsewhere any id."""
    sampler = Sampler(session["params"], i, IDS, [EOS], session["prompt"])
    block: list[int] = []
    for slot in range(session["k"]):
        at = [*output, *block]
        place = (turn * 3 + slot) % 30
        right = sampler.choose(rows[slot], sampler.prompt_length + len(at), at)
        block.append(right if session["right"][place] else session["block"][place])
    return block


# ---------------------------------------------------------------------------- a block and single steps


GRAMMARS = [
    Grammar(GrammarForm.JSON_SCHEMA, '{"type": "object", "properties": {"name": {"enum": ["cat", "hat"]}, "n": {"type": "integer"}}}'),
    Grammar(GrammarForm.REGEX, "(the|hat|[0-9]{2}| )+"),
    Grammar(GrammarForm.CHOICE, options=("the cat", "the hat", "that", "on the mat")),
    Grammar(GrammarForm.REGEX, "[a-c]{1,3}", start_after="t"),
]


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer())


def some(*values: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), st.none(), st.sampled_from(values))


ID = st.integers(0, TOKENIZER_VOCAB - 1)
FIELDS = st.fixed_dictionaries(
    {
        "temperature": some(0.0, 0.4, 2.0),
        "top_k": some(1, 3, 40, 300),
        "top_p": some(0.2, 0.8, 0.999),
        "min_p": some(0.05, 0.5),
        "frequency_penalty": some(-2.0, 1.0),
        "presence_penalty": some(-1.0, 1.5),
        "repetition_penalty": some(0.7, 1.4),
        "logit_bias": st.one_of(st.none(), st.dictionaries(ID, st.sampled_from([-100.0, -2.0, 5.0]), max_size=20)),
        "banned_token_ids": st.one_of(st.none(), st.lists(ID, min_size=1, max_size=8).map(tuple)),
        "allowed_token_ids": some(tuple(range(0, TOKENIZER_VOCAB, 2)), tuple(range(3, 60))),
        "min_tokens": some(1, 3, 6),
        "ignore_eos": some(True),
        "logprobs": some(0, 2),
        "grammar": some(*GRAMMARS),
    }
).map(lambda fields: {name: value for name, value in fields.items() if value is not None})


def generated(params: SamplingParams, seed: int, method: RejectionMethod, plan: Any, kind: type[Sampler] = Sampler) -> tuple[Any, ...]:
    """(tokens, log-probabilities, finish, stop id) of one answer; finish None: refused, by fields that leave nothing.

    `plan` = a generator that says how long blocks are and where they are right; None = no blocks.
    """
    model, output, logprobs = Model(TOKENIZER_VOCAB, 2.5), [], []
    sampler, ahead = made(params, seed, kind), made(params, seed)
    while True:
        block: list[int] = []
        for _ in range(0 if plan is None else int(plan.integers(0, 6))):
            block.append(proposed(ahead, model, [*output, *block], plan))
        if isinstance(sampler, chains.Faulty):
            sampler.begin(output)
        try:
            verdict = verify(model.rows(output, block), block, (), sampler, output, method)
        except InvalidRequest:
            return output, logprobs, None, None
        output += verdict.tokens
        logprobs += verdict.logprobs
        if verdict.finish is not None:
            return output, logprobs, verdict.finish, verdict.stop_token_id


def made(params: SamplingParams, seed: int, kind: type[Sampler] = Sampler) -> Sampler:
    constraint = None if params.grammar is None else compiler().compile(params.grammar)
    return kind(params, seed, TOKENIZER_VOCAB, [EOS_ID], PROMPT, constraint=constraint)


def proposed(sampler: Sampler, model: Model, output: list[int], plan: Any) -> int:
    """Mostly what the target will decide."""
    if plan.random() < 0.85:
        try:
            return sampler.choose(model.row([*PROMPT, *output]), len(PROMPT) + len(output), output)
        except InvalidRequest:
            pass
    return int(plan.integers(TOKENIZER_VOCAB))


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(FIELDS, st.integers(1, 12), st.integers(0, 11), st.sampled_from(["none", "there", "any"]), st.integers(0, 2**64 - 1))
def test_a_block_decides_what_single_steps_decide(fields, max_tokens, index, stop, seed):
    """F21, F25: any parameters, a grammar among them; a stop id is one that the answer holds at `index`, so it meets every slot."""
    compare(fields, max_tokens, index, stop, seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(max_examples=3000, deadline=None, suppress_health_check=SLOW)
@given(FIELDS, st.integers(1, 30), st.integers(0, 29), st.sampled_from(["none", "there", "any"]), st.integers(0, 2**64 - 1))
def test_a_block_decides_what_single_steps_decide_long(fields, max_tokens, index, stop, seed):
    compare(fields, max_tokens, index, stop, seed)


def compare(fields: dict[str, Any], max_tokens: int, index: int, stop: str, seed: int, kind: type[Sampler] = Sampler) -> None:
    fields = {**fields, "max_tokens": max(max_tokens, fields.get("min_tokens", 0))}
    method = STANDARD if fields.get("temperature") == 0.0 and seed % 2 else COUPLED  # without temperature both decide by argmax
    try:
        text = generated(SamplingParams(**fields), seed, method, None)[0]
        if stop != "none" and text:
            fields["stop_token_ids"] = (text[index % len(text)], *((0, 9) if stop == "any" else ()))
        plain = generated(params := SamplingParams(**fields), seed, method, None)
    except InvalidRequest:  # at once
        return
    for plan in (np.random.default_rng(seed), np.random.default_rng(index)):
        assert generated(params, seed, method, plan, kind) == plain
    tokens, logprobs, finish, stopped_by = plain
    assert len(tokens) <= params.max_tokens and (finish is not FinishReason.LENGTH or len(tokens) == params.max_tokens)
    assert len(logprobs) == (0 if params.logprobs is None else len(tokens))
    assert stopped_by is None or (stopped_by not in tokens and finish is FinishReason.STOP)


TWINS = {
    chains.PenaltiesOfThePrefix: {"frequency_penalty": 2.0, "repetition_penalty": 1.4},
    chains.PenaltiesOfLastTokens: {"frequency_penalty": 2.0},
    chains.PenaltiesCountedTwice: {"frequency_penalty": 1.0, "logit_bias": {50: 8.0}},
    chains.MinPOnTheBonusRow: {"min_p": 0.5},
    chains.BiasOnTheBonusRow: {"logit_bias": {i: -100.0 for i in range(0, TOKENIZER_VOCAB, 2)}},
    chains.MasksOnRowZero: {"grammar": GRAMMARS[1]},
    chains.EndsOnRowZero: {"min_tokens": 12, "logit_bias": {EOS_ID: 6.0}},
}


@pytest.mark.parametrize("kind", TWINS, ids=lambda kind: kind.__name__)
def test_twins_decide_otherwise(kind):
    """F11, F12, F13, F14, F46: the property above tells a sampler that treats rows of a block otherwise."""
    with pytest.raises(AssertionError):
        for seed in range(10):
            compare(TWINS[kind], 30, 0, "none", seed, kind)
    compare(TWINS[kind], 30, 0, "none", 0)

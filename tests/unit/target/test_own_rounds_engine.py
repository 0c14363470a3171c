"""On an engine with weights, in float64: what a session is told is the same, to the last bit, whether each round was asked for or the
target went on by itself, behind whatever continuations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from specdec.engine import Engine
from specdec.engine.cache import KvBudget
from specdec.hashing import prefix_hash
from specdec.terms import (
    Ahead,
    Answer,
    Begin,
    Close,
    Closed,
    Grammar,
    GrammarForm,
    NoRoom,
    PrefixNeeded,
    Result,
    SamplingParams,
    Step,
    TokenLogprobs,
)
from target_service.verifier import Verifier
from tests.tiny import EOS_ID, TOKENIZER_VOCAB, tiny_engine
from tests.unit.target.harness import SAMPLED, Bench
from tests.unit.target.test_grammars import compiler

SCHEMA = Grammar(GrammarForm.REGEX, "[a-z ]{1,30}")
CASES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, logprobs=2),
    "sampled": replace(SAMPLED, max_tokens=40, logprobs=2, temperature=0.8, top_p=0.95, prompt_logprobs=1),
    "penalties": replace(SAMPLED, max_tokens=40, logprobs=1, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2),
    "stops": replace(SAMPLED, max_tokens=60, logprobs=1, stop_token_ids=tuple(range(40, 52)), min_tokens=5),
    "grammar": replace(SAMPLED, max_tokens=40, logprobs=1, grammar=SCHEMA),
}
PROMPTS = [[(7 * i + j) % 300 for i in range(12 + 9 * j)] for j in range(3)]


@cache
def engine() -> Engine:
    return tiny_engine(vocab=TOKENIZER_VOCAB, window=256)


@dataclass
class Talk:
    name: str
    prompt: list[int]
    committed: list[int]
    kv: int = 0
    round: int = 0
    open: bool = False
    heard: list[Result] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return bool(self.heard) and self.heard[-1].finish is not None

    def hear(self, answer: Answer) -> None:
        match answer.outcome:
            case Result() as result:
                assert result.prefix_length == len(self.committed)
                self.heard.append(result)
                self.committed += result.tokens
                self.kv = min(result.kv_length_after, len(self.committed) - 1)
                if answer.round > self.round:
                    self.round, self.open = answer.round, False
            case PrefixNeeded(have):
                self.kv, self.open = have, False
            case Closed():
                assert self.done
            case NoRoom():
                self.open = self.open and answer.round <= self.round
            case other:
                raise AssertionError(other)

    def all(self) -> tuple[list[int], list[TokenLogprobs], list[TokenLogprobs], Any, Any]:
        """What the client is told."""
        entries = [entry for result in self.heard for entry in result.logprobs]
        prompt = [entry for result in self.heard for entry in result.prompt_logprobs]
        return self.committed[len(self.prompt) :], entries, prompt, self.heard[-1].finish, self.heard[-1].stop_token_id


def converse(params: SamplingParams, texts: Sequence[Sequence[int]] = (), seed: int = 0, kv_tokens: int = 4096) -> tuple[list[Talk], int]:
    """Three sessions until their ends, and how many results nobody asked for. With `texts`, whole ones, there is run-ahead, and there are
    blocks and continuations taken from them: right, wrong, stale, doubled, too early."""
    rng = random.Random(seed)
    bench = Bench(
        vocab=TOKENIZER_VOCAB, eos_ids=(EOS_ID,), grammars=compiler(), max_num_speculative_tokens=4, max_step_rows=24, prefix_block_tokens=0
    )
    bench.engine = bench.executor._engine = engine()  # type: ignore[assignment]
    bench.verifier = Verifier(bench.limits, KvBudget(kv_tokens))
    stream = bench.hello()
    talks = [Talk(f"s{i}", prompt, list(prompt)) for i, prompt in enumerate(PROMPTS)]

    def guess(which: int, behind: int, most: int) -> tuple[int, ...]:
        tokens = list(texts[which][behind : behind + rng.randrange(most)])
        if tokens and rng.random() < 0.3:
            tokens[rng.randrange(len(tokens))] = rng.randrange(TOKENIZER_VOCAB)
        return tuple(tokens)

    def step(which: int, talk: Talk) -> Step:
        block = guess(which, len(talk.committed), 5) if texts else ()
        allowed = rng.choice([0, 1, 4]) if texts else 0
        begin = None if talk.heard else Begin(len(talk.prompt), params, 7 + which)
        base = talk.kv
        hashed = prefix_hash(talk.committed[:base])
        talk.open = True
        tokens = (*talk.committed[base:], *block)
        return Step(talk.name, 1, talk.round + 1, base, hashed, tokens, len(block), 60_000, allowed, begin=begin)

    def ahead(which: int, talk: Talk) -> Ahead:
        known = len(talk.committed)
        length = rng.randrange(max(1, known - 3), min(known + 6, max(known, len(texts[which])) + 1))
        prefix = [*talk.committed, *texts[which][known:]][:length]
        hashed = prefix_hash(prefix) ^ (rng.random() < 0.1)
        return Ahead(talk.name, 1, len(prefix), hashed, guess(which, length, 10) or (1,))

    unasked = 0
    for _ in range(400):
        for which, talk in enumerate(talks):
            if not talk.done and not talk.open and (not texts or rng.random() < 0.4 or not talk.heard):
                bench.verifier.submit(stream, step(which, talk), bench.now)
            if texts and talk.heard and not talk.done:
                items = [ahead(which, talk)] * rng.choice([0, 1, 2])
                for item in items:
                    bench.verifier.submit(stream, item, bench.now)
        for _, answer in bench.turn():
            talk = talks[int(answer.session_id[1:])]
            decided = isinstance(answer.outcome, Result)
            unasked += decided and answer.round == talk.round
            talk.hear(answer)
            if decided and talk.done:
                bench.verifier.submit(stream, Close(talk.name, 1), bench.now)
        bench.now += 60
        if all(talk.done for talk in talks):
            break
    assert all(talk.done for talk in talks)
    bench.settle()
    assert bench.verifier.num_sessions == 0 and engine().kv.used_tokens == 0
    return talks, unasked


@pytest.mark.parametrize("case", CASES)
def test_nobody_sees_who_said_go_on(case: str) -> None:
    """Text, log-probabilities of both kinds, finish and stop token, with room and without."""
    plain, none = converse(CASES[case])
    assert none == 0
    texts = [talk.committed for talk in plain]
    unasked = 0
    for seed in range(3):
        talks, more = converse(CASES[case], texts, seed, kv_tokens=4096 if seed % 2 else 128)
        unasked += more
        assert [talk.all() for talk in talks] == [talk.all() for talk in plain]
    assert unasked > 15

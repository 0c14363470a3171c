"""A session with a grammar: every row of a block is masked, and what is refused leaves no trace in the grammar's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from specdec.grammar import Constraint, GrammarCompiler
from specdec.grammar.reading import Reading
from specdec.sampling import Sampler
from specdec.terms import Close, Closed, Expired, Failed, FinishReason, Grammar, GrammarForm, Result, SamplingParams, StaleEpoch
from target_service import __main__ as target
from tests.fakes import hashed_script
from tests.tiny import EOS_ID, TOKENIZER_VOCAB, tiny_tokenizer
from tests.unit.target.harness import GREEDY, SAMPLED, Bench, Caller, first_step, next_step, only, run_all

SCRIPT = hashed_script(TOKENIZER_VOCAB)
PROMPT = [50, 60, 70]
SCHEMA = Grammar(
    GrammarForm.JSON_SCHEMA,
    '{"type": "object", "properties": {"name": {"enum": ["cat", "hat", "mat"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},'
    ' "required": ["name", "age"], "additionalProperties": false}',
)
REGEX = Grammar(GrammarForm.REGEX, "[a-f]{3,12}")
CHOICE = Grammar(GrammarForm.CHOICE, options=("the cat sat", "the hat", "them"))
LATER = Grammar(GrammarForm.REGEX, "[0-9]{2,6}", start_after="a")
GRAMMARS = {"schema": SCHEMA, "regex": REGEX, "choice": CHOICE, "later": LATER}


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer())


@cache
def state_of(grammar: Grammar) -> Constraint:
    """A state for looking things up: what it says depends on the output alone."""
    return compiler().compile(grammar)


def under(grammar: Grammar | None, base: SamplingParams = SAMPLED, **more: Any) -> SamplingParams:
    return replace(base, grammar=grammar, **{"max_tokens": 40, **more})


def bench_with(script: Any = SCRIPT, **more: Any) -> Bench:
    return Bench(script, vocab=TOKENIZER_VOCAB, eos_ids=(EOS_ID,), grammars=compiler(), **more)


def alone(params: SamplingParams, script: Any = SCRIPT, seed: int = 7) -> tuple[list[int], FinishReason]:
    """The answer token by token, and its end."""
    grammar = params.grammar
    constraint = None if grammar is None else state_of(grammar)
    sampler = Sampler(params, seed, TOKENIZER_VOCAB, (EOS_ID,), PROMPT, constraint=constraint)
    output: list[int] = []
    assert params.max_tokens is not None
    while len(output) < params.max_tokens:
        if sampler.must_end(output):
            return output, FinishReason.STOP
        token = sampler.choose(script([*PROMPT, *output]), len(PROMPT) + len(output), output)
        if token in sampler.stop_ids:
            return output, FinishReason.STOP
        output.append(token)
    return output, FinishReason.STOP if sampler.must_end(output) else FinishReason.LENGTH


def legal(grammar: Grammar, output: Sequence[int]) -> list[int]:
    mask = state_of(grammar).at(output).mask
    return list(range(TOKENIZER_VOCAB)) if mask is None else [int(i) for i in mask.nonzero()[0]]


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("base", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_text_is_that_of_single_steps_whatever_the_block(name: str, base: SamplingParams, k: int) -> None:
    params = under(GRAMMARS[name], base)
    text, finish = alone(params)
    for period in (1, 3, 1000) if k else (1000,):

        def draft(committed: Sequence[int], period: int = period) -> list[int]:
            made = len(committed) - len(PROMPT)
            block = text[made : made + k] + [5] * (k - len(text[made : made + k]))
            if block and made % period == 0 and period < 1000:
                block[made % k] = (block[made % k] + 1) % TOKENIZER_VOCAB
            return block

        bench = bench_with()
        caller = Caller(bench, bench.hello(), PROMPT, sampling=params, want=100, draft=draft)
        run_all(bench, [caller])
        assert (caller.output, caller.finish) == (text, finish)


@pytest.mark.parametrize("slot", [0, 1, 4])
@pytest.mark.parametrize("name", ["schema", "regex", "later"])
def test_f110_valid_proposals_refused_at_each_slot(name: str, slot: int) -> None:
    """The state is that of the kept tokens: the next round goes on from them."""
    grammar, params = GRAMMARS[name], under(GRAMMARS[name])
    text, _ = alone(params)
    tried = 0
    for at in range(slot, len(text) - 1):
        others = [i for i in legal(grammar, text[:at]) if i not in (text[at], EOS_ID)]
        if not others:
            continue
        tried += 1
        block = [*text[at - slot : at], others[0]]
        while len(block) < 8 and (more := legal(grammar, [*text[: at - slot], *block])):
            block.append(more[-1])
        bench = bench_with()
        stream = bench.hello()
        bench.send(stream, first_step([*PROMPT, *text[: at - slot]], block, prompt_length=3, sampling=params))
        result = only(bench.turn())
        assert (result.tokens, result.num_accepted) == (tuple(text[at - slot : at + 1]), slot)
        bench.send(stream, next_step([*PROMPT, *text[: at + 1]], text[at + 1 : at + 4], round_=2))
        assert only(bench.turn()).tokens == tuple(text[at + 1 : at + 5])
    assert tried > 0


@pytest.mark.parametrize("slot", [0, 1, 3])
def test_f111_invalid_proposals_are_refused_without_a_word(slot: int) -> None:
    params = under(SCHEMA)
    text, _ = alone(params)
    bad = next(i for i in range(TOKENIZER_VOCAB) if i not in legal(SCHEMA, text[:slot]))
    bench = bench_with()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT, [*text[:slot], bad, EOS_ID, bad], sampling=params))
    assert only(bench.turn()).tokens == tuple(text[: slot + 1])
    bench.send(stream, next_step([*PROMPT, *text[: slot + 1]], [bad], round_=2))
    assert only(bench.turn()).tokens == (text[slot + 1],)


@pytest.mark.parametrize("name", GRAMMARS)
def test_f109_nothing_is_fed_after_an_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block goes on behind the end, with the end token among it."""
    fed: list[int] = []
    feed = Constraint._feed
    monkeypatch.setattr(Constraint, "_feed", lambda self, token: fed.append(token) or feed(self, token))
    params = under(GRAMMARS[name], max_tokens=30)

    def ending(prefix: Sequence[int]) -> torch.Tensor:
        row = SCRIPT(prefix)
        row[EOS_ID] = 25.0
        return row

    text, finish = alone(params, ending)
    fed.clear()
    bench = bench_with(ending)
    stream = bench.hello()
    committed = list(PROMPT)
    for round_ in range(1, 100):
        made = len(committed) - len(PROMPT)
        block = [*text[made : made + 5], EOS_ID, 70, 71][:8]
        bench.send(stream, next_step(committed, block, round_=round_) if made else first_step(committed, block, sampling=params))
        result = only(bench.turn())
        committed += result.tokens
        if result.finish is not None:
            break
    assert (committed[len(PROMPT) :], result.finish) == (text, finish)
    assert EOS_ID not in fed and 70 not in fed[len(text) :], "neither the end nor what is behind it"
    assert result.forced == ()


def test_forced_ids_are_told_while_the_answer_goes_on() -> None:
    params = under(SCHEMA)
    text, _ = alone(params)
    bench = bench_with()
    stream = bench.hello()
    committed, told = list(PROMPT), 0
    bench.send(stream, first_step(committed, sampling=params))
    for round_ in range(2, 100):
        result = only(bench.turn())
        committed += result.tokens
        made = len(committed) - len(PROMPT)
        assert list(result.forced) == text[made : made + len(result.forced)], "they are what follows"
        told += len(result.forced)
        if result.finish is not None:
            break
        block = result.forced[:8]
        bench.send(stream, next_step(committed, block, round_=round_))
    assert (committed[len(PROMPT) :], result.forced) == (text, ())
    assert told > len(text) // 2, "most of such an answer is forced"
    assert round_ < len(text), "and saves rounds"


def test_no_forced_ids_where_max_tokens_ends_it() -> None:
    for max_tokens in (1, 2, 3):
        bench = bench_with()
        bench.send(bench.hello(), first_step(PROMPT, alone(under(SCHEMA))[0][:8], sampling=under(SCHEMA, max_tokens=max_tokens)))
        result = only(bench.turn())
        assert (len(result.tokens), result.finish, result.forced) == (max_tokens, FinishReason.LENGTH, ())


@pytest.mark.parametrize("min_tokens", [0, 35])
@pytest.mark.parametrize("block", [[], [3, 4]])
def test_a_resumed_answer_that_is_complete_ends_in_its_first_round(min_tokens: int, block: list[int]) -> None:
    params = under(SCHEMA, min_tokens=min_tokens)
    text, finish = alone(params)
    assert finish is FinishReason.STOP
    bench = bench_with()
    bench.send(bench.hello(), first_step([*PROMPT, *text], block, prompt_length=3, sampling=params))
    length = len(PROMPT) + len(text)
    assert only(bench.turn()) == Result(length, length - 1, len(block), 0, (), finish=FinishReason.STOP)


def test_a_resumed_answer_that_breaks_the_grammar_fails_alone() -> None:
    bench = bench_with()
    stream = bench.hello()
    bench.send(stream, first_step([*PROMPT, 70, 71], prompt_length=3, sampling=under(SCHEMA)), first_step(PROMPT, session="t"))
    answers = {a.session_id: a.outcome for _, a in bench.turn()}
    assert isinstance(answers["s"], Failed) and answers["s"].code == 3 and answers["s"].message.startswith("sampling.grammar")
    assert isinstance(answers["t"], Result)


@pytest.mark.parametrize("at", [0, 3])
def test_a_dead_end_fails_its_session_alone(at: int) -> None:
    """Banned ids leave nothing of what the grammar allows: at once, or in the middle of the answer."""
    text, _ = alone(under(CHOICE, GREEDY))
    banned = tuple(legal(CHOICE, text[:at])) if at == 0 else tuple(i for i in range(TOKENIZER_VOCAB) if i not in text[:at])
    params = under(CHOICE, GREEDY, banned_token_ids=banned)
    bench = bench_with()
    stream = bench.hello()
    others = [Caller(bench, stream, PROMPT, session=f"s{i}", sampling=under(SCHEMA), seed=i, want=100) for i in range(3)]
    bad = Caller(bench, stream, PROMPT, session="bad", sampling=params, want=100)
    run_all(bench, [bad, *others])
    assert bad.failure is not None and bad.failure.code == 3 and bad.failure.message.startswith("sampling.grammar")
    assert "banned_token_ids" in bad.failure.message
    assert bad.output == text[: len(bad.output)]
    assert [c.output for c in others] == [alone(under(SCHEMA), seed=i)[0] for i in range(3)]


# ------------------------------------------------------------ compiling


BROKEN = {
    "json_schema": Grammar(GrammarForm.JSON_SCHEMA, '{"type": "nothing"}'),
    "regex": Grammar(GrammarForm.REGEX, "(unclosed"),
    "ebnf": Grammar(GrammarForm.EBNF, "start: missing"),
}


@pytest.mark.parametrize("form", BROKEN)
def test_what_is_no_grammar_is_refused_before_any_row(form: str) -> None:
    bench = bench_with()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT, session="bad", sampling=under(BROKEN[form])), first_step(PROMPT, session="good"))
    answers = {a.session_id: a.outcome for _, a in bench.turn()}
    failed = answers["bad"]
    assert isinstance(failed, Failed) and failed.code == 3 and failed.drop and failed.message.startswith(f"sampling.grammar.{form}")
    assert isinstance(answers["good"], Result) and len(bench.engine.log[0]) == 1
    bench.settle()
    assert bench.verifier.num_sessions == 1 and len(bench.pool.held) == 1


def test_a_session_waits_for_its_grammar_and_nobody_else_does() -> None:
    bench = bench_with()
    stream = bench.hello()
    verifier = bench.verifier
    bench.send(stream, first_step(PROMPT, session="slow", sampling=under(SCHEMA)), first_step(PROMPT, session="quick"))
    [order] = verifier.take_grammars()
    assert order.grammar == SCHEMA
    assert [a.session_id for _, a in bench.turn()] == ["quick"]
    verifier.compiled(order, compiler().compile(SCHEMA))
    assert only(bench.turn()).tokens == tuple(alone(under(SCHEMA))[0][:1])
    bench.send(stream, next_step([*PROMPT, *alone(under(SCHEMA))[0][:1]], round_=2, session="slow"))
    assert verifier.take_grammars() == [], "once"


@pytest.mark.parametrize("fault", [None, Failed(3, "sampling.grammar: bad")], ids=["fine", "bad"])
@pytest.mark.parametrize("meanwhile", ["expires", "closes", "is placed anew", "leaves"])
def test_what_a_session_does_while_its_grammar_is_compiled(meanwhile: str, fault: Failed | None) -> None:
    bench = bench_with()
    stream = bench.hello()
    verifier = bench.verifier
    step = first_step(PROMPT, sampling=under(SCHEMA), remaining_ms=50)
    bench.send(stream, step)
    [order] = verifier.take_grammars()
    if meanwhile == "expires":
        bench.now += 60
        verifier.tick(bench.now)
        assert only(bench.heard()) == Expired()
    elif meanwhile == "closes":
        assert only(bench.send(stream, Close("s", 1))) == Closed()
    elif meanwhile == "is placed anew":
        assert only(bench.send(stream, replace(step, epoch=2))) == StaleEpoch(2)
        [newer] = verifier.take_grammars()
    else:
        verifier.detach(stream, bench.now)
        stream = bench.hello()
    verifier.compiled(order, fault or compiler().compile(SCHEMA))
    assert verifier.take_answers() == []
    if meanwhile == "is placed anew":
        assert verifier.plan(bench.now) is None or not bench.engine.log, "the older placement's grammar is not this one's"
        verifier.compiled(newer, compiler().compile(SCHEMA))
    else:
        bench.send(stream, replace(step, epoch=2 if meanwhile == "closes" else 1))
    assert only(bench.turn()).tokens == tuple(alone(under(SCHEMA))[0][:1])


def test_a_grammar_belongs_to_one_session_also_where_its_name_and_epoch_come_again() -> None:
    bench = bench_with()
    stream, verifier = bench.hello(), bench.verifier
    bench.send(stream, first_step(PROMPT, sampling=under(SCHEMA)))
    [older] = verifier.take_grammars()
    bench.send(stream, Close("s", 1), first_step(PROMPT, sampling=under(REGEX)))
    [newer] = verifier.take_grammars()
    assert not verifier.awaits(older) and verifier.awaits(newer)
    verifier.compiled(older, compiler().compile(SCHEMA))
    plan = verifier.plan(bench.now)
    assert plan is None or not plan.rows, "it waits for its own"
    verifier.compiled(newer, compiler().compile(REGEX))
    assert not verifier.awaits(newer), "once"
    assert only(bench.turn()).tokens == tuple(alone(under(REGEX))[0][:1])


async def test_a_resumed_output_is_read_beside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = alone(under(SCHEMA))
    want = legal(SCHEMA, text[:5])
    bench = bench_with()
    bench.send(bench.hello(), first_step([*PROMPT, *text[:5]], [9], prompt_length=3, sampling=under(SCHEMA)))
    [order] = bench.verifier.take_grammars()
    assert order.output == tuple(text[:5])
    monkeypatch.setattr(target, "READ_AT_ONCE", 2)
    grammars = target.Grammars(compiler())
    constraint = await grammars.ready(order)
    with monkeypatch.context() as patch:
        patch.setattr(Reading, "feed", None)
        patch.setattr(Reading, "look", None)
        assert list(np.flatnonzero(constraint.at(order.output).mask)) == want
    broken = await grammars.ready(replace(order, output=(*text[:3], 70, 71, 72, 73)))
    assert isinstance(broken, Constraint), "whoever asks is told"
    grammars.close()


# ------------------------------------------------------------ outgrown limits


OUTGROWS = Grammar(GrammarForm.REGEX, "(a{1,1000}){1,1000}")


def outgrown(k: int, anew: bool = False) -> tuple[list[int], Failed | None]:
    """An answer with blocks of k of its own tokens, and what ends it; `anew`: it is placed again every few rounds."""

    def draft(committed: Sequence[int]) -> list[int]:
        return [token] * k

    token = compiler().compile(OUTGROWS).at([]).mask.nonzero()[0][0]  # type: ignore[union-attr]

    def script(prefix: Sequence[int]) -> torch.Tensor:
        row = torch.zeros(TOKENIZER_VOCAB, dtype=torch.float64)
        row[token] = 9.0
        return row

    bench = bench_with(script)
    caller = Caller(bench, bench.hello(), PROMPT, sampling=under(OUTGROWS, GREEDY, max_tokens=300), want=300, draft=draft)

    def place(turn: int) -> None:
        if anew and turn % 5 == 4 and caller.waiting is None and not caller.done:
            caller.place()

    run_all(bench, [caller], each_turn=place)
    return caller.output, caller.failure


def test_where_an_answer_breaks_off_hangs_on_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar outgrows its limits: the same tokens, then the same error, without blocks, with blocks and placed anew."""
    output, failure = want = outgrown(0)
    assert 10 < len(output) < 200 and failure is not None and failure.code == 3 and "too complex" in failure.message
    assert [outgrown(4), outgrown(7), outgrown(0, anew=True), outgrown(4, anew=True)] == [want] * 4
    monkeypatch.setattr(GrammarCompiler, "compile", GrammarCompiler.compile_roaming)
    assert len({str(outgrown(k)) for k in (0, 4, 7)}) > 1, "the broken twin: a state that rolls back"


# ------------------------------------------------------------ broken twins


def test_a_state_that_keeps_what_was_refused_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """F110's broken twin: the grammar is advanced over the block before it is judged, and never begun anew."""
    params = under(SCHEMA)
    text, _ = alone(params)
    slot = next(at for at in range(len(text)) if len(legal(SCHEMA, text[:at])) > 1)
    block = [*text[:slot], next(i for i in legal(SCHEMA, text[:slot]) if i != text[slot])]
    bench = bench_with()
    bench.send(bench.hello(), first_step(PROMPT, block, sampling=params))
    bench.compile()
    constraint = bench.verifier._sessions["orch", "s"].constraint
    assert isinstance(constraint, Constraint)
    constraint.at(block)
    monkeypatch.setattr(Constraint, "_begin", lambda self: None)
    outcome = only(bench.turn())
    assert isinstance(outcome, Failed) or outcome.tokens != tuple(text[: slot + 1])

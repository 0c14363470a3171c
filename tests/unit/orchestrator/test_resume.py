"""Answers that go on: after a stop inside a block, on another target, in another stream. F42, F47, F86, F87, F88."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.answer import AnswerStream, Delta, Finished
from orchestrator.detokenise import DecoderPlan, IncrementalDecoder
from orchestrator.generation import Generation
from orchestrator.handle import Handle
from orchestrator.output import Ended, TokensDecided
from orchestrator.pace import FixedPace
from orchestrator.stops import StopMatcher
from specdec import terms
from specdec.grammar import GrammarCompiler
from specdec.terms import Grammar, GrammarForm, SamplingParams
from tests.unit.orchestrator.scripted_pools import SEED, Pools, answer_of, fetch, prompt_of, settle
from tests.unit.orchestrator.tokenizers_here import byte_level

pytestmark = pytest.mark.timeout(30)
TOKENIZER = byte_level()
PLAN = DecoderPlan(TOKENIZER)
COUNT = 40


def stream(stop: Sequence[str] = (), resumed: Sequence[int] = ()) -> AnswerStream:
    return AnswerStream(IncrementalDecoder(PLAN), StopMatcher(stop), prompt_tokens=4, resumed=resumed)


def again(pools: Pools, name: str, output: Sequence[int], **sampling: Any) -> Handle:
    prompt = prompt_of(name)
    params = SamplingParams(max_tokens=COUNT, **sampling)
    request = ev.Admitted(f"{name} again", (*prompt, *output), len(prompt), params, SEED, 10_000, 3, 8)
    return pools.driver.start((request,), f"{name} again")


async def relayed(handle: Handle, answer: AnswerStream) -> tuple[list[Delta], Finished]:
    deltas = []
    async for _, event in handle:
        if isinstance(event, Ended):
            return deltas, answer.finish(event)[1]
        deltas.append(answer.tokens(event))
        if answer.stopped is not None:
            return deltas, answer.finish(handle.stop_here(0))[1]
    raise AssertionError("no end")


@pytest.mark.parametrize("at", range(4, 30, 3))
async def test_F42_a_stop_inside_a_block_leaves_no_state_ahead(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A stop string is completed at each place of a block; what goes on from the ids that were delivered is what would have followed."""
    pools = Pools(monkeypatch)
    whole = answer_of(prompt_of("stopped"), COUNT)
    stop = TOKENIZER.decode(whole[at - 2 : at])
    first = stream([stop])
    deltas, last = await relayed(pools.start("stopped", count=COUNT), first)
    delivered = [token for delta in deltas for token in delta.token_ids]
    assert delivered == whole[: len(delivered)] and last.stop_reason == stop and len(delivered) <= at
    assert last.usage.completion_tokens == len(delivered) and last.usage.discarded == last.stats.decided - len(delivered)
    assert delivered + await fetch(again(pools, "stopped", delivered)) == whole
    await settle()
    pools.check_empty()


async def test_F42_the_twin_that_goes_on_from_all_that_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    whole = answer_of(prompt_of("stopped"), COUNT)
    decided: list[int] = []
    handle = pools.start("stopped", count=COUNT)
    async for _, event in handle:
        assert not isinstance(event, Ended)
        decided += event.tokens
        if len(decided) > 8:
            handle.stop_here(0)
            break
    delivered = decided[:7]
    assert delivered + await fetch(again(pools, "stopped", decided)) != whole


@pytest.mark.parametrize("cut", [0, 1, 7, 19, 39])
async def test_F87_one_max_tokens_for_both_streams(monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    pools = Pools(monkeypatch)
    whole = answer_of(prompt_of("cut"), COUNT)
    second = stream(resumed=whole[:cut])
    deltas, last = await relayed(again(pools, "cut", whole[:cut], min_tokens=10), second)
    assert whole[:cut] + [token for delta in deltas for token in delta.token_ids] == whole
    assert last.usage.completion_tokens == COUNT


async def test_F86_F87_a_target_that_is_lost_mid_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a grammar, penalties, a seed and a half-matched stop string: the next target is given all of it and the ids, in one piece."""
    pools = Pools(monkeypatch, targets=2)
    shape: dict[str, Any] = {
        "grammar": Grammar(GrammarForm.REGEX, "(.|\n)*", start_after="x"),
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "min_tokens": 10,
    }
    whole = answer_of(prompt_of("lost"), COUNT)
    text = TOKENIZER.decode(whole)
    half = text[12:15] + "never"
    handle = pools.start("lost", count=COUNT, **shape)
    answer, deltas, lost = stream([half]), [], 0
    async for _, event in handle:
        if isinstance(event, Ended):
            rest, last = answer.finish(event)
            break
        deltas.append(answer.tokens(event))
        if lost < 3:  # in the middle of a round
            lost += 1
            holder = next(target for target in pools.targets if target.held)
            holder.fall()
            holder.rise()
    begun = [b for target in pools.targets for b in target.begun.values()]
    assert len(begun) == 2 and begun[0] == begun[1], "the same of every epoch"
    assert begun[0].sampling == SamplingParams(max_tokens=COUNT, **shape) and begun[0].prompt_length == len(prompt_of("lost"))
    assert [token for delta in deltas for token in delta.token_ids] == whole
    assert "".join(delta.text for delta in deltas) + rest.text == text
    assert last.usage.completion_tokens == COUNT and last.stats.replacements == 3


def test_F86_a_grammar_is_where_the_committed_ids_are() -> None:
    """What a target rebuilds from ids and prompt_length is the state of the target that was lost, at every cut."""
    schema = '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}'
    grammar, grammars = Grammar(GrammarForm.JSON_SCHEMA, schema), GrammarCompiler(TOKENIZER)
    ids = TOKENIZER.encode('{"a": [1, 22, 333]}').ids
    walked = grammars.compile(grammar)
    for cut in range(len(ids) + 1):
        ahead, rebuilt = walked.at(ids[:cut]), grammars.compile(grammar).at(ids[:cut])
        assert ahead.mask is not None and rebuilt.mask is not None
        assert (ahead.mask == rebuilt.mask).all() and (ahead.may_end, ahead.must_end) == (rebuilt.may_end, rebuilt.must_end)
        assert cut == len(ids) or ahead.mask[ids[cut]]
    assert walked.at(ids).must_end


@pytest.mark.parametrize("text", ["na🎉ïve", "안녕 세계"])
def test_F88_ids_and_not_text_are_what_goes_on(text: str) -> None:
    """The text of a cut answer encodes to other ids; so it is the ids that travel, and the text of both streams fits."""
    ids, reencoded_otherwise = TOKENIZER.encode(text).ids, False
    for cut in range(len(ids) + 1):
        first, second = stream(), stream(resumed=ids[:cut])
        plain = (terms.Origin.PLAIN,)
        before = first.tokens(_decided(ids[:cut], plain)).text
        after = second.tokens(_decided(ids[cut:], plain)).text + second.flush()
        assert before + after == text
        reencoded_otherwise |= TOKENIZER.encode(before).ids != ids[:cut]
        request = ev.Admitted("s", (5, *ids[:cut]), 1, SamplingParams(max_tokens=100), SEED, 1000, 2, 8)
        (step,) = steps(Generation(request, FixedPace(request.num_speculative_tokens, 1)))
        assert step.tokens == (5, *ids[:cut]) and step.begin is not None and step.begin.prompt_length == 1
    assert reencoded_otherwise


def _decided(tokens: Sequence[int], origin: tuple[terms.Origin, ...]) -> TokensDecided:
    return TokensDecided(tuple(tokens), (), origin * len(tokens))


def steps(generation: Generation) -> list[terms.Step]:
    commands = [*generation.begin(), *generation.handle(ev.TargetPlaced("t"))]
    return [command.item for command in commands if isinstance(command, ev.ToTarget) and isinstance(command.item, terms.Step)]


@pytest.mark.parametrize("min_tokens", [0, 32, COUNT])
async def test_F47_min_tokens_does_not_turn_drafting_off(monkeypatch: pytest.MonkeyPatch, min_tokens: int) -> None:
    pools = Pools(monkeypatch)
    stats = []
    for asked in ({"min_tokens": min_tokens}, {}):
        async for _, event in pools.start("s", count=COUNT, **asked):
            if isinstance(event, Ended):
                stats.append(event.stats)
        await settle()
    assert stats[0] == stats[1] and stats[0].drafted > COUNT // 2 and stats[0].spec_rounds > 3

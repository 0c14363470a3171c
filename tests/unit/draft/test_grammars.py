"""The draft under a grammar: it proposes what the target may decide, rests where nothing may follow, and holds nobody up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch

from draft_service.checks import Limits
from draft_service.choosing import chooser_factory
from draft_service.drafter import Drafter
from draft_service.stepper import Stepper
from specdec.errors import InvalidRequest
from specdec.grammar import GrammarCompiler, Roamer
from specdec.sampling import Sampler, draft_choice
from specdec.terms import CloseDraft, DraftMethod, Grammar, GrammarForm, Refused, RejectionMethod, SamplingParams
from tests.fakes import ScriptedEngine, hashed_script
from tests.tiny import EOS_ID, TOKENIZER_VOCAB, tiny_tokenizer
from tests.unit.draft.rig import FakeRoom, Rig, proposals

SCRIPT = hashed_script(TOKENIZER_VOCAB)
PROMPT = (50, 60, 70)
SCHEMA = Grammar(
    GrammarForm.JSON_SCHEMA,
    '{"type": "object", "properties": {"name": {"enum": ["cat", "hat"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},'
    ' "required": ["name", "age"], "additionalProperties": false}',
)
REGEX = Grammar(GrammarForm.REGEX, "[a-f]{3,30}")
SHORT = Grammar(GrammarForm.CHOICE, options=("the", "hat"))
MAYBE = Grammar(GrammarForm.CHOICE, options=tuple("abcdefgh"[:n] for n in range(1, 9)))  # one id goes on, or the end
LATER = Grammar(GrammarForm.REGEX, "[0-9]{2,6}", start_after="a")


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer())


def ids(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text, add_special_tokens=False).ids)


def text_of(tokens: Sequence[int]) -> str:
    return str(tiny_tokenizer().decode(list(tokens), skip_special_tokens=False))


class GrammarRig(Rig):
    """A Rig over the tiny tokenizer's 320 ids. `columns`: of a reduced head; its rows are cut to them."""

    def __init__(self, grammar: Grammar | None = SCHEMA, columns: Sequence[int] | None = None, grammars: Any = None, **more: Any) -> None:
        super().__init__()
        self.engine = ScriptedEngine(SCRIPT, vocab_size=TOKENIZER_VOCAB, window=400, eos_ids=(EOS_ID,))
        if columns is not None:
            self.engine.script = lambda prefix: SCRIPT(prefix)[torch.tensor(columns)]
        self.eos_ids, self.columns, self.grammar = (EOS_ID,), columns, grammar
        factory = chooser_factory(TOKENIZER_VOCAB, (EOS_ID,), columns, grammars or compiler(), more.get("beside"))
        self.room = FakeRoom()
        self.drafter = Drafter(Limits(TOKENIZER_VOCAB, 400, (EOS_ID,)), self.room, factory)
        self.stepper = Stepper(self.engine)

    def open(self, session_id: str = "s", tokens: Sequence[int] = PROMPT, k: int = 3, budget: int = 16, **more: Any) -> Any:
        sampling = SamplingParams(grammar=self.grammar, **{"temperature": 1.0, "max_tokens": 200, **more.pop("sampling", {})})
        return super().open(session_id, tokens, k, budget, sampling=sampling, prompt_length=len(PROMPT), **more)

    def naive(self, prefix: Sequence[int], count: int, session_id: str = "s") -> list[int]:
        """What a draft with neither cache nor lookahead proposes, every row's grammar fed anew; shorter where nothing may follow."""
        command, tokens = self.opened[session_id], list(prefix)
        for _ in range(count):
            output = tokens[len(PROMPT) :]
            grammar = command.sampling.grammar
            constraint = None if grammar is None else compiler().compile(grammar)
            sampler = Sampler(command.sampling, command.seed, TOKENIZER_VOCAB, self.eos_ids, PROMPT, self.columns, constraint)
            if sampler.must_end(output):
                break
            choice = draft_choice(sampler, self.engine.script(tokens), len(tokens), output, command.draft_method)
            assert choice is not None
            tokens.append(choice.token)
            if choice.token in sampler.stop_ids:
                break
        return tokens[len(prefix) :]

    def told(self, session_id: str = "s") -> list[int]:
        return [token for event in proposals(self.events, session_id) for token in event.tokens]


@pytest.mark.parametrize("grammar", [SCHEMA, REGEX, SHORT, MAYBE, LATER, None], ids=["schema", "regex", "choice", "maybe", "later", "none"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", [DraftMethod.GUMBEL, DraftMethod.GREEDY])
def test_proposals_are_the_draft_s_own_masked(grammar: Grammar | None, temperature: float, method: DraftMethod) -> None:
    """Round after round, whatever part of the block is decided, with the correction the target would have made."""
    for keep in range(4):
        rig = GrammarRig(grammar)
        rig.open(sampling={"temperature": temperature, "stop_token_ids": () if grammar else (0, 1)}, draft_method=method)
        rig.settle()
        for _ in range(12):
            prefix = rig.committed["s"]
            ahead = rig.undecided()
            assert ahead == rig.naive(prefix, len(ahead)) and ahead[:3] == rig.naive(prefix, 3)
            whole = rig.naive(prefix, keep + 1)
            if not whole or whole[-1] in (EOS_ID, 0, 1):
                break
            rig.sent(min(3, len(rig.undecided())))
            rig.settle()
            rig.commit(whole)
            rig.settle()
        assert rig.drafter.tally.broken == 0 and rig.drafter.num_sessions == 1


def test_probabilities_of_a_masked_row_are_of_legal_ids() -> None:
    rig = GrammarRig(REGEX)
    rig.open(rejection_method=RejectionMethod.STANDARD, draft_method=DraftMethod.PROBABILISTIC)
    rig.settle()
    (told,) = proposals(rig.events)
    for i, q in enumerate(told.distributions):
        mask = compiler().compile(REGEX).at(told.tokens[:i]).mask
        assert q is not None and mask is not None and mask[list(q.ids)].all() and told.tokens[i] in q.ids


def test_f109_nothing_is_drafted_behind_a_whole_sentence() -> None:
    """Neither a row nor a log line for it, until a commit changes the tokens."""
    rig = GrammarRig(SHORT)
    rig.open()
    rig.settle()
    assert text_of(rig.told()) in SHORT.options
    forwards = rig.forwards()
    rig.sent(len(rig.told()))
    rig.settle()
    rig.settle()
    assert rig.drafter.plan() is None and rig.forwards() == forwards
    assert rig.session().wanted == 0 and rig.drafter.tally.broken == 0


def test_a_commit_during_the_step_that_finds_the_end() -> None:
    """What the step saw is not what there is any more."""
    rig = GrammarRig(REGEX)
    rig.open()
    rig.sent(2, block=ids("12"))
    plan = rig.drafter.plan()
    assert plan is not None
    outcome = rig.run(plan)
    rig.commit(ids("a"))
    rig.finish(plan, outcome)
    assert not rig.session().over
    rig.settle()
    assert rig.undecided() == rig.naive(rig.committed["s"], 3)


def test_a_sentence_shorter_than_the_block_is_told_at_once() -> None:
    rig = GrammarRig(SHORT)
    rig.open(k=8)
    rig.settle()
    (told,) = proposals(rig.events)
    assert text_of(told.tokens) in SHORT.options and len(told.tokens) < 8


@pytest.mark.parametrize("rounds", [1, 8])
def test_f111_illegal_blocks_from_elsewhere(rounds: int, caplog: pytest.LogCaptureFixture) -> None:
    """F111: a lookup proposes what the grammar forbids, again and again; the draft waits for the commit and goes on."""
    rig = GrammarRig(REGEX)
    rig.open()
    rig.settle()
    with caplog.at_level(logging.INFO, "draft"):
        for _ in range(rounds):
            rig.sent(3, block=ids("123"))
            rig.settle()
            assert rig.session().over and rig.drafter.plan() is None
            rig.commit(rig.naive(rig.committed["s"], 1))
            rig.settle()
            assert rig.undecided() == rig.naive(rig.committed["s"], 3)
    assert rig.drafter.tally.broken == 0 and rig.drafter.num_sessions == 1 and caplog.records == []


def test_f110_a_block_that_is_illegal_only_at_its_end() -> None:
    """F110: what was kept of it moves the state, what was refused leaves no trace."""
    rig = GrammarRig(SCHEMA)
    rig.open()
    rig.settle()
    true = rig.naive(rig.committed["s"], 2)
    rig.sent(3, block=[*true, *ids("z")[:1]])
    rig.settle()
    assert rig.session().over
    rig.commit(rig.naive(rig.committed["s"], 3))
    rig.settle()
    assert rig.undecided() == rig.naive(rig.committed["s"], 3)


def test_a_legal_block_from_elsewhere_is_gone_on_from() -> None:
    """Forced ids are told to the draft like that, and may be more than K."""
    rig = GrammarRig(SCHEMA)
    rig.open()
    forced = list(compiler().compile(SCHEMA).forced([]))
    assert len(forced) > 3
    rig.sent(len(forced), block=forced)
    rig.settle()
    ahead = rig.undecided()
    assert ahead[: len(forced)] == forced and ahead[len(forced) :] == rig.naive([*PROMPT, *forced], len(ahead) - len(forced)) != []
    rig.commit([*forced, ahead[len(forced)]])
    assert rig.undecided() == ahead[len(forced) + 1 :]


def test_another_block_after_an_illegal_one_is_drafted_behind() -> None:
    rig = GrammarRig(REGEX)
    rig.open()
    rig.settle()
    true = rig.naive(rig.committed["s"], 1)
    rig.sent(3, block=ids("123"))
    rig.settle()
    assert rig.session().over
    rig.sent(1, block=true)
    rig.settle()
    assert rig.undecided()[:1] == true and len(rig.undecided()) > 1


def test_a_grammar_outside_the_reduced_head_is_no_proposal(caplog: pytest.LogCaptureFixture) -> None:
    """Round after round: no error, no line in the log, no refusal."""
    rig = GrammarRig(REGEX, columns=tuple(range(3, 40)))
    rig.open()
    with caplog.at_level(logging.INFO, "draft"):
        for _ in range(6):
            rig.settle()
            rig.sent(0)
            rig.settle()
            rig.commit(ids("a"))
    assert rig.told() == [] and rig.drafter.num_sessions == 1 and caplog.records == []
    assert rig.forwards() <= 12


def test_the_only_legal_id_is_proposed_though_the_head_lacks_it() -> None:
    rig = GrammarRig(SCHEMA, columns=tuple(range(3, 40)))
    rig.open()
    rig.settle()
    assert rig.told() == list(compiler().compile(SCHEMA).forced([]))[:3]
    (told,) = proposals(rig.events)
    assert told.confidences == (1.0, 1.0, 1.0)


def test_a_grammar_that_does_not_compile_costs_its_session_alone(caplog: pytest.LogCaptureFixture) -> None:
    rig = GrammarRig(Grammar(GrammarForm.REGEX, "a("))
    with caplog.at_level(logging.INFO, "draft"):
        rig.open("bad", traceparent="its trace")
        rig.grammar = REGEX
        rig.open("good")
        for _ in range(4):
            rig.settle()
            for name in ("bad", "good"):
                if rig.drafter.session(1, name) is not None:
                    rig.commit(ids("a"), name)
    (refused,) = [event for _, event in rig.events if isinstance(event, Refused)]
    assert refused.session_id == "bad" and refused.retry_after_ms == 0
    assert proposals(rig.events, "bad") == [] and len(rig.told("good")) >= 9
    (line,) = caplog.records
    assert "sampling.grammar.regex: " in line.getMessage() and line.exc_info is None
    assert (line.__dict__["session"], line.__dict__["traceparent"]) == ("bad", "its trace")


def test_a_language_that_outgrows_the_limits_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class TooMuch(Roamer):
        def __init__(self) -> None:
            pass

        def at(self, output: Sequence[int]) -> Any:
            raise InvalidRequest("sampling.grammar", "too complex after 0 tokens of the answer: said so")

    class Grammars:
        def compile_roaming(self, grammar: Grammar) -> Roamer:
            return TooMuch()

    rig = GrammarRig(REGEX, grammars=Grammars())
    with caplog.at_level(logging.INFO, "draft"):
        rig.open()
        for _ in range(5):
            rig.settle()
            rig.commit(ids("a"))
    assert rig.told() == [] and rig.drafter.num_sessions == 1 and len(caplog.records) == 1


def test_a_draft_without_grammars_proposes_nothing_under_one() -> None:
    rig = GrammarRig(REGEX)
    rig.drafter._make_chooser = chooser_factory(TOKENIZER_VOCAB, (EOS_ID,), None)
    rig.open("bound")
    rig.grammar = None
    rig.open("free")
    rig.settle()
    assert rig.told("bound") == [] and len(rig.told("free")) == 3 and rig.drafter.num_sessions == 2


def test_nobody_waits_for_a_grammar_that_is_being_compiled() -> None:
    gate = threading.Event()

    class Slow:
        def compile_roaming(self, grammar: Grammar) -> Roamer:
            gate.wait(10)
            return compiler().compile_roaming(grammar)

    with ThreadPoolExecutor(1) as pool:
        futures: list[Future[Roamer]] = []

        def beside(call: Any) -> Future[Roamer]:
            futures.append(pool.submit(call))
            return futures[-1]

        rig = GrammarRig(REGEX, grammars=Slow(), beside=beside)
        rig.open("bound")
        rig.grammar = None
        rig.open("free")
        rig.settle()
        assert rig.told("bound") == [] and len(rig.told("free")) == 3
        gate.set()
        futures[0].result(10)
        rig.commit(ids("a"), "bound")  # the next tokens are asked about again
        rig.settle()
        assert rig.told("bound") == rig.naive([*PROMPT, *ids("a")], 3, "bound")


def test_grammars_of_sessions_that_are_gone_are_not_compiled() -> None:
    """Clients that leave would fill the compiler's queue, and whoever comes next waits behind all that nobody wants."""
    queued: list[Future[Roamer]] = []

    def beside(call: Any) -> Future[Roamer]:
        queued.append(Future())
        return queued[-1]

    rig = GrammarRig(REGEX, beside=beside)
    for number in range(4):
        rig.open(str(number))
    rig.settle()
    for number in (0, 2):
        rig.apply(CloseDraft(str(number)))
    assert [one.cancelled() for one in queued] == [True, False, True, False]
    rig.drafter.close_stream(1)
    assert all(one.cancelled() for one in queued)

"""Whatever the order of items, engine steps, time, forks and broken streams: the books balance."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.hashing import prefix_hash
from specdec.logprobs import token_logprobs
from specdec.terms import (
    Answer,
    Begin,
    Close,
    Closed,
    Expired,
    Failed,
    NoRoom,
    PrefixNeeded,
    Result,
    StaleEpoch,
    StaleRound,
    Step,
    TokenLogprobs,
    UnknownSession,
)
from target_service import sessions
from target_service.executor import Executor
from target_service.plan import Fork, Keep, StepPlan
from tests.fakes import hashed_script
from tests.unit.target.harness import GREEDY, Bench, reference
from tests.unit.target.pools import BlockPool

VOCAB = 8
SCRIPT = hashed_script(VOCAB)
SESSIONS = ["a", "b", "c", "d"]
SHARED = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 7]
PROMPTS = st.builds(
    lambda shared, rest: (SHARED[:shared] + rest)[:12] or [0],
    st.integers(0, 12),
    st.lists(st.integers(0, VOCAB - 1), max_size=4),
)


@cache
def entry(prefix: tuple[int, ...], token: int) -> TokenLogprobs:
    return token_logprobs(SCRIPT(prefix).numpy(), token, 2)


def entries(prompt: Sequence[int]) -> list[TokenLogprobs]:
    """The prompt's log-probabilities, without any engine."""
    return [entry(tuple(prompt[:at]), prompt[at]) for at in range(1, len(prompt))]


class Book:
    """What one orchestrator knows of a session's placement. `asks`: for the prompt's log-probabilities."""

    def __init__(self, epoch: int, prompt: list[int], asks: bool, fork: str) -> None:
        self.epoch, self.prompt, self.asks, self.fork = epoch, prompt, asks, fork
        self.committed, self.kv, self.round, self.begun = list(prompt), 0, 1, False
        self.outstanding = 0  # 1 while an answer to the open round is owed
        self.closing = self.lost = False


class Interleavings(RuleBasedStateMachine):
    @initialize(pool=st.integers(24, 80), rows=st.integers(6, 24), prompt=PROMPTS, blocks=st.booleans(), cache=st.booleans())
    def start(self, pool: int, rows: int, prompt: list[int], blocks: bool, cache: bool) -> None:
        self.bench = Bench(
            SCRIPT,
            vocab=VOCAB,
            pool=BlockPool(pool) if blocks else pool,
            window=24,
            max_step_rows=rows,
            max_num_speculative_tokens=5,
            reserve_tokens=2,
            lease_ms=100.0,
            max_sessions=3,
            prefix_block_tokens=4 if cache else 0,
        )
        self.stream: int | None = self.bench.hello()
        self.books: dict[str, Book] = {}
        self.epochs: Counter[str] = Counter()
        self.plan: StepPlan | None = None
        self.owed_closed: Counter[tuple[str, int]] = Counter()
        self.place("a", prompt, 0, False, "")
        self.run_dry()

    # ------------------------------------------------------------ what happens

    @precondition(lambda self: self.stream is not None)
    @rule(name=st.sampled_from(SESSIONS), prompt=PROMPTS, k=st.integers(0, 5), asks=st.booleans(), fork=st.sampled_from(SESSIONS))
    def place(self, name: str, prompt: list[int], k: int, asks: bool, fork: str) -> None:
        self.epochs[name] += 1
        old = self.books.get(name)
        stale = old is not None and old.outstanding
        self.books[name] = Book(self.epochs[name], prompt if old is None else old.committed, asks, fork)
        self.books[name].prompt = prompt if old is None else old.prompt
        answers = self.ask(name, k)
        if stale and old is not None:
            assert [a.outcome for a in answers if a.epoch == old.epoch and not isinstance(a.outcome, Closed)] in (
                [StaleEpoch(self.epochs[name])],
                [],  # its session was gone already
            )

    @precondition(lambda self: self.stream is not None)
    @rule(name=st.sampled_from(SESSIONS), k=st.integers(0, 5), right=st.booleans(), remaining=st.sampled_from([5, 60_000]))
    def step(self, name: str, k: int, right: bool, remaining: int) -> None:
        book = self.books.get(name)
        if book is not None and not book.closing:
            self.ask(name, k, right, remaining)

    @precondition(lambda self: self.stream is not None)
    @rule(name=st.sampled_from(SESSIONS), keep=st.integers(0, 24), rest=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
    def edit(self, name: str, keep: int, rest: list[int]) -> None:
        """Another history: in the output, in the prompt, or before there was a result."""
        book = self.books.get(name)
        if book is None or book.closing or book.outstanding or book.lost:
            return
        edited = [*book.committed[:keep], *rest]
        if len(book.prompt) <= len(edited) <= 24:
            book.prompt, book.committed, book.kv = edited[: len(book.prompt)], edited, min(book.kv, keep)
            self.ask(name, 0)

    def ask(self, name: str, k: int, right: bool = True, remaining: int = 60_000) -> list[Answer]:
        book = self.books[name]
        block = (reference(SCRIPT, book.committed, k, vocab=VOCAB) if right else [1] * k)[:k]
        params = replace(GREEDY, prompt_logprobs=2) if book.asks else GREEDY
        begin = None if book.begun else Begin(len(book.prompt), params, 7, fork_session_id=book.fork)
        tokens = (*book.committed[book.kv :], *block)
        step = Step(
            name, book.epoch, book.round, book.kv, prefix_hash(book.committed[: book.kv]), tokens, len(block), remaining, begin=begin
        )
        book.outstanding = 1
        assert self.stream is not None
        self.bench.verifier.submit(self.stream, step, self.bench.now)
        return self.listen()

    @precondition(lambda self: self.stream is not None)
    @rule(name=st.sampled_from(SESSIONS), times=st.integers(1, 2))
    def close(self, name: str, times: int) -> None:
        book = self.books.get(name)
        if book is None or book.closing:
            return
        book.closing = True
        self.owed_closed[name, book.epoch] += 1
        assert self.stream is not None
        self.bench.verifier.submit(self.stream, Close(name, book.epoch), self.bench.now)
        if times == 2 and self.owed_closed and (name, book.epoch) in self.bench_closing():
            self.bench.verifier.submit(self.stream, Close(name, book.epoch), self.bench.now)
        self.listen()

    def bench_closing(self) -> set[tuple[str, int]]:
        return {(s.key[1], s.epoch) for s in self.bench.verifier._sessions.values() if s.closing}

    @rule(nan=st.booleans())
    def begin_or_end_a_step(self, nan: bool) -> None:
        if self.plan is None:
            self.plan = self.bench.plan()
            self.listen()
        else:
            self.end_step(nan)

    @rule()
    def run_dry(self) -> None:
        """Engine steps until nothing waits."""
        while True:
            self.plan = self.plan or self.bench.plan()
            self.listen()
            if self.plan is None:
                return
            self.end_step(False)

    def end_step(self, nan: bool) -> None:
        assert self.plan is not None
        assert self.plan.size <= self.bench.limits.max_step_rows
        self.bench.engine.nan_when = (lambda prefix: len(prefix) % 7 == 3) if nan else None
        rounds = {s.key: s.round for s in self.bench.verifier._sessions.values()}
        self.bench.finish(self.plan)
        self.plan = None
        for session in self.bench.verifier._sessions.values():
            if session.round > rounds[session.key] and session.resident is not None and session.told:
                slot = self.bench.engine.kv.slots[self.bench.executor._slots[session.resident]]
                decided = isinstance(session.told[-1].outcome, Result) and session.told[-1].outcome.tokens
                assert len(slot) == session.kv_length or not decided, "F119: the rollback was one"
        self.listen()

    @rule(ms=st.sampled_from([1, 10, 60, 200]))
    def pass_time(self, ms: int) -> None:
        self.bench.now += ms
        self.bench.verifier.tick(self.bench.now)
        self.listen()

    @rule()
    def lose_the_stream(self) -> None:
        if self.stream is not None:
            self.bench.verifier.detach(self.stream, self.bench.now)
            assert not [a for to, a in self.bench.verifier.take_answers() if to == self.stream]
        self.stream = self.bench.hello()
        for name, book in list(self.books.items()):
            book.lost, book.outstanding = book.lost or bool(book.outstanding), 0
            if book.closing:
                self.owed_closed.pop((name, book.epoch), None)
                del self.books[name]

    # ------------------------------------------------------------ what is heard

    def listen(self) -> list[Answer]:
        answers = []
        for to, answer in self.bench.verifier.take_answers():
            assert to == self.stream, "an answer for a stream that is gone"
            answers.append(answer)
            self.hear(answer)
        return answers

    def hear(self, answer: Answer) -> None:
        name = answer.session_id
        if isinstance(answer.outcome, Closed):
            assert self.owed_closed[name, answer.epoch] == 1, "closed is said once, to who asked"
            del self.owed_closed[name, answer.epoch]
            if name in self.books and self.books[name].epoch == answer.epoch:
                del self.books[name]
            return
        book = self.books.get(name)
        assert book is not None, f"nothing comes after closed: {answer}"
        if answer.epoch < book.epoch:
            assert isinstance(answer.outcome, StaleEpoch), answer
            return
        if book.outstanding == 0:  # asked on a stream that broke; Close from the new one brought its answer along
            assert book.lost and book.closing, f"answered twice: {answer}"
        book.lost = False
        assert answer.round == book.round
        book.outstanding = 0
        self.obey(book, answer.outcome)

    def obey(self, book: Book, outcome: Any) -> None:
        match outcome:
            case Result() as result:
                assert result.prefix_length == len(book.committed)
                assert list(result.tokens) == reference(SCRIPT, book.committed, len(result.tokens), vocab=VOCAB)
                assert result.num_accepted <= result.num_verified
                assert list(result.prompt_logprobs) == (entries(book.prompt) if book.asks and book.round == 1 else [])
                book.committed += result.tokens
                assert result.finish is not None or result.kv_length_after == len(book.committed) - 1
                assert result.kv_length_after < len(book.committed)
                book.kv, book.round, book.begun = result.kv_length_after, book.round + 1, True
            case PrefixNeeded(have):
                assert have < book.kv
                book.kv = have
            case UnknownSession() | StaleEpoch() | Failed():
                if isinstance(outcome, Failed):
                    assert outcome.code == 13
                book.begun, book.kv = False, 0
                book.round = 1
                name = next(n for n, b in self.books.items() if b is book)
                self.epochs[name] += 1
                book.epoch = self.epochs[name]
            case NoRoom() | Expired():
                pass
            case StaleRound():
                raise AssertionError("the orchestrator is never behind its own rounds")

    # ------------------------------------------------------------ what always holds

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "bench"):
            return
        verifier, pool = self.bench.verifier, self.bench.pool
        assert pool.used_tokens <= pool.total_tokens
        live = {s.resident for s in verifier._sessions.values() if s.resident is not None}
        kept = verifier.room._cache._entries
        assert live | kept.keys() == pool.held.keys() and not live & kept.keys()
        assert len(pool.releases) == len(set(pool.releases))
        assert {s.key for s in verifier._sessions.values() if s.flying} <= {s.key for s, _ in verifier._flying}
        holds = {resident: self.bench.engine.kv.slots[slot] for resident, slot in self.bench.executor._slots.items()}
        for change in [*(self.plan.changes if self.plan is not None else ()), *verifier._room._changes]:
            if isinstance(change, Fork):
                assert len(holds[change.donor]) >= change.length
                holds[change.resident] = holds[change.donor][: change.length]
            elif isinstance(change, Keep):
                assert len(holds[change.resident]) >= change.length
                holds[change.resident] = holds[change.resident][: change.length]
        assert all(holds[resident] == list(one.tokens) for resident, one in kept.items())
        for session in verifier._sessions.values():
            assert session.kv_length < max(1, len(session.tokens))
            assert session.resident is None or session.kv_length <= pool.held[session.resident]
            if session.resident in holds:
                assert holds[session.resident][: session.kv_length] == session.tokens[: session.kv_length]
            else:
                assert session.kv_length == 0
            prompt = session.tokens[: session.begin.prompt_length]
            assert session.prompt_logprobs == entries(prompt)[: len(session.prompt_logprobs)]
            assert not session.unscored or session.kv_length <= len(session.prompt_logprobs)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        if self.plan is not None:
            self.bench.finish(self.plan)
        if self.stream is not None:
            self.bench.verifier.detach(self.stream, self.bench.now)
        self.bench.now += 1000
        self.bench.settle()
        kept = self.bench.verifier.room._cache._entries
        assert self.bench.verifier.num_sessions == 0 and self.bench.executor._samplers == {}
        assert self.bench.pool.held.keys() == self.bench.executor._slots.keys() == kept.keys()
        assert len(self.bench.engine.kv.slots) == len(kept)
        assert self.bench.verifier.room.live_tokens == 0


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def walk(seed: int, steps: int = 80) -> None:
    """The same machine at random: most of the time sessions come, ask and are computed, so that much is in the air at once."""
    rng = random.Random(seed)

    def prompt() -> list[int]:
        return [*SHARED[: rng.randrange(1, 13)], *rng.choices(range(VOCAB), k=rng.randrange(3))][:12]

    def name() -> str:
        return rng.choice(SESSIONS)

    machine = Interleavings()
    machine.start(pool=rng.randrange(24, 81), rows=rng.randrange(6, 25), prompt=prompt(), blocks=seed % 2 == 1, cache=seed % 3 > 0)
    acts: list[tuple[int, Callable[[], None]]] = [
        (4, lambda: machine.place(name(), prompt(), rng.randrange(6), rng.random() < 0.3, name())),
        (8, lambda: machine.step(name(), rng.randrange(6), rng.random() < 0.7, 5 if rng.random() < 0.1 else 60_000)),
        (2, lambda: machine.edit(name(), rng.randrange(25), rng.choices(range(VOCAB), k=rng.randrange(1, 7)))),
        (12, lambda: machine.begin_or_end_a_step(rng.random() < 0.03)),
        (2, lambda: machine.close(name(), rng.choice([1, 2]))),
        (1, lambda: machine.pass_time(rng.choice([1, 10, 60, 200]))),
        (1, machine.run_dry),
        (1, machine.lose_the_stream),
    ]
    for act in rng.choices([act for _, act in acts], [weight for weight, _ in acts], k=steps):
        act()
        machine.the_books_balance()
    machine.teardown()


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_walks(first: int) -> None:
    for seed in range(first, first + 10):
        walk(seed)


# ------------------------------------------------------------ broken twins


def a_token_too_many(agreement: Callable[..., int] = sessions.agreement) -> Callable[..., int]:
    """Forks, and what is kept when other tokens come, reach one token past what agrees."""
    return lambda one, other: min(agreement(one, other) + 1, len(one), len(other))


def the_row_behind(right: Any = Executor._prompt_logprobs) -> Any:
    """Each token of the prompt is looked up in the row that it made."""
    return lambda self, row, prompt, logits: right(self, row, prompt, logits.roll(-1, 0))


@pytest.mark.parametrize(
    ("owner", "name", "twin"),
    [(sessions, "agreement", a_token_too_many()), (Executor, "_prompt_logprobs", the_row_behind())],
    ids=["a fork of a token too many", "log-probabilities of the row behind"],
)
def test_a_broken_twin_is_found(owner: Any, name: str, twin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, twin)
    with pytest.raises(AssertionError):
        for seed in range(10):
            walk(seed)

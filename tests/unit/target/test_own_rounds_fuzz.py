"""Whatever Steps, continuations, repeats, closes and losses come in whatever order, heard late or at once: what is told of a session is the
target's own text, in order, no token twice and none missing; and no proposal is verified behind another prefix than its own."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from specdec.hashing import prefix_hash
from specdec.terms import (
    Ahead,
    Answer,
    Begin,
    Close,
    Closed,
    Expired,
    Failed,
    NoRoom,
    PrefixNeeded,
    RejectionMethod,
    Result,
    SamplingParams,
    StaleEpoch,
    Step,
    UnknownSession,
)
from target_service import rounds
from target_service.ahead import Waiting
from target_service.plan import StepPlan
from target_service.rounds import Rounds
from target_service.sessions import Session
from tests.fakes import hashed_script
from tests.unit.target.harness import Bench, reference

VOCAB, MOST = 8, 30
SCRIPT = hashed_script(VOCAB)
PROMPTS = [(3, 1, 4), (3, 1, 4, 1, 5, 2), (7,), (0, 0, 0, 0)]
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=MOST),
    SamplingParams(temperature=1.0, max_tokens=MOST, presence_penalty=0.5),
    SamplingParams(temperature=1.0, max_tokens=MOST, stop_token_ids=(5,)),
]


@cache
def text(prompt: tuple[int, ...], which: int) -> list[int]:
    """All that the session will ever be told, and 8 tokens nobody will."""
    alone = reference(SCRIPT, prompt, MOST, sampling=SAMPLINGS[which], vocab=VOCAB)
    return [*prompt, *alone, *[1] * 8]


@dataclass
class Talk:
    """A session as its orchestrator sees it, which may be late: `inbox` = told, not heard yet; `truth` = prompt and all that was told."""

    name: str
    epoch: int
    prompt: tuple[int, ...]
    which: int
    committed: list[int]
    truth: list[int]
    kv: int = 0
    round: int = 0  # of the last Step whose result was heard
    open: bool = False
    begun: bool = False
    inbox: deque[Answer] = field(default_factory=deque)
    under: dict[int, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    credit: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    said: list[list[int]] = field(default_factory=list)  # whole texts that were proposed, by whatever item
    finished: bool = False


class Target:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.bench = Bench(
            SCRIPT,
            vocab=VOCAB,
            pool=rng.choice([70, 120, 400]),
            window=48,
            max_step_rows=rng.choice([6, 9, 24]),
            max_num_speculative_tokens=5,
            reserve_tokens=2,
            lease_ms=500.0,
            max_run_ahead=6,
            prefix_block_tokens=0,
        )
        self.stream = self.bench.hello()
        self.talks: dict[str, Talk] = {}
        self.epochs: dict[str, int] = defaultdict(int)
        self.plan: StepPlan | None = None
        self.own = self.verified = self.stripped = 0

    # ------------------------------------------------------------ what is said

    def place(self, name: str) -> None:
        old = self.talks.get(name)
        self.epochs[name] += 1
        which = self.rng.randrange(3) if old is None else old.which
        prompt = self.rng.choice(PROMPTS) if old is None else old.prompt
        known = list(prompt) if old is None or old.finished else list(old.committed)
        self.talks[name] = Talk(name, self.epochs[name], prompt, which, known, list(known))
        self.step(name)

    def guess(self, talk: Talk, behind: int, k: int) -> list[int]:
        right = text(talk.prompt, talk.which)[behind : behind + k]
        if self.rng.random() < 0.3 and right:
            at = self.rng.randrange(len(right))
            right[at:] = [(token + 1) % VOCAB for token in right[at:]]
        return right

    def step(self, name: str, remaining: int = 60_000) -> None:
        talk, rng = self.talks.get(name), self.rng
        if talk is None or talk.finished:
            return
        block = self.guess(talk, len(talk.committed), rng.randrange(6))
        begin = None if talk.begun else Begin(len(talk.prompt), SAMPLINGS[talk.which], 7, RejectionMethod.COUPLED)
        allowed = rng.choice([0, 0, 1, 3, 50])
        round_, base = talk.round + 1, talk.kv
        tokens = (*talk.committed[base:], *block)
        talk.open = True
        talk.credit[round_] = max(talk.credit[round_], min(allowed, 6))
        talk.said.append([*talk.committed, *block])
        hashed = prefix_hash(talk.committed[:base])
        step = Step(name, talk.epoch, round_, base, hashed, tokens, len(block), remaining, allowed, begin=begin)
        if talk.under.get(round_):
            self.again(talk, step)
        else:
            self.submit(step)

    def repeat(self, name: str) -> None:
        """The last round that was heard, once more."""
        talk = self.talks.get(name)
        if talk is not None and talk.round > 0 and talk.round == max(talk.under):
            self.again(talk, Step(name, talk.epoch, talk.round, 0, prefix_hash(()), tuple(talk.committed), 0, 60_000))

    def again(self, talk: Talk, step: Step) -> None:
        """A round that has its result: everything that was told under it, word by word."""
        self.listen()
        self.bench.verifier.submit(self.stream, step, self.bench.now)
        heard = self.bench.heard(self.stream)
        assert heard == talk.under[step.round] or [a.outcome for a in heard] == [UnknownSession()]

    def ahead(self, name: str) -> None:
        talk, rng = self.talks.get(name), self.rng
        if talk is None:
            return
        whole = text(talk.prompt, talk.which)
        start = rng.randrange(max(1, len(talk.committed) - 4), len(talk.committed) + 8)
        prefix = [*talk.committed, *whole[len(talk.committed) :]][:start]
        tokens = self.guess(talk, len(prefix), rng.randrange(1, 12)) or [1]
        hashed, epoch = prefix_hash(prefix), talk.epoch
        match rng.randrange(8):
            case 0:
                hashed = prefix_hash([*prefix[:-1], (prefix[-1] + 1) % VOCAB])  # right tokens behind another prefix
            case 1:
                epoch += rng.choice([1, -1]) if epoch > 1 else 1
            case _:
                talk.said.append([*prefix, *tokens])
        for _ in range(rng.choice([1, 1, 2])):
            self.submit(Ahead(name, epoch, len(prefix), hashed, tuple(tokens)))

    def close(self, name: str) -> None:
        talk = self.talks.pop(name, None)
        if talk is not None:
            self.submit(Close(name, talk.epoch))

    def lose_the_stream(self) -> None:
        self.listen()
        self.bench.verifier.detach(self.stream, self.bench.now)
        self.stream = self.bench.hello()
        for name in list(self.talks):
            if self.rng.random() < 0.5:
                self.place(name)
            else:
                del self.talks[name]
                self.submit(Close(name, self.epochs[name]))

    def submit(self, item: Step | Ahead | Close) -> None:
        self.bench.verifier.submit(self.stream, item, self.bench.now)
        self.listen()

    # ------------------------------------------------------------ what is done

    def engine(self) -> None:
        if self.plan is not None:
            self.bench.finish(self.plan)
            self.plan = None
        else:
            behind = {self.stream} if self.rng.random() < 0.1 else set()
            self.plan = self.bench.verifier.plan(self.bench.now, behind)
            self.check_rows(bool(behind))
        self.listen()

    def check_rows(self, behind: bool) -> None:
        for session, row in self.bench.verifier._flying:
            talk = self.talks.get(session.key[1])
            if row.score is None or talk is None or talk.epoch != session.epoch:
                continue
            assert session.pending is not None and not (behind and session.pending.own)
            tokens = [*session.tokens, *row.score.block]
            assert session.tokens == talk.truth, "what is decided was told, and what was told is decided"
            assert any(said[: len(tokens)] == tokens for said in talk.said) or not row.score.block, "proposals of another prefix"
            self.own += session.pending.own
            self.verified += session.pending.own and bool(row.score.block)

    # ------------------------------------------------------------ what is told

    def listen(self) -> None:
        for to, answer in self.bench.verifier.take_answers():
            talk = self.talks.get(answer.session_id)
            if to != self.stream or talk is None or answer.epoch != talk.epoch:
                assert not isinstance(answer.outcome, Result) or to == self.stream
                continue
            if isinstance(answer.outcome, Result):
                self.told(talk, answer, answer.outcome)
            assert not (isinstance(answer.outcome, Failed) and answer.round == 0), answer
            talk.inbox.append(answer)

    def told(self, talk: Talk, answer: Answer, result: Result) -> None:
        assert result.prefix_length == len(talk.truth), "no token twice, none missing"
        right = text(talk.prompt, talk.which)
        assert list(result.tokens) == right[len(talk.truth) : len(talk.truth) + len(result.tokens)]
        talk.truth += result.tokens
        assert len(talk.truth) <= len(right) - 8 and (result.finish is None or len(talk.truth) == len(right) - 8)
        assert result.tokens or result.finish is not None
        assert answer.round >= max(talk.under, default=1), "rounds never go back"
        if talk.under[answer.round] and result.num_verified == 0:
            talk.credit[answer.round] -= 1
            assert talk.credit[answer.round] >= 0, "no more plain tokens than were allowed"
        talk.under[answer.round].append(answer)

    def hear(self, name: str, most: int = 100) -> None:
        talk = self.talks.get(name)
        while talk is not None and talk.inbox and most and self.talks.get(name) is talk:
            self.obey(talk, talk.inbox.popleft())
            most -= 1

    def obey(self, talk: Talk, answer: Answer) -> None:
        match answer.outcome:
            case Result() as result:
                assert result.prefix_length == len(talk.committed)
                talk.committed += result.tokens
                talk.kv, talk.begun = min(result.kv_length_after, len(talk.committed) - 1), True
                talk.finished = result.finish is not None
                if answer.round == talk.round + 1:
                    talk.round, talk.open = answer.round, False
            case PrefixNeeded(have):
                talk.kv = min(talk.kv, have)
            case NoRoom() | Expired():
                talk.open = talk.open and answer.round <= talk.round
                if isinstance(answer.outcome, NoRoom):
                    talk.credit[answer.round] = max(0, talk.credit[answer.round])
            case UnknownSession() | StaleEpoch():
                self.place(talk.name)
            case Closed():
                pass
            case other:
                raise AssertionError(other)

    # ------------------------------------------------------------ the end

    def finish(self) -> None:
        """Everything is heard and asked for until every session was told all of its text."""
        for turn in range(600):
            self.engine()
            if turn % 3 == 0:
                for name, talk in list(self.talks.items()):
                    self.hear(name)
                    if not talk.inbox and not talk.finished and self.talks.get(name) is talk:
                        self.step(name)
                    if talk.finished and self.talks.get(name) is talk:
                        assert talk.committed == talk.truth == text(talk.prompt, talk.which)[:-8]
                        self.close(name)
                self.bench.now += 30
            if not self.talks:
                break
        assert not self.talks
        if self.plan is not None:
            self.bench.finish(self.plan)
        self.bench.settle()
        assert self.bench.verifier.num_sessions == 0 and self.bench.pool.used_tokens == 0


def walk(seed: int, steps: int = 240) -> Target:
    rng = random.Random(seed)
    target = Target(rng)

    def name() -> str:
        return rng.choice("abc")

    acts: list[tuple[int, Callable[[], None]]] = [
        (4, lambda: target.place(name()) if (n := name()) not in target.talks or rng.random() < 0.05 else target.hear(n)),
        (10, lambda: target.step(name(), 5 if rng.random() < 0.1 else 60_000)),
        (24, lambda: target.ahead(name())),
        (2, lambda: target.repeat(name())),
        (40, target.engine),
        (12, lambda: target.hear(name(), rng.choice([1, 2, 100]))),
        (1, lambda: target.close(name())),
        (1, lambda: setattr(target.bench, "now", target.bench.now + rng.choice([1, 20, 200]))),
    ]
    for act in rng.choices([act for _, act in acts], [weight for weight, _ in acts], k=steps):
        act()
        if rng.random() < 0.01:
            target.lose_the_stream()
    target.finish()
    return target


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_what_is_told_is_the_text(first: int) -> None:
    """F66, F85, F86"""
    walks = [walk(seed) for seed in range(first, first + 10)]
    assert sum(w.own for w in walks) > 50 and sum(w.verified for w in walks) > 30


# ------------------------------------------------------------ broken twins


def any_prefix(self: Waiting, decided: Any, hash_at: Any, right: Any = Waiting.behind) -> Waiting | None:
    """Its prefix is not compared."""
    return right(replace(self, hash=None), decided, hash_at)  # type: ignore[no-any-return]


def every_step_is_an_edit(self: Session, base_length: int, committed: tuple[int, ...], right: Any = Session.knows) -> bool:
    """What a Step does not name is decided once more."""
    return base_length + len(committed) == len(self.tokens) and right(self, base_length, committed)  # type: ignore[no-any-return]


def for_nothing(self: Rounds, session: Session, now_ms: float, right: Any = Rounds._begin_own) -> None:
    """Plain rows without end."""
    session.credit = 1
    right(self, session, now_ms)


def all_proposals(step: Step, session: Session) -> Any:
    """Those that foresaw what is decided stand behind it once more."""
    return step.tokens[len(step.tokens) - step.num_proposed :], step.distributions


@pytest.mark.parametrize(
    ("owner", "name", "twin"),
    [
        (Waiting, "behind", any_prefix),
        (Session, "knows", every_step_is_an_edit),
        (Rounds, "_begin_own", for_nothing),
        (rounds, "unsaid", all_proposals),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.rpartition(".")[2],
)
def test_a_broken_twin_is_found(owner: Any, name: str, twin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, twin)
    with pytest.raises(AssertionError):
        for seed in range(10):
            walk(seed)

"""A target, a draft and sessions, simulated: time is a number, chance comes from a seeded generator. The pace is the real one.

All sessions run in one wave: each commits, waits for its draft as long as its pace lets it, and the target computes all rows in one step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.control import Desk
from orchestrator.control.adaptive import AdaptivePace
from orchestrator.events import Admitted
from orchestrator.lookahead import EMPTY, Block
from orchestrator.pace import Pace
from specdec.terms import Answer, Result, SamplingParams


def stairs(width: int, first_ms: float, each_ms: float) -> Callable[[int], float]:
    """A step's time: rows in blocks of `width`."""
    return lambda rows: first_ms + each_ms * (-(-rows // width) - 1)


@dataclass
class Machine:
    """`step_ms` by rows; `outside_ms` between steps; the draft takes `draft_ms` for each token and `answer_ms` beside, has something ready
    in `ready` of the rounds, no more than `begun` tokens then, and slows the target's steps by the factor `contention` while it works."""

    step_ms: Callable[[int], float] = stairs(1, 20.0, 0.6)
    outside_ms: float = 2.0
    draft_ms: float = 3.0
    answer_ms: float = 2.0
    ready: float = 0.2
    begun: int = 100
    contention: float = 1.0
    noise: float = 0.05


@dataclass
class Session:
    """Each slot's confidence is drawn; it stands with that chance."""

    pace: Pace
    confidence: tuple[float, float]
    left: int
    tokens: int = 0
    ready: bool = False


class World:
    def __init__(self, machine: Machine, *, seed: int = 1, most: int = 5, desk: Desk | None = None) -> None:
        self.machine, self.most = machine, most
        self.random = random.Random(seed)
        self.desk = desk or Desk(50.0)
        self.now_ms = self.desk.now_ms
        self.sessions: list[Session] = []
        self.tokens = self.rounds = self.drafting_rounds = 0
        self.blocks: list[int] = []  # lengths, of all rounds

    def add(self, confidence: tuple[float, float], k: int | None = None, tokens: int = 10**9) -> Session:
        """`confidence`: bounds of a slot's. `k`: fixed block length; None = adaptive."""
        pace = self.desk.pace(self.request(k), len(self.sessions) + 1)
        pace.moved("target")
        session = Session(pace, confidence, tokens)
        self.sessions.append(session)
        return session

    def request(self, k: int | None) -> Admitted:
        most = self.most if k is None else k
        return Admitted("s", (1,), 1, SamplingParams(temperature=0.0), 1, 10**6, most, 16, adaptive=k is None)

    def run(self, duration_ms: float) -> float:
        """Tokens per second of all sessions together."""
        began, before = self.now_ms, self.tokens
        while self.now_ms < began + duration_ms and self.sessions:
            self._round()
        return (self.tokens - before) / (self.now_ms - began) * 1000

    def _round(self) -> None:
        began = self.now_ms
        drafting = any(s.pace.drafts for s in self.sessions)
        sent: list[tuple[Session, Block, str]] = []
        latest = began
        for session in self.sessions:
            block, at = self._block(session, began)
            self.blocks.append(len(block.tokens))
            latest = max(latest, at)
            sent.append((session, block, "draft"))
        rows = sum(1 + len(block.tokens) for _, block, _ in sent)
        m = self.machine
        slowed = m.contention if drafting else 1.0
        took = m.step_ms(rows) * slowed * (1 + m.noise * abs(self.random.gauss(0, 1)))
        self.now_ms = latest + took + m.outside_ms
        self.desk.now_ms = self.now_ms
        results = [self._result(session, block) for session, block, _ in sent]
        answers = tuple(Answer("s", 1, 1, result) for result in results)
        self.desk.heard("target", rows, round(took * 1000), answers)
        for (session, block, source), result in zip(sent, results, strict=True):
            self._commit(session, block, source, result)
        self.rounds += 1
        self.drafting_rounds += drafting

    def _block(self, session: Session, began: float) -> tuple[Block, float]:
        """What its next round proposes, and when its Step leaves."""
        pace, m = session.pace, self.machine
        self.desk.now_ms = began
        if not pace.speculates:
            pace.opened()
            return EMPTY, began
        arrives = began
        if not session.ready:
            arrives += m.answer_ms + m.draft_ms * pace.wanted
            grace = pace.grace_ms() if pace.waits else 0.0
            if began + grace < arrives:
                self.desk.now_ms = began + grace
                pace.opened()
                self.desk.now_ms = arrives
                pace.proposed()
                return EMPTY, began + grace
        self.desk.now_ms = arrives
        pace.proposed()
        wanted = min(pace.wanted, m.begun) if session.ready else pace.wanted
        confidences = tuple(self.random.uniform(*session.confidence) for _ in range(wanted))
        n = pace.length("draft", confidences)
        pace.opened()
        return Block((0,) * n, (None,) * n, confidences=confidences[:n]), arrives

    def _result(self, session: Session, block: Block) -> Result:
        accepted = 0
        while accepted < len(block.tokens) and self.random.random() < block.confidences[accepted]:
            accepted += 1
        return Result(1, 1, len(block.tokens), accepted, (0,) * (accepted + 1))

    def _commit(self, session: Session, block: Block, source: str, result: Result) -> None:
        self.tokens += len(result.tokens)
        session.tokens += len(result.tokens)
        if result.num_verified:
            session.pace.learn(source, block, result)
        session.ready = session.pace.drafts and self.random.random() < self.machine.ready
        session.pace.committed(session.ready)
        session.left -= len(result.tokens)
        if session.left <= 0:
            session.pace.moved("")
            self.sessions.remove(session)


def fixed_rates(machine: Machine, confidences: Sequence[tuple[float, float]], most: int, ms: float = 20_000.0) -> dict[int, float]:
    """Tokens per second at each block length, for sessions like these."""
    rates = {}
    for k in range(most + 1):
        world = World(machine, seed=7, most=most)
        for confidence in confidences:
            world.add(confidence, k)
        rates[k] = world.run(ms)
    return rates


def adaptive(world: World) -> list[AdaptivePace]:
    return [session.pace for session in world.sessions if isinstance(session.pace, AdaptivePace)]

"""A target without network and clock: verifier, executor and scripted engine, driven step by step; and callers that talk to it the way an
orchestrator does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.errors import InvalidRequest
from specdec.hashing import prefix_hash
from specdec.sampling import Constraint, Sampler
from specdec.terms import (
    Answer,
    Begin,
    Close,
    DraftMethod,
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
from target_service.checks import Limits
from target_service.executor import Executor
from target_service.plan import Compile, StepPlan
from target_service.verifier import Verifier
from tests.fakes import Script, ScriptedEngine, hashed_script
from tests.unit.target.pools import BlockPool, BoundedKv, Pool

VOCAB = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=1000)


class Bench:
    """One target process. `now` is milliseconds; nothing moves it but the test."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        vocab: int = VOCAB,
        pool: int | BlockPool = 4096,
        eos_ids: tuple[int, ...] = (),
        grammars: Any = None,
        **limits: Any,
    ) -> None:
        self.engine = ScriptedEngine(script or hashed_script(vocab), vocab_size=vocab, eos_ids=eos_ids)
        defaults = Limits(
            vocab_size=vocab, window=512, max_sessions=64, max_step_rows=64, max_num_speculative_tokens=8, reserve_tokens=8, lease_ms=1000.0
        )
        self.limits = replace(defaults, **limits)
        self.pool: Any = pool
        if isinstance(pool, BlockPool):
            self.engine.kv = BoundedKv(total_tokens=pool.total_tokens)
            self.engine.on_forward = self.engine.kv.reserve
        else:
            self.pool = Pool(pool)
        self.verifier = Verifier(self.limits, self.pool)
        self.grammars = grammars
        self.executor = Executor(self.engine, vocab, eos_ids)
        self.now = 0.0
        self.step_ms = 10.0

    def hello(self, orchestrator_id: str = "orch") -> int:
        return self.verifier.attach(orchestrator_id)

    def send(self, stream: int, *items: Step | Close) -> list[Answer]:
        """Answers that came at once."""
        for item in items:
            self.verifier.submit(stream, item, self.now)
        return self.heard(stream)

    def heard(self, stream: int | None = None) -> list[Answer]:
        return [answer for to, answer in self.verifier.take_answers() if stream is None or to == stream]

    async def compile_grammar(self, order: Compile) -> Constraint:
        assert self.grammars is not None
        return self.grammars.compile(order.grammar)

    def compile(self) -> None:
        """The compiler's part: everything that waits for it."""
        for order in self.verifier.take_grammars():
            assert self.grammars is not None
            try:
                self.verifier.compiled(order, self.grammars.compile(order.grammar))
            except InvalidRequest as error:
                self.verifier.compiled(order, Failed(3, str(error), drop=True))

    def plan(self) -> StepPlan | None:
        self.compile()
        return self.verifier.plan(self.now)

    def finish(self, plan: StepPlan) -> None:
        """The engine's part of a planned step, and what follows."""
        outcome = self.executor.execute(plan)
        self.now += self.step_ms
        self.verifier.commit(plan, replace(outcome, engine_us=int(1000 * self.step_ms)), self.now)

    def turn(self) -> list[tuple[int, Answer]]:
        """One engine step with everything queued; (stream, answer) of all that was decided."""
        plan = self.plan()
        if plan is not None:
            self.finish(plan)
        return self.verifier.take_answers()

    def until_answered(self, stream: int, limit: int = 200) -> list[Answer]:
        for _ in range(limit):
            answers = [answer for to, answer in self.turn() if to == stream]
            if answers:
                return answers
        raise AssertionError("no answer")

    def settle(self) -> list[tuple[int, Answer]]:
        """Turns until nothing is left to do."""
        heard = self.verifier.take_answers()
        while (plan := self.plan()) is not None:
            self.finish(plan)
            heard += self.verifier.take_answers()
        return heard + self.verifier.take_answers()


def first_step(
    tokens: Sequence[int],
    block: Sequence[int] = (),
    *,
    session: str = "s",
    epoch: int = 1,
    prompt_length: int | None = None,
    sampling: SamplingParams = GREEDY,
    seed: int = 7,
    remaining_ms: int = 60_000,
    **begin: Any,
) -> Step:
    about = Begin(len(tokens) if prompt_length is None else prompt_length, sampling, seed, **begin)
    return Step(session, epoch, 1, 0, prefix_hash(()), (*tokens, *block), len(block), remaining_ms, begin=about)


def next_step(
    committed: Sequence[int],
    block: Sequence[int] = (),
    *,
    round_: int,
    base: int | None = None,
    session: str = "s",
    epoch: int = 1,
    **more: Any,
) -> Step:
    """`base` None = all but the newest committed token."""
    base = len(committed) - 1 if base is None else base
    return Step(
        session,
        epoch,
        round_,
        base,
        prefix_hash(committed[:base]),
        (*committed[base:], *block),
        len(block),
        more.pop("remaining_ms", 60_000),
        **more,
    )


def only(answers: Sequence[Any]) -> Any:
    """The outcome of the only answer."""
    assert len(answers) == 1, answers
    return answers[0][1].outcome if isinstance(answers[0], tuple) else answers[0].outcome


def reference(
    script: Script,
    prompt: Sequence[int],
    count: int,
    *,
    sampling: SamplingParams = GREEDY,
    seed: int = 7,
    vocab: int = VOCAB,
    eos_ids: Sequence[int] = (),
) -> list[int]:
    """What the target alone produces, one token at a time, without cache, batch or block."""
    sampler = Sampler(sampling, seed, vocab, eos_ids, prompt)
    output: list[int] = []
    while len(output) < min(count, sampling.max_tokens or count):
        token = sampler.choose(script([*prompt, *output]), len(prompt) + len(output), output)
        if token in sampler.stop_ids:
            break
        output.append(token)
    return output


Drafter = Callable[[Sequence[int]], Sequence[int]]
"""Committed tokens → block."""


def oracle(
    script: Script, prompt_length: int, k: int, wrong_at: Callable[[int], int] = lambda n: -1, sampling: SamplingParams = GREEDY
) -> Drafter:
    """The target's own next k tokens; slot `wrong_at(committed length)` is spoiled, none when it is negative."""

    def draft(committed: Sequence[int]) -> list[int]:
        sampler = Sampler(sampling, 7, VOCAB, (), committed[:prompt_length])
        out = list(committed)
        for slot in range(k):
            token = sampler.choose(script(out), len(out), out[prompt_length:])
            out.append((token + 1) % VOCAB if slot == wrong_at(len(committed)) else token)
        return out[len(committed) :]

    return draft


@dataclass
class Caller:
    """One generation as an orchestrator drives it: one Step at a time, every answer obeyed."""

    bench: Bench
    stream: int
    prompt: Sequence[int]
    session: str = "s"
    sampling: SamplingParams = GREEDY
    seed: int = 7
    draft: Drafter = lambda committed: ()
    want: int = 20
    fork: str = ""
    method: RejectionMethod = RejectionMethod.COUPLED
    committed: list[int] = field(default_factory=list)
    epoch: int = 0
    round: int = 0
    kv: int = 0
    begun: bool = False
    waiting: Step | None = None
    retry_at: float | None = None
    results: list[Result] = field(default_factory=list)
    prefills: int = 0  # Steps that named nothing in KV
    failure: Failed | None = None
    finish: Any = None
    priority: int = 0

    def __post_init__(self) -> None:
        self.committed = list(self.prompt)
        self.place()

    @property
    def output(self) -> list[int]:
        return self.committed[len(self.prompt) :]

    @property
    def done(self) -> bool:
        return self.failure is not None or self.finish is not None or len(self.output) >= self.want

    def place(self) -> None:
        self.epoch, self.round, self.kv, self.begun, self.waiting = self.epoch + 1, 1, 0, False, None

    def build(self, block: Sequence[int] | None = None) -> Step:
        block = tuple(self.draft(self.committed)) if block is None else tuple(block)
        begin = (
            None
            if self.begun
            else Begin(len(self.prompt), self.sampling, self.seed, self.method, DraftMethod.GREEDY, "", self.priority, self.fork)
        )
        tokens = (*self.committed[self.kv :], *block)
        return Step(
            self.session, self.epoch, self.round, self.kv, prefix_hash(self.committed[: self.kv]), tokens, len(block), 60_000, begin=begin
        )

    def act(self) -> None:
        """Send the next Step if it is time to."""
        if self.done or self.waiting is not None or (self.retry_at is not None and self.bench.now < self.retry_at):
            return
        self.retry_at = None
        self.waiting = self.build()
        self.prefills += self.kv == 0
        self.bench.verifier.submit(self.stream, self.waiting, self.bench.now)

    def hear(self, answer: Answer) -> None:
        assert self.waiting is not None, f"nobody asked for {answer}"
        assert (answer.epoch, answer.round) == (self.epoch, self.round)
        self.waiting = None
        match answer.outcome:
            case Result() as result:
                assert result.prefix_length == len(self.committed)
                self.results.append(result)
                self.committed += result.tokens
                self.kv, self.round, self.begun, self.finish = result.kv_length_after, self.round + 1, True, result.finish
            case PrefixNeeded(have):
                self.kv = have
            case NoRoom(retry_after_ms):
                self.retry_at = self.bench.now + retry_after_ms
            case UnknownSession() | StaleEpoch():
                self.place()
            case Failed() as failed:
                self.failure = failed
            case other:
                raise AssertionError(other)

    def close(self) -> None:
        self.bench.verifier.submit(self.stream, Close(self.session, self.epoch), self.bench.now)


def run_all(bench: Bench, callers: Sequence[Caller], limit: int = 2000, each_turn: Callable[[int], None] = lambda turn: None) -> None:
    """Everybody talks and listens until everybody is done; the finished close."""
    closed: set[str] = set()
    for turn in range(limit):
        each_turn(turn)
        for caller in callers:
            caller.act()
        heard = bench.turn()
        if not heard:
            bench.now += 5.0
        for stream, answer in heard:
            for caller in callers:
                if caller.stream == stream and caller.session == answer.session_id and caller.session not in closed:
                    caller.hear(answer)
        for caller in callers:
            if caller.done and caller.session not in closed:
                closed.add(caller.session)
                caller.close()
        if len(closed) == len(callers):
            return
    raise AssertionError(f"not done after {limit} turns: {[c.session for c in callers if not c.done]}")

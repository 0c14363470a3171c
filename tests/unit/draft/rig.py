"""The draft without its event loop: decider, stepper and a scripted engine, driven one forward pass at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from draft_service.checks import Limits
from draft_service.choosing import chooser_factory
from draft_service.drafter import Addressed, Drafter
from draft_service.outbox import Told
from draft_service.plan import DraftPlan, PlanOutcome
from draft_service.session import Session
from draft_service.stepper import Stepper
from specdec.hashing import prefix_hash
from specdec.sampling import Sampler, draft_choice
from specdec.terms import (
    CloseDraft,
    Commit,
    DraftCommand,
    DraftEvent,
    DraftMethod,
    Open,
    Proposal,
    RejectionMethod,
    SamplingParams,
    Sent,
)
from tests.fakes import ScriptedEngine, hashed_script

VOCAB = 31
GREEDY = SamplingParams(temperature=0.0)
Script = Callable[[Sequence[int]], torch.Tensor]


class FakeRoom:
    """KvBudget's accounting, without blocks."""

    def __init__(self, total_tokens: int = 10_000) -> None:
        self.total_tokens, self.booked = total_tokens, dict[int, int]()

    @property
    def used_tokens(self) -> int:
        return sum(self.booked.values())

    def can_admit(self, tokens: int, reserve_tokens: int) -> bool:
        return self.used_tokens + tokens + reserve_tokens <= 0.9 * self.total_tokens

    def grow(self, session: int, tokens: int) -> bool:
        held = self.booked.get(session, 0)
        if self.used_tokens - held + max(held, tokens) > self.total_tokens:
            return False
        self.booked[session] = max(held, tokens)
        return True

    def release(self, session: int) -> None:
        self.booked.pop(session, None)


class Rig:
    """`events` = everything told, in order. `tokens` of a session as the test sees them: `committed[session_id]`."""

    def __init__(
        self, script: Script | None = None, window: int = 200, eos_ids: tuple[int, ...] = (), total: int = 10_000, **limits: Any
    ) -> None:
        self.engine = ScriptedEngine(script or hashed_script(VOCAB), vocab_size=VOCAB, window=window, eos_ids=eos_ids)
        self.room = FakeRoom(total)
        self.eos_ids = eos_ids
        choosers = chooser_factory(VOCAB, eos_ids, None, guessing=limits.get("fanout", 0) > 1)
        self.drafter = Drafter(Limits(VOCAB, window, eos_ids, **limits), self.room, choosers)
        self.stepper = Stepper(self.engine)
        self.events: list[tuple[int, DraftEvent]] = []
        self.opened: dict[str, Open] = {}
        self.committed: dict[str, list[int]] = {}

    # commands ---------------------------------------------------------------------------------------------

    def apply(self, command: DraftCommand, stream: int = 1) -> list[DraftEvent]:
        told = plain(self.drafter.apply(stream, command))
        self.events += told
        return [event for _, event in told]

    def open(self, session_id: str = "s", tokens: Sequence[int] = (1, 2, 3), k: int = 3, budget: int = 16, **more: Any) -> list[DraftEvent]:
        defaults = {
            "epoch": 1,
            "prompt_length": len(tokens),
            "sampling": GREEDY,
            "seed": 7,
            "rejection_method": RejectionMethod.COUPLED,
            "draft_method": DraftMethod.GUMBEL,
        }
        command = Open(session_id, tokens=tuple(tokens), budget_tokens=budget, num_speculative_tokens=k, **{**defaults, **more})
        self.opened[session_id], self.committed[session_id] = command, list(tokens)
        return self.apply(command)

    def sent(self, n: int, session_id: str = "s", block: Sequence[int] = (), ahead: Sequence[int] = ()) -> list[DraftEvent]:
        prefix = [*self.committed[session_id], *ahead]
        return self.apply(Sent(session_id, len(prefix), prefix_hash(prefix), n, tuple(block)))

    def commit(self, tokens: Sequence[int], session_id: str = "s") -> list[DraftEvent]:
        prefix = self.committed[session_id]
        command = Commit(session_id, len(prefix), prefix_hash(prefix), tuple(tokens))
        prefix.extend(tokens)
        return self.apply(command)

    def close(self, session_id: str = "s") -> list[DraftEvent]:
        return self.apply(CloseDraft(session_id))

    # steps ------------------------------------------------------------------------------------------------

    def step(self, interrupted: bool = False) -> tuple[DraftPlan | None, list[DraftEvent]]:
        """One plan; `interrupted` = it ends after its first forward pass."""
        plan = self.drafter.plan()
        if plan is None:
            return None, []
        return plan, self.finish(plan, self.run(plan, interrupted))

    def run(self, plan: DraftPlan, interrupted: bool = False) -> PlanOutcome:
        return self.stepper.run(plan, lambda: interrupted)

    def finish(self, plan: DraftPlan, outcome: PlanOutcome) -> list[DraftEvent]:
        told = plain(self.drafter.commit_step(plan, outcome))
        self.events += told
        return [event for _, event in told]

    def settle(self, interrupted: bool = False) -> list[DraftEvent]:
        """Steps until nothing is wanted."""
        events: list[DraftEvent] = []
        while True:
            plan, told = self.step(interrupted)
            if plan is None:
                return events
            events += told

    # views ------------------------------------------------------------------------------------------------

    def session(self, session_id: str = "s") -> Session:
        session = self.drafter.session(1, session_id)
        assert session is not None
        return session

    def undecided(self, session_id: str = "s") -> list[int]:
        chain = self.session(session_id).chain
        return chain.tokens[chain.committed :]

    def kv_tokens(self, session_id: str = "s") -> list[int]:
        """The tokens whose K/V the engine holds."""
        slot = self.stepper._slots[self.session(session_id).handle]
        return list(self.engine.kv.slots[slot])

    def forwards(self) -> int:
        return len(self.engine.log)

    def naive(self, prefix: Sequence[int], count: int, session_id: str = "s") -> list[int]:
        """What a draft without cache, batch or lookahead proposes after `prefix`, one token at a time."""
        command = self.opened[session_id]
        prompt = command.tokens[: command.prompt_length]
        tokens = list(prefix)
        for _ in range(count):
            sampler = Sampler(command.sampling, command.seed, VOCAB, self.eos_ids, prompt)
            choice = draft_choice(sampler, self.engine.script(tokens), len(tokens), tokens[len(prompt) :], command.draft_method)
            assert choice is not None
            tokens.append(choice.token)
        return tokens[len(prefix) :]


def plain(told: Sequence[Addressed]) -> list[tuple[int, DraftEvent]]:
    """Without the lines that only the outbox cares for."""
    return [(stream, event.proposal if isinstance(event, Told) else event) for stream, event in told]


def proposals(events: Sequence[Any], session_id: str = "s") -> list[Proposal]:
    plain = [event[1] if isinstance(event, tuple) else event for event in events]
    return [event for event in plain if isinstance(event, Proposal) and event.session_id == session_id]


def other(token: int) -> int:
    """A token that is not `token`."""
    return (token + 1) % VOCAB

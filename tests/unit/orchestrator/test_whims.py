"""A pace that does as it likes, and the real one, in the worlds of test_generation_fuzz.py: the text stays the target's, and what the draft
hears is one unbroken history."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from orchestrator import events as ev
from orchestrator.control import Desk
from orchestrator.control.adaptive import AdaptivePace
from orchestrator.drafting import DraftSide
from orchestrator.pace import FixedPace
from specdec import terms
from specdec.hashing import prefix_hash
from tests.unit.orchestrator.test_generation_fuzz import World, reference


class Whims(FixedPace):
    """Any length, any rest, at any commit."""

    def __init__(self, most: int, draw: random.Random) -> None:
        super().__init__(most, 5)
        self._random = draw
        self.committed(False)

    def length(self, source: str, confidences: Sequence[float]) -> int:
        return self._random.randint(0, min(self.most, len(confidences)))

    def lookup_first(self, guess: int, ready: bool) -> bool:
        return self._random.random() < 0.5

    def grace_ms(self) -> float:
        return self._random.choice((0.0, 50.0, 50.0))

    def committed(self, ready: bool) -> None:
        self.wanted = self._random.randint(1, self.most)
        if self._random.random() < 0.3:
            self.drafts = self._random.random() < 0.5
            self.speculates = self.drafts or self._random.random() < 0.3
        if self._random.random() < 0.1:
            self.waits = not self.waits


class Heard:
    """What one draft was told, checked as a draft would."""

    def __init__(self) -> None:
        self.tokens: tuple[int, ...] | None = None
        self.resting = False
        self.rests = 0

    def hear(self, command: terms.DraftCommand) -> None:
        if isinstance(command, terms.Open):
            self.tokens, self.resting = command.tokens, False
        elif isinstance(command, terms.CloseDraft):
            self.tokens = None
        else:
            assert self.tokens is not None, "nothing is open"
            if isinstance(command, terms.Pause | terms.Resume):
                assert self.resting == isinstance(command, terms.Resume)
                self.resting, self.rests = not self.resting, self.rests + 1
            else:
                assert (command.prefix_length, command.prefix_hash) == (len(self.tokens), prefix_hash(self.tokens))
                if isinstance(command, terms.Commit):
                    assert command.tokens and command.num_speculative_tokens <= 8
                    self.tokens += command.tokens
                else:
                    assert isinstance(command, terms.Sent) and not self.resting, "a draft that rests is told nothing"


class Watched(World):
    def __init__(self, seed: int, n: int) -> None:
        super().__init__(seed, 8, n)
        self.drafts: dict[str, Heard] = {}

    def take(self, pace: Whims | AdaptivePace) -> None:
        generation = self.generation
        generation._pace = generation._sources._pace = generation.drafting._pace = pace

    def carry_out(self, commands: Iterable[ev.Command]) -> None:
        commands = list(commands)
        for command in commands:
            if isinstance(command, ev.ToDraft):
                self.drafts.setdefault(command.draft, Heard()).hear(command.command)
        super().carry_out(commands)


def check(world: Watched) -> None:
    world.run()
    assert world.failed is None or "had to be started" in str(world.failed) or "did not get to" in str(world.failed)
    assert tuple(world.delivered) == reference(60)[: len(world.delivered)]


@pytest.mark.parametrize("seed", range(40))
def test_any_pace_leaves_the_text_alone(seed: int) -> None:
    world = Watched(seed, n=60)
    world.take(Whims(8, random.Random(seed)))
    check(world)


@pytest.mark.parametrize("seed", range(10))
def test_the_real_pace_leaves_the_text_alone(seed: int) -> None:
    world, desk = Watched(seed, n=60), Desk(5.0)
    pace = AdaptivePace(8, 5.0, desk, desk._draft[True], desk._lookup[True], begins=seed % 2 == 0)
    pace.moved("t0")
    world.take(pace)
    world.generation.handle = ticking(desk, world.generation.handle)  # type: ignore[method-assign]
    check(world)


def ticking(desk: Desk, handle):  # type: ignore[no-untyped-def]
    def handled(event: ev.Event) -> list[ev.Command]:
        desk.now_ms += 1.0
        return handle(event)  # type: ignore[no-any-return]

    return handled


def test_drafts_do_rest_here() -> None:
    rests = 0
    for seed in range(12):
        world = Watched(seed, n=60)
        world.take(Whims(8, random.Random(seed)))
        world.run()
        rests += sum(heard.rests for heard in world.drafts.values())
    assert rests > 20


def test_a_draft_that_is_not_told_what_it_missed_cannot_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken twin: it hears what was committed last, and not what was committed while it rested."""
    go_on = DraftSide._go_on

    def forgetful(self: DraftSide, lookahead):  # type: ignore[no-untyped-def]
        self._missed = self._missed[-1:]
        return go_on(self, lookahead)

    monkeypatch.setattr(DraftSide, "_go_on", forgetful)
    with pytest.raises(AssertionError):
        for seed in range(40):
            test_any_pace_leaves_the_text_alone(seed)

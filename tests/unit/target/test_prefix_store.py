"""Sessions that come, talk and go over a cache of prefixes, on the stores of the engine: the CPU's files and the accelerator's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.engine import KvBudget
from specdec.engine.cache import BLOCK_TOKENS
from specdec.engine.kv import KvStore
from specdec.engine.paged import PagedStore, flat
from target_service.verifier import Verifier
from tests.fakes import ScriptedEngine, hashed_script
from tests.unit.target.harness import SAMPLED, VOCAB, Bench, Caller, oracle, reference

SCRIPT = hashed_script(VOCAB)
TOTAL, WINDOW, DIM = 10 * BLOCK_TOKENS, 400, 64  # a token is 512 bytes, a block whole pages
PARAGRAPHS = [[(i * i + 7 * seed * i + seed) % VOCAB for i in range(BLOCK_TOKENS)] for seed in range(3)]


class MemoryEngine(ScriptedEngine):
    """Its keys and values are the ids themselves, and it knows of a prefix only what it reads there."""

    def __init__(self, paged: bool) -> None:
        super().__init__(SCRIPT, vocab_size=VOCAB)
        self.paged = paged
        self.kv = (
            PagedStore(1, 1, DIM, torch.float64, torch.device("cpu"), total_tokens=TOTAL)
            if paged
            else KvStore(1, 1, DIM, torch.float64, window=WINDOW, total_tokens=TOTAL)
        )

    def read(self, slot: int, length: int) -> list[int]:
        held = self.kv.slot(slot)
        memory = flat(self.kv.pool, 0)[held.places(0, length), 0] if self.paged else held.memory[0, 0, :length]
        assert (memory == memory[:, :1]).all()
        return [int(token) for token in memory[:, 0]]

    def write(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        held, numbers = self.kv.slot(slot), torch.tensor(tokens, dtype=torch.float64)
        if self.paged:
            flat(self.kv.pool, 0)[held.places(start, start + len(tokens))] = numbers[:, None, None].expand(-1, 2, DIM)
        else:
            held.written(start, start + len(tokens)).copy_(numbers[None, None, :, None].expand(1, 2, -1, DIM))

    def forward(self, segments: Sequence[Any]) -> list[torch.Tensor]:
        self.kv.reserve({s.slot: s.start + len(s.tokens) for s in segments})
        return [self._logits(s) for s in segments]

    def _logits(self, segment: Any) -> torch.Tensor:
        assert self.kv.length(segment.slot) == segment.start
        prefix = self.read(segment.slot, segment.start)
        self.write(segment.slot, segment.start, segment.tokens)
        self.kv.slot(segment.slot).length = segment.start + len(segment.tokens)
        ends = range(segment.logits_from + 1, len(segment.tokens) + 1)
        rows = [self._row([*prefix, *segment.tokens[:end]]) for end in ends]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB, dtype=torch.float64)


class Conversations(RuleBasedStateMachine):
    @initialize(paged=st.booleans())
    def start(self, paged: bool) -> None:
        self.engine = MemoryEngine(paged)
        self.bench = Bench(window=WINDOW, reserve_tokens=4, max_num_speculative_tokens=4, max_step_rows=200)
        self.bench.engine = self.bench.executor._engine = self.engine
        self.bench.pool = self.bench.verifier.budget = KvBudget(TOTAL)
        self.bench.verifier = Verifier(self.bench.limits, self.bench.pool)
        self.stream = self.bench.hello()
        self.callers: dict[str, Caller] = {}
        self.begun = 0

    @rule(picks=st.lists(st.integers(0, 2), max_size=4), rest=st.integers(1, 70), seed=st.integers(0, 2), again=st.booleans())
    def begin(self, picks: list[int], rest: int, seed: int, again: bool) -> None:
        """A prompt of known paragraphs, or one that goes on with what an earlier session was told."""
        if len(self.callers) == 3:
            return
        prompt = [token for pick in picks for token in PARAGRAPHS[pick]] + PARAGRAPHS[seed][::-1][:rest]
        if again and self.callers:
            prompt = [*next(iter(self.callers.values())).committed, 1, 2][:300]
        self.begun += 1
        name = f"s{self.begun}"
        draft = oracle(SCRIPT, len(prompt), 3, lambda n: n % 4, SAMPLED)
        self.callers[name] = Caller(self.bench, self.stream, prompt, session=name, sampling=SAMPLED, want=40, draft=draft)

    @rule(turns=st.integers(1, 12))
    def talk(self, turns: int) -> None:
        for _ in range(turns):
            for caller in self.callers.values():
                caller.act()
            self.hear(self.bench.turn())
            self.bench.now += 20.0
        self.what_is_kept_stays_as_it_is()

    def hear(self, answers: Sequence[Any]) -> None:
        for _, answer in answers:
            if answer.session_id in self.callers:
                self.callers[answer.session_id].hear(answer)

    @rule(which=st.integers(0, 2), turns=st.integers(0, 2))
    def leave(self, which: int, turns: int) -> None:
        """Done or not, its Step answered or not."""
        if which >= len(self.callers):
            return
        self.talk(turns)
        name, caller = list(self.callers.items())[which]
        assert caller.output == reference(SCRIPT, caller.prompt, len(caller.output), sampling=SAMPLED)
        del self.callers[name]
        caller.close()
        self.hear(self.bench.settle())

    @rule()
    def what_is_kept_stays_as_it_is(self) -> None:
        self.hear(self.bench.settle())
        for resident, entry in self.bench.verifier.room._cache._entries.items():
            slot = self.bench.executor._slots[resident]
            assert self.engine.kv.length(slot) == len(entry.tokens)
            assert self.engine.read(slot, len(entry.tokens)) == list(entry.tokens)
        assert self.engine.kv.used_tokens <= self.bench.pool.used_tokens

    @invariant()
    def accounts_never_exceed_the_room(self) -> None:
        if hasattr(self, "bench"):
            room = self.bench.verifier.room
            assert 0 <= room.live_tokens <= self.bench.pool.used_tokens <= TOTAL

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        while self.callers:
            self.leave(0, 3)
        assert self.bench.verifier.room.live_tokens == 0
        assert len(self.engine.kv._slots) == len(self.bench.verifier.room._cache.residents)


TestConversations = Conversations.TestCase
TestConversations.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def play(paged: bool) -> int:
    machine = Conversations()
    machine.start(paged)
    for picks in ([0, 1], [0, 2], [0, 1], [0], [0, 1, 2]):
        machine.begin(picks, 5, 1, False)
        machine.talk(4)
        machine.begin(picks, 70, 2, True)
        machine.talk(4)
        machine.leave(0, 1)
    hits = machine.bench.verifier.room.hit_tokens
    machine.teardown()
    return hits


@pytest.mark.parametrize("paged", [False, True], ids=["files", "blocks"])
def test_f113_conversations_find_what_was_said(paged: bool) -> None:
    assert play(paged) >= 64 * 8


@pytest.mark.parametrize("paged", [False, True], ids=["files", "blocks"])
def test_writing_into_what_is_shared_is_found_out(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: what a fork writes behind the shared part is written into its donor's memory too."""
    owner: Any = PagedStore if paged else KvStore
    right = owner.fork

    def fork(self: Any, slot: int, length: int) -> int:
        name, parent = right(self, slot, length), self._slots[slot]
        if paged:
            self._slots[name].blocks = list(parent.blocks)
            self._seen_by.update(parent.blocks[length // BLOCK_TOKENS :])
        else:
            self._slots[name].use(parent.memory, None)
        return int(name)

    monkeypatch.setattr(owner, "fork", fork)
    monkeypatch.setattr(PagedStore, "_part", lambda self, slot, start: None)
    with pytest.raises(AssertionError):
        play(paged)

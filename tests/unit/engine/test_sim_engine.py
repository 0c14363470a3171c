"""The engine without a model keeps the promises of one that has some."""

from __future__ import annotations

import pytest
import torch

from specdec.bench.sim.path import Path
from specdec.engine import EngineConfig, OutOfRoom, Segment
from specdec.engine.sim import SimulatedEngine
from specdec.simulation import Simulation
from specdec.vocabulary import Vocabulary

pytestmark = pytest.mark.unit
PROMPT = (20, 30, 40, 50)
SIM = Simulation(acceptance=1.0, step_ms=0, row_ms=0, prefill_ms=0)


def engine(sim: Simulation = SIM, kv_tokens: int = 256) -> SimulatedEngine:
    slept.clear()
    return SimulatedEngine(sim, EngineConfig(path="sim", kv_tokens=kv_tokens), Vocabulary(300, b"", (2,), None), slept.append)


slept: list[float] = []


def decided(made: SimulatedEngine, slot: int, tokens: tuple[int, ...]) -> list[int]:
    (logits,) = made.forward([Segment(slot, made.kv.length(slot), tokens, 0)])
    return [int(token) for token in logits.argmax(-1)]


def test_token_by_token_in_one_piece_and_beside_others_it_says_the_same() -> None:
    made = engine()
    text, slot, token = [], made.kv.open(), decided(made, made.kv.open(), PROMPT)[-1]
    assert decided(made, slot, PROMPT)[-1] == token
    for _ in range(10):
        text.append(token)
        token = decided(made, slot, (token,))[-1]
    whole, other = made.kv.open(), made.kv.open()
    rows, _ = made.forward([Segment(whole, 0, (*PROMPT, *text), 3), Segment(other, 0, (99, 98), 1)])
    assert rows.argmax(-1).tolist() == [*text, token]
    assert text == Path(SIM, 300, PROMPT).upto(14)[4:14]


def test_a_slot_that_was_cut_goes_on_as_if_nothing_had_been_fed() -> None:
    made = engine()
    slot = made.kv.open()
    right = decided(made, slot, PROMPT)[-1]
    decided(made, slot, (77, 78))
    made.kv.truncate(slot, 3)
    assert decided(made, slot, PROMPT[3:]) == [right]


def test_forks_branches_and_grafts() -> None:
    made = engine()
    kv, slot = made.kv, made.kv.open()
    right = decided(made, slot, PROMPT)[-1]
    fork, branch = kv.fork(slot, 3), kv.branch(slot, 3)
    assert decided(made, fork, PROMPT[3:]) == decided(made, branch, PROMPT[3:]) == [right]
    following = decided(made, branch, (right,))
    kv.graft(slot, branch)
    kv.truncate(slot, 4)
    assert decided(made, slot, (right,)) == following
    with pytest.raises(ValueError, match="branch"):
        kv.truncate(kv.branch(slot, 3), 2)
    kv.close(slot)
    assert kv.used_tokens == 4  # the fork's


def test_room_is_bounded_and_a_refused_call_changes_nothing() -> None:
    made = engine(kv_tokens=6)
    slot = made.kv.open()
    decided(made, slot, PROMPT)
    other = made.kv.open()
    with pytest.raises(OutOfRoom):
        decided(made, other, (20, 21, 22))
    assert (made.kv.length(slot), made.kv.length(other)) == (4, 0)


def test_steps_take_what_the_simulation_says_and_no_noise_overrules_a_row() -> None:
    made = engine(Simulation(step_ms=4, row_ms=1, prefill_ms=0.5))
    (logits,) = made.forward([Segment(made.kv.open(), 0, PROMPT, 3)])
    assert slept == [pytest.approx(0.0065)]
    assert float(torch.softmax(logits / 2, -1).max()) == 1.0

"""What a simulated model says and takes."""

from __future__ import annotations

import pytest

from specdec.errors import InvalidRequest
from specdec.hashing import prefix_hash
from specdec.simulation import FIRST_ID, Simulation, simulation

pytestmark = pytest.mark.unit
VOCAB = 300


def said(sim: Simulation, draft: bool, prompt: tuple[int, ...], count: int) -> list[int]:
    """Along the target's text."""
    ids, out = list(prompt), []
    for _ in range(count):
        name = prefix_hash(ids)
        out.append((sim.proposes if draft else sim.decides)(len(ids), name, VOCAB))
        ids.append(sim.decides(len(ids), name, VOCAB))
    return out


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 1.0])
def test_a_draft_agrees_as_often_as_it_is_asked_to(acceptance: float) -> None:
    sim = Simulation(acceptance=acceptance)
    pairs = zip(said(sim, True, (20, 21), 4000), said(sim, False, (20, 21), 4000), strict=True)
    share = sum(a == b for a, b in pairs) / 4000
    assert share == pytest.approx(acceptance, abs=0.03 if 0 < acceptance < 1 else 0)


def test_the_text_is_of_the_prefix_and_the_seed_alone() -> None:
    texts = {tuple(said(Simulation(seed=seed), False, prompt, 20)) for seed in (0, 1) for prompt in ((20, 21), (21, 20), (20,))}
    assert len(texts) == 6 and all(FIRST_ID <= token < VOCAB for text in texts for token in text)
    assert said(Simulation(acceptance=0.1, step_ms=5), False, (20,), 20) == said(Simulation(), False, (20,), 20)


def test_a_step_takes_more_beyond_the_knee() -> None:
    sim = Simulation(step_ms=10, row_ms=0.5, prefill_ms=0.25, knee=4, beyond_ms=2)
    assert [sim.took_ms(rows) for rows in (0, 4, 6)] == [10, 12, 16]
    assert sim.took_ms(1, 8) == 12.5


@pytest.mark.parametrize("text", ["steps=3", "step-ms=fast", "acceptance=1.5", "row_ms=-1", "knee=2.5", "step_ms=nan"])
def test_what_is_no_simulation_is_named(text: str) -> None:
    with pytest.raises(InvalidRequest, match=text.split("=")[0].replace("-", ".")):
        simulation(text, "SPECDEC_SIM")


def test_names_take_either_dash() -> None:
    assert simulation("step-ms=3, acceptance=0.2", "SPECDEC_SIM") == Simulation(step_ms=3, acceptance=0.2)
    assert simulation("", "SPECDEC_SIM") == Simulation()

"""The formulas against simulated engines on a clock that only they move, and their points of balance."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.bench import advice, economics, whatif
from specdec.bench.whatif import Setting
from specdec.engine import EngineConfig, Segment
from specdec.engine.sim import SimulatedEngine
from specdec.simulation import Simulation
from specdec.vocabulary import Vocabulary

pytestmark = pytest.mark.unit
PROMPT = (20, 21, 22)
WORDS = Vocabulary(size=300, fingerprint=b"f", eos_ids=(2,), max_model_len=1 << 16)


class Clock:
    """`ms` moves when an engine computes."""

    def __init__(self) -> None:
        self.ms = 0.0

    def engine(self, step_ms: float, row_ms: float, acceptance: float) -> SimulatedEngine:
        simulation = Simulation(acceptance=acceptance, step_ms=step_ms, row_ms=row_ms, prefill_ms=0.0)
        return SimulatedEngine(simulation, EngineConfig(Path("none"), kv_tokens=1 << 14), WORDS, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.ms += 1000 * seconds


def said(engine: SimulatedEngine, slot: int, tokens: list[int]) -> list[int]:
    """What follows each of `tokens`."""
    (rows,) = engine.forward([Segment(slot, engine.kv.length(slot), tuple(tokens), 0)])
    return [int(row.argmax()) for row in rows]


def measured(setting: Setting, k: int, tokens: int) -> float:
    """Milliseconds a token of a round trip, a block, and a draft that begins again after a miss and works on while a block is in flight."""
    clock = Clock()
    target = clock.engine(setting.target_step_ms - setting.row_ms, setting.row_ms, 1.0)
    draft = clock.engine(setting.draft_step_ms, 0.0, setting.alphas[0])
    at, own = target.kv.open(), draft.kv.open()
    text, ready = list(PROMPT), list[int]()
    said(target, at, text[:-1])
    said(draft, own, text[:-1])
    clock.ms = 0.0
    while len(text) < len(PROMPT) + tokens:
        if k and not ready:
            clock.ms += setting.rtt_ms  # the commit on its way to the draft, the proposal on its way back
            ready = drafted(draft, own, text, k)
        began = clock.ms
        rows = said(target, at, [text[-1], *ready])
        decided = next((i for i, token in enumerate(ready) if rows[i] != token), len(ready)) + 1
        clock.ms += setting.rtt_ms + setting.host_ms
        done, clock.ms = clock.ms, began
        further = drafted(draft, own, [*text, *ready], k + 1) if k else []  # beside the target
        drafting, clock.ms = clock.ms, done
        text += rows[:decided]
        target.kv.truncate(at, len(text) - 1)
        if further and decided == len(ready) + 1 and further[0] == text[-1]:
            clock.ms, ready = max(clock.ms, drafting), further[1:]
        else:
            ready = []
    return clock.ms / (len(text) - len(PROMPT))


def drafted(draft: SimulatedEngine, slot: int, text: list[int], k: int) -> list[int]:
    """k tokens behind the text, a step each; what the draft has computed of it is kept."""
    held = draft.kv.slots[slot].tokens
    same = next((i for i, (a, b) in enumerate(zip(held, text[:-1], strict=False)) if a != b), min(len(held), len(text) - 1))
    draft.kv.truncate(slot, same)
    found, feed = list[int](), text[same:]
    for _ in range(k):
        found.append(said(draft, slot, feed)[-1])
        feed = found[-1:]
    return found


@pytest.mark.parametrize(
    ("setting", "k"),
    [
        (Setting(20.0, 1.0, (0.8,), row_ms=0.5), 4),
        (Setting(20.0, 1.0, (0.5,), row_ms=2.0), 2),
        (Setting(20.0, 5.0, (0.7,), row_ms=0.5, rtt_ms=4.0), 5),  # a draft that is not ready in time
        (Setting(10.0, 1.0, (0.9,), row_ms=3.0, rtt_ms=10.0, host_ms=2.0), 3),
    ],
)
def test_what_is_modelled_is_what_simulated_engines_take(setting: Setting, k: int) -> None:
    """Within 10 %."""
    plain, block = measured(setting, 0, 120), measured(setting, k, 900)
    assert plain == pytest.approx(setting.plain_ms)
    assert whatif.waiting(setting, k).ratio == pytest.approx(plain / block, rel=0.10)


def drawn(number: int) -> tuple[Setting, int]:
    draw = random.Random(number)
    target = draw.uniform(5, 40)
    setting = Setting(
        target, target * draw.choice([0.03, 0.1, 0.3, 0.8]) * draw.uniform(0.3, 1), (draw.uniform(0.1, 0.97),),
        row_ms=target * draw.choice([0, 0.02, 0.1, 0.3]), rtt_ms=draw.choice([0, 0.5, 5, 20]), host_ms=draw.choice([0, 1, 4]),
        foresight=draw.choice([0, 0, 0.3, 0.6]),
    )  # fmt: skip
    return setting, draw.randint(1, 8)


@pytest.mark.long
@pytest.mark.parametrize("number", range(24))
def test_what_is_modelled_for_any_hardware_is_what_simulated_engines_take(number: int) -> None:
    """Within 10 %. This draft foresees no other end of a block than the whole of it."""
    setting, k = drawn(number)
    setting = replace(setting, foresight=0.0)
    plain, block = measured(setting, 0, 20), measured(setting, k, 900)
    assert whatif.waiting(setting, k).ratio == pytest.approx(plain / block, rel=0.10)


def counted(setting: Setting, k: int, rounds: int, draw: random.Random) -> float:
    """Ratio to plain decoding of a target that decides plain tokens while its draft has no whole block, by the events one after another:
    the draft drafts on along its chain, and begins again when a decided token is not the chain's, nor one that was foreseen."""
    now, tokens, began, used = 0.0, 0, 0.0, 0

    def well() -> bool:
        return draw.random() < setting.alphas[0] or draw.random() < setting.foresight

    for _ in range(rounds):
        drafted = (now - began - setting.rtt_ms) / setting.draft_step_ms + 1e-9
        if int(drafted) - used >= k:
            kept = next((i for i in range(k) if draw.random() >= setting.alphas[0]), k)
            on = well() if kept == k else draw.random() < setting.foresight
            now += setting.step_ms(k + 1) + setting.rtt_ms + setting.host_ms
            decided, ahead = kept + 1, k + 1
        else:
            on, decided, ahead = well(), 1, 1
            now += setting.plain_ms
        tokens += decided
        began, used = (began, used + ahead) if on else (now, 0)
    return tokens / now * setting.plain_ms


@pytest.mark.parametrize("number", range(24))
def test_deciding_plain_tokens_meanwhile_is_what_counting_gives(number: int) -> None:
    """Within 5 %. The tokens decided meanwhile have to be foreseen: without that a draft that needs two rounds for a block seemed to gain
    up to a quarter more than it does."""
    setting, k = drawn(100 + number)
    found = whatif.meanwhile(setting, k)
    assert found.ratio == pytest.approx(counted(setting, k, 4000, random.Random(number)), rel=0.05)
    assert whatif.predicted(setting, k).ratio == max(found.ratio, whatif.waiting(setting, k).ratio)


def test_extremes_are_numbers() -> None:
    for setting in (
        Setting(20.0, 0.0, (0.0,)),
        Setting(20.0, 9e6, (1.0,), rtt_ms=9e6),
        Setting(1e-3, 9e6, (0.5,), row_ms=9e6),
        Setting(9e6, 0.0, (1.0,)),
        Setting(5.0, 5.0, (0.0, 1.0), foresight=1.0),
    ):
        told = advice.what_if(setting)
        assert told["ratio"] >= 1.0 and json.dumps(told, allow_nan=False)
        text = "\n".join(advice.said(told))
        assert "nan" not in text and "inf" not in text and "acceptance of 0.00" not in text


def test_points_of_balance() -> None:
    setting = Setting(20.0, 3.0, (0.7,), row_ms=4.0, rtt_ms=1.0)
    even = whatif.break_even_acceptance(setting, 3)
    assert even is not None and whatif.predicted(replace(setting, alphas=(even,)), 3).ratio == pytest.approx(1.0, abs=1e-6)
    dearest = whatif.break_even_draft_ms(setting, 3)
    assert dearest is not None and whatif.waiting(replace(setting, draft_step_ms=dearest), 3).ratio == pytest.approx(1.0, abs=1e-6)
    hopeless = Setting(5.0, 1.0, (1.0,), row_ms=20.0)
    assert whatif.break_even_acceptance(hopeless, 3) is None is whatif.break_even_draft_ms(hopeless, 3)
    assert whatif.best(hopeless).k == 0 and whatif.best(Setting(20.0, 0.0, (1.0,))).k == whatif.MAX_K
    sure = {ratio: (ratio, 0.95 * ratio, 1.05 * ratio) for ratio in (1.6, 1.2, 0.9, 0.8)}
    assert whatif.break_even_load([1, 4, 16], [sure[1.6], sure[1.2], sure[0.8]]) == pytest.approx(8.0)
    assert whatif.break_even_load([1, 4], [sure[1.6], sure[1.2]]) is None is whatif.break_even_load([1, 4], [sure[0.9], sure[0.8]])
    for unsure in (
        [(1.02, 0.9, 1.2), (0.98, 0.8, 1.1)],
        [sure[1.6], (0.98, 0.8, 1.1)],
        [(1.02, 0.9, 1.2), sure[0.8]],
        [(1.1, None, None)] * 2,
    ):
        assert whatif.break_even_load([1, 4], unsure) is None, "it only seems to cross"


def test_the_block_that_is_advised_is_the_shortest_of_those_that_gain_most() -> None:
    assert economics.best_k([[0, 1.0], [1, 1.3], [2, 1.49], [3, 1.5], [4, 1.4]]) == 2
    assert economics.best_k([[0, 1.0], [1, 0.9]]) == 0
    assert economics.alpha_of(1 + 0.6 + 0.36, 2) == pytest.approx(0.6)
    assert economics.break_even(Setting(10.0, 0.0, (0.5,), row_ms=6.0), 2) == pytest.approx(economics.alpha_of(2.2, 2))
    assert economics.break_even(Setting(10.0, 0.0, (0.5,), row_ms=50.0), 2) is None
    assert [economics.drafts_needed(busy, drafts) for busy, drafts in ((None, 2), (0.3, 1), (0.95, 1), (0.9, 3))] == [2, 1, 2, 4]

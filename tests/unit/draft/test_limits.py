"""Windows, room, budgets of rows, broken logits, bad input: one session's trouble is not another's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from draft_service.choosing import chooser_factory
from draft_service.stepper import Stepper
from specdec.hashing import prefix_hash
from specdec.terms import Commit, DraftMethod, Open, Refused, RejectionMethod, SamplingParams, Sent
from tests.unit.draft.rig import GREEDY, VOCAB, Rig, other, proposals


def rounds(rig: Rig, names: list[str], count: int) -> dict[str, list[int]]:
    """`count` rounds in which everything is accepted. Returns the lengths of the blocks each session could send."""
    lengths: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(count):
        for name in names:
            if rig.drafter.session(1, name) is not None:
                block = rig.undecided(name)[:3]
                lengths[name].append(len(block))
                rig.sent(len(block), name)
        rig.settle()
        for name in names:
            if (session := rig.drafter.session(1, name)) is not None:
                ahead = rig.undecided(name)
                bonus = ahead[lengths[name][-1]] if len(ahead) > lengths[name][-1] else 0
                rig.commit([*ahead[: lengths[name][-1]], bonus], name)
                assert len(session.chain) <= rig.drafter.limits.window
        rig.settle()
    return lengths


def refusals(rig: Rig, name: str = "s") -> list[Refused]:
    return [e for _, e in rig.events if isinstance(e, Refused) and e.session_id == name]


def test_f62_at_the_drafts_window_proposals_end_with_one_refusal() -> None:
    rig = Rig(window=32)
    rig.open("s", tokens=range(20))
    rig.settle()
    rounds(rig, ["s"], 10)
    (refused,) = refusals(rig)
    assert refused.retry_after_ms == 0 and "window" in refused.reason
    assert rig.engine.kv.slots == {} and rig.room.used_tokens == 0
    assert all(p.prefix_length + len(p.tokens) <= 32 for p in proposals(rig.events))
    assert rig.apply(Commit("s", 5, 1, (3,))) == []  # kept closed, told once


@pytest.mark.parametrize("length, told", [(31, 1), (32, 0), (40, 0)])
def test_f62_prompts_around_the_window(length: int, told: int) -> None:
    rig = Rig(window=32)
    rig.open("s", tokens=[i % VOCAB for i in range(length)])
    rig.settle()
    assert len(proposals(rig.events)) == told and len(refusals(rig)) == 1 - told
    assert all(len(p.tokens) == 1 for p in proposals(rig.events))


def test_f63_one_session_past_the_window_costs_the_others_nothing() -> None:
    rig = Rig(window=48, step_rows=64)
    names = [f"s{i}" for i in range(8)]
    for i, name in enumerate(names):
        rig.open(name, tokens=[i] * (40 if i == 0 else 3))
    rig.settle()
    lengths = rounds(rig, names, 6)
    assert len(refusals(rig, "s0")) == 1
    assert all(lengths[name] == [3] * 6 for name in names[1:])


def test_no_room_refuses_one_session_and_says_when_to_come_back() -> None:
    rig = Rig(total=40)
    rig.open("a", budget=16)
    (refused,) = rig.open("b", tokens=[1] * 20, budget=16)
    assert refused == Refused("b", 1, "no room for keys and values", 1000)
    rig.close("a")
    rig.open("b", tokens=[1] * 20, budget=16)
    assert len(proposals(rig.settle(), "b")) == 1


def test_room_that_ends_while_a_session_grows() -> None:
    rig = Rig(total=43)
    rig.open("a", budget=16)
    rig.open("b", budget=16)
    rig.settle()
    (refused,) = [e for e in rig.commit([7] * 6, "a") if isinstance(e, Refused)]
    assert refused.retry_after_ms > 0
    rig.commit([1], "b")
    assert len(proposals(rig.settle(), "b")) == 1


def test_max_sessions() -> None:
    rig = Rig(max_sessions=1)
    rig.open("a")
    (refused,) = rig.open("b")
    assert isinstance(refused, Refused) and refused.retry_after_ms > 0
    rig.open("a", epoch=2)
    assert rig.session("a").epoch == 2


def test_f84_a_row_that_is_not_finite_is_no_proposal_this_time() -> None:
    rig = Rig()
    rig.open("s")
    rig.open("t", tokens=(4, 5))
    bad = [1, 2, 3, *rig.naive([1, 2, 3], 1)]
    rig.engine.nan_when = lambda prefix: list(prefix) == bad
    rig.settle()
    assert len(proposals(rig.events, "t")) == 1
    (short,) = proposals(rig.events, "s")
    assert list(short.tokens) == bad[3:]  # what came before the broken row stands
    assert rig.drafter.tally.broken == 1
    rig.commit([other(bad[3])])
    (told,) = proposals(rig.settle(), "s")
    assert list(told.tokens) == rig.naive(rig.committed["s"], 3)


def test_f84_a_model_that_only_says_nan_is_left_alone() -> None:
    rig = Rig()
    rig.open("s")
    rig.engine.nan_when = lambda prefix: True
    for _ in range(5):
        rig.settle()
        if rig.drafter.session(1, "s") is not None:
            rig.commit([1])
    assert len(refusals(rig)) == 1 and proposals(rig.events) == []
    assert rig.forwards() == 3


def test_a_failing_pass_costs_the_sessions_in_it() -> None:
    rig = Rig()
    rig.open("s")
    rig.engine.raises = RuntimeError("out of memory")
    rig.settle()
    (refused,) = refusals(rig)
    assert refused.retry_after_ms > 0 and "RuntimeError" in refused.reason
    rig.engine.raises = None
    rig.open("s", epoch=2)
    assert len(proposals(rig.settle())) == 1
    assert len(rig.engine.kv.slots) == 1


def test_f125_f126_long_prompts_enter_in_chunks_while_others_draft() -> None:
    rig = Rig(step_rows=16, chunk_rows=8)
    rig.open("short")
    rig.settle()
    rig.open("long", tokens=[i % VOCAB for i in range(50)])
    rig.sent(3, "short")
    drafted = []
    while (plan := rig.drafter.plan()) is not None:
        rig.finish(plan, rig.run(plan))
        rows = rig.engine.log[-1]
        assert sum(row.rows for row in rows) <= 16 and all(row.rows <= 8 for row in rows)
        if rig.session("long").chain.kv < 50:
            drafted.append(len(rig.undecided("short")))
            assert rig.undecided("long") == []  # nothing before the prompt is complete
    assert drafted[0] == 4 and drafted[3] == 7  # a token a pass beside the chunks
    for name in ("short", "long"):
        tokens = [*rig.committed[name], *rig.undecided(name)]
        assert rig.kv_tokens(name) == tokens[:-1]
        assert rig.undecided(name) == rig.naive(rig.committed[name], len(rig.undecided(name)), name)


def test_f41_kv_length_follows_the_chain_in_every_round() -> None:
    rig = Rig(window=2000)
    rig.open("s", sampling=SamplingParams(temperature=1.0), seed=11)
    rig.settle()
    for i in range(200):
        block = rig.undecided()[:3]
        rig.sent(len(block))
        rig.settle(interrupted=i % 2 == 0)
        ahead, keep = rig.undecided(), i % 5
        rig.commit([*ahead[:keep], other(ahead[keep])] if keep < 4 else ahead[:4])
        assert rig.session().chain.kv <= len(rig.committed["s"]) + len(rig.undecided())
        rig.settle()
        assert rig.kv_tokens() == [*rig.committed["s"], *rig.undecided()][:-1]


def test_f99_f97_ragged_batches_say_what_each_session_alone_says() -> None:
    def solo(name: str, tokens: list[int], seed: int) -> list[int]:
        rig = Rig()
        rig.open(name, tokens, k=4, seed=seed, sampling=SamplingParams(temperature=1.0))
        rig.settle()
        rig.sent(4, name)
        rig.settle()
        return rig.undecided(name)

    sessions = {f"s{i}": ([i + 1] * (2 * i + 1), i) for i in range(6)}
    rig = Rig(step_rows=20, chunk_rows=5)
    for name, (tokens, seed) in sessions.items():
        rig.open(name, tokens, k=4, seed=seed, sampling=SamplingParams(temperature=1.0))
        rig.step(interrupted=True)  # they join one by one and are at different places
    rig.settle()
    for name in reversed(sessions):
        rig.sent(4, name)
        rig.step(interrupted=True)
    rig.settle()
    for name, (tokens, seed) in sessions.items():
        assert rig.undecided(name) == solo(name, tokens, seed)


def test_hungry_sessions_come_first() -> None:
    rig = Rig(step_rows=8)
    names = [f"s{i}" for i in range(12)]
    for name in names:
        rig.open(name, tokens=(1,))
    rig.settle()
    for name in names[:9]:
        rig.sent(3, name)
    for name in names[9:]:
        rig.commit([5], name)
    plan = rig.drafter.plan()
    assert plan is not None and len(plan.rows) == 8
    hungry = {rig.session(name).handle for name in names[9:]}
    assert {row.handle for row in plan.rows[:3]} == hungry
    assert plan.steps == 1  # others wait


def test_reduced_head_says_target_ids() -> None:
    columns = (0, 3, 7, 11, 30)
    rig = Rig()
    script = rig.engine.script
    rig.engine.script = lambda prefix: script(prefix)[list(columns)]
    rig.drafter._make_chooser = chooser_factory(VOCAB, (), columns)
    rig.open("s", draft_method=DraftMethod.PROBABILISTIC, rejection_method=RejectionMethod.STANDARD, sampling=SamplingParams())
    (told,) = proposals(rig.settle())
    assert set(told.tokens) <= set(columns)
    for token, distribution in zip(told.tokens, told.distributions, strict=True):
        assert distribution is not None and token in distribution.ids and set(distribution.ids) <= set(columns)


def test_f48_f50_padded_ids_are_never_proposed() -> None:
    rig = Rig()
    rig.drafter._make_chooser = chooser_factory(VOCAB - 10, (), None)
    rig.engine.script = lambda prefix: rig_row(prefix)
    rig.open("s")
    (told,) = proposals(rig.settle())
    assert max(told.tokens) < VOCAB - 10


def rig_row(prefix: Any) -> Any:
    """The best ids are padding."""
    import torch

    return torch.arange(VOCAB, dtype=torch.float64)


GOOD = Open("s", 1, (1, 2, 3), 3, GREEDY, 7, RejectionMethod.COUPLED, DraftMethod.GUMBEL, 16, 3)


@pytest.mark.parametrize(
    "field, change",
    [
        ("session_id", {"session_id": ""}),
        ("session_id", {"session_id": "é" * 65}),
        ("epoch", {"epoch": 0}),
        ("tokens", {"tokens": (1, VOCAB, 3)}),
        ("tokens", {"tokens": (1, -1, 3)}),
        ("prompt_length", {"tokens": ()}),
        ("prompt_length", {"prompt_length": 0}),
        ("prompt_length", {"prompt_length": 4}),
        ("num_speculative_tokens", {"num_speculative_tokens": 0}),
        ("num_speculative_tokens", {"num_speculative_tokens": 17}),
        ("draft_sample_method", {"draft_method": DraftMethod.PROBABILISTIC}),
        ("sampling.top_p", {"sampling": SamplingParams(top_p=0.0)}),
        ("sampling.logit_bias", {"sampling": SamplingParams(logit_bias={VOCAB: 1.0})}),
    ],
)
def test_f51_bad_open_is_refused_by_name(field: str, change: dict[str, Any]) -> None:
    rig = Rig()
    rig.open("t")
    (refused,) = rig.apply(dataclasses.replace(GOOD, **change))
    assert isinstance(refused, Refused) and field in refused.reason and refused.retry_after_ms == 0
    assert len(proposals(rig.settle(), "t")) == 1


@pytest.mark.parametrize(
    "command",
    [
        Sent("s", 3, prefix_hash((1, 2, 3)), 3, (1, 2, VOCAB)),
        Sent("s", 3, prefix_hash((1, 2, 3)), 3, (1, 2)),
        Sent("s", 3, prefix_hash((1, 2, 3)), 17),
        Commit("s", 3, prefix_hash((1, 2, 3)), ()),
        Commit("s", 3, prefix_hash((1, 2, 3)), (VOCAB,)),
        Commit("s", 3, prefix_hash((1, 2, 3)), (-1,)),
    ],
)
def test_f51_bad_command_ends_its_session_alone(command: Any) -> None:
    rig = Rig()
    rig.open("s")
    rig.open("t")
    (refused,) = rig.apply(command)
    assert isinstance(refused, Refused) and refused.epoch == 1
    assert rig.apply(command) == []
    assert len(proposals(rig.settle(), "t")) == 1
    assert len(rig.engine.kv.slots) <= 1


def test_a_bias_that_leaves_the_reduced_head_empty_is_no_proposal() -> None:
    rig = Rig()
    rig.drafter._make_chooser = chooser_factory(VOCAB, (), (0, 1, 2))
    rig.engine.script = lambda prefix: rig_row(prefix)[:3]
    rig.open("s", sampling=SamplingParams(temperature=0.0, allowed_token_ids=(9,)))
    rig.settle()
    assert proposals(rig.events) == [] and rig.drafter.tally.broken == 1


def test_shares_tell_how_useful_the_draft_is() -> None:
    rig = Rig(window=2000)
    rig.open("s")
    rig.settle()
    rounds(rig, ["s"], 100)
    load = rig.drafter.load()
    assert load.needed_work_share == pytest.approx(0.75, abs=0.1)  # the bonus token is the one nobody verifies
    assert load.late_share == 0.0 and load.sessions == 1 and load.kv_used_tokens > 0
    for _ in range(50):
        rig.commit(rig.undecided()[:1] or [1])
    assert rig.drafter.load().late_share > 0.5


def test_stepper_survives_a_slot_that_cannot_be_opened() -> None:
    rig = Rig()
    rig.engine.kv.open = lambda: (_ for _ in ()).throw(RuntimeError("no slot"))
    rig.open("s")
    rig.settle()
    assert len(refusals(rig)) == 1
    assert isinstance(rig.stepper, Stepper)


def test_blocks_behind_blocks_are_bounded_as_drafted_tokens_are() -> None:
    """A peer that tells one block after the other and commits none would make a chain of any length."""
    rig = Rig(max_budget=16, max_block=4)
    rig.open(k=3)
    chain = [1, 2, 3]
    for number in range(100):
        block = (number % 7,) * 4
        (refused,) = rig.apply(Sent("s", len(chain), prefix_hash(chain), 4, block)) or (None,)
        if refused is not None:
            break
        chain += block
        assert rig.session().chain.tokens == chain
    assert isinstance(refused, Refused) and refused.reason.startswith("sent.num_proposed") and refused.retry_after_ms == 0
    assert len(chain) == 3 + 16 + 4 and rig.drafter.num_sessions == 0

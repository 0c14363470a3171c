"""What went wrong in other systems at the end of a text, at the end of a window and when proposals are taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from specdec.terms import Close, FinishReason, PrefixNeeded, SamplingParams
from tests.fakes import hashed_script
from tests.unit.target.harness import GREEDY, SAMPLED, VOCAB, Bench, Caller, first_step, next_step, only, oracle, reference, run_all

SCRIPT = hashed_script(VOCAB)
EOS = 63
END_OF_TURN = 62  # whoever ends a prompt with it hears nothing


def mute(prefix: Sequence[int]) -> torch.Tensor:
    row = SCRIPT(prefix)
    row[EOS] = 50.0 if prefix[-1] == END_OF_TURN else -50.0
    row[END_OF_TURN] = -50.0
    return row


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("how", ["eos", "stop_token_ids"])
def test_f30_a_turn_that_ends_at_once(how: str, k: int) -> None:
    """Turn 2 of a conversation decides a stop token first: no tokens, `stop`; turn 3 and eight other sessions are as ever."""
    params = replace(GREEDY, max_tokens=12) if how == "eos" else replace(GREEDY, max_tokens=12, stop_token_ids=(EOS,))
    bench = Bench(mute, eos_ids=(EOS,) if how == "eos" else ())
    stream = bench.hello()
    draft = oracle(mute, 3, k, lambda n: n % 5)
    others = [Caller(bench, stream, [i, 1, 2], session=f"s{i}", sampling=params, want=12, draft=draft) for i in range(8)]
    conversation: list[int] = []
    heard: list[Caller] = []
    for turn, ask in enumerate(([5, 6, 7], [8, END_OF_TURN], [9])):
        conversation += ask
        caller = Caller(bench, stream, list(conversation), session=f"turn {turn}", sampling=params, want=12, draft=lambda c: [EOS] * k)
        run_all(bench, [caller, *others] if turn == 1 else [caller])
        conversation += caller.output
        heard.append(caller)
    assert [len(caller.output) for caller in heard] == [12, 0, 12]
    [result] = heard[1].results
    assert (result.tokens, result.finish, result.stop_token_id) == ((), FinishReason.STOP, EOS)
    for caller in [*heard, *others]:
        assert caller.output == reference(mute, caller.prompt, 12, eos_ids=(EOS,))
    bench.settle()
    assert bench.pool.held == {} and bench.engine.kv.slots == {}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("how", ["parked", "placed anew"])
@pytest.mark.parametrize("before_the_end", range(1, 8))
def test_f65_resumed_right_before_the_windows_end(before_the_end: int, how: str, sampling: SamplingParams) -> None:
    """K is cut to what still fits: no row past the window, and no token."""
    window, k = 40, 6
    bench = Bench(window=window, pool=window)
    stream = bench.hello()
    whole = reference(SCRIPT, [1, 2, 3], window - 3, sampling=sampling)
    committed = [1, 2, 3, *whole[: window - 3 - before_the_end]]
    bench.send(stream, first_step(committed[:-1], prompt_length=3, sampling=sampling))
    assert only(bench.turn()).tokens == (committed[-1],)
    epoch = 1
    if how == "parked":
        bench.verifier._room.free(bench.verifier._sessions["orch", "s"])
        assert only(bench.send(stream, next_step(committed, round_=2))) == PrefixNeeded(0)
    else:
        epoch = 2
    round_ = 2 if how == "parked" else 1
    finish = None
    while finish is None:
        made = len(committed) - 3
        block = [*whole[made : made + k], *[9] * k][:k]
        if made % 3 == 0:
            block[0] = (block[0] + 1) % VOCAB
        base = 0 if made == window - 3 - before_the_end else None
        if base == 0 and epoch == 2:
            bench.send(stream, first_step(committed, block, prompt_length=3, sampling=sampling, epoch=2))
        else:
            bench.send(stream, next_step(committed, block, round_=round_, base=base, epoch=epoch))
        result = only(bench.turn())
        committed += result.tokens
        assert result.num_verified <= window - result.prefix_length - 1
        finish, round_ = result.finish, round_ + 1
    assert committed == [1, 2, 3, *whole] and finish is FinishReason.LENGTH
    assert max(row.start + row.rows for call in bench.engine.log for row in call) <= window


@pytest.mark.parametrize("per_call", [1, 5])
def test_f118_f119_after_every_rollback_the_slot_is_as_long_as_what_is_committed(per_call: int) -> None:
    """All but the newest token, whose row is fed again; twenty calls of several tokens, refused at every slot in turn."""
    bench = Bench(max_step_rows=9, max_num_speculative_tokens=8)
    stream = bench.hello()
    committed = [*range(7)]
    script = oracle(SCRIPT, 7, per_call - 1, lambda n: n % per_call) if per_call > 1 else lambda committed: []
    bench.send(stream, first_step(committed, script(committed)))
    for round_ in range(2, 22):
        result = only(bench.until_answered(stream))
        committed += result.tokens
        [slot] = bench.engine.kv.slots.values()
        assert slot == committed[:-1] and len(slot) == result.kv_length_after
        bench.send(stream, next_step(committed, script(committed), round_=round_))
    assert committed[7:] == reference(SCRIPT, [*range(7)], len(committed) - 7)
    bench.send(stream, Close("s", 1))
    bench.settle()
    assert bench.engine.kv.slots == {}

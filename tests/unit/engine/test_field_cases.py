"""What went wrong elsewhere, by the number of the case, on the engine alone."""

from __future__ import annotations

import random

import pytest
import torch

from specdec.engine import Engine, EngineConfig, Segment, kv, load_engine_from_module
from tests.tiny import tiny_engine, tiny_gpt2, tiny_llama, tiny_qwen3
from tests.unit.engine.play import Turn, feed, played, text, whole


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(11, kv_tokens=32768)


def greedy(engine: Engine, prompt: list[int], n: int) -> list[int]:
    """The reference: alone, one token at a time."""
    slot = engine.kv.open()
    tokens = [int(feed(engine, slot, prompt)[-1].argmax())]
    while len(tokens) < n:
        tokens.append(int(feed(engine, slot, tokens[-1:])[-1].argmax()))
    engine.kv.close(slot)
    return tokens


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129])
def test_f67_evicted_and_fed_again_at_a_block_edge(engine, length):
    tokens = text(length + 10, seed=length)
    reference = whole(engine, tokens)
    slot = engine.kv.open()
    feed(engine, slot, tokens[:length])
    engine.kv.close(slot)
    assert torch.equal(played(engine, tokens, length, [Turn(5), Turn(5)]), reference[length:])


@pytest.mark.parametrize("lengths", [(1, 33), (2, 65), (5, 5)])
@pytest.mark.parametrize("path", ["lean", "generic"])
def test_f93_no_row_is_poisoned_by_padding(path, lengths):
    engine = tiny_engine(2, path=path)
    slots = [engine.kv.open() for _ in lengths]
    texts = [text(n + 5, seed=n) for n in lengths]
    first = engine.forward([Segment(s, 0, tuple(t[:-5]), 0) for s, t in zip(slots, texts, strict=True)])
    then = engine.forward([Segment(s, len(t) - 5, tuple(t[-5:]), 0) for s, t in zip(slots, texts, strict=True)])
    for rows, more, tokens in zip(first, then, texts, strict=True):
        got = torch.cat([rows, more])
        assert got.isfinite().all()
        assert (got - whole(engine, tokens)).abs().max() < 1e-9


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_f95_f96_neighbours_cannot_be_seen(dtype):
    """One request alone, among 31 others, and among 31 others with different content: the same bits."""
    engine = tiny_engine(4, dtype=dtype)
    mine = text(40)
    alone = whole(engine, mine)
    for crowd in (7, 31):
        for content in (0, 100):
            slots = [engine.kv.open() for _ in range(crowd + 1)]
            segments = [Segment(s, 0, tuple(text(10, seed=content + s)), 9) for s in slots[1:]]
            rows = engine.forward([Segment(slots[0], 0, tuple(mine), 0), *segments])[0]
            assert torch.equal(rows, alone)
            for slot in slots:
                engine.kv.close(slot)


def test_f97_sessions_come_and_go_with_draft_lengths_of_their_own(engine):
    """Every round the batch has other members in another order with blocks of 0, 4, 1 and 2 proposals; each must stay itself."""
    draw = random.Random(0)
    prompts = {name: text(draw.randrange(3, 40), seed=name) for name in range(8)}
    references = {name: greedy(engine, prompt, 60) for name, prompt in prompts.items()}
    live: dict[int, tuple[int, list[int]]] = {}
    finished = 0
    for turn in range(500):
        name = draw.randrange(8)
        if name not in live:
            slot = engine.kv.open()
            live[name] = slot, [int(feed(engine, slot, prompts[name])[-1].argmax())]
        order = list(live)
        draw.shuffle(order)
        segments = []
        for position, other in enumerate(order):
            slot, done = live[other]
            right = references[other][len(done) : len(done) + (0, 4, 1, 2)[(turn + position) % 4]]
            block = [token if draw.random() < 0.7 else (token + 1) % 128 for token in right]
            segments.append(Segment(slot, engine.kv.length(slot), (done[-1], *block), 0))
        for other, segment, rows in zip(order, segments, engine.forward(segments), strict=True):
            accept(engine, live[other][1], segment, rows)
        for other in order:
            slot, done = live[other]
            assert done == references[other][: len(done)]
            if len(done) >= 55 or draw.random() < 0.02:
                engine.kv.close(slot)
                del live[other]
                finished += 1
    assert finished > 20
    for slot, _ in live.values():
        engine.kv.close(slot)
    assert engine.kv.used_tokens == 0


def accept(engine: Engine, done: list[int], segment: Segment, rows: torch.Tensor) -> None:
    """Greedy verification: own tokens up to and including the first that differs from the block."""
    for i, row in enumerate(rows):
        done.append(int(row.argmax()))
        if i + 1 < len(segment.tokens) and segment.tokens[i + 1] != done[-1] or len(done) >= 60:
            break
    engine.kv.truncate(segment.slot, min(segment.start + i + 1, engine.kv.length(segment.slot)))


@pytest.mark.parametrize("path", ["lean", "generic"])
def test_f98_mixed_acceptance_in_one_batch(path):
    engine = tiny_engine(9, path=path)
    texts = [text(30, seed=s) for s in range(3)]
    slots = [engine.kv.open() for _ in texts]
    engine.forward([Segment(s, 0, tuple(t[:20]), 20) for s, t in zip(slots, texts, strict=True)])
    blocks = [(*t[20 : 21 + kept], *[0] * (4 - kept)) for t, kept in zip(texts, (0, 2, 4), strict=True)]
    engine.forward([Segment(s, 20, block, 0) for s, block in zip(slots, blocks, strict=True)])
    for slot, kept in zip(slots, (0, 2, 4), strict=True):
        engine.kv.truncate(slot, 21 + kept)
    nexts = [Segment(s, engine.kv.length(s), (t[21 + kept],), 0) for s, t, kept in zip(slots, texts, (0, 2, 4), strict=True)]
    for row, tokens, kept in zip(engine.forward(nexts), texts, (0, 2, 4), strict=True):
        assert (row[0] - whole(engine, tokens)[21 + kept]).abs().max() < 1e-9


def test_f99_ragged_drafting_equals_solo(engine):
    prompts = [text(n, seed=n) for n in (3, 17, 31, 64)]
    solo = [greedy(engine, prompt, 8) for prompt in prompts]
    slots = [engine.kv.open() for _ in prompts]
    rows = engine.forward([Segment(s, 0, tuple(p), len(p) - 1) for s, p in zip(slots, prompts, strict=True)])
    drafts = [[int(row[-1].argmax())] for row in rows]
    while len(drafts[0]) < 8:
        rows = engine.forward([Segment(s, engine.kv.length(s), (d[-1],), 0) for s, d in zip(slots, drafts, strict=True)])
        for draft, row in zip(drafts, rows, strict=True):
            draft.append(int(row[0].argmax()))
    assert drafts == solo
    for slot in slots:
        engine.kv.close(slot)


@pytest.mark.parametrize("prompt", [8, 9, 16, 17])
def test_f122_f123_a_last_piece_of_one_token_is_still_prefill(engine, prompt):
    """Prompts cut into pieces of 8, batched with a session that verifies a block."""
    tokens, other = text(prompt + 4, seed=prompt), text(60, seed=99)
    reference = whole(engine, tokens)
    slot, busy = engine.kv.open(), engine.kv.open()
    feed(engine, busy, other[:20])
    rows = []
    for start in range(0, prompt, 8):
        piece = tuple(tokens[start : min(prompt, start + 8)])
        answers = engine.forward([Segment(busy, 20, tuple(other[20:25]), 0), Segment(slot, start, piece, 0)])
        engine.kv.truncate(busy, 20)
        rows.append(answers[1])
    rows.append(feed(engine, slot, tokens[prompt:]))
    assert torch.equal(torch.cat(rows), reference)
    engine.kv.close(slot)
    engine.kv.close(busy)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3, tiny_gpt2])
@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_f124_four_at_once_equals_one_by_one(make, dtype):
    engine = load_engine_from_module(make(1), EngineConfig(dtype=dtype, kv_tokens=1024, self_test=False))
    tokens = text(24)
    together, single = played(engine, tokens, 20, [Turn(4)]), played(engine, tokens, 20, [Turn(1)] * 4)
    assert (together - single).abs().max() < 1e-9


def test_f126_a_session_behind_by_a_prefill_catches_up_in_the_same_batch(engine):
    one, two = text(50, seed=1), text(50, seed=2)
    a, b = engine.kv.open(), engine.kv.open()
    feed(engine, a, one[:30])
    rows = engine.forward([Segment(a, 30, tuple(one[30:33]), 0), Segment(b, 0, tuple(two[:40]), 39)])
    assert (engine.kv.length(a), engine.kv.length(b)) == (33, 40)
    assert torch.equal(rows[0], whole(engine, one[:33])[30:])
    assert torch.equal(rows[1], whole(engine, two[:40])[39:])
    engine.kv.close(a)
    engine.kv.close(b)


def test_f118_a_slot_is_bounded_however_many_tokens_arrive_per_call():
    """Five at a time into a window of 40: row for row what single feeding gives, and past the window a refusal that changes nothing."""
    engine = load_engine_from_module(tiny_llama(3), EngineConfig(dtype="float64", kv_tokens=256, window=40, self_test=False))
    tokens = text(40)
    slot = engine.kv.open()
    rows = [feed(engine, slot, tokens[i : i + 5]) for i in range(0, 40, 5)]
    assert torch.equal(torch.cat(rows), played(engine, tokens, 0, [Turn(1)] * 40))
    for _ in range(12):
        with pytest.raises(ValueError, match="past the window of 40"):
            feed(engine, slot, [1] * 5)
        assert (engine.kv.length(slot), engine.kv.used_tokens) == (40, 64)


def test_f119_a_rollback_that_does_nothing_is_found_at_once(monkeypatch):
    """After every rollback the slot must hold what is committed: by assertion in the engine, and again where the next tokens come."""
    engine = tiny_engine(3)
    slot = engine.kv.open()
    tokens = text(20)
    feed(engine, slot, tokens)
    for length in (19, 15, 3, 0):
        engine.kv.truncate(slot, length)
        assert engine.kv.length(slot) == length
    feed(engine, slot, tokens)
    monkeypatch.setattr(kv.Slot, "length", property(lambda self: 20, lambda self, length: None), raising=False)
    with pytest.raises(AssertionError):
        engine.kv.truncate(slot, 15)
    with pytest.raises(ValueError, match="starts at 15, slot 0 holds 20"):
        engine.forward([Segment(slot, 15, (1,), 0)])


def test_f120_at_the_end_of_the_window_every_rollback_still_works():
    """What applies here: no cache kind that refuses to roll back is loaded, so no session must fall back to plain decoding for it. Blocks
    up to the very last position are verified and refused as anywhere else."""
    engine = load_engine_from_module(tiny_llama(3), EngineConfig(dtype="float64", kv_tokens=512, window=70, self_test=False))
    tokens = text(70)
    reference = whole(engine, tokens)
    slot = engine.kv.open()
    feed(engine, slot, tokens[:60])
    for at in range(60, 70):
        block = (tokens[at], *[7] * min(4, 69 - at))
        rows = engine.forward([Segment(slot, at, block, 0)])[0]
        engine.kv.truncate(slot, at + 1)
        assert torch.equal(rows[0], reference[at])
    assert engine.kv.length(slot) == 70

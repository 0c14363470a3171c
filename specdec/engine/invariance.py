"""Start-up examination: does this engine, on this machine, give a row the same bits however it is batched?

A short form of the property that the tests check at length. It costs a few hundred rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.engine.api import Engine, UnsupportedModel
from specdec.engine.batch import Segment
from specdec.engine.cache import BLOCK_TOKENS

LENGTH = 75  # past the first edge of 64
TAIL = 13  # rows compared; they straddle blocks of 4 and 8 and the edge
CROWD = 2  # neighbours, of one block at most each
LOOSE = 0.2  # a cache that is wrong is wrong by whole logits; rounding of any dtype stays below this share of their spread


def examine(engine: Engine) -> bool:
    """True when all ways of feeding the same tokens agree bit for bit. Raises UnsupportedModel when they differ beyond rounding."""
    info = engine.info
    length = min(LENGTH, info.window - 4, info.kv_total_tokens - 4, info.max_rows - 8)
    tail = min(TAIL, length // 2)
    crowd = CROWD if info.window >= BLOCK_TOKENS and info.kv_total_tokens >= (CROWD + 2) * BLOCK_TOKENS else 0
    if length < 4:
        return False  # too small to tell
    draw = random.Random(0)
    tokens = [draw.randrange(info.vocab_size) for _ in range(length)]
    reference = _feed(engine, tokens, tail, [length])
    exact = True
    one_by_one = [length - tail, *[1] * tail]
    mixed = [17, length - tail - 17, 3, 6, *[1] * (tail - 9)]
    for cuts, company in ((one_by_one, 0), (mixed if tail == TAIL and length > tail + 17 else one_by_one, crowd)):
        rows = _feed(engine, tokens, tail, cuts, company, draw)
        exact = exact and torch.equal(rows, reference)
        _refuse_a_broken_cache(engine, rows, reference)
    return exact


def _feed(
    engine: Engine, tokens: Sequence[int], tail: int, cuts: Sequence[int], crowd: int = 0, draw: random.Random | None = None
) -> Tensor:
    """Logits [tail, columns] of the last rows, fed in `cuts`. A crowd: neighbours of other lengths, and refused tokens behind the cuts."""
    draw = draw or random.Random(1)
    vocab, kv = engine.info.vocab_size, engine.kv
    slot, neighbours = kv.open(), [kv.open() for _ in range(crowd)]
    rows: list[Tensor] = []
    position = 0
    for n in cuts:
        refused = [draw.randrange(vocab) for _ in range(draw.randrange(3) if crowd else 0)]
        fed = (*tokens[position : position + n], *refused)
        segments = [Segment(slot, position, fed, max(0, min(n, len(tokens) - tail - position)))]
        for name in neighbours:
            others = tuple(draw.randrange(vocab) for _ in range(draw.randrange(1, 4)))
            segments.insert(draw.randrange(2), Segment(name, kv.length(name), others, len(others)))
        answers = engine.forward(segments)
        mine = next(answer for answer, segment in zip(answers, segments, strict=True) if segment.slot == slot)
        rows.append(mine[: len(mine) - len(refused)])
        position += n
        kv.truncate(slot, position)
    for name in (slot, *neighbours):
        kv.close(name)
    return torch.cat(rows)


def _refuse_a_broken_cache(engine: Engine, rows: Tensor, reference: Tensor) -> None:
    spread = float(reference.double().std())
    error = float((rows.double() - reference.double()).abs().mean())
    if error > LOOSE * max(spread, 1e-9):
        raise UnsupportedModel(
            f"tokens fed one at a time and all at once disagree (mean difference {error:.3g}, spread {spread:.3g}): "
            "this model's cache is not position-exact, so speculation would change its text"
        )

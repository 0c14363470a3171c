"""Feeds a text to an engine in any way one can think of; the rows that come back must not show which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.engine import Engine, Segment


def text(length: int, vocab: int = 128, seed: int = 1) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def feed(engine: Engine, slot: int, tokens: Sequence[int], *, logits: bool = True) -> Tensor:
    """Appends `tokens` to a slot in one call: [n, columns], or none."""
    start = engine.kv.length(slot)
    return engine.forward([Segment(slot, start, tuple(tokens), 0 if logits else len(tokens))])[0]


def whole(engine: Engine, tokens: Sequence[int], chunk: int = 256) -> Tensor:
    """Logits after every token, [len, columns], fed alone in chunks."""
    slot = engine.kv.open()
    rows = torch.cat([feed(engine, slot, tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)])
    engine.kv.close(slot)
    return rows


@dataclass(frozen=True)
class Turn:
    """One call: `n` tokens of the text, `refused` others behind them that are rolled back, neighbours with so many rows each."""

    n: int
    refused: tuple[int, ...] = ()
    neighbours: tuple[int, ...] = ()
    before: bool = False


def played(engine: Engine, tokens: Sequence[int], start: int, turns: Sequence[Turn], chunk: int = 256) -> Tensor:
    """The first `start` tokens as a prefill in chunks, then turn by turn: logits of the turns' own tokens."""
    slot = engine.kv.open()
    for i in range(0, start, chunk):
        feed(engine, slot, tokens[i : min(start, i + chunk)], logits=False)
    crowd = {i: engine.kv.open() for turn in turns for i in range(len(turn.neighbours))}
    rows, position = [], start
    for turn in turns:
        mine = Segment(slot, position, (*tokens[position : position + turn.n], *turn.refused), 0)
        others = [_neighbour(engine, crowd[i], n) for i, n in enumerate(turn.neighbours)]
        segments = [*others, mine] if turn.before else [mine, *others]
        answers = dict(zip((s.slot for s in segments), engine.forward(segments), strict=True))
        rows.append(answers[slot][: turn.n])
        position += turn.n
        engine.kv.truncate(slot, position)
    for name in (slot, *crowd.values()):
        engine.kv.close(name)
    return torch.cat(rows)


def _neighbour(engine: Engine, slot: int, n: int) -> Segment:
    """Its first call is long, so that it stands somewhere else than the session under test."""
    start = engine.kv.length(slot)
    n = n if start else 7 * n + slot % 5
    return Segment(slot, start, tuple(text(n, seed=slot)), n - 1)

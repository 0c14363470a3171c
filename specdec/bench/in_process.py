"""One generation in one process, without services: target and draft are engines called in turn. For checks and ceilings."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.acceptance import verify
from specdec.engine import Engine, Segment
from specdec.sampling import Sampler
from specdec.terms import RejectionMethod, SamplingParams

SEED = 20260101
BLOCK = 4  # proposals of a round


def prompt_of(length: int, vocab: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(3, vocab) for _ in range(length))


def filled(engine: Engine, tokens: Sequence[int]) -> int:
    """A slot that holds them."""
    slot = engine.kv.open()
    for cut in range(0, len(tokens), engine.info.max_rows):
        piece = tuple(tokens[cut : cut + engine.info.max_rows])
        engine.forward([Segment(slot, cut, piece, len(piece))])
    return slot


def read(engine: Engine, tokens: Sequence[int], piece: int) -> Tensor:
    """Logits after every token, fed so many at a time."""
    slot = engine.kv.open()
    rows = [engine.forward([Segment(slot, i, tuple(tokens[i : i + piece]), 0)])[0] for i in range(0, len(tokens), piece)]
    engine.kv.close(slot)
    return torch.cat(rows)


@dataclass(frozen=True, slots=True)
class Spoken:
    """`rounds` = target steps after the prefill."""

    tokens: tuple[int, ...]
    rounds: int
    accepted: int
    seconds: float

    def figures(self) -> dict[str, Any]:
        per_second = round(len(self.tokens) / self.seconds, 1)
        return {"tokens": len(self.tokens), "rounds": self.rounds, "accepted": self.accepted, "tokens_per_s": per_second}


def speak(engine: Engine, prompt: Sequence[int], params: SamplingParams, n: int, propose: Callable[[list[int]], Sequence[int]]) -> Spoken:
    """One generation of n tokens. `propose`: decided tokens → the next block, which may be empty."""
    sampler = Sampler(params, SEED, engine.info.vocab_size, engine.info.eos_ids, prompt)
    slot = filled(engine, prompt[:-1])
    output: list[int] = []
    rounds = accepted = 0
    begun = time.perf_counter()
    while len(output) < n:
        block = list(propose(output))[: n - len(output) - 1]
        start = engine.kv.length(slot)
        rows = engine.forward([Segment(slot, start, (output[-1] if output else prompt[-1], *block), 0)])[0]
        verdict = verify(rows, block, (), sampler, output, RejectionMethod.COUPLED)
        output += verdict.tokens
        engine.kv.truncate(slot, start + len(verdict.tokens))
        rounds, accepted = rounds + 1, accepted + verdict.num_accepted
    taken = time.perf_counter() - begun
    engine.kv.close(slot)
    return Spoken(tuple(output), rounds, accepted, taken)


class SelfDraft:
    """Proposes what another engine would say next under the same noise."""

    def __init__(self, engine: Engine, prompt: Sequence[int], params: SamplingParams) -> None:
        self._engine, self._prompt = engine, tuple(prompt)
        self._sampler = Sampler(params, SEED, engine.info.vocab_size, engine.info.eos_ids, prompt)
        self._slot = engine.kv.open()
        self._fed: tuple[int, ...] = ()

    def __call__(self, output: list[int]) -> list[int]:
        text = (*self._prompt, *output)
        keep = next((i for i, (a, b) in enumerate(zip(self._fed, text, strict=False)) if a != b), min(len(self._fed), len(text) - 1))
        self._engine.kv.truncate(self._slot, keep)
        block: list[int] = []
        feed = text[keep:]
        while len(block) < BLOCK:
            start = self._engine.kv.length(self._slot)
            row = self._engine.forward([Segment(self._slot, start, tuple(feed), len(feed) - 1)])[0][0]
            block.append(self._sampler.choose(row, len(text) + len(block), [*output, *block]))
            feed = (block[-1],)
        self._fed = (*text, *block[:-1])
        return block


class Scripted:
    """The known text, each token right with probability `share`."""

    def __init__(self, text: Sequence[int], share: float) -> None:
        self._text, self._share = text, share

    def __call__(self, output: list[int]) -> list[int]:
        draw = random.Random(len(output))
        ahead = self._text[len(output) : len(output) + BLOCK]
        return [token if draw.random() < self._share else 3 for token in ahead]

"""The text behind one prompt as a simulated target decides it, and what a simulated draft says along it. Pure.

Both pools of a benchmark read the same paths, so an id costs one hash however many of them ask. A path is also where they leave the times
that only a look at both sides can compare: it belongs to one session.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from specdec.hashing import PrefixHash, prefix_hash
from specdec.simulation import FIRST_ID, Simulation


class Path:
    """`tokens` = prompt and the ids behind it as far as somebody asked. Times are of time.perf_counter, 0 = never."""

    __slots__ = ("__weakref__", "_hashes", "_simulation", "_vocab_size", "_walk", "prompt_length", "proposed_at", "told", "tokens")

    def __init__(self, simulation: Simulation, vocab_size: int, prompt: Sequence[int]) -> None:
        self._simulation, self._vocab_size = simulation, vocab_size
        self.tokens, self.prompt_length = list(prompt), len(prompt)
        self._walk = PrefixHash(prompt)
        self._hashes = [self._walk.value]
        self.proposed_at = 0.0  # when a draft that had to begin again had something
        self.told: list[tuple[int, float]] = []  # length and time of results that the client has not seen

    def upto(self, length: int) -> list[int]:
        """The ids, at least `length` of them."""
        tokens, walk = self.tokens, self._walk
        while len(tokens) < length:
            token = self._simulation.decides(len(tokens), self._hashes[-1], self._vocab_size)
            tokens.append(token)
            self._hashes.append(walk.extend((token,)).value)
        return tokens

    def hash_at(self, length: int) -> int | None:
        """Of the first `length` ids; None inside the prompt."""
        self.upto(length)
        return self._hashes[length - self.prompt_length] if length >= self.prompt_length else None

    def agrees(self, start: int, tokens: Sequence[int]) -> int:
        """How many of `tokens` are the path's from `start` on."""
        own = self.upto(start + len(tokens))
        for i, token in enumerate(tokens):
            if own[start + i] != token:
                return i
        return len(tokens)

    def drafted(self, length: int, chain: Sequence[int], count: int) -> tuple[int, list[int]]:
        """(hash, ids): what a draft says behind the first `length` ids and its own `chain` after them, and the hash of both. Behind a wrong
        id of its own it says anything."""
        start, on_path = length + len(chain), self.agrees(length, chain) == len(chain)
        named = self.hash_at(start) if on_path else prefix_hash([*self.tokens[:length], *chain])
        assert named is not None
        said: list[int] = []
        for position in range(start, start + count):
            if on_path:
                right = self.upto(position + 1)[position]
                token = self._simulation.proposes(position, self._hashes[position - self.prompt_length], self._vocab_size)
                on_path = token == right
            else:
                token = FIRST_ID + (31 * position + start) % (self._vocab_size - FIRST_ID)
            said.append(token)
        return named, said


class Paths:
    """By prompt; a path lives as long as somebody holds it."""

    def __init__(self, simulation: Simulation, vocab_size: int) -> None:
        self.simulation, self.vocab_size = simulation, vocab_size
        self._known: weakref.WeakValueDictionary[tuple[int, ...], Path] = weakref.WeakValueDictionary()

    def of(self, prompt: Sequence[int]) -> Path:
        key = tuple(prompt)
        path = self._known.get(key)
        if path is None:
            path = self._known[key] = Path(self.simulation, self.vocab_size, key)
        return path

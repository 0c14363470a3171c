"""The text a grammar begins after."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

KEPT = 16  # answers of `overrun` that are kept: each may name half the vocabulary


class Marker:
    """`words`: (bytes, id) of every id that has bytes, ascending. Immutable; may be shared by sessions and threads."""

    def __init__(self, text: bytes, words: Sequence[tuple[bytes, int]]) -> None:
        self.text, self._words = text, words
        self._inside = [i for word, i in words if 0 <= word.find(text) < len(word) - len(text)]
        self.overrun = functools.lru_cache(KEPT)(self._overrun)

    def beginning(self, text: bytes) -> bytes:
        """The longest end of `text` that the marker begins with, short of all of it."""
        longest = min(len(text), len(self.text) - 1)
        return next((self.text[:n] for n in range(longest, 0, -1) if text.endswith(self.text[:n])), b"")

    def _overrun(self, beginning: bytes) -> npt.NDArray[np.int64]:
        """Ascending ids that complete the marker after such a beginning and go on behind it."""
        found = set(self._inside)
        for n in (n for n in range(1, len(beginning) + 1) if beginning.endswith(self.text[:n])):
            rest = self.text[n:]
            first = bisect.bisect_right(self._words, rest, key=_bytes)
            for word, i in itertools.islice(self._words, first, None):
                if not word.startswith(rest):
                    break
                found.add(i)
        return np.array(sorted(found), dtype=np.int64)


def _bytes(entry: tuple[bytes, int]) -> bytes:
    return entry[0]

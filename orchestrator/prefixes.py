"""Which process lately took which beginning of a prompt, and so has it in its prefix cache, most likely. Pure.

A prompt is named at some of its lengths: a hash of everything before each mark. Marks are multiples of a cache block, close together at
first and ever wider apart, at most two to an octave: a match may be a third shorter than what is there, and a long prompt costs some
twenty entries. Processes are named by boot id: one that was restarted has nothing, and what is written of the old one ages away.
What is remembered is bounded: of MAX_PREFIXES beginnings, those used last, each with the MAX_HOLDERS that took it last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from specdec.hashing import PrefixHash

BLOCK_TOKENS = 64  # of the targets' caches; shorter prompts are not worth it
MARKS = tuple(BLOCK_TOKENS * blocks for blocks in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256))
MAX_PREFIXES = 1 << 15
MAX_HOLDERS = 8


class PrefixIndex:
    def __init__(self) -> None:
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # hash of a beginning -> processes, the newest first

    def __len__(self) -> int:
        return len(self._holders)

    def took(self, tokens: Sequence[int], process: str) -> None:
        """`process` computes `tokens`."""
        for _, name in _marks(tokens):
            others = (other for other in self._holders.pop(name, ()) if other != process)
            self._holders[name] = (process, *others)[:MAX_HOLDERS]
        while len(self._holders) > MAX_PREFIXES:
            self._holders.popitem(last=False)

    def holders(self, tokens: Sequence[int]) -> Mapping[str, int]:
        """Tokens of the beginning that each process has, most likely."""
        found: dict[str, int] = {}
        for length, name in _marks(tokens):
            for process in self._holders.get(name, ()):
                found[process] = length
        return found


def _marks(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """(length, hash) of the beginnings that are looked at."""
    running, marks = PrefixHash(), []
    for length in MARKS:
        if length > len(tokens):
            break
        running.extend(tokens[running.length : length])
        marks.append((length, running.value))
    return marks

"""Stop strings in a stream of text. Pure.

Rules
1. The first stop string to be completed ends the answer; of several completed by one character the longest counts. Neither depends on
   how the text was cut into pieces.
2. Text that may yet become a stop string is held back, nothing else is; what turns out to be harmless leaves in order.
3. Hidden text (special tokens that are left out of the answer) is matched and never released.
4. Until `armed`, a completed stop string is text like any other (`min_tokens`).

Aho and Corasick 1975, "Efficient string matching": one table lookup per character, whatever the number of stop strings.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """One per answer. `any` = whether there is a stop string at all. `include` leaves it in the text; then nothing needs to be held
    back."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.any = bool(stops)
        self._include = include
        self._goto: list[dict[str, int]] = [{}]
        self._found: list[str | None] = [None]  # longest stop string that ends at this node
        self._depth = [0]
        for stop in stops:
            self._insert(stop)
        self._link()
        self._state = 0
        self._held: list[tuple[str, bool]] = []  # characters not released yet, and whether they are hidden

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._goto[node].get(char)
            if child is None:
                child = len(self._goto)
                self._goto[node][char] = child
                self._goto.append({})
                self._found.append(None)
                self._depth.append(self._depth[node] + 1)
            node = child
        self._found[node] = stop

    def _link(self) -> None:
        """Failure links: the longest proper suffix of a node that is a node. `hold` = characters that a stop string may still need."""
        self._fail = [0] * len(self._goto)
        self._hold = [0] * len(self._goto)
        queue = deque([0])
        while queue:
            node = queue.popleft()
            fail = self._fail[node]
            if node:
                self._hold[node] = self._depth[node] if self._goto[node] else self._hold[fail]
                if self._found[node] is None:
                    self._found[node] = self._found[fail]
            for char, child in self._goto[node].items():
                self._fail[child] = self._next(fail, char) if node else 0
                queue.append(child)

    def _next(self, node: int, char: str) -> int:
        while char not in self._goto[node]:
            if not node:
                return 0
            node = self._fail[node]
        return self._goto[node][char]

    def push(self, text: str, *, hidden: bool = False, armed: bool = True) -> tuple[str, str | None]:
        """(text released, the stop string that was completed or None). After a stop string nothing more may be pushed."""
        if not self.any:
            return ("" if hidden else text), None
        for i, char in enumerate(text):
            self._state = self._next(self._state, char)
            stop = self._found[self._state]
            if stop is not None and armed:
                self._held += [(c, hidden) for c in text[: i + 1]]
                kept = self._release(len(self._held) - (0 if self._include else len(stop)))
                self._held.clear()
                return kept, stop
        self._held += [(c, hidden) for c in text]
        return self._release(len(self._held) - (0 if self._include else self._hold[self._state])), None

    def fork(self) -> StopMatcher:
        """A second matcher in the same state, for text that may yet be taken back."""
        twin = copy.copy(self)
        twin._held = self._held.copy()
        return twin

    def flush(self) -> str:
        """What was held back; the answer ended without a stop string."""
        self._state = 0
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        released = "".join(char for char, hidden in self._held[:count] if not hidden)
        del self._held[:count]
        return released

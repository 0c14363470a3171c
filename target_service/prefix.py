"""KV of sessions that ended, found by what it says. Pure: knows residents by their names and tokens, no room, no engine, no clock.

Rules

- An entry is whole blocks of committed tokens, from the start of a sequence. Its chain names every block by the hash of all tokens up to
  the block's end, so a block is found only behind the very tokens it was computed behind. Tokens are compared as well: a hash of 64 bits
  finds, it does not decide.
- No entry is the beginning of another one: the longer one says it all.
- The least recently used entry goes first. To be found, or to be added again, is a use.
- Of several entries that begin alike the oldest lends: later ones were mostly forked from it and share its memory already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.hashing import PrefixHash

MAX_ENTRIES = 1024  # each is a slot of the engine, which has a bounded number of them


@dataclass(frozen=True, slots=True)
class Entry:
    """`resident` holds exactly `tokens`, whole blocks; `chain[i]` names the first i + 1 of them."""

    resident: int
    tokens: tuple[int, ...]
    chain: tuple[int, ...]


def chain_of(tokens: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """Hashes of all prefixes that end with a block."""
    growing = PrefixHash()
    ends = range(block_tokens, len(tokens) + 1, block_tokens)
    return tuple(growing.extend(tokens[end - block_tokens : end]).value for end in ends)


class PrefixCache:
    """`block_tokens` 0 = nothing is kept and nothing found."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._entries: dict[int, Entry] = {}  # by resident, the least recently used first
        self._holders: dict[int, dict[int, None]] = {}  # hash of a chain → residents, the oldest first
        self._complete: dict[int, int] = {}  # last hash of a chain → the resident whose chain it is

    @property
    def residents(self) -> frozenset[int]:
        return frozenset(self._entries)

    def whole(self, tokens: int) -> int:
        """The part of `tokens` that is whole blocks."""
        return 0 if self.block_tokens == 0 else tokens // self.block_tokens * self.block_tokens

    def add(self, resident: int, tokens: Sequence[int]) -> list[int]:
        """What the resident holds: at least one block, and nothing but whole blocks. Returns residents that are needed no longer: those
        that say less, the least recently used ones where there are too many, or this one, if all of it was known."""
        entry = Entry(resident, tuple(tokens), chain_of(tokens, self.block_tokens))
        known = next(iter(self._holders.get(entry.chain[-1], ())), None)
        if known is not None:
            self._use(known)
            return [resident]
        redundant = [self._complete[link] for link in entry.chain[:-1] if link in self._complete]
        self._entries[resident] = entry
        self._complete[entry.chain[-1]] = resident
        for link in entry.chain:
            self._holders.setdefault(link, {})[resident] = None
        for other in redundant:
            self.remove(other)
        while len(self._entries) > MAX_ENTRIES and (oldest := self.oldest()) is not None:
            redundant.append(oldest)
            self.remove(oldest)
        return redundant

    def find(self, tokens: Sequence[int]) -> tuple[Entry, int] | None:
        """The entry that begins with most of `tokens`, and how many of them: whole blocks, never all of the tokens."""
        if not self._entries:
            return None
        chain = chain_of(tokens[: self.whole(len(tokens) - 1)], self.block_tokens)
        for blocks in range(len(chain), 0, -1):
            length = blocks * self.block_tokens
            for resident in self._holders.get(chain[blocks - 1], ()):
                entry = self._entries[resident]
                if entry.tokens[:length] == tuple(tokens[:length]):
                    self._use(resident)
                    return entry, length
        return None

    def remove(self, resident: int) -> None:
        """It is taken over, or its room is needed."""
        entry = self._entries.pop(resident)
        del self._complete[entry.chain[-1]]
        for link in set(entry.chain):
            del self._holders[link][resident]
            if not self._holders[link]:
                del self._holders[link]

    def oldest(self, besides: int | None = None) -> int | None:
        """The least recently used resident; `besides` only when there is no other."""
        return next((resident for resident in self._entries if resident != besides), besides if besides in self._entries else None)

    def _use(self, resident: int) -> None:
        self._entries[resident] = self._entries.pop(resident)

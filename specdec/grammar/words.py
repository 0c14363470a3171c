"""The vocabulary as llguidance asks for it.

The library masks by the bytes of each id, and asks for the ids of a text wherever the language leaves no choice of text. Those must spell
exactly that text: an id that stands for more, or a special one, would be a mask that no state accepts. The tokenizer's own answer is taken
when it does; a text it cannot write that way (names of special ids, a space that it puts in front, letters that it normalises) is cut
into the fewest words there are. Some vocabularies lack a byte or two: a text that cannot be written at all is remembered as such.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import cached_property

from tokenizers import Tokenizer

from specdec.vocabulary import decoder_steps, special_ids, token_bytes

LONGEST_WORD = 512  # bytes; the library's tree of words is not deeper than twice that
GLANCE = 256  # characters of a long text that are written at once: only its first id is wanted
FEW = 16  # ids that the library must get of a long text: it sets some of the last ones aside
SPECIAL_MARK = b"\xff"  # begins special ids in the library's tree; no text holds this byte
DEAD = 5  # ids of nobody behind what can be written of a text: with none at all the library would give up
LEADS = ("", "\n")  # in front of a text, for tokenizers that put a space at the beginning


class Words:
    """`table` = the bytes each id stands for, None where it names nothing. The end token is one that nobody has: ends are decided in
    constraint.py."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.table = token_bytes(tokenizer)
        self.concatenate = pieces_concatenate(tokenizer)
        self.special_token_ids = sorted(special_ids(tokenizer))
        self._special = frozenset(self.special_token_ids)
        self.eos_token_id = len(self.table)
        self.bos_token_id = None
        self.tokens = [*(self._legal(i) for i in range(len(self.table))), b"<|end of the language|>"]
        self.special_token_ids.append(self.eos_token_id)
        self._here = threading.local()
        self._encode: Callable[[str], Sequence[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False).ids

    def _legal(self, token: int) -> bytes:
        """The bytes under which the library knows the id; empty = never legal."""
        word = self.table[token] or b""
        text_like = len(word) == 1 or not word.startswith(SPECIAL_MARK)
        return word if token in self._special or (text_like and len(word) <= LONGEST_WORD) else b""

    @cached_property
    def by_bytes(self) -> list[tuple[bytes, int]]:
        """(bytes, id) of every id that has some, ascending."""
        return sorted((word, i) for i, word in enumerate(self.table) if word)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """An id per word that a text may be cut into. Of several the last: the first ones are the bytes of byte-fallback."""
        return {word: i for i, word in enumerate(self.tokens[:-1]) if word and i not in self._special}

    @cached_property
    def _lengths(self) -> dict[bytes, list[int]]:
        """The lengths of the words that begin with two bytes, ascending."""
        lengths: dict[bytes, set[int]] = {}
        for word in self._ids:
            if len(word) > 1:
                lengths.setdefault(word[:2], set()).add(len(word))
        return {begin: sorted(found) for begin, found in lengths.items()}

    def take_unwritable(self) -> bool:
        """Whether the library asked for a text that cannot be written, on this thread, since the last call."""
        was: bool = getattr(self._here, "unwritable", False)
        self._here.unwritable = False
        return was

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids that spell `text`, or the beginning of a long one; of a text that cannot be written, whatever can and ids of nobody.
        Never raises: the library could not bear it."""
        whole = text if isinstance(text, str) else text.decode("utf-8", "replace")
        length = GLANCE
        while True:
            part = whole[:length]
            ids = self._own(part) or self._cut(part.encode())
            if len(ids) >= FEW or len(part) == len(whole):
                return ids
            length *= 4

    def _own(self, text: str) -> list[int]:
        """The tokenizer's way to write `text`; empty when it is none."""
        wanted = text.encode()
        for lead in LEADS:
            try:
                ids = list(self._encode(lead + text))
            except Exception:  # a tokenizer that refuses a text has no way to write it
                continue
            lengths = [len(self.tokens[i]) for i in ids]
            spelled = b"".join(self.tokens[i] for i in ids)
            ends = list(itertools.accumulate(lengths, initial=0))
            first = len(spelled) - len(wanted)
            if spelled.endswith(wanted) and first in ends and all(lengths) and self._special.isdisjoint(ids):
                return ids[ends.index(first) :]
        return []

    def _cut(self, data: bytes) -> list[int]:
        """The fewest words that spell `data`, or the longest beginning of it that can be spelled and ids of nobody."""
        reached: dict[int, tuple[int, int]] = {0: (0, 0)}  # place -> number of words up to there, length of the last
        for place in range(len(data)):
            if place in reached:
                count = reached[place][0] + 1
                for length in (1, *self._lengths.get(data[place : place + 2], ())):
                    end = place + length
                    if data[place:end] in self._ids and end <= len(data) and count < reached.get(end, (count + 1, 0))[0]:
                        reached[end] = count, length
        place, ids = max(reached), list[int]()
        dead = []
        if place < len(data):
            self._here.unwritable = True
            dead = [self.eos_token_id] * DEAD
        while place:
            length = reached[place][1]
            ids.append(self._ids[data[place - length : place]])
            place -= length
        return ids[::-1] + dead


def pieces_concatenate(tokenizer: Tokenizer) -> bool:
    """Whether a text is what its ids stand for, one after the other (but for its first and last one)."""
    kinds = [step["type"] for step in decoder_steps(tokenizer)]
    each = kinds[: kinds.index("Fuse")] if "Fuse" in kinds else kinds
    return "Strip" not in each and "CTC" not in kinds

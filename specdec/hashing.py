"""Names of prefixes: blake2b, 8 bytes, over token ids as little-endian uint32, read as a little-endian integer (a proto fixed64)."""

from __future__ import annotations

import array
import hashlib
import struct
import sys
from collections.abc import Sequence

_ONE = struct.Struct("<I").pack


def _bytes(ids: Sequence[int]) -> bytes:
    if len(ids) == 1:  # the usual step of a walk
        return _ONE(ids[0])
    packed = array.array("I", ids)
    if packed.itemsize != 4:  # pragma: no cover - no supported platform
        raise RuntimeError("array type 'I' is not 32 bits wide here")
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class PrefixHash:
    """The hash of a growing list of ids. Extending costs only the new ids; `copy` lets two continuations share a prefix."""

    __slots__ = ("_state", "length")

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._state = hashlib.blake2b(_bytes(ids), digest_size=8)
        self.length = len(ids)

    def extend(self, ids: Sequence[int]) -> PrefixHash:
        self._state.update(_bytes(ids))
        self.length += len(ids)
        return self

    def step(self, token: int) -> int:
        """Extends by one id; the hash with it."""
        self._state.update(_ONE(token))
        self.length += 1
        return int.from_bytes(self._state.digest(), "little")

    def copy(self) -> PrefixHash:
        twin = PrefixHash.__new__(PrefixHash)
        twin._state, twin.length = self._state.copy(), self.length
        return twin

    def after(self, token: int) -> PrefixHash:
        """Of these ids and one more; this one stays."""
        twin = PrefixHash.__new__(PrefixHash)
        twin._state, twin.length = self._state.copy(), self.length + 1
        twin._state.update(_ONE(token))
        return twin

    @property
    def value(self) -> int:
        return int.from_bytes(self._state.digest(), "little")


def prefix_hash(ids: Sequence[int]) -> int:
    """Hash of exactly these ids. prefix_hash(a + b) == PrefixHash(a).extend(b).value."""
    return PrefixHash(ids).value

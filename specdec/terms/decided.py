"""What was decided, and what a draft drew from."""

from __future__ import annotations

import enum
import math
import struct
from dataclasses import dataclass

from specdec.errors import InvalidRequest


class Origin(enum.Enum):
    """Where a decided token came from. accepted + corrected + bonus + plain = decided = delivered + discarded."""

    ACCEPTED = "accepted"
    CORRECTED = "corrected"
    BONUS = "bonus"
    PLAIN = "plain"

    __hash__ = object.__hash__  # a key for every token; that of enum.Enum is Python


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """log p of the chosen token and of the likeliest alternatives (likeliest first, ties by id), under the raw logits."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """q of one proposed token under the standard method: ids and the very float32 numbers that were sampled from."""

    ids: tuple[int, ...]
    probs: bytes  # float32 little-endian, len(ids) of them

    def floats(self) -> list[float]:
        """The numbers, as Python floats. Call `check` first on what a stranger sent."""
        return list(struct.unpack(f"<{len(self.ids)}f", self.probs))

    def check(self, vocab_size: int, name: str = "distribution") -> None:
        """Raises InvalidRequest, calling the distribution `name`. Sums may be off by a thousandth: readers divide by the sum."""
        if not self.ids or len(self.probs) != 4 * len(self.ids):
            raise InvalidRequest(name, f"{len(self.ids)} ids need {4 * len(self.ids)} bytes of float32, got {len(self.probs)}")
        if len(set(self.ids)) != len(self.ids):
            raise InvalidRequest(name, "ids must be distinct")
        bad = next((i for i in self.ids if not 0 <= i < vocab_size), None)
        if bad is not None:
            raise InvalidRequest(name, f"token id {bad} is not in the vocabulary (0 to {vocab_size - 1})")
        numbers = self.floats()
        if not all(0.0 <= number <= 1.01 for number in numbers):  # refuses NaN too
            raise InvalidRequest(name, "probabilities must be finite and in [0, 1]")
        if abs(math.fsum(numbers) - 1.0) > 1e-3:
            raise InvalidRequest(name, f"probabilities must sum to 1, got {math.fsum(numbers)!r}")

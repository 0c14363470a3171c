"""What a simulated model says and how long it takes, as functions of numbers. Pure; standard library only.

A simulated target decides, behind a prefix, an id that depends on the model's seed, the position and the hash of the prefix alone, so its
text can be compared with and without speculation like any other. A simulated draft says the same id with probability `acceptance`, by a
hash of the same three numbers, else another one: the share of proposals that stand is what was asked for, at every slot.

Times follow a roof line: a step takes a base, a little per row, and beyond a knee (where the arithmetic, not the memory, is what it waits
for) more per row; tokens of a prompt have a price of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from specdec.errors import InvalidRequest
from specdec.seeds import MASK64, mix64

FIRST_ID = 16  # ids below are left alone: the special ones of most vocabularies are among them
_DRAFT = 0x9E3779B97F4A7C15  # tells the draft's coin from the target's choice


@dataclass(frozen=True, slots=True)
class Simulation:
    """Times in ms. `acceptance` = the chance that the draft says what the target decides; `knee` = rows up to which a row costs `row_ms`,
    beyond them `beyond_ms` each."""

    seed: int = 0
    acceptance: float = 0.6
    step_ms: float = 20.0
    row_ms: float = 0.02
    prefill_ms: float = 0.02
    knee: int = 256
    beyond_ms: float = 0.1

    def took_ms(self, rows: int, prefill_tokens: int = 0) -> float:
        """One engine step. `rows` = rows that are scored, `prefill_tokens` = tokens fed beside them."""
        beyond = max(0, rows - self.knee)
        return self.step_ms + self.row_ms * (rows - beyond) + self.beyond_ms * beyond + self.prefill_ms * prefill_tokens

    def decides(self, position: int, prefix_hash: int, vocab_size: int) -> int:
        """The target's id at `position`, behind a prefix of that hash."""
        return _choice(mix64(mix64(self.seed ^ position) ^ prefix_hash), vocab_size)

    def proposes(self, position: int, prefix_hash: int, vocab_size: int) -> int:
        """The draft's."""
        token = self.decides(position, prefix_hash, vocab_size)
        coin = mix64(mix64(self.seed ^ _DRAFT ^ position) ^ prefix_hash)
        return token if coin < self.acceptance * (MASK64 + 1) else _next(token, vocab_size)


def _choice(number: int, vocab_size: int) -> int:
    first = min(FIRST_ID, vocab_size - 1)
    return first + number % (vocab_size - first)


def _next(token: int, vocab_size: int) -> int:
    """Another id that may be said."""
    first = min(FIRST_ID, vocab_size - 1)
    return first + (token + 1 - first) % (vocab_size - first)


def simulation(text: str, field: str) -> Simulation:
    """`name=number,…` → a simulation; what is not named keeps its default. Raises InvalidRequest naming `field`."""
    kinds: dict[str, type[int] | type[float]] = {entry.name: int if entry.type == "int" else float for entry in fields(Simulation)}
    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        name = name.replace("-", "_")
        if name not in kinds:
            raise InvalidRequest(field, f"{part!r}: known are {', '.join(kinds)}")
        try:
            values[name] = kinds[name](number)
        except ValueError:
            raise InvalidRequest(field, f"{part!r}: must be a number") from None
    found = replace(Simulation(), **values)  # type: ignore[arg-type]
    if not 0.0 <= found.acceptance <= 1.0:
        raise InvalidRequest(field, f"acceptance={found.acceptance:g} must lie in [0, 1]")
    for name in ("step_ms", "row_ms", "prefill_ms", "beyond_ms", "knee"):
        if not 0 <= getattr(found, name) < 1e9:
            raise InvalidRequest(field, f"{name}={getattr(found, name):g} must not be negative")
    return found

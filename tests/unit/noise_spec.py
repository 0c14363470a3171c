"""The noise as its specification reads, slow and dumb: Python integers, and logarithms of fifty digits. Shares no code with specdec.

`python -m tests.unit.noise_spec` prints proto/golden/noise.json anew.
"""

from __future__ import annotations

import json
import struct
from decimal import Decimal, localcontext
from typing import Any

U64 = 2**64
SEEDS = (0, 1, 2, 42, 0x9E3779B97F4A7C15, 2**63 - 1, 2**63, 2**64 - 1)
POSITIONS = (0, 1, 2, 511, 131071)
IDS = (0, 1, 2, 49151, 151935)


def finalise(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % U64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % U64
    return z ^ (z >> 31)


def h(seed: int, tag: int, position: int, token: int) -> int:
    return finalise(finalise(finalise(seed ^ tag) ^ position) ^ token)


def u(bits: int) -> float:
    value = (bits >> 11) * 2.0**-53 + 2.0**-54
    return value if value < 1.0 else 1.0 - 2.0**-53


def g(uniform: float) -> Decimal:
    """-log(-log(1 - u)) to fifty digits."""
    with localcontext() as context:
        context.prec = 50
        return -(-(1 - Decimal(uniform)).ln()).ln()


def float32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def vectors() -> list[dict[str, Any]]:
    entries = []
    for tag in range(4):
        for i, seed in enumerate(SEEDS):
            for j, position in enumerate(POSITIONS):
                token = IDS[(i + j) % len(IDS)]
                bits = h(seed, tag, position, token)
                uniform = u(bits)
                entries.append(
                    {
                        "seed": f"{seed:#018x}",
                        "tag": tag,
                        "position": position,
                        "id": token,
                        "h": f"{bits:#018x}",
                        "u": repr(uniform),
                        "gumbel": repr(float(g(uniform))),
                        "gumbel_float32": repr(float32(float(g(uniform)))),
                    }
                )
    return entries


def document() -> str:
    head = {
        "about": "Examples of the keyed noise. seed and h are 64-bit integers in hexadecimal; u is an exact double; gumbel is the double "
        "nearest to the mathematical value, implementations may be 4e-15 off; gumbel_float32 is what is added to a score.",
        "tags": {"shared": 0, "draft": 1, "acceptance": 2, "residual": 3},
        "formula": "h = mix64(mix64(mix64(seed ^ tag) ^ position) ^ id); u = (h >> 11) * 2^-53 + 2^-54, at most 1 - 2^-53; "
        "gumbel = -log(-log1p(-u)); mix64 is splitmix64's finaliser",
    }
    lines = ",\n    ".join(json.dumps(entry) for entry in vectors())
    return json.dumps(head, indent=2)[:-2] + ',\n  "vectors": [\n    ' + lines + "\n  ]\n}\n"


if __name__ == "__main__":
    print(document(), end="")

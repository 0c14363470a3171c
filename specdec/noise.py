"""Keyed noise: numbers that depend on (seed, stream, position, id) and on nothing else. Knows no logit, no session, no clock.

    h = mix64(mix64(mix64(seed ^ tag) ^ position) ^ id)         splitmix64's finaliser, 64-bit integers
    u = (h >> 11) * 2**-53 + 2**-54                             uniform in (0, 1); the one value that rounds to 1 is taken as 1 - 2**-53
    g = -log(-log1p(-u))                                        standard Gumbel, in [-3.61, 37.43]; rounded to float32 where it is added

Target and draft, on whatever hardware, must hear the same noise, and a number must not depend on its place in a vector (maths
libraries treat the last few elements differently). So the logarithms are written out here in IEEE double +, -, *, / and exact scaling,
in one fixed order: the same bits on any device, in any language, for one id or for a vocabulary. Within 2e-15 of the mathematical value.
proto/golden/noise.json holds examples for implementers.

Gumbel-max (Gumbel 1954; Maddison, Tarlow, Minka 2014, "A* sampling"): argmax over ids of log p + g is distributed as p.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec.seeds import mix64, position_key

GUMBEL_MAX = 37.5  # no noise is larger: u >= 2**-54

_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # ln 2 cut to 33 bits, so that exponent * _LN2_HIGH is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")  # the rest
_SQRT_HALF = math.sqrt(0.5)
_ODD_INVERSES = tuple(1.0 / n for n in range(21, 1, -2))  # 1/21, 1/19, ..., 1/3
_LARGEST_U = 1.0 - 2.0**-53


def _signed(x: int) -> int:
    """The 64-bit pattern of x as torch's int64 holds it."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical shift of int64: the sign bits that an arithmetic shift copies in are masked away."""
    return (x >> count) & ((1 << (64 - count)) - 1)


_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _mix64(x: Tensor) -> Tensor:
    """splitmix64's finaliser, elementwise on int64 (products wrap)."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def bits(seed: int | Tensor, tag: int, position: int | Tensor, ids: Tensor) -> Tensor:
    """h of every id, as int64. `ids` int64; seed and position may be int64 tensors (seeds as signed patterns) that broadcast with it."""
    if isinstance(seed, int) and isinstance(position, int):
        return _mix64(ids ^ _signed(position_key(seed, tag, position)))
    stream = _mix64(seed ^ tag) if isinstance(seed, Tensor) else _signed(mix64(seed ^ tag))
    key = stream ^ position
    return _mix64(_mix64(key if isinstance(key, Tensor) else torch.tensor(key)) ^ ids)


def uniform(seed: int | Tensor, tag: int, position: int | Tensor, ids: Tensor) -> Tensor:
    """u of every id, float64 in (0, 1). Shapes as in `bits`."""
    return (_shift_right(bits(seed, tag, position, ids), 11).double() * 2.0**-53 + 2.0**-54).clamp_(max=_LARGEST_U)


def gumbel(
    seed: int | Tensor, tag: int, position: int | Tensor, ids: Tensor | int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """g of every id, computed in float64 and rounded to `dtype`. `ids`: int64 tensor, or a vocabulary size n for ids 0 to n - 1."""
    if isinstance(ids, int):
        ids = torch.arange(ids)
    return gumbel_of_uniform(uniform(seed, tag, position, ids)).to(dtype)


def gumbel_of_uniform(u: Tensor) -> Tensor:
    """-log(-log1p(-u)), elementwise in float64; the same operations, in the same order, as `gumbel_one`."""
    near_zero = _twice_atanh(u / (2.0 - u))
    exponential = torch.where(u <= 0.25, near_zero, -_log(1.0 - u))
    return -_log(exponential)


def _twice_atanh(s: Tensor) -> Tensor:
    z = s * s
    series = torch.full_like(s, _ODD_INVERSES[0])
    for inverse in _ODD_INVERSES[1:]:
        series = series * z + inverse
    twice = s + s
    return twice + twice * (z * series)


def _log(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    low = mantissa < _SQRT_HALF
    mantissa = torch.where(low, mantissa + mantissa, mantissa)
    power = exponent.double() - low.double()
    series = _twice_atanh((mantissa - 1.0) / (mantissa + 1.0))
    return power * _LN2_HIGH + (series + power * _LN2_LOW)


def uniform_one(seed: int, tag: int, position: int, token: int) -> float:
    """`uniform` of one id in Python floats, bit for bit."""
    return min((mix64(position_key(seed, tag, position) ^ token) >> 11) * 2.0**-53 + 2.0**-54, _LARGEST_U)


def gumbel_one(seed: int, tag: int, position: int, token: int) -> float:
    """`gumbel` of one id in float64, in Python floats, bit for bit."""
    u = uniform_one(seed, tag, position, token)
    exponential = _twice_atanh_one(u / (2.0 - u)) if u <= 0.25 else -_log_one(1.0 - u)
    return -_log_one(exponential)


def _twice_atanh_one(s: float) -> float:
    z = s * s
    series = _ODD_INVERSES[0]
    for inverse in _ODD_INVERSES[1:]:
        series = series * z + inverse
    twice = s + s
    return twice + twice * (z * series)


def _log_one(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = mantissa + mantissa, exponent - 1
    series = _twice_atanh_one((mantissa - 1.0) / (mantissa + 1.0))
    return exponent * _LN2_HIGH + (series + exponent * _LN2_LOW)


def winner(scores: Tensor, seed: int, tag: int, position: int, ids: Tensor | None = None) -> int:
    """Column of the largest scores + noise; ties go to the lowest column. -inf marks impossible columns.

    `scores` [n] float32 or float64; `ids` [n] the token id of each column (None: the column itself). Noise is rounded to float32,
    then added in the dtype of the scores.
    """
    if ids is None:
        ids = torch.arange(scores.shape[0], device=scores.device)
    return int(torch.argmax(scores + gumbel(seed, tag, position, ids)))

"""Keyed noise: numbers that depend on (seed, stream, position, id) and on nothing else. Knows no session and no clock.

    h = mix64(mix64(mix64(seed ^ tag) ^ position) ^ id)    splitmix64's finaliser, 64-bit integers
    u = (h >> 11) * 2**-53 + 2**-54                        uniform in (0, 1); where that rounds to 1: 1 - 2**-53
    g = -log(-log1p(-u))                                   standard Gumbel, in [-3.61, 37.43]; float32 where it is added

Target and draft, on whatever hardware, must hear the same noise, and a number must not depend on its place in a vector
(maths libraries may treat the last few elements differently). So the logarithms are written out here in IEEE double
+, -, *, / and exact scaling, in one fixed order: the same bits on any device, in any language, for one id or for a
vocabulary, within 4e-15 of the mathematical value. proto/golden/noise.json holds examples for implementers.

Gumbel-max (Gumbel 1954; Maddison, Tarlow, Minka 2014, "A* Sampling"): the argmax over ids of log p + g is distributed
as p. `gumbel` is the definition, for tensors of any shape on any device; `winner` finds the same argmax of one row
on a CPU without computing most of the noise. Its pass over all ids is compiled where a compiler was at hand (specdec.native): whole numbers
only, so a session that moves to a machine without it hears the same noise.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec.native import loud as native
from specdec.ranking import FEW, NOWHERE, Floats, Places, head
from specdec.seeds import mix64, position_key

Keys = npt.NDArray[np.uint64]

_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_LN2 = math.log(2.0)
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # ln 2 cut to 32 bits, so that exponent * _LN2_HIGH is exact
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


def _mix64(x: Tensor) -> Tensor:
    """splitmix64's finaliser, elementwise on int64 (products wrap)."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MULTIPLIERS[0])
    x = (x ^ _shift_right(x, 27)) * _signed(_MULTIPLIERS[1])
    return x ^ _shift_right(x, 31)


def bits(seed: int | Tensor, tag: int, position: int | Tensor, ids: Tensor) -> Tensor:
    """h of every id, int64. seed and position may be int64 tensors (seeds as signed patterns); all broadcast with ids."""
    if isinstance(seed, int) and isinstance(position, int):
        return _mix64(ids ^ _signed(position_key(seed, tag, position)))
    stream = _mix64(seed ^ tag) if isinstance(seed, Tensor) else _signed(mix64(seed ^ tag))
    key = stream ^ position
    return _mix64(_mix64(key if isinstance(key, Tensor) else torch.tensor(key, device=ids.device)) ^ ids)


def uniform(seed: int | Tensor, tag: int, position: int | Tensor, ids: Tensor) -> Tensor:
    """u of every id, float64 in (0, 1). Shapes as in `bits`."""
    return (_shift_right(bits(seed, tag, position, ids), 11).double() * 2.0**-53 + 2.0**-54).clamp_(max=_LARGEST_U)


def gumbel(seed: int | Tensor, tag: int, position: int | Tensor, ids: Tensor | int, dtype: torch.dtype = torch.float32) -> Tensor:
    """g of every id, computed in float64, rounded to `dtype`. ids: int64 tensor, or n for the ids 0 to n - 1."""
    if isinstance(ids, int):
        ids = torch.arange(ids)
    return gumbel_of_uniform(uniform(seed, tag, position, ids)).to(dtype)


def gumbel_of_uniform(u: Tensor) -> Tensor:
    """-log(-log1p(-u)), elementwise in float64; the same operations, in the same order, as `gumbel_one`."""
    near_zero = _twice_atanh(u / (2.0 - u))
    return -_log(torch.where(u <= 0.25, near_zero, -_log(1.0 - u)))


def _twice_atanh(s: Tensor) -> Tensor:
    z = s * s
    series = torch.full_like(s, _ODD_INVERSES[0])
    for inverse in _ODD_INVERSES[1:]:
        series.mul_(z).add_(inverse)
    twice = s + s
    return series.mul_(z).mul_(twice).add_(twice)


def _log(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    low = mantissa < _SQRT_HALF
    mantissa = torch.where(low, mantissa + mantissa, mantissa)
    power = exponent.double() - low.double()
    series = _twice_atanh((mantissa - 1.0) / (mantissa + 1.0))
    return power * _LN2_HIGH + (series + power * _LN2_LOW)


def uniform_one(seed: int, tag: int, position: int, token: int) -> float:
    """`uniform` of one id in Python floats, bit for bit."""
    return _uniform_of_key(position_key(seed, tag, position), token)


def gumbel_one(seed: int, tag: int, position: int, token: int) -> float:
    """`gumbel` of one id in float64, in Python floats, bit for bit."""
    return _gumbel_of_key(position_key(seed, tag, position), token)


def _uniform_of_key(key: int, token: int) -> float:
    return min((mix64(key ^ token) >> 11) * 2.0**-53 + 2.0**-54, _LARGEST_U)


def _gumbel_of_key(key: int, token: int) -> float:
    u = _uniform_of_key(key, token)
    return -_log_one(_twice_atanh_one(u / (2.0 - u)) if u <= 0.25 else -_log_one(1.0 - u))


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


# The bounds behind `winner`. Let k = h >> 33. Then u >= k * 2**-31 and -log1p(-u) >= u, so g <= -log(u) <= 31 ln 2 - log k.
# h >> 33 does not need the last step of mix64. Ids are below 2**30, so the first step is one exclusive or with a constant.
# Roundings: log k < 21.5 within 4 ulp (8e-6), scores to float32, one subtraction, g to float32, one addition: together below
# 3e-5 + 3e-7 * |score|; and a score that can still win is within 40 of the best total. The slack is thirty times that.
_SLACK = 1e-3
_SLACK_PER_UNIT = 1e-5
_K_ZERO = np.float32(1e-7)  # stands for k = 0, where u >= 2**-54 is all that is known: 31 ln 2 - log(1e-7) > 54 ln 2 >= g
_CHUNK = 1 << 14  # ids at a time: scratch stays in the cache
_STEPS = (np.uint64(_MULTIPLIERS[0]), np.uint64(27), np.uint64(_MULTIPLIERS[1]), np.uint64(33))
NEAR, _MOST = 8.0, 1024  # the best scores are looked at first: those so near to the best, at most so many


@functools.lru_cache(maxsize=8)
def all_ids(n: int) -> Keys:
    """0 to n - 1 as keys, read-only."""
    ids = np.arange(n, dtype=np.uint64)
    ids.flags.writeable = False
    return ids


@functools.lru_cache(maxsize=1)
def _products() -> Keys:
    """id * first multiplier of the ids of a chunk, read-only."""
    products = np.arange(_CHUNK, dtype=np.uint64) * _STEPS[0]
    products.flags.writeable = False
    return products


def winner(scores: Floats, seed: int, tag: int, position: int, ids: Keys | None = None, guess: float | None = None) -> int:
    """Index of the largest scores + noise, ties to the lowest index; exactly that of the definition below.

        argmax(scores + gumbel(seed, tag, position, ids, float32))        added in the dtype of the scores

    scores [n] float32 or float64, -inf = impossible; ids [n] uint64 below 2**30, None: 0 to n - 1. Raises ValueError when
    nothing is possible. `guess`: a score that a few hundred ids may reach; it decides nothing but the time. An id is left out
    only when a bound on its noise proves that it cannot reach the best total found.
    """
    with np.errstate(over="ignore"):  # of float64 scores too low for a float32 bound
        return _Search(scores, position_key(seed, tag, position), ids, guess=guess).winner()


def drawn(weights: Floats, seed: int, tag: int, position: int, ids: Keys | None = None) -> int:
    """winner(log(weights), ...), at the price of a few logarithms. weights [n] >= 0."""
    with np.errstate(divide="ignore"):
        return _Search(weights, position_key(seed, tag, position), ids, np.log, 0.0).winner()


class _Search:
    """Best scores first, then those whose noise is large enough to make up for what they lack.

    values [n]: scores, or with `scale` what it turns into scores; `impossible` = the value whose score is -inf.
    """

    def __init__(
        self,
        values: Floats,
        key: int,
        ids: Keys | None,
        scale: np.ufunc | None = None,
        impossible: float = -math.inf,
        guess: float | None = None,
    ) -> None:
        self.values, self.key, self.scale, self.impossible, self.guess = values, key, scale, impossible, guess
        every = all_ids(len(values))
        self.ids = every if ids is None else ids
        self.every = self.ids is every
        self.best, self.chosen = -math.inf, -1

    def winner(self) -> int:
        first, border = NOWHERE, self.impossible
        if len(self.values) > FEW:
            first, border = head(self.values, 1, self._near() if self.guess is None else self.guess)
        if border > self.impossible:
            if len(first) > _MOST:
                first, border = first[:_MOST], float(self.values.max())
            self._look(first)
            self._look(self._loud(self._limit(border if self.scale is None else math.log(border))))
        else:
            self._look(np.flatnonzero(self.values > self.impossible))
        if self.chosen < 0:
            raise ValueError("no id is possible")
        return self.chosen

    def _near(self) -> float:
        highest = float(self.values.max())
        return highest - NEAR if self.scale is None else highest * math.exp(-NEAR)

    def _loud(self, limit: np.uint64) -> Places:
        """Places whose words are at most `limit`."""
        compiled = native.load()
        if compiled is not None:
            return compiled(self.key, None if self.every else self.ids, len(self.ids), int(limit))
        tabled = len(self.ids) // _CHUNK if self.every else 0
        parts = [_loud_of_all(self.key, tabled, limit)] if tabled else []
        for start in range(tabled * _CHUNK, len(self.ids), _CHUNK):
            loud = _words(self.key, self.ids[start : start + _CHUNK]) <= limit
            parts.append(np.flatnonzero(loud) + start)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _look(self, places: Places) -> None:
        """At these places, best bound first, until no bound reaches the best total."""
        scores, ids = self.values[places], places.view(np.uint64) if self.every else self.ids[places]
        if self.scale is not None:
            scores = self.scale(scores)
        bounds = _bounds(scores, self.key, ids)
        while len(bounds):
            index = int(bounds.argmax())
            bound = float(bounds[index])
            if bound == -math.inf or bound + 31.0 * _LN2 < self._least():
                break
            total = float(scores[index] + scores.dtype.type(np.float32(_gumbel_of_key(self.key, int(ids[index])))))
            place = int(places[index])
            if total > self.best or (total == self.best and place < self.chosen):
                self.best, self.chosen = total, place
            bounds[index] = -math.inf

    def _limit(self, ceiling: float) -> np.uint64:
        """The largest word with which a score of at most `ceiling` can still win."""
        most = math.exp(min(0.0, ceiling - self._least())) * 2.0**31  # k of an id that just reaches what it must
        return np.uint64(min((int(most) + 1) << 33, 1 << 64) - 1)

    def _least(self) -> float:
        """The total that a bound must reach."""
        return self.best - (_SLACK + _SLACK_PER_UNIT * abs(self.best))


def _words(key: int, ids: Keys) -> Keys:
    """Of every id 64 bits whose upper 31 are those of h: mix64 without its last step [n]."""
    words = ids ^ np.uint64(key ^ (key >> 30))
    words *= _STEPS[0]
    words ^= words >> _STEPS[1]
    words *= _STEPS[2]
    return words


def _loud_of_all(key: int, chunks: int, limit: np.uint64) -> Places:
    """Ids of the first chunks whose words are at most `limit`, in any order.

    Let c = key ^ (key >> 30) and r = (id ^ c) modulo the chunk, which runs over a chunk as id does. Then id ^ c = b + r, with one b
    for all ids of a chunk, and (id ^ c) * m = b * m + r * m: one addition to a table. The word of an id is found in place r.
    """
    constant = key ^ (key >> 30)
    low = constant & (_CHUNK - 1)
    words, shifted = np.empty(_CHUNK, dtype=np.uint64), np.empty(_CHUNK, dtype=np.uint64)
    loud = np.empty(chunks * _CHUNK, dtype=np.bool_)
    for start in range(0, len(loud), _CHUNK):
        base = np.uint64(((constant ^ low ^ start) * _MULTIPLIERS[0]) & ((1 << 64) - 1))
        np.add(_products(), base, out=words)
        np.right_shift(words, _STEPS[1], out=shifted)
        np.bitwise_xor(words, shifted, out=words)
        np.multiply(words, _STEPS[2], out=words)
        np.less_equal(words, limit, out=loud[start : start + _CHUNK])
    places = np.flatnonzero(loud)
    places ^= low
    return places


def _bounds(scores: Floats, key: int, ids: Keys) -> npt.NDArray[np.float32]:
    """scores - log k, float32 [n]: at least score + g - 31 ln 2, up to the slack."""
    log_k = (_words(key, ids) >> _STEPS[3]).view(np.int64).astype(np.float32)
    np.maximum(log_k, _K_ZERO, out=log_k)
    np.log(log_k, out=log_k)
    return np.subtract(scores, log_k, out=log_k, casting="same_kind")

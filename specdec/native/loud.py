"""The compiled search for ids with loud noise. Whole numbers only: what it finds is what specdec.noise finds without it."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specdec.native.build import NOISE, BuildFailed, variant

Loud = Callable[[int, npt.NDArray[np.uint64] | None, int, int], npt.NDArray[np.int64]]
log = logging.getLogger(__name__)


def bound(path: Path) -> Loud:
    """(key, ids [count] below 2**30 or None = 0 to count - 1, count, limit) → the ascending places whose words are at most `limit`.

    Raises OSError where `path` is no such library.
    """
    try:
        function = ctypes.CDLL(str(path)).specdec_loud
    except AttributeError as error:
        raise OSError(f"{path} is another library: {error}") from error
    pointer, word, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64
    function.argtypes, function.restype = [word, pointer, number, word, pointer], number

    def loud(key: int, ids: npt.NDArray[np.uint64] | None, count: int, limit: int) -> npt.NDArray[np.int64]:
        if ids is not None:
            ids = np.ascontiguousarray(ids)
        places = np.empty(count, dtype=np.int64)
        found = function(key, None if ids is None else ids.ctypes.data, count, limit, places.ctypes.data)
        return places[:found]

    return loud


@functools.cache
def load() -> Loud | None:
    """This CPU's, once per process; None where `make setup` left none. Never compiles: a request would wait for it."""
    try:
        path = NOISE.find(variant(), NOISE.places())
        if path is not None:
            return bound(path)
        log.info("the search of the noise is computed by numpy, which takes some 0.04 ms a row longer: it was not compiled (make setup)")
    except (BuildFailed, OSError) as error:
        log.info("the search of the noise is computed by numpy, which takes some 0.04 ms a row longer: %s", error)
    return None

"""The lean path under int8 on a CPU as compiled code: one call computes a whole step. Where it cannot be compiled, torch computes it."""

from specdec.engine.native.kernels import Kernels, load_kernels
from specdec.engine.native.model import Descriptors, NativeModel, why_not

__all__ = ["Descriptors", "Kernels", "NativeModel", "load_kernels", "why_not"]

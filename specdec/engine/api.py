"""The engine as its users see it: what it is built from, what it says of itself, what it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from specdec.engine.batch import Segment
from specdec.errors import EngineFault

DTYPES = ("int8", "int4", "float32", "float64", "bfloat16")
QUANTISED = ("int8", "int4")  # the CPU's
PATHS = ("auto", "lean", "generic", "sim")
DEVICES = ("cpu", "cuda")


class UnsupportedModel(EngineFault):
    """A model this engine must not serve; says which and why, and what would help."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to build an engine.

    `dtype`: int8 (weights and activations, batch-invariant), int4 (the same with weights of 4 bits, for a draft; int8 where there are no
    compiled kernels or they cannot compute the model), float32, float64 (the reference), bfloat16.
    `device`: cpu, or cuda: float32, float64 and bfloat16 on a GPU, where the batch decides the kernels and so a row's last bits.
    `path`: lean (own forward of the Llama shape), generic (transformers' modules), auto (lean where it fits), sim (no model: sim.py, by
    what `simulated` says).
    `kv_tokens`: bound on K/V over all slots; 8192 are 377 MB for SmolLM2-135M, whose token takes 46 KB.
    `max_rows`: most tokens in one call. `window`: longest slot; None = what the model was made for, or kv_tokens when that is less.
    `reduced_head`: score only the ids of model_dir/draft_vocab.json when the file is there.
    `native`: under int8 and int4 on the lean path, compiled kernels where they can be had; False: torch's, whose bits differ.
    `replay`: on a GPU, record steps of a recurring shape and replay them (lean path).
    `self_test`: prove at start, on this machine, what `EngineInfo.batch_invariant` claims; without it the claim is False.
    """

    model_dir: Path | str = ""
    dtype: str = "int8"
    path: str = "auto"
    device: str = "cpu"
    kv_tokens: int = 8192
    threads: int = 1
    max_rows: int = 512
    window: int | None = None
    reduced_head: bool = False
    native: bool = True
    replay: bool = True
    self_test: bool = True
    simulated: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} must be one of {', '.join(DTYPES)}")
        if self.path not in PATHS:
            raise ValueError(f"path {self.path!r} must be one of {', '.join(PATHS)}")
        self._check_device()
        for name in ("kv_tokens", "threads", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window} must be at least 1")

    def _check_device(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"device {self.device!r} must be one of {', '.join(DEVICES)}")
        if self.device == "cuda" and self.dtype in QUANTISED:
            raise ValueError(f"dtype {self.dtype!r} runs on the CPU only; with device cuda use bfloat16, float32 or float64")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device 'cuda' is not there: torch {torch.__version__} sees no GPU on this machine; use cpu")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself.

    `vocab_size` = ids it can be fed, and columns of its logits unless `draft_ids` names the target id of each column.
    `window` = most tokens of a slot. `dtype` = the arithmetic in use, which is float32 where int8 kernels are missing.
    `batch_invariant`: a row has the same bits in any batch, in any cutting, with any neighbours; measured at start.
    Two engines with equal `numerics_fingerprint`, both invariant, give the same bits. `model_fingerprint` stands for what the model's files
    hold, whatever computes it: engines that differ in it say different things.
    """

    vocab_size: int
    window: int
    eos_ids: tuple[int, ...]
    dtype: str
    path: str
    batch_invariant: bool
    numerics_fingerprint: str
    kv_total_tokens: int
    max_rows: int
    draft_ids: tuple[int, ...] | None = None
    model_fingerprint: str = ""


class KvSlots(Protocol):
    """K/V of many sessions under one bound. Memory grows with the slots and is freed on close."""

    @property
    def used_tokens(self) -> int: ...

    def open(self) -> int:
        """A new, empty slot."""

    def fork(self, slot: int, length: int) -> int:
        """A new slot with the first `length` tokens of another. Memory is shared until either writes; both then live on their own, also
        when the other closes."""

    def branch(self, slot: int, length: int) -> int:
        """A new slot that reads its first `length` tokens from `slot`, which must keep them as long as the branch lives, and holds up to
        BRANCH_TOKENS more of its own. A branch has no branches and is never cut below `length`. Raises ValueError and OutOfRoom."""

    def graft(self, slot: int, branch: int) -> None:
        """`slot` becomes what its branch is: the tokens the branch read from it, then the branch's own, copied. The branch closes. Raises
        ValueError when another branch reads what would change, and OutOfRoom; then nothing has changed."""

    def close(self, slot: int) -> None:
        """Frees it, and its branches with it."""

    def length(self, slot: int) -> int: ...

    def truncate(self, slot: int, length: int) -> None:
        """Exact rollback: what comes next is as if nothing after `length` had ever been fed."""


class Engine(Protocol):
    """Synchronous, and used by one thread only: no call locks anything."""

    info: EngineInfo

    @property
    def kv(self) -> KvSlots: ...

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes by kind; any thread may read it. `weights`: what the model keeps to compute with, embeddings, scales and rotary tables
        included, each byte once however many tensors lie on it. `kv`: the room for keys and values at its bound; `kv_used`: what is booked
        of it. On a GPU also `device` and `device_peak`: what this process has allocated there, and the most it ever had."""

    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        """One pass over all segments; the slots grow by their tokens.

        Answers one [n - logits_from, columns] per segment, in order. Raises ValueError on segments that do not fit and OutOfRoom, both
        before anything has changed. A row that is not finite is left as it is and does not touch any other row.
        """

"""Settings of the draft service: SPECDEC_* variables, read once at start."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from specdec.runtime.settings import CommonSettings, setting


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    model: Path = setting(doc="folder of the draft model, its tokenizer included")
    dtype: str = setting(
        "int4",
        choices=("int4", "int8", "float32", "float64", "bfloat16"),
        doc="number format; int4 = weights of 4 bits, int8 where there are no compiled kernels",
    )
    engine_path: str = setting("auto", choices=("auto", "lean", "generic", "sim"), doc="which forward the engine uses; sim = no model")
    sim: str = setting("", doc="of a simulated engine, name=number,…: step_ms, row_ms, prefill_ms, knee, beyond_ms, seed, acceptance")
    device: str = setting("cpu", choices=("cpu", "cuda"), doc="where the model runs; cuda takes neither int4 nor int8")
    threads: int = setting(1, low=1, high=256, doc="threads inside one operation")
    kv_tokens: int = setting(16384, low=64, doc="room for keys and values, tokens over all sessions")
    max_sessions: int = setting(64, low=1, high=4096, doc="most sessions at once, over all streams")
    max_step_rows: int = setting(256, low=8, high=8192, doc="most tokens fed in one forward pass")
    self_test: bool = setting(True, doc="prove at start that a row is the same in any batch")
    hung_step_ms: int = setting(
        30_000, low=100, high=3_600_000, doc="age at which a running step is taken for hung and `liveness` goes off, ms"
    )
    budget_tokens: int = setting(64, low=1, high=256, doc="most tokens a session may hold past its last commit, whatever it asks for")
    max_num_speculative_tokens: int = setting(16, low=1, high=64, doc="longest block a session may ask for")
    lookahead_floor: float = setting(
        0.2, low=0, high=1, doc="smallest chance of a whole block at which the draft works past it; 0 = always"
    )
    speculative_fanout: int = setting(
        8,
        low=0,
        high=16,
        doc="outcomes of a block in flight that the draft works on, per session; 0 or 1 = only that all of it is accepted",
    )
    branch_floor: float = setting(
        0.015, low=0, high=1, doc="smallest chance to be of use at which a token is drafted for one of several outcomes"
    )
    scaling_smoothing_ms: int = setting(
        10_000, low=100, high=600_000, doc="time constant of the load that is told to who scales the pool, ms"
    )

    def problems(self) -> list[str]:
        found = super().problems()
        if self.device == "cuda" and self.dtype in ("int4", "int8"):
            found.append(
                f"SPECDEC_DTYPE={self.dtype} runs on the CPU only; with SPECDEC_DEVICE=cuda set it to bfloat16, float32 or float64"
            )
        return found


if __name__ == "__main__":
    from specdec.runtime.listening import checked

    sys.exit(checked("draft", Settings))

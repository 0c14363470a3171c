"""Settings of the target service, from SPECDEC_* variables; read once."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from specdec.runtime.settings import CommonSettings, setting
from specdec.terms import MAX_ROUND_RESULTS


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    model: Path = setting(doc="folder of the model")
    dtype: str = setting("int8", choices=("int8", "float32", "float64", "bfloat16"), doc="number format of the engine")
    engine_path: str = setting("auto", choices=("auto", "lean", "generic", "sim"), doc="which forward the engine uses; sim = no model")
    sim: str = setting("", doc="of a simulated engine, name=number,…: step_ms, row_ms, prefill_ms, knee, beyond_ms, seed")
    device: str = setting("cpu", choices=("cpu", "cuda"), doc="where the model runs; cuda takes no int8")
    threads: int = setting(1, low=1, high=1024, doc="threads inside one operation")
    kv_tokens: int = setting(8192, low=64, doc="room for keys and values, tokens of all sessions together")
    prefix_cache: bool = setting(True, doc="keep what sessions computed, while nobody needs its room, for prompts that begin alike")
    max_sessions: int = setting(64, low=1, high=65536, doc="most sessions held at once")
    max_step_rows: int = setting(64, low=1, high=65536, doc="most rows of one engine step; longer prefills are cut into pieces")
    self_test: bool = setting(True, doc="prove batch invariance at the start")
    hung_step_ms: int = setting(
        30_000, low=100, high=3_600_000, doc="age at which a running step is taken for hung and `liveness` goes off, ms"
    )
    reserve_tokens: int = setting(128, low=0, doc="room to grow that a new session must find, tokens")
    lease_ms: int = setting(10_000, low=0, high=3_600_000, doc="how long sessions outlive their stream, ms")
    max_unread_results: int = setting(1024, low=1, doc="unread answers after which a stream is closed")
    max_run_ahead: int = setting(64, low=0, high=MAX_ROUND_RESULTS - 1, doc="most tokens decided after a Step without being asked")
    max_num_speculative_tokens: int = setting(16, low=0, high=1024, doc="most proposals in one Step")
    scaling_smoothing_ms: int = setting(
        10_000, low=100, high=600_000, doc="time constant of the load that is told to who scales the pool, ms"
    )

    def problems(self) -> list[str]:
        told = super().problems()
        if self.max_step_rows <= self.max_num_speculative_tokens:
            told.append(f"SPECDEC_MAX_STEP_ROWS={self.max_step_rows} must exceed SPECDEC_MAX_NUM_SPECULATIVE_TOKENS")
        if self.device == "cuda" and self.dtype == "int8":
            told.append("SPECDEC_DTYPE=int8 runs on the CPU only; with SPECDEC_DEVICE=cuda set it to bfloat16, float32 or float64")
        return told


if __name__ == "__main__":
    from specdec.runtime.listening import checked

    sys.exit(checked("target", Settings))

"""What a model server says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model server is; servers of one release must agree in vocabulary_fingerprint. `model_fingerprint` empty: it does not say."""

    model: str
    vocab_size: int  # ids the tokenizer knows
    vocabulary_fingerprint: bytes
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    boot_id: str
    numerics_fingerprint: str
    batch_invariant: bool
    dtype: str
    kv_total_tokens: int
    max_num_speculative_tokens: int
    max_sessions: int
    model_fingerprint: str = ""

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

    def goes_on_at(self, other: ModelInfo) -> bool:
        """Whether an answer of the one model may go on at the other. Numerics may differ: that costs the bit-for-bit promise alone. What
        one of them does not tell is not compared."""
        named = self.model, self.vocab_size, self.vocabulary_fingerprint, self.eos_token_ids
        if named != (other.model, other.vocab_size, other.vocabulary_fingerprint, other.eos_token_ids):
            return False
        return self.model_fingerprint == other.model_fingerprint or not (self.model_fingerprint and other.model_fingerprint)

"""A model folder without weights: a byte-level tokenizer with a few hundred pairs of letters, for services of a simulated system."""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specdec.vocabulary import Vocabulary, vocabulary

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WINDOW = 1 << 20


def write(folder: Path) -> Vocabulary:
    """Writes tokenizer.json and config.json; what a service will read there."""
    pairs = [(first, second) for first in string.ascii_lowercase for second in string.ascii_lowercase]
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(first + second for first, second in pairs)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, pairs))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "simulated", "vocab_size": len(words), "eos_token_id": 2, "max_position_embeddings": WINDOW}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[2]}))
    return vocabulary(folder)

"""A model folder's vocabulary: how many ids, what bytes each stands for, which ones end a text. Knows no model, no text, no torch.

Rules
- Servers that exchange ids must agree on the bytes of every id; the fingerprint is the proof. Sizes alone prove nothing: two
  tokenizers of equal size may have two ids swapped, and a padded output head makes one tokenizer look like two.
- `size` counts the ids the tokenizer knows. An output head may be longer (padding): ids beyond `size` are nobody's.
- End-of-sequence ids come from config.json (`eos_token_id`, one or a list) and from the `eos_token` of tokenizer_config.json.
  generation_config.json is not read, neither for ids nor for sampling defaults: no file of a checkpoint changes what a request
  means. A chat model that names a further end token only there is asked with `stop_token_ids`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specdec.errors import NotFound

FINGERPRINT_BYTES = 16
_ABSENT, _ORDINARY, _SPECIAL = b"\0", b"\1", b"\2"
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_DIRTY = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " do not", " 's", " 've", " 're")  # in the order of the library
_WINDOW_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`size` = largest id + 1; `fingerprint` = hash over the bytes of every id; `max_model_len` = window in tokens, if told."""

    size: int
    fingerprint: bytes
    eos_ids: tuple[int, ...]
    max_model_len: int | None


def vocabulary(model_dir: str | Path) -> Vocabulary:
    """Reads tokenizer.json, tokenizer_config.json and config.json of a folder. Raises NotFound without a tokenizer.json."""
    return describe(load_tokenizer(model_dir), model_dir)


def describe(tokenizer: Tokenizer, model_dir: str | Path) -> Vocabulary:
    """The same for a tokenizer that is loaded already."""
    table = token_bytes(tokenizer)
    special = special_ids(tokenizer)
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    for token_id, value in enumerate(table):
        mark = _ABSENT if value is None else _SPECIAL if token_id in special else _ORDINARY
        value = value or b""
        digest.update(mark + len(value).to_bytes(4, "little") + value)
    config = read_json(Path(model_dir) / "config.json")
    eos = _eos_ids(tokenizer, config, read_json(Path(model_dir) / "tokenizer_config.json"), len(table))
    return Vocabulary(len(table), digest.digest(), eos, _window(config))


def load_tokenizer(model_dir: str | Path) -> Tokenizer:
    path = Path(model_dir) / "tokenizer.json"
    if not path.is_file():
        raise NotFound(
            f"{model_dir} holds no tokenizer.json; a tokenizer in another format can be converted by loading it"
            " with transformers and saving it again"
        )
    tokenizer = Tokenizer.from_file(str(path))
    # A file may ask for truncation or padding, which suits training; a prompt is never cut or filled in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when the file does not exist."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that decoding leaves out on request."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def token_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """The bytes each id stands for inside a text, None for an id that names nothing. Marks of word starts are spaces here;
    that some decoders drop the first one of a text is the decoder's affair."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    table: list[bytes | None] = [None] * (max(ids.values(), default=-1) + 1)
    steps = decoder_steps(tokenizer)
    for token, token_id in ids.items():
        table[token_id] = _bytes_inside(token, steps)
    return table


def _bytes_inside(token: str, steps: list[dict[str, Any]]) -> bytes:
    """What the decoder's steps make of a token that is not the first. Steps that look at the whole text come after these."""
    if not steps:
        token = " " + token  # what the library does without a decoder
    for step in steps:
        match step["type"]:
            case "ByteLevel":
                return byte_level_bytes(token)
            case "ByteFallback" if byte := _BYTE_FALLBACK.fullmatch(token):
                return bytes((int(byte[1], 16),))
            case "Metaspace":
                token = token.replace(step["replacement"], " ")
            case "Replace" if "String" in step["pattern"]:
                token = token.replace(step["pattern"]["String"], step["content"])
            case "WordPiece":
                token = word_piece(token, step["prefix"], step["cleanup"], first=False)
            case "BPEDecoder":
                token = token.replace(step["suffix"], " ")
    return token.encode()


def word_piece(piece: str, prefix: str, cleanup: bool, first: bool) -> str:
    """A space in front of every piece but the first, unless a prefix says that a word goes on; spaces that English does not write go."""
    if not first:
        piece = piece.removeprefix(prefix) if piece.startswith(prefix) else " " + piece
    for dirty in _DIRTY if cleanup else ():
        piece = piece.replace(dirty, " don't" if dirty == " do not" else dirty.strip())
    return piece


def decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The tokenizer's decoder as a flat list of steps, as tokenizer.json writes them; empty when it has none."""
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    return _flat(json.loads(decoder.__getstate__()))


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for child in step["decoders"] for inner in _flat(child)]


def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()


@functools.lru_cache(maxsize=1 << 15)
def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a token with a foreign character is taken literally, as the library does."""
    try:
        return bytes([BYTE_OF_CHAR[c] for c in token])
    except KeyError:
        return token.encode()


def _eos_ids(tokenizer: Tokenizer, config: dict[str, Any], tokenizer_config: dict[str, Any], size: int) -> tuple[int, ...]:
    told = config.get("eos_token_id", _text_config(config).get("eos_token_id"))
    ids = set(told if isinstance(told, list) else [] if told is None else [told])
    token = tokenizer_config.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str) and (token_id := tokenizer.token_to_id(token)) is not None:
        ids.add(token_id)
    return tuple(sorted(i for i in ids if isinstance(i, int) and 0 <= i < size))


def _window(config: dict[str, Any]) -> int | None:
    for source in (config, _text_config(config)):
        for key in _WINDOW_KEYS:
            if isinstance(source.get(key), int):
                return int(source[key])
    return None


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints of several modalities keep the language model's part apart."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}

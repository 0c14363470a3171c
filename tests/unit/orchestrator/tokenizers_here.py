"""Small tokenizers of every family that streams differently, made in the process."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LINES = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "def add(a, b):\n    return a + b\n",
    "안녕하세요 세계, 다람쥐 헌 쳇바퀴에 타고파",
    "שָׁלוֹם עוֹלָם and naïve café",
]
SPECIAL = ["<s>", "</s>", "<|im_end|>"]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


@cache
def byte_level() -> Tokenizer:
    """GPT-2's family: every character may be cut into bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _trained(tokenizer)


@cache
def llama3() -> Tokenizer:
    """The same behind a pattern of its own, as in Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated", invert=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return _trained(tokenizer)


def _trained(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return _special(tokenizer)


def _pieces() -> dict[str, int]:
    words = ["▁", "▁the", "▁Khaleesi", "▁is", "▁_", "▁_leading", "_x", "_", "▁▁", "ing"]
    characters = sorted({char for line in LINES[:2] for char in line if not char.isspace()})
    vocab = {token: i for i, token in enumerate(["<unk>", *BYTES])}
    for token in [*words, *characters]:
        vocab.setdefault(token, len(vocab))
    return vocab


@cache
def byte_fallback() -> Tokenizer:
    """Llama's family: words start with a mark, what the vocabulary lacks is written in bytes, one first space is dropped."""
    vocab = _pieces()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return _special(tokenizer)


@cache
def byte_fallback_no_strip() -> Tokenizer:
    """Gemma's family: the same without the dropped space."""
    tokenizer = Tokenizer.from_str(byte_fallback().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """SentencePiece words without bytes."""
    vocab = [(token, -1.0) for token in ["<unk>", *[t for t in _pieces() if not t.startswith("<0x")][1:]]]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _special(tokenizer)


@cache
def words() -> Tokenizer:
    """No decoder at all: the library joins with spaces."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _special(tokenizer)


@cache
def strip_each() -> Tokenizer:
    """A step per piece that trims its start, in front of the join."""
    tokenizer = Tokenizer.from_str(byte_fallback().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.Strip("_", 1, 0), decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@cache
def strip_start() -> Tokenizer:
    """Trims the start of the whole text, by two."""
    tokenizer = Tokenizer.from_str(byte_fallback().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    return tokenizer


@cache
def unigram_bytes() -> Tokenizer:
    """SentencePiece Unigram that writes in bytes what it lacks; its decoder marks the first word only."""
    vocab = [(token, -1.0 - 0.01 * len(token)) for token in _pieces()]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)])
    return _special(tokenizer)


@cache
def metaspace_never() -> Tokenizer:
    """Words whose first mark is a space like the others."""
    tokenizer = Tokenizer.from_str(metaspace().to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return tokenizer


@cache
def word_pieces() -> Tokenizer:
    """BERT's family: `##` joins, and spaces in front of punctuation go."""
    pieces = ["<unk>", "the", "##s", "##", "do", "n't", "not", " do not", "'s", " ' ", "'", ".", ",", "?", "!", "é", "안녕", "x##y", "###"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _special(tokenizer)


@cache
def word_pieces_as_they_are() -> Tokenizer:
    tokenizer = Tokenizer.from_str(word_pieces().to_str())
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


@cache
def word_ends() -> Tokenizer:
    """GPT's first: `</w>` ends a word."""
    vocab = {token: i for i, token in enumerate(["<unk>", "t", "h", "e", "s", "</w>", "the</w>", "s</w>", "안녕</w>", "</w></w>", "x</w"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return _special(tokenizer)


FAMILIES = {
    build.__name__: build
    for build in (
        byte_level,
        llama3,
        byte_fallback,
        byte_fallback_no_strip,
        unigram_bytes,
        metaspace,
        metaspace_never,
        words,
        word_pieces,
        word_pieces_as_they_are,
        word_ends,
        strip_each,
        strip_start,
    )
}

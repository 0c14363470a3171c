"""Ids to text, one id at a time. Pure; knows no session and no stop string.

Rules
1. The text released after some ids is a function of those ids alone, never of how they were cut into blocks. So a resumed answer goes
   on where the first stream stopped, and a block may end inside a character.
2. Everything released plus `flush()` is what the tokenizer's own decoder makes of all the ids. No window of recent ids is decoded
   again (a window may start inside a character): each step of the decoder is a small transducer, so an id costs the same whether
   it is the tenth or the ten-thousandth.
3. A decoder step that is not known here is refused when the tokenizer is loaded, by name.

Byte-fallback tokenizers decode a run of byte ids as a whole: one broken byte turns the whole run into U+FFFD. A run is therefore held
until it ends, for at most MAX_HELD_BYTES ids; then complete characters are let go, and what breaks later breaks alone.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from specdec.errors import Unsupported
from specdec.vocabulary import byte_level_bytes, decoder_steps, special_ids

MAX_HELD_BYTES = 64
PRIMING_TOKENS = 128  # newest prompt ids that can matter to what follows
REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Step(Protocol):
    """One step of a decoder. Pieces of text in, pieces out; what must wait for more stays inside."""

    def push(self, piece: str) -> Sequence[str]: ...

    def settle(self) -> None:
        """The prompt ends here: its complete characters are the prompt's, a character begun goes on."""

    def flush(self) -> Sequence[str]: ...


class _PerPiece:
    """Steps that look at one piece alone, or at whether it is the first: nothing ever waits in them."""

    def settle(self) -> None:
        pass

    def flush(self) -> Sequence[str]:
        return ()


class _Replace(_PerPiece):
    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content

    def push(self, piece: str) -> Sequence[str]:
        return (piece.replace(self._pattern, self._content),)


class _Metaspace(_PerPiece):
    """Marks of word starts become spaces; in the first piece of a text they vanish, unless the tokenizer adds none there."""

    def __init__(self, replacement: str, prepend_scheme: str) -> None:
        self._mark, self._drop = replacement, prepend_scheme != "never"

    def push(self, piece: str) -> Sequence[str]:
        drop, self._drop = self._drop, False
        return (piece.replace(self._mark, "" if drop else " "),)


class _JoinWithSpaces(_PerPiece):
    """What the library does without a decoder."""

    def __init__(self) -> None:
        self._first = True

    def push(self, piece: str) -> Sequence[str]:
        first, self._first = self._first, False
        return (piece if first else " " + piece,)


class _StripEach(_PerPiece):
    """Up to `start` leading and `stop` trailing characters of every piece."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop

    def push(self, piece: str) -> Sequence[str]:
        left = _run(piece, self._content, self._start)
        right = len(piece) - _run(piece[::-1], self._content, self._stop)
        return (piece[left : max(left, right)],)


class _StripText:
    """The same for the text as a whole: trailing characters wait until something follows them."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._held = ""

    def push(self, piece: str) -> Sequence[str]:
        cut = _run(piece, self._content, self._start)
        self._start = self._start - cut if cut == len(piece) else 0
        piece = self._held + piece[cut:]
        trailing = _run(piece[::-1], self._content, self._stop)
        self._held = piece[len(piece) - trailing :]
        return (piece[: len(piece) - trailing],)

    def settle(self) -> None:
        pass

    def flush(self) -> Sequence[str]:
        self._held = ""
        return ()


def _run(text: str, char: str, most: int) -> int:
    """Leading `char`s of the text, at most `most`."""
    count = 0
    while count < min(most, len(text)) and text[count] == char:
        count += 1
    return count


class _ByteLevel:
    """Byte-level BPE: pieces are bytes, and only complete characters leave."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> Sequence[str]:
        return (self._utf8.decode(byte_level_bytes(piece)),)

    def settle(self) -> None:
        pass

    def flush(self) -> Sequence[str]:
        return (self._utf8.decode(b"", final=True),)


class _ByteFallback:
    """`<0xNN>` pieces are bytes of characters the vocabulary lacks. The run so far is valid, or it is broken and lost as a whole."""

    def __init__(self) -> None:
        self._run = bytearray()
        self._broken = False

    def push(self, piece: str) -> Sequence[str]:
        match = _BYTE.fullmatch(piece)
        if match is None:
            return (*self.flush(), piece)
        if self._broken:
            return (REPLACEMENT,)
        self._run.append(int(match[1], 16))
        complete = _complete(self._run)
        if complete is None:
            self._broken = True
            return self._give_up()
        if len(self._run) > MAX_HELD_BYTES:
            return (self._release(complete),)
        return ()

    def _release(self, complete: int) -> str:
        text = self._run[:complete].decode()
        del self._run[:complete]
        return text

    def _give_up(self) -> Sequence[str]:
        lost = [REPLACEMENT] * len(self._run)
        self._run.clear()
        return lost

    def settle(self) -> None:
        self._release(_complete(self._run) or 0)

    def flush(self) -> Sequence[str]:
        self._broken = False
        if _complete(self._run) != len(self._run):
            return self._give_up()
        return (self._release(len(self._run)),) if self._run else ()


def _complete(run: bytearray) -> int | None:
    """Bytes of the run that are complete characters; None when no continuation can make it valid."""
    try:
        run.decode()
        return len(run)
    except UnicodeDecodeError as error:
        # "unexpected end" is a character that has begun; every other reason is final.
        return error.start if error.reason == "unexpected end of data" else None


def _steps(described: Iterable[dict[str, Any]]) -> list[Step]:
    steps: list[Step] = []
    fused = False  # behind this, pieces are parts of one text and their borders mean nothing
    for step in described:
        kind = step["type"]
        if kind == "ByteLevel":
            steps.append(_ByteLevel())
            fused = True
        elif kind == "ByteFallback":
            steps.append(_ByteFallback())
        elif kind == "Fuse":
            fused = True
        elif kind == "Metaspace" and not fused:
            steps.append(_Metaspace(step["replacement"], step.get("prepend_scheme", "always")))
        elif kind == "Replace" and "String" in step["pattern"] and (not fused or len(step["pattern"]["String"]) == 1):
            steps.append(_Replace(step["pattern"]["String"], step["content"]))
        elif kind == "Strip":
            build = _StripText if fused else _StripEach
            steps.append(build(step["content"], step["start"], step["stop"]))
        else:
            raise Unsupported("tokenizer.json: decoder", f"the step {kind} cannot be streamed here")
    return steps or [_JoinWithSpaces()]


class DecoderPlan:
    """What the decoders of all answers share. Raises Unsupported when the tokenizer's decoder has a step that is not known here."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = special_ids(tokenizer)
        self._described = decoder_steps(tokenizer)
        self.steps()

    def steps(self) -> list[Step]:
        return _steps(self._described)


class IncrementalDecoder:
    """The text of one answer as its ids arrive. One per answer; not shared.

    `prompt` = ids before the answer: they consume what happens only at the start of a text (a first space dropped), and a character
    begun by the last of them is completed here. With `skip_special_tokens` special ids leave no text; `step` still names them, since
    a stop string may.
    """

    def __init__(self, plan: DecoderPlan, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = plan.tokenizer
        self._hidden = plan.special if skip_special_tokens else frozenset()
        self._steps = plan.steps()
        for token_id in prompt[-PRIMING_TOKENS:]:
            self.step(token_id)
        for step in self._steps:
            step.settle()

    def step(self, token_id: int) -> tuple[str, str]:
        """(text that is final now, hidden text of a special id that is left out). Ids that name nothing have no text."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return "", ""
        if token_id in self._hidden:
            return "", token
        return self._through((token,), 0), ""

    def push(self, ids: Iterable[int]) -> str:
        """Text that is final after these ids and was not before."""
        return "".join(self.step(token_id)[0] for token_id in ids)

    def flush(self) -> str:
        """The rest; the answer has ended. A character left unfinished shows as U+FFFD, as in the tokenizer's own decoding."""
        text = ""
        for i, step in enumerate(self._steps):
            text += self._through(step.flush(), i + 1)
        return text

    def _through(self, pieces: Sequence[str], first: int) -> str:
        for step in self._steps[first:]:
            pieces = [out for piece in pieces for out in step.push(piece)]
        return "".join(pieces)

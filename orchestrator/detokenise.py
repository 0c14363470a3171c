"""Ids to text, one id at a time. Pure; knows no session and no stop string.

Rules
1. The text released after some ids is a function of those ids alone, never of how they were cut into blocks. So a resumed answer goes
   on where the first stream stopped, and a block may end inside a character.
2. Everything released plus `flush()` is what the tokenizer's own decoder makes of all the ids. No window of recent ids is decoded
   again (a window may start inside a character): each step of the decoder is a small transducer, so an id costs the same whether
   it is the tenth or the ten-thousandth.
3. Special ids that are left out of the text still name themselves, at their place in it, since a stop string may (`Hidden`). Of those
   behind a character that has begun and does not go on, the first MAX_HELD_MARKS do.
4. A decoder step that is not known here is refused when the tokenizer is loaded, by name.

Byte-fallback tokenizers decode a run of byte ids as a whole: one broken byte turns the whole run into U+FFFD. A run is therefore held
until it ends, for at most MAX_HELD_BYTES ids; from then on each complete character is let go, and what breaks later breaks alone.
"""

from __future__ import annotations

import codecs
import copy
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from specdec.errors import Unsupported
from specdec.vocabulary import byte_level_bytes, decoder_steps, special_ids, word_piece

MAX_HELD_BYTES = 64
MAX_HELD_MARKS = 16  # hidden ids behind a character begun that a stop string may still name: each of them is searched with all before it
PRIMING_TOKENS = 128  # newest prompt ids that can matter to what follows
REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_INSIDE_CHARACTER = re.compile(r"<0x[89ABab][0-9A-Fa-f]>")


class Hidden(str):
    """The text of a special id that is left out of the answer."""


class Step(Protocol):
    """One step of a decoder. Pieces of text in, pieces out; what must wait for more stays inside."""

    def push(self, piece: str) -> Sequence[str]: ...

    def settle(self) -> Sequence[str]:
        """The prompt ends here: its complete characters are the prompt's, a character begun goes on."""

    def waiting(self) -> str:
        """Complete characters that are held because what follows may change them."""

    def flush(self) -> Sequence[str]: ...


class _PerPiece:
    """Steps that look at one piece alone, or at whether it is the first: nothing ever waits in them."""

    def settle(self) -> Sequence[str]:
        return ()

    def waiting(self) -> str:
        return ""

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


class _WordPiece(_PerPiece):
    def __init__(self, prefix: str, cleanup: bool) -> None:
        self._prefix, self._cleanup, self._first = prefix, cleanup, True

    def push(self, piece: str) -> Sequence[str]:
        first, self._first = self._first, False
        return (word_piece(piece, self._prefix, self._cleanup, first),)


class _WordEnds(_PerPiece):
    """Marks of word ends become spaces; in the last piece of a text they vanish, so they wait until something follows."""

    def __init__(self, suffix: str) -> None:
        self._suffix, self._held = suffix, ""

    def push(self, piece: str) -> Sequence[str]:
        before, cut = self._held.replace(self._suffix, " "), piece.find(self._suffix)
        cut = len(piece) if cut < 0 else cut
        self._held = piece[cut:]
        return (before + piece[:cut],)

    def flush(self) -> Sequence[str]:
        held, self._held = self._held, ""
        return (held.replace(self._suffix, ""),)


class _StripEach(_PerPiece):
    """Up to `start` leading and `stop` trailing characters of every piece."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop

    def push(self, piece: str) -> Sequence[str]:
        left = _run(piece, self._content, self._start)
        right = len(piece) - _run(piece[::-1], self._content, self._stop)
        return (piece[left : max(left, right)],)


class _StripText(_PerPiece):
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

    def flush(self) -> Sequence[str]:
        self._held = ""
        return ()


def _run(text: str, char: str, most: int) -> int:
    """Leading `char`s of the text, at most `most`."""
    count = 0
    while count < min(most, len(text)) and text[count] == char:
        count += 1
    return count


class _ByteLevel(_PerPiece):
    """Byte-level BPE: pieces are bytes, and only complete characters leave."""

    def __init__(self) -> None:
        self._begun = b""  # a character whose last bytes are to come

    def push(self, piece: str) -> Sequence[str]:
        read = self._begun + byte_level_bytes(piece)
        text, used = codecs.utf_8_decode(read, "replace", False)
        self._begun = read[used:]
        return (text,)

    def flush(self) -> Sequence[str]:
        begun, self._begun = self._begun, b""
        return (begun.decode(errors="replace"),)


class _ByteFallback:
    """`<0xNN>` pieces are bytes of characters the vocabulary lacks. The run so far is valid, or it is broken and lost as a whole."""

    def __init__(self) -> None:
        self._run = bytearray()  # bytes that are held
        self._whole = 0  # those of them that are complete characters
        self._length = 0  # of the run, with what was let go
        self._broken = False

    def push(self, piece: str) -> Sequence[str]:
        match = _BYTE.fullmatch(piece)
        if match is None:
            return (*self.flush(), piece)
        if self._broken:
            return (REPLACEMENT,)
        self._run.append(int(match[1], 16))
        self._length += 1
        whole = _complete(self._run)
        if whole is None:
            self._broken = True
            return self._give_up()
        self._whole = whole
        return self._release() if self._length > MAX_HELD_BYTES else ()

    def _release(self) -> Sequence[str]:
        text = self.waiting()
        del self._run[: self._whole]
        self._whole = 0
        return (text,) if text else ()

    def _give_up(self) -> Sequence[str]:
        lost = [REPLACEMENT] * len(self._run)
        self._run.clear()
        self._whole = 0
        return lost

    def settle(self) -> Sequence[str]:
        self._length = 0
        return self._release()

    def waiting(self) -> str:
        return self._run[: self._whole].decode()

    def flush(self) -> Sequence[str]:
        self._broken, self._length = False, 0
        return self._release() if self._whole == len(self._run) else self._give_up()


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
        if kind == "ByteLevel" and not any(isinstance(step, _ByteFallback) for step in steps):
            steps.append(_ByteLevel())
            fused = True
        elif kind == "ByteFallback":
            steps.append(_ByteFallback())
        elif kind == "Fuse":
            fused = True
        elif kind == "Metaspace" and not fused:
            steps.append(_Metaspace(step["replacement"], step.get("prepend_scheme", "always")))
        elif kind == "WordPiece" and not fused:
            steps.append(_WordPiece(step["prefix"], step["cleanup"]))
        elif kind == "BPEDecoder" and not steps and not fused:
            steps.append(_WordEnds(step["suffix"]))
            fused = True
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
        self.tokens: dict[int, str] = {}  # those that were asked for: the library makes a new text each time
        self.special = special_ids(tokenizer)
        self._described = decoder_steps(tokenizer)
        self.steps()

    def steps(self) -> list[Step]:
        return _steps(self._described)


class IncrementalDecoder:
    """The text of one answer as its ids arrive. One per answer; not shared.

    Text comes in pieces; those of special ids that `skip_special_tokens` leaves out are `Hidden`. `prompt` = ids before the answer: they
    consume what happens only at the start of a text (a first space dropped), and a character begun by the last of them is completed here.
    """

    def __init__(self, plan: DecoderPlan, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._tokens = plan.tokenizer, plan.tokens
        self._hidden = plan.special if skip_special_tokens else frozenset()
        self._steps = plan.steps()
        self._marks: list[tuple[int, Hidden]] = []  # hidden texts, and how many characters leave before them
        self._ends_hidden = False  # the newest id was a hidden one
        for token in self._newest(prompt):
            _through(self._steps, (token,))
        for i, step in enumerate(self._steps):
            _through(self._steps[i + 1 :], step.settle())

    def step(self, token_id: int) -> Sequence[str]:
        """Pieces that are final now and were not before. Ids that name nothing have none."""
        token = self._tokens.get(token_id)
        if token is None:
            if (token := self._tokenizer.id_to_token(token_id)) is None:
                return ()
            self._tokens[token_id] = token
        self._ends_hidden = token_id in self._hidden
        if not self._ends_hidden:
            return self._with_marks(_through(self._steps, (token,)))
        if not (rest := self._rest()):
            return (Hidden(token),)
        if len(self._marks) < MAX_HELD_MARKS:
            waiting = self._waiting()
            self._marks.append((len(waiting) + (rest != waiting), Hidden(token)))  # behind a character begun, whatever becomes of it
        return ()

    def pending(self) -> Sequence[str]:
        """Pieces that would come now if nothing followed: complete characters, and behind a hidden id also what is left of others."""
        if not self._ends_hidden:
            return _interleaved(self._waiting(), self._marks)[0]
        if not self._marks:
            return ()
        return (*_interleaved(self._rest(), self._marks[:-1])[0], self._marks[-1][1])

    def flush(self) -> Sequence[str]:
        """The rest; the answer has ended. A character left unfinished shows as U+FFFD, as in the tokenizer's own decoding."""
        pieces = self._with_marks(_flush(self._steps))
        left, self._marks = self._marks, []
        return (*pieces, *(hidden for _, hidden in left))

    def _newest(self, prompt: Sequence[int]) -> Iterable[str]:
        """The texts of the newest ids that leave any, from the first on that begins a character."""
        visible = (self._tokenizer.id_to_token(i) for i in reversed(prompt) if i not in self._hidden)
        newest = [*itertools.islice((token for token in visible if token is not None), PRIMING_TOKENS)]
        newest.reverse()
        if len(newest) < PRIMING_TOKENS:
            return newest
        return itertools.dropwhile(_INSIDE_CHARACTER.fullmatch, newest)

    def _with_marks(self, text: str) -> Sequence[str]:
        if not self._marks:
            return (text,) if text else ()
        pieces, self._marks = _interleaved(text, self._marks)
        return pieces

    def _waiting(self) -> str:
        for i, step in enumerate(self._steps):
            if text := step.waiting():
                return _through([copy.copy(later) for later in self._steps[i + 1 :]], (text,))
        return ""

    def _rest(self) -> str:
        return _flush(copy.deepcopy(self._steps))


def visible(pieces: Iterable[str]) -> str:
    """What the client sees of the pieces."""
    return "".join([piece for piece in pieces if not isinstance(piece, Hidden)])


def _through(steps: Sequence[Step], pieces: Sequence[str]) -> str:
    for step in steps:
        pieces = step.push(pieces[0]) if len(pieces) == 1 else [out for piece in pieces for out in step.push(piece)]
    return pieces[0] if len(pieces) == 1 else "".join(pieces)


def _flush(steps: Sequence[Step]) -> str:
    return "".join([_through(steps[i + 1 :], step.flush()) for i, step in enumerate(steps)])


def _interleaved(text: str, marks: Sequence[tuple[int, Hidden]]) -> tuple[list[str], list[tuple[int, Hidden]]]:
    """Text with the marks at their places; and the marks behind it, with their places in what follows."""
    pieces: list[str] = []
    done = 0
    for place, hidden in marks:
        if place > len(text):
            break
        pieces += [text[done:place], hidden]
        done = place
    pieces.append(text[done:])
    left = [(place - len(text), hidden) for place, hidden in marks if place > len(text)]
    return [piece for piece in pieces if piece], left

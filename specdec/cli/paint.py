"""How the demo shows tokens: colours on a terminal, marks in a pipe, and a plain table. Pure: text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from specdec.terms import Origin

GREEN, BOLD, DIM, RESET = "\x1b[32m", "\x1b[1m", "\x1b[2m", "\x1b[0m"
OPEN, CLOSE = "‹", "›"
WINDOW = 8  # tokens decoded together; the longest character of a byte-level vocabulary spans 4


class Painter:
    """Text of one answer, piece by piece. A run of accepted tokens is green, or stands in ‹ › where there are no colours."""

    def __init__(self, decode: Callable[[Sequence[int]], str], colour: bool) -> None:
        self._decode, self._colour = decode, colour
        self._ids: list[int] = []
        self._shown = ""  # text of the window that is on the screen
        self._inside = False

    def feed(self, token_ids: Iterable[int], origins: Iterable[Origin | None]) -> str:
        return "".join(self._one(token, origin is Origin.ACCEPTED) for token, origin in zip(token_ids, origins, strict=True))

    def end(self) -> str:
        return self._switch(False)

    def _one(self, token: int, accepted: bool) -> str:
        if len(self._ids) >= 2 * WINDOW:
            self._ids = self._ids[-WINDOW:]
            self._shown = self._whole()
        self._ids.append(token)
        text = self._whole()
        piece, self._shown = text[len(self._shown) :], text
        return self._switch(accepted) + piece if piece else ""

    def _whole(self) -> str:
        """Without a last character that is not complete yet."""
        return self._decode(self._ids).rstrip("\ufffd")

    def _switch(self, inside: bool) -> str:
        if inside == self._inside:
            return ""
        self._inside = inside
        if self._colour:
            return GREEN if inside else RESET
        return OPEN if inside else CLOSE


def legend(colour: bool) -> str:
    accepted = f"{GREEN}green{RESET}" if colour else f"{OPEN}marked{CLOSE}"
    return f"{accepted} = proposed by the draft, accepted by the target; the rest was decided by the target itself"


def heading(text: str, colour: bool) -> str:
    return f"{BOLD}{text}{RESET}" if colour else f"== {text}"


def dim(text: str, colour: bool) -> str:
    return f"{DIM}{text}{RESET}" if colour else text


def table(rows: Sequence[Sequence[str]]) -> str:
    """First row = titles; first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])

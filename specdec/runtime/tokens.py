"""Bearer tokens of clients (RFC 6750 §2.1): the file that lists them, and who a token belongs to.

One entry a line, `name:hash`; `hash` is the SHA-256 of the token in hex, so the file alone opens nothing. Empty lines and lines that begin
with # say nothing. A name may stand on several lines: while tokens are exchanged, the old and the new one hold.

    token=$(openssl rand -hex 32)
    echo "alice:$(printf %s "$token" | sha256sum | cut -d' ' -f1)" >> tokens

SHA-256 without salt is right for tokens that were drawn at random, and wrong for words that people think of.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import Unauthenticated
from specdec.runtime.files import read_bounded

MAX_TOKENS = 4096  # entries of a file; each call is compared with all of them
MAX_FILE_BYTES = 1 << 20
MAX_TOKEN_CHARS = 4096
_ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._@-]{0,63}):([0-9a-fA-F]{64})")
_REMEDY = "send the header `authorization: Bearer TOKEN` (specdec: --token-file FILE, or SPECDEC_TOKEN_FILE)"


@dataclass(frozen=True, slots=True)
class Tokens:
    """`entries` = name and SHA-256 of the token."""

    entries: tuple[tuple[str, bytes], ...]

    def owner(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """The name behind a call's header. Raises Unauthenticated; what was sent is never repeated."""
        header = next((value for key, value in metadata if key == "authorization"), None)
        if header is None:
            raise Unauthenticated(f"authorization: this service asks for a token; {_REMEDY}")
        scheme, _, token = header.partition(" ") if isinstance(header, str) else ("", "", "")
        if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN_CHARS:
            raise Unauthenticated(f"authorization: not a bearer token; {_REMEDY}")
        digest = hashlib.sha256(token.encode()).digest()
        found = ""
        for name, expected in self.entries:  # all of them, whichever fits: the time it takes tells nothing
            if hmac.compare_digest(digest, expected):
                found = name
        if not found:
            raise Unauthenticated("authorization: this token is not known here; it may have been replaced, ask for another")
        return found


def read_tokens(path: Path) -> Tokens:
    """Raises ValueError naming the line, never its content."""
    content = read_bounded("SPECDEC_TOKENS_FILE", path, MAX_FILE_BYTES, "MAX_FILE_BYTES")
    return parse_tokens(content.decode("utf-8", "replace"))


def parse_tokens(text: str) -> Tokens:
    entries: list[tuple[str, bytes]] = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        match = _ENTRY.fullmatch(line)
        if match is None:
            raise ValueError(
                f"SPECDEC_TOKENS_FILE: line {number} is not `name:hash` with the SHA-256 of the token, 64 hexadecimal digits;"
                " a token itself does not belong into this file"
            )
        entries.append((match[1], bytes.fromhex(match[2])))
    if not entries:
        raise ValueError("SPECDEC_TOKENS_FILE: the file holds no token; unset it where clients need none")
    if len(entries) > MAX_TOKENS:
        raise ValueError(f"SPECDEC_TOKENS_FILE: {len(entries)} tokens, more than {MAX_TOKENS} (MAX_TOKENS)")
    return Tokens(tuple(entries))


def read_token(name: str, path: Path) -> str:
    """A client's own token: the file's first line. Raises ValueError with `name`, the setting or flag."""
    try:
        with path.open("rb") as file:
            token = file.read(MAX_TOKEN_CHARS + 2).decode("ascii").strip()
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        token = ""
    if not token or len(token) > MAX_TOKEN_CHARS or not token.isprintable() or " " in token:
        raise ValueError(f"{name}: {path} must hold one token on one line, printable ASCII without spaces")
    return token

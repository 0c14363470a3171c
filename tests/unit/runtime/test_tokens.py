"""The file of tokens, and whose token a call carries."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest

from specdec.errors import Unauthenticated
from specdec.runtime import tokens
from specdec.runtime.tokens import parse_tokens, read_token, read_tokens


def line(name: str, token: str) -> str:
    return f"{name}:{hashlib.sha256(token.encode()).hexdigest()}"


BOB = "bob" + line("bob", "secret-c").removeprefix("bob").upper()
FILE = f"# who may call\n\n{line('alice', 'secret-a')}\n  {line('alice', 'secret-b')}\n{BOB}\n"


def owner(header: str | bytes | None, text: str = FILE) -> str:
    metadata = [("user-agent", "x")] + ([] if header is None else [("authorization", header)])
    return parse_tokens(text).owner(metadata)  # type: ignore[arg-type]


def test_whose_token_it_is() -> None:
    assert [owner(f"Bearer secret-{x}") for x in "abc"] == ["alice", "alice", "bob"]
    assert owner("bearer secret-a") == "alice"  # the scheme's case does not matter (RFC 9110 §11.1)


@pytest.mark.parametrize(
    "header", [None, "", "secret-a", "Basic secret-a", "Bearer", "Bearer ", "Bearer x", b"Bearer secret-a", "Bearer secret-a "]
)
def test_refusals_say_what_to_send_and_never_what_was_sent(header: str | bytes | None) -> None:
    with pytest.raises(Unauthenticated) as caught:
        owner(header)
    assert "authorization: " in str(caught.value) and "secret" not in str(caught.value)


def test_a_token_of_endless_length_is_not_hashed() -> None:
    with pytest.raises(Unauthenticated, match="not a bearer token"):
        owner("Bearer " + "x" * (tokens.MAX_TOKEN_CHARS + 1))


def test_all_entries_are_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(b) or a == b)
    for token in ("secret-a", "secret-c", "nobody's"):
        compared.clear()
        try:
            owner(f"Bearer {token}")
        except Unauthenticated:
            assert token == "nobody's"
        assert len(compared) == 3


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "holds no token"),
        ("# nobody\n", "holds no token"),
        (f"{line('a', 'x')}\nsecret-plain\n", "line 2 is not"),
        ("alice:secret-plain", "line 1 is not"),
        (f"{line('a b', 'x')}", "line 1 is not"),
        (f"{line('a', 'x')[:-1]}", "line 1 is not"),
        ("\n".join(line("a", str(i)) for i in range(tokens.MAX_TOKENS + 1)), "MAX_TOKENS"),
    ],
)
def test_a_file_that_makes_no_sense(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        parse_tokens(text)
    assert "SPECDEC_TOKENS_FILE" in str(caught.value) and "secret" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"SPECDEC_TOKENS_FILE: .*gone cannot be read: No such file"):
        read_tokens(tmp_path / "gone")


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"two\nlines", b"\xff\xfe", b"x" * 5000])
def test_a_clients_own_token_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="--token-file: .* one token on one line"):
        read_token("--token-file", path)
    path.write_bytes(b"good-token\n")
    assert read_token("--token-file", path) == "good-token"

"""What is written to a client, what is measured of it, and how long it may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.answer import Delta
from orchestrator.fronts.relay import Relay
from orchestrator.output import TokensDecided
from specdec.runtime.hangup import current_call

UNREAD_S = 7.0


class Watched:
    """A call's context and its meter, in one list of what happened."""

    def __init__(self, breaks: bool = False) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._breaks = breaks

    def wait(self, seconds: float) -> Any:
        self.seen.append(("wait", seconds))
        return lambda: self.seen.append(("over",))

    async def write(self, message: Any) -> None:
        self.seen.append(("write", message.index, tuple(message.delta.token_ids)))
        if self._breaks:
            raise ConnectionError("the client is gone")

    def now(self) -> float:
        return 3.25

    def tokens(self, count: int, index: int = 0, began: float | None = None) -> None:
        self.seen.append(("tokens", count, index, began))

    def said(self, text: str, index: int) -> None:
        self.seen.append(("said", text, index))


def relay(watched: Watched) -> Relay:
    stream: Any = SimpleNamespace(tokens=lambda event: Delta(event.tokens, "ab"), stopped=None)
    whole: Any = watched
    return Relay(whole, whole, None, (), (stream, stream), UNREAD_S)  # type: ignore[arg-type]


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_client_is_waited_for_while_a_message_is_written_and_no_longer(breaks: bool) -> None:
    watched = Watched(breaks)
    token = current_call.set(watched)  # type: ignore[arg-type]
    try:
        await relay(watched)._pass_on(None, 1, TokensDecided((7, 8), (), ()))  # type: ignore[arg-type]
    except ConnectionError:
        assert breaks
    finally:
        current_call.reset(token)
    assert watched.seen == [
        ("tokens", 2, 1, 3.25), ("said", "ab", 1), ("wait", UNREAD_S), ("write", 1, (7, 8)), ("over",)
    ]  # fmt: skip


async def test_outside_a_call_a_message_is_written_all_the_same() -> None:
    watched = Watched()
    await relay(watched)._pass_on(None, 0, TokensDecided((7,), (), ()))  # type: ignore[arg-type]
    assert watched.seen[-1] == ("write", 0, (7,))

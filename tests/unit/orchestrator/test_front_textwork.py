"""Text work that needs no place: what of it may wait is bounded by bytes as well as by number."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from orchestrator.fronts import textwork
from orchestrator.fronts.requests import MAX_PROMPT_BYTES, MAX_PROMPT_TOKENS
from orchestrator.fronts.textwork import TextWork, prepare
from orchestrator.request import Ids, Request
from orchestrator.stops import StopMatcher
from specdec.errors import Overloaded
from specdec.runtime.channels import MAX_CALL_BYTES, server_options
from specdec.terms import MAX_GRAMMAR_BYTES, DraftMethod, RejectionMethod, SamplingParams
from tests.fakes_driver import decided
from tests.unit.orchestrator.front_rig import ids, text_model_in

MESSAGE = 4 << 20


async def test_bytes_that_wait_are_bounded_and_given_back() -> None:
    work, open_ = TextWork(), threading.Event()
    many = [asyncio.create_task(work.run(open_.wait, MESSAGE)) for _ in range(textwork.MAX_BYTES // MESSAGE)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await work.run(lambda: True, MESSAGE)
    many[-1].cancel()
    await asyncio.gather(many[-1], return_exceptions=True)
    last = asyncio.create_task(work.run(lambda: True, MESSAGE))
    open_.set()
    assert await last
    await asyncio.gather(*many, return_exceptions=True)
    assert (work._tasks, work._bytes) == (0, 0)
    work.close()


async def test_large_texts_are_read_one_at_a_time_and_hold_up_no_short_one() -> None:
    work, open_, begun = TextWork(), threading.Event(), threading.Semaphore(0)

    def read() -> bool:
        begun.release()
        return open_.wait(20)

    size = textwork.LARGE_BYTES + 1
    gone, *others = [asyncio.create_task(work.run(read, size, placed)) for placed in (True, False, True)]
    await asyncio.to_thread(begun.acquire)
    gone.cancel()  # its thread is not free before it has ended
    assert await work.run(lambda: True, textwork.LARGE_BYTES)
    assert not begun.acquire(blocking=False)
    open_.set()
    assert all(await asyncio.gather(*others))
    work.close()


def test_what_a_client_may_send_fits_a_message_of_its_own_limit() -> None:
    largest_id = 4  # bytes of one below 2^28
    assert MAX_PROMPT_BYTES + 2 * largest_id * MAX_PROMPT_TOKENS + MAX_GRAMMAR_BYTES < MAX_CALL_BYTES
    assert dict(server_options(MAX_CALL_BYTES))["grpc.max_receive_message_length"] == MAX_CALL_BYTES


def test_answers_share_what_is_known_of_their_stop_strings_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen strings of 512 bytes take a tenth of a second to learn."""
    made: list[StopMatcher] = []

    def counted(*arguments: object) -> StopMatcher:
        made.append(StopMatcher(*arguments))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(textwork, "StopMatcher", counted)
    request = Request(Ids((5,)), SamplingParams(), RejectionMethod.COUPLED, DraftMethod.GUMBEL, n=3, stop=("the dog",))
    one, two, three = prepare(text_model_in(tmp_path), request).streams
    assert len(made) == 1
    assert one.tokens(decided(*ids("the"))).text == "" and two.tokens(decided(*ids("dog"))).text == "dog"
    assert one.tokens(decided(*ids(" dog"))).text == "" and one.stopped == "the dog"
    assert three.tokens(decided(*ids(" dog"))).text == " dog" and (two.stopped, three.stopped) == (None, None)

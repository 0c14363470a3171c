"""The simulated pools follow the protocol; what they say and time can be trusted."""

from __future__ import annotations

import pytest

from specdec.bench.sim import draft as sim_draft
from specdec.bench.sim import target as sim_target
from specdec.bench.sim.http2 import Connection, frame
from specdec.bench.sim.path import Path, Paths
from specdec.bench.sim.run import Scenario, scenario
from specdec.errors import InvalidRequest
from specdec.hashing import prefix_hash
from specdec.simulation import Simulation
from specdec.v1 import draft_pb2, target_pb2

pytestmark = pytest.mark.unit
PROMPT = tuple(range(20, 28))
N = len(PROMPT)


def path(acceptance: float = 1.0) -> Path:
    return Path(Simulation(acceptance=acceptance), 300, PROMPT)


def step(on: Path, committed: int, round_: int, block: tuple[int, ...] = (), run_ahead: int = 0) -> target_pb2.Step:
    return target_pb2.Step(
        session_id="s", epoch=1, round=round_, base_length=committed - 1, run_ahead=run_ahead, num_proposed=len(block),
        tokens=(*on.upto(committed)[committed - 1 : committed], *block),
    )  # fmt: skip


def test_the_hash_of_a_path_is_that_of_its_ids() -> None:
    on = path()
    assert on.hash_at(N + 5) == prefix_hash(on.tokens[: N + 5]) and on.hash_at(N - 1) is None


def test_a_draft_that_errs_names_what_it_said_itself() -> None:
    on = path(0.5)
    named, said = on.drafted(N, (), 12)
    assert named == prefix_hash(PROMPT) and 0 < on.agrees(N, said) < 12
    further, _ = on.drafted(N, said, 3)
    assert further == prefix_hash([*PROMPT, *said])


def test_a_round_keeps_what_agrees_and_adds_one() -> None:
    on = path()
    session = sim_target.Session("s", 1, on, N, 20)
    right = on.upto(N + 3)[N : N + 3]
    session.ask(step(on, N, 1, (right[0], right[1], 1)))
    session.running = True
    result = session.decide().result
    assert (list(result.tokens), result.num_verified, result.num_accepted) == (right, 3, 2)
    assert not session.pending and not session.broken


def test_what_waits_there_is_verified_without_a_step_and_credit_gives_plain_rows() -> None:
    on = path()
    session = sim_target.Session("s", 1, on, N, 20)
    session.ask(step(on, N, 1, run_ahead=1))
    session.running = True
    text = on.upto(N + 8)
    session.offer(target_pb2.Ahead(session_id="s", epoch=1, prefix_length=N, prefix_hash=on.hash_at(N), tokens=text[N : N + 4]))
    session.offer(target_pb2.Ahead(session_id="s", epoch=1, prefix_length=N, prefix_hash=7, tokens=text[N : N + 4]))  # of another text
    told = []
    while session.pending:
        session.running = True
        told.append(session.decide())
    assert [(t.round, t.result.num_verified, len(t.result.tokens)) for t in told] == [(1, 0, 1), (1, 3, 4), (1, 0, 1)]
    assert session.credit == 0 and session.decided == N + 6


def test_a_step_that_crosses_results_brings_only_what_is_news() -> None:
    """It was written before the session had gone on by itself."""
    on = path()
    session = sim_target.Session("s", 1, on, N, 20)
    session.ask(step(on, N, 1, run_ahead=1))
    text = on.upto(N + 8)
    for _ in range(2):
        session.running = True
        session.decide()
    session.ask(step(on, N + 1, 2, tuple(text[N + 1 : N + 4])))
    assert session.block == tuple(text[N + 2 : N + 4]) and not session.broken
    session.running = True
    assert session.decide().result.prefix_length == N + 2


def test_the_answer_ends_where_it_must() -> None:
    on = path()
    session = sim_target.Session("s", 1, on, N, 3)
    session.ask(step(on, N, 1, tuple(on.upto(N + 6)[N : N + 6])))
    session.running = True
    result = session.decide().result
    assert len(result.tokens) == 3 and result.finish and not session.pending


def test_an_orchestrator_that_lies_is_noticed() -> None:
    on = path()
    session = sim_target.Session("s", 1, on, N + 1, 20)
    session.ask(target_pb2.Step(session_id="s", epoch=1, round=1, base_length=N, tokens=[on.upto(N + 1)[N] + 1]))
    assert session.broken == 1


def opened(on: Path, hits: float = 1.0) -> sim_draft.Session:
    command = draft_pb2.Open(session_id="s", epoch=1, tokens=PROMPT, prompt_length=N, num_speculative_tokens=3)
    return sim_draft.Session(command, on, 0.5, hits)


def test_a_draft_goes_on_behind_a_block_and_begins_again_behind_a_surprise() -> None:
    on = path()
    draft = opened(on)
    (event,) = draft.tell(draft.begin())
    text = on.upto(N + 20)
    assert list(event.proposal.tokens) == text[N : N + 3] and draft.fresh
    work = draft.sent(draft_pb2.Sent(session_id="s", prefix_length=N, num_proposed=3))
    assert work is not None
    chain, _ = draft.tell(work)
    assert (chain.proposal.prefix_length, list(chain.proposal.tokens)) == (N + 3, text[N + 3 : N + 7])
    assert draft.commit(draft_pb2.Commit(session_id="s", tokens=text[N : N + 4])) is None and not draft.fresh
    again = draft.commit(draft_pb2.Commit(session_id="s", tokens=[299]))
    assert again is not None and again.chain == 3 and draft.fresh


@pytest.mark.parametrize(("hits", "kept"), [(1.0, True), (0.0, False)])
def test_the_other_guess_comes_as_often_as_it_is_asked_to(hits: float, kept: bool) -> None:
    on = path(0.0)
    draft = opened(on, hits)
    draft.tell(draft.begin())
    work = draft.sent(draft_pb2.Sent(session_id="s", prefix_length=N, num_proposed=3))
    assert work is not None
    draft.tell(work)
    assert (draft.commit(draft_pb2.Commit(session_id="s", tokens=on.upto(N + 1)[N : N + 1])) is None) is kept


def test_two_who_ask_for_a_prompt_read_one_path() -> None:
    paths = Paths(Simulation(), 300)
    held = paths.of(PROMPT)
    assert paths.of(list(PROMPT)) is held and paths.of((*PROMPT, 20)) is not held


def test_frames_are_read_however_they_are_cut() -> None:
    connection, heard = Connection("/a/b", "h"), list[bytes | None]()
    stream = connection.call(b"", heard.append)
    message = b"\0" + (3).to_bytes(4, "big") + b"abc"
    sent = frame(0, 0, stream, message + message[:4]) + frame(0, 0, stream, message[4:]) + frame(1, 1, stream, b"")
    for i in range(len(sent)):
        connection.data_received(sent[i : i + 1])
    assert heard == [b"abc", b"abc", None]


@pytest.mark.parametrize("text", ["target=1", "targets=0", "sessions=x", "acceptance=2", "adaptive=2", "prompt=1", "step-ms=-1"])
def test_a_scenario_that_cannot_be_is_named(text: str) -> None:
    with pytest.raises(InvalidRequest, match=text.split("=")[0].replace("-", ".")):
        scenario(text)


def test_a_scenario_in_words() -> None:
    assert scenario("targets=8, step-ms=5,rtt_ms=1") == Scenario(targets=8, step_ms=5.0, rtt_ms=1.0)

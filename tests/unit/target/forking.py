"""A donor, and sessions that name it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.terms import Step
from tests.fakes import hashed_script
from tests.unit.target.harness import SAMPLED, VOCAB, Bench, first_step, only, reference

SCRIPT = hashed_script(VOCAB)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def child(tokens: Sequence[int] = PROMPT, donor: str = "donor", session: str = "child", seed: int = 8, **more: Any) -> Step:
    more.setdefault("sampling", SAMPLED)
    return first_step(tokens, session=session, seed=seed, fork_session_id=donor, **more)


def with_donor(bench: Bench, tokens: Sequence[int] = PROMPT, orchestrator_id: str = "orch") -> int:
    """A session that has its first token: the prompt is in KV, and no more. Returns its stream."""
    stream = bench.hello(orchestrator_id)
    bench.send(stream, first_step(tokens, session="donor", sampling=SAMPLED))
    assert only(bench.turn()).tokens == tuple(reference(SCRIPT, tokens, 1, sampling=SAMPLED))
    return stream


def starts(bench: Bench) -> list[int]:
    """Where the rows of the last forward began."""
    return [row.start for row in bench.engine.log[-1]]


def decided(bench: Bench, tokens: Sequence[int] = PROMPT, seed: int = 8) -> None:
    """The child's first token is the one it would have without a donor."""
    assert only(bench.turn()).tokens == tuple(reference(SCRIPT, tokens, 1, sampling=SAMPLED, seed=seed))

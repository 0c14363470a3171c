"""The table of two ways."""

from __future__ import annotations

from typing import Any

from specdec.bench.compare import summarise


def row(tokens: int, on: float, off: float) -> dict[str, Any]:
    figures = {"mean_acceptance_length": 1.5, "tokens_per_round": 1.2, "hit_rate": 0.5}
    return {"kind": "code", "tokens": tokens, "on_tokens_per_s": on, "off_tokens_per_s": off, "identical": True, **figures}


def test_answers_without_a_rate_are_left_out() -> None:
    """Too short to count, or all in one message."""
    assert summarise([row(4, 9.0, 9.0), row(20, 0.0, 10.0), row(20, 10.0, 0.0)]) == {"identical": True}
    told = summarise([row(20, 20.0, 10.0), row(20, 0.0, 10.0)])
    assert told["code"] == told["all"] and (told["all"]["answers"], told["all"]["ratio"]) == (1, 2.0)

"""Pure statistics of raw arrivals: first token, time per token, what lies between arrivals, goodput, acceptance. Seconds in, milliseconds
out.

    first token   from when a question was asked, or due, to its first tokens
    per token     of an answer: first arrival to last, over the tokens behind the first arrival
    between       between two arrivals of an answer. With speculation several tokens arrive at once; this is what a reader sees
    jitter        standard deviation of those gaps within an answer, the mean over answers
    goodput       answers a second that kept both limits: first token, and 95 of 100 gaps of the answer (DistServe, OSDI 2024, has the idea)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from specdec.bench import figures
from specdec.bench.figures import Seen
from specdec.bench.record import Run, Said, origins_of

QUANTILES = (0.5, 0.95, 0.99)
LEAST_JUDGED = 20  # rounds that judged a slot, for its share to be told


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a service level; None = none. Milliseconds."""

    first_token_ms: float | None = None
    between_ms: float | None = None

    @property
    def any(self) -> bool:
        return self.first_token_ms is not None or self.between_ms is not None


def gaps_s(said: Said) -> list[float]:
    return [later[0] - earlier[0] for earlier, later in pairwise(said.arrivals)]


def per_token_s(said: Said) -> float | None:
    """None when nothing came behind the first arrival."""
    return said.decode_s / said.behind_first if said.behind_first else None


def jitter_s(said: Said) -> float | None:
    gaps = gaps_s(said)
    return float(np.std(gaps)) if len(gaps) > 1 else None


def within(said: Said, limits: Limits) -> bool:
    """Whether an answer kept the limits; one that failed did not."""
    if said.error:
        return False
    if limits.first_token_ms is not None and 1e3 * said.first_s > limits.first_token_ms:
        return False
    gaps = gaps_s(said)
    return limits.between_ms is None or not gaps or 1e3 * figures.percentile(gaps, 0.95) <= limits.between_ms


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def latencies(runs: Sequence[Run]) -> dict[str, Any]:
    """Of all whole answers, None where none has such a time; `…_ci` = 95 % by the bootstrap over the repeats, None for one repeat."""
    answers = [one for run in runs for one in run.answers]
    found: dict[str, Any] = {}
    for name, values in (
        ("first_token", [one.first_s for one in answers]),
        ("time_per_token", _known([per_token_s(one) for one in answers])),
        ("between_arrivals", [gap for one in answers for gap in gaps_s(one)]),
        ("answer", [one.total_s for one in answers]),
    ):
        found |= {
            f"{name}_ms_p{100 * share:.0f}": round(1e3 * figures.percentile(values, share), 2) if values else None for share in QUANTILES
        }
    jitters = _known([jitter_s(one) for one in answers])
    found["jitter_ms"] = round(1e3 * float(np.mean(jitters)), 2) if jitters else None
    found["first_token_ms_p50_ci"] = _interval(runs, lambda run: [one.first_s for one in run.answers], 0.5)
    found["time_per_token_ms_p50_ci"] = _interval(runs, lambda run: _known([per_token_s(one) for one in run.answers]), 0.5)
    found["between_arrivals_ms_p99_ci"] = _interval(runs, lambda run: [gap for one in run.answers for gap in gaps_s(one)], 0.99)
    return found


def _interval(runs: Sequence[Run], values: Callable[[Run], list[float]], share: float) -> list[float] | None:
    found = figures.bootstrap_quantile([values(run) for run in runs], share)
    return None if found is None else [round(1e3 * value, 2) for value in found]


def throughput(runs: Sequence[Run], limits: Limits) -> dict[str, Any]:
    """Rates count all of the turns' time. Goodput is None where no limit was set."""
    seconds, tokens = sum(run.seconds for run in runs), sum(run.tokens for run in runs)
    pairs = [(run.tokens, run.seconds) for run in runs]
    between = figures.bootstrap(pairs, lambda drawn: sum(tokens for tokens, _ in drawn) / (sum(seconds for _, seconds in drawn) or 1.0))
    said = [one for run in runs for one in run.said]
    good = sum(within(one, limits) for one in said)
    return {
        "turns": len(runs),
        "answers": sum(not one.error for one in said),
        "errors": sum(bool(one.error) for one in said),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2) if seconds else 0.0,
        "tokens_per_s_ci": None if between is None else [round(value, 2) for value in between],
        "goodput_per_s": round(good / seconds, 4) if limits.any and seconds else None,
        "goodput_share": round(good / len(said), 4) if limits.any and said else None,
        "prompt_tokens": round(float(np.mean([one.prompt_tokens for one in said])), 1) if said else 0.0,
    }


# ---------------------------------------------------------------- acceptance


def acceptance(runs: Sequence[Run]) -> dict[str, Any]:
    """`alpha` = share kept of each slot, of the rounds that judged it, as far as LEAST_JUDGED did; by kind as well."""
    answers = [one for run in runs for one in run.answers]
    with_block, rounds = sum(one.count("num_spec_steps") for one in answers), sum(one.count("num_rounds") for one in answers)
    accepted, drafted = (sum(one.count(name) for one in answers) for name in ("num_accepted_draft_tokens", "num_draft_tokens"))
    tokens = sum(len(one.token_ids) for one in answers)
    hits = sum(one.count("hit_rate") * one.count("num_rounds") for one in answers)  # rounds that wanted a block are not told by answer
    kinds = dict.fromkeys(one.kind for one in answers)
    return {
        "mean_acceptance_length": round(1 + accepted / with_block, 3) if with_block else None,
        "mean_block": round(drafted / with_block, 3) if with_block else None,
        "hit_rate": round(hits / rounds, 3) if with_block and rounds else None,
        "tokens_per_round": round(tokens / rounds, 3) if rounds else None,
        "rounds": rounds,
        # An answer's first round is the prompt's, and never has a block.
        "share_with_block": round(with_block / max(1.0, rounds - len(answers)), 4) if rounds else 0.0,
        "alpha": alphas(answers) if with_block else [],
        "alpha_by_kind": {kind: alphas([one for one in answers if one.kind == kind]) for kind in kinds} if with_block else {},
    }


def alphas(answers: Sequence[Said]) -> list[float]:
    seen = [one for said in answers for one in figures.rounds_seen(origins_of(said))]
    shares = figures.survival(seen)
    return [round(share, 4) for share, judged in zip(shares, _judged(seen, len(shares)), strict=True) if judged >= LEAST_JUDGED]


def _judged(seen: Sequence[Seen], slots: int) -> list[int]:
    return [sum(one.accepted > slot or (one.accepted == slot and one.refused) for one in seen) for slot in range(slots)]


def round_ms(runs: Sequence[Run]) -> float | None:
    """A round of decoding as a client sees it: the time behind first arrivals over the rounds behind each answer's first."""
    answers = [one for run in runs for one in run.answers if one.count("num_rounds") > 1]
    rounds = sum(one.count("num_rounds") - 1 for one in answers)
    return 1e3 * sum(one.decode_s for one in answers) / rounds if rounds else None

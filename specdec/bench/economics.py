"""From what was measured in a cell to what it means: what a round costs, the block that gains most, where it stops paying. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.bench import timings, whatif
from specdec.bench.figures import CONFIDENCE, expected_length, repeats_until, student_quantile
from specdec.bench.record import Run
from specdec.bench.whatif import Setting

MOST_BUSY = 0.8  # of a draft's time, beyond which another one is advised
LEAST_SHARE = 0.05  # of rounds with a block, below which what they cost cannot be told
MOST_UNSURE = 0.25  # of a plain round's time: how far off what a block costs may be (95 %), for it to be told
TURNS_DIFFER = 0.03  # of the same work, standard deviation as a share: assumed where a single repeat tells nothing of it
NORMAL = 1.96  # Student's quantile where the spread is assumed
MARGIN_K = 0.02  # what a longer block must gain beyond a shorter one, to be advised


def of_way(plain: Sequence[Run], runs: Sequence[Run], told: Mapping[str, Any]) -> dict[str, Any]:
    """`plain` = the runs without speculation, `told` = acceptance of `runs` (timings.acceptance). Empty where there is nothing to say, and
    where it cannot be told (`too_few`).

    `block_round_ms` = a round with a block, the wait for it included, known to ± `block_round_reach_ms` (95 %); `slot_ms` = what a slot of
    it costs; `draft_budget_ms` = how much longer such a round might take and still gain; `curve` = [K, ratio] by the formula, with slots
    and acceptance as measured."""
    seen = _cost(plain, runs, told)
    if seen is None or seen.unsure or not told["alpha"]:
        return {}
    plain_ms, block_ms, block = seen.plain_ms, seen.block_ms, told["mean_block"]
    slot_ms = max(0.0, block_ms - plain_ms) / block
    length = told["mean_acceptance_length"]
    setting = Setting(plain_ms, 0.0, tuple(told["alpha"]), row_ms=slot_ms, foresight=1.0)
    curve = [[k, round(ratio_at(setting, k), 4)] for k in range(whatif.MAX_K + 1)]
    even = break_even(setting, round(block))
    return {
        "plain_round_ms": round(plain_ms, 3),
        "block_round_ms": round(block_ms, 3),
        "block_round_reach_ms": round(seen.reach * plain_ms, 3),
        "slot_ms": round(slot_ms, 3),
        "break_even_acceptance": None if even is None else round(even, 4),
        "constant_acceptance": round(constant_alpha(length, round(block)), 4),
        "draft_budget_ms": round(length * plain_ms - block_ms, 3),
        "best_k": best_k(curve),
        "curve": curve,
    }


def too_few(plain: Sequence[Run], runs: Sequence[Run], told: Mapping[str, Any]) -> dict[str, Any]:
    """Where what a block costs cannot be told: `rounds` that had one, and about how many it takes, at their share of all rounds; `needed`
    None where no number is worth naming. Empty where it can be told, and where there is nothing to say."""
    seen = _cost(plain, runs, told)
    if seen is None or not seen.unsure:
        return {}
    rounds = round(sum(one.count("num_spec_steps") for run in runs for one in run.answers))
    return {"rounds": rounds, "needed": None if seen.repeats is None else _about(rounds * seen.repeats / seen.repeats_seen)}


@dataclass(frozen=True, slots=True)
class _Cost:
    """`reach` = half of the interval of what a round with a block takes, as a share of a plain one; `repeats` that would be enough."""

    plain_ms: float
    block_ms: float
    reach: float
    repeats_seen: int
    repeats: int | None

    @property
    def unsure(self) -> bool:
        """Too wide an interval, or one that lies below a plain round's time: more rows cannot take less, so the machine was faster."""
        return self.reach > MOST_UNSURE or self.block_ms < (1 - self.reach) * self.plain_ms


def _cost(plain: Sequence[Run], runs: Sequence[Run], told: Mapping[str, Any]) -> _Cost | None:
    """From the rounds of all kinds together, since a client does not see which of them had a block: what the others took by themselves
    weighs the more, the fewer those with a block are."""
    plain_ms, mixed_ms = timings.round_ms(plain), timings.round_ms(runs)
    share = told["share_with_block"]
    if not plain_ms or not mixed_ms or share < LEAST_SHARE or not told["mean_block"]:
        return None
    by_repeat = {run.turn.repeat: timings.round_ms([run]) for run in plain}
    pairs = [(timings.round_ms([run]), by_repeat.get(run.turn.repeat)) for run in runs]
    ratios = [mixed / other for mixed, other in pairs if mixed and other]
    seen = len(ratios)
    spread = statistics.stdev(ratios) if seen > 1 else math.sqrt(2) * TURNS_DIFFER
    reach = (student_quantile(seen - 1, CONFIDENCE) if seen > 1 else NORMAL) * spread / math.sqrt(max(1, seen)) / share
    block_ms = (mixed_ms - (1 - share) * plain_ms) / share
    enough = repeats_until(spread, MOST_UNSURE * share, seen + 1) if reach > MOST_UNSURE else None
    return _Cost(plain_ms, block_ms, reach, max(1, seen), enough)


def _about(rounds: float) -> int:
    """Two digits of it, rounded up."""
    unit = 10 ** max(0, math.floor(math.log10(rounds)) - 1) if rounds >= 1 else 1
    return math.ceil(rounds / unit) * unit


def ratio_at(setting: Setting, k: int) -> float:
    """With every wait inside the slots' cost."""
    return expected_length(setting.alpha(k)) * setting.plain_ms / (setting.step_ms(k + 1) + setting.rtt_ms + setting.host_ms)


def best_k(curve: Sequence[Sequence[float]]) -> int:
    """The shortest block that gains as much as the best one, within MARGIN_K; 0 where none gains."""
    most = max(ratio for _, ratio in curve)
    return 0 if most <= 1.0 else int(min(k for k, ratio in curve if ratio >= most - MARGIN_K))


def break_even(setting: Setting, k: int) -> float | None:
    """The constant acceptance at which E t(1) = t(K+1)."""
    wanted = setting.step_ms(k + 1) / setting.plain_ms
    return alpha_of(wanted, k) if k >= 1 and wanted <= k + 1 else None


def constant_alpha(length: float, k: int) -> float:
    """The one acceptance of every slot that gives this mean acceptance length."""
    return alpha_of(length, k) if k >= 1 else 0.0


def alpha_of(length: float, k: int) -> float:
    """a with 1 + a + … + a^k = length, within [0, 1]."""
    low, high = 0.0, 1.0
    for _ in range(whatif.STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_length([middle] * k) < length else (low, middle)
    return high


def drafts_needed(busy: float | None, drafts: int) -> int:
    """`busy` = share of the time that all of them computed, None where nobody told it."""
    return drafts if busy is None else max(1, math.ceil(busy * drafts / MOST_BUSY))


def phases(runs: Sequence[Run]) -> dict[str, float] | None:
    """Milliseconds a round by where its time goes, of those turns that were looked at; see `rounds.py` for the names. `draft` goes on
    beside the others."""
    told = [run.seen["phases"] for run in runs if run.seen.get("phases")]
    rounds = sum(one.get("engine", [0.0, 0.0])[1] for one in told)
    if not rounds:
        return None
    names = dict.fromkeys(name for one in told for name in one)
    ms = {name: 1e3 * sum(one.get(name, [0.0, 0.0])[0] for one in told) / rounds for name in names}
    if "engine" in ms:
        ms["forward"] = max(0.0, ms.pop("engine") - ms.get("sample", 0.0))
    return {name: round(value, 3) for name, value in ms.items()}


def draft_step_ms(runs: Sequence[Run]) -> float | None:
    told = [run.seen["phases"]["draft"] for run in runs if run.seen.get("phases", {}).get("draft")]
    steps = sum(count for _, count in told)
    return 1e3 * sum(seconds for seconds, _ in told) / steps if steps else None


def setting_of(cell: Mapping[str, Any], way: str, baseline: str = "none") -> Setting | None:
    """A measured cell as a setting that can be changed: by the services' metrics, else by what a client saw. None where it tells too
    little."""
    figure, plain = cell["ways"].get(way, {}), cell["ways"].get(baseline, {})
    costs = figure.get("economics")
    if not costs:
        return None
    round_ms, target_ms, row_ms = costs["plain_round_ms"], costs["plain_round_ms"], costs["slot_ms"]
    steps = [sum((one.get("phases") or {}).get(name, 0.0) for name in ("forward", "sample")) for one in (plain, figure)]
    if all(steps):
        # Of all rounds: those without a block are as in the plain way.
        target_ms, row_ms = min(steps[0], round_ms), max(0.0, steps[1] - steps[0]) / figure["share_with_block"] / figure["mean_block"]
    setting = Setting(target_ms, figure.get("draft_step_ms") or 0.0, tuple(figure["alpha"]), row_ms, host_ms=max(0.0, round_ms - target_ms))
    whole = math.prod(setting.alpha(round(figure["mean_block"]) + 1))
    seen = ((figure.get("hit_rate") or 0.0) - whole) / (1 - whole) if whole < 1 else 1.0
    return replace(setting, foresight=min(1.0, max(0.0, seen)))


def draft_busy(runs: Sequence[Run]) -> float | None:
    """Share of the turns' time in which the drafts computed, all together over how many there are."""
    told = [run for run in runs if run.seen.get("phases", {}).get("draft")]
    seconds = sum(run.seconds for run in told)
    drafts = max((run.seen.get("processes", {}).get("draft", 1) for run in told), default=1)
    return sum(run.seen["phases"]["draft"][0] for run in told) / seconds / drafts if seconds else None


def memory(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The most of every process, MiB."""
    return most_of(one for run in runs for one in run.seen.get("memory", ()))


def most_of(told: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Entries of the same name become one, of the largest numbers. `rest_mib` = of the peak, what is neither weights nor keys and values:
    code, buffers, what loading took for a moment, on a GPU what its libraries keep; None where one of them was not told."""
    most: dict[str, dict[str, Any]] = {}
    for one in told:
        held = most.setdefault(one["name"], dict(one))
        held.update({key: max(held.get(key) or 0, value) for key, value in one.items() if isinstance(value, int | float)})
    return [{**held, "rest_mib": _rest_mib(held)} for held in most.values()]


def _rest_mib(held: Mapping[str, Any]) -> float | None:
    """A GPU's room is taken as a whole; a CPU's where it is booked, and weights that are mapped are in the process's memory too."""
    device = held.get("device_peak_mib")
    peak, kv = (held.get("peak_mib"), held.get("kv_used_mib")) if device is None else (device, held.get("kv_mib"))
    return None if peak is None or kv is None or "weights_mib" not in held else round(peak - held["weights_mib"] - kv, 1)

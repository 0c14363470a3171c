"""Does speculation pay in a cell, and what should be set? A verdict in one word, and its reasons in sentences. Pure.

    pays      the whole interval of the ratio lies above 1, and the ratio is at least 1 + margin
    costs     the whole interval lies below 1, and the ratio is at most 1 - margin
    neutral   anything else: `decided` tells an interval within 1 ± margin from one that is too wide to say

A way whose texts differ where equality is promised, or whose answers fail more often than without speculation beyond chance, is not
advised whatever it gains: it costs, and `defect` tells why. Where more failed, and that may be chance, it does not pay yet. Of many
cells some intervals miss the truth by chance: `together` tells whether a verdict also holds when all of them are looked at together.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.bench import economics, figures
from specdec.bench.experiment import NONE

PAYS, NEUTRAL, COSTS = "pays", "neutral", "costs"
WORDS = (PAYS, NEUTRAL, COSTS)
MARGIN = 0.03
SLOW_FIRST_TOKEN = 1.1
SHOWN = 0.005  # what is less is 0.00 in print
FEW_FAILURES = 0.01  # more failed answers than without speculation, as a share of all, that do not matter
RANK = {PAYS: 2, NEUTRAL: 1, COSTS: 0}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`way` = the best of those that were measured; `advised` = what to set, `num_speculative_tokens` 0 = no speculation."""

    word: str
    decided: bool
    way: str
    ratio: float
    low: float | None
    high: float | None
    defect: str = ""
    together: bool = True
    reasons: tuple[str, ...] = ()
    advised: Mapping[str, Any] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        return {**asdict(self), "reasons": list(self.reasons), "advised": dict(self.advised)}


def word_of(ratio: float, low: float | None, high: float | None, margin: float = MARGIN) -> tuple[str, bool]:
    """(word, decided). Without an interval nothing is decided."""
    if low is None or high is None:
        return NEUTRAL, False
    if low > 1.0 and ratio >= 1.0 + margin:
        return PAYS, True
    if high < 1.0 and ratio <= 1.0 - margin:
        return COSTS, True
    return NEUTRAL, 1.0 - margin <= low and high <= 1.0 + margin


def verdict(ways: Mapping[str, Mapping[str, Any]], baseline: str, open_loop: bool = False, margin: float = MARGIN) -> Verdict | None:
    """`ways` = figures by way (report.py). None where there is nothing to compare. In an open loop the arrivals set the rate, so the ratio
    is that of the times of an answer."""
    rated = {way: figure for way, figure in ways.items() if way != baseline and figure.get("ratio")}
    if not rated or baseline not in ways:
        return None
    words = {way: word_of(*_interval(figure), margin) for way, figure in rated.items()}
    for way, figure in rated.items():
        if words[way][0] == PAYS and _fails_more(figure, ways[baseline]):
            words[way] = NEUTRAL, False
    defects = {way: _defect(figure, ways[baseline]) for way, figure in rated.items()}
    way = max(
        rated, key=lambda name: (not defects[name], *_rank(words[name][0], bool(rated[name].get("adaptive")), rated[name]["ratio"]["mean"]))
    )
    word, decided = words[way]
    ratio, low, high = _interval(rated[way])
    if defects[way]:
        word, decided = COSTS, True
    reasons = [
        *_troubles(rated, ways[baseline], baseline),
        _headline(way, words[way], rated[way], margin, open_loop, baseline),
        *_others(rated, words, way),
        *_why(rated[way], ways[baseline], baseline),
    ]
    advised = _advised(word, way, rated[way], baseline, ways[baseline])
    return Verdict(word, decided, way, ratio, low, high, defects[way], reasons=tuple(reasons), advised=advised)


def without(baseline: str) -> str:
    """What the ways are compared with, in words."""
    return "no speculation" if baseline == NONE else f"the way {baseline}"


def _interval(figure: Mapping[str, Any]) -> tuple[float, float | None, float | None]:
    ratio = figure["ratio"]
    return ratio["mean"], ratio["low"], ratio["high"]


def _defect(figure: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    if figure.get("differing"):
        return "texts differ"
    return "answers fail" if figures.more_often(figure.get("errors", 0), base.get("errors", 0)) else ""


def _fails_more(figure: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    more = figure.get("errors", 0) - base.get("errors", 0)
    return bool(more > FEW_FAILURES * (figure.get("answers", 0) + figure.get("errors", 0)))


def _troubles(rated: Mapping[str, Mapping[str, Any]], base: Mapping[str, Any], baseline: str) -> list[str]:
    against = without(baseline)
    found = [f"{way}: {figure['differing']} texts differ from those of {against}, which must not be: a defect, do not use it"
             for way, figure in rated.items() if figure.get("differing")]  # fmt: skip
    failed = {way: figure.get("errors", 0) for way, figure in rated.items()}
    before = base.get("errors", 0)
    found += [f"{way}: {count} answers failed, {before} with {against}" for way, count in failed.items() if count != before]
    return found


def _headline(way: str, word: tuple[str, bool], figure: Mapping[str, Any], margin: float, open_loop: bool, baseline: str) -> str:
    ratio, low, high = _interval(figure)
    what = "answers are done in 1/{:.2f} of the time" if open_loop else "{:.2f} times the tokens per second"
    between = "one repeat, so no interval" if low is None or high is None else f"95 %: {low:.2f} to {high:.2f}"
    told = f"{way}: {what.format(ratio)} of {without(baseline)} ({between})"
    if word == (NEUTRAL, True):
        return f"{told}: the same within {margin:.0%}"
    if word == (NEUTRAL, False):
        if low is not None and low > 1.0 + margin:
            return f"{told}: more answers failed, which may be chance; more --repeats would tell"
        return f"{told}: too uncertain to say; {_repeats_that_tell(figure.get('pairs', ()), margin)} would tell"
    return told


def _repeats_that_tell(pairs: Sequence[float], margin: float) -> str:
    """Until the interval lies on one side of 1 or within the margin, if the ratio stays what it is. Nothing of two repeats, whose spread is
    chance."""
    if len(pairs) < 3:
        return "more --repeats"
    logs = [math.log(pair) for pair in pairs]
    off = abs(statistics.fmean(logs))
    about = figures.repeats_until(statistics.stdev(logs), max(off, math.log1p(margin) - off), len(logs) + 1)
    return f"about {about} --repeats" if about else f"not even {figures.MOST_REPEATS} --repeats"


def _others(rated: Mapping[str, Mapping[str, Any]], words: Mapping[str, tuple[str, bool]], way: str) -> list[str]:
    shown = {other: f"{word}{'' if decided else '?'}" for other, (word, decided) in words.items()}
    return [f"{other} {shown[other]} ({figure['ratio']['mean']:.2f})" for other, figure in rated.items() if other != way]


def _why(figure: Mapping[str, Any], base: Mapping[str, Any], baseline: str = NONE) -> list[str]:
    """What the ratio is made of, and what it does not tell."""
    reasons = []
    costs = figure.get("economics") or {}
    if costs:
        longer, reach = (costs.get(name, 0.0) / costs["plain_round_ms"] for name in ("block_round_ms", "block_round_reach_ms"))
        unsure = f" ± {reach:.2f}" if reach >= SHOWN else ""
        reasons.append(
            f"a round with a block decides {figure['mean_acceptance_length']:.2f} tokens and takes {longer:.2f} times as long{unsure} "
            f"({costs['block_round_ms']:.1f} ms for {costs['plain_round_ms']:.1f} ms); "
            f"{figure['share_with_block']:.0%} of the rounds have one"
        )
        if costs["break_even_acceptance"] is not None:
            even = costs["break_even_acceptance"]
            pays = f"it pays from {even:.2f} on at this cost" if even >= SHOWN else "it pays with any, since a block costs nothing here"
            reasons.append(f"acceptance per proposal {costs['constant_acceptance']:.2f}; {pays}")
            best, block, modelled = costs["best_k"], round(figure["mean_block"]), dict(map(tuple, costs["curve"]))
            if not figure.get("adaptive") and best and abs(best - figure["mean_block"]) >= 1:
                beside = f", of {block} {modelled[block]:.2f} times" if block in modelled else ""
                reasons.append(f"modelled: blocks of {best} would give {modelled[best]:.2f} times{beside}")
        else:
            reasons.append("at this cost of a round not even a draft that is always right would pay")
    elif few := figure.get("too_few_blocks"):
        reasons.append(_too_few(few["rounds"], few["needed"], figure["share_with_block"]))
    elif figure.get("share_with_block", 0.0) < economics.LEAST_SHARE:
        reasons.append("hardly any round had a block: there is no draft, or the service found that it does not pay")
    first, before = figure.get("first_token_ms_p50"), base.get("first_token_ms_p50")
    if before and first and first > SLOW_FIRST_TOKEN * before:
        reasons.append(f"the first token comes later: {first:.0f} ms for {before:.0f} ms")
    if figure.get("goodput_share") is not None and base.get("goodput_share") is not None:
        reasons.append(
            f"within the limits: {figure['goodput_share']:.0%} of the answers, {base['goodput_share']:.0%} with {without(baseline)}"
        )
    return reasons


def _too_few(rounds: int, needed: int | None, share: float) -> str:
    told = f"what a round with a block costs cannot be told from the {rounds} rounds that had one ({share:.0%} of them)"
    if needed is None:
        return f"{told}: the rounds without one took other times by themselves"
    return f"{told}: at this share it takes about {needed}; more --repeats would tell"


def _advised(word: str, way: str, figure: Mapping[str, Any], baseline: str = NONE, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the way should be set to, or, where it does not pay, what it was compared with."""
    costs, k = figure.get("economics") or {}, figure.get("num_speculative_tokens") or 0
    adaptive = bool(figure.get("adaptive"))
    if word == COSTS or (word == NEUTRAL and not adaptive):
        if baseline != NONE and base is not None:
            return _advised(PAYS, baseline, base)
        return {"disable_spec_decode": True, "num_speculative_tokens": 0, "drafts": 0}
    drafts = economics.drafts_needed(figure.get("draft_busy"), figure.get("drafts") or 1)
    if adaptive:  # it chooses up to a maximum, which should leave room
        return {"enable_adaptive_verification": True, "num_speculative_tokens": max(k, costs.get("best_k", 0), 1), "drafts": drafts}
    return {"enable_adaptive_verification": False, "num_speculative_tokens": costs.get("best_k") or k, "drafts": drafts}


# ---------------------------------------------------------------- of the whole sweep


def judge_together(cells: Sequence[dict[str, Any]], baseline: str) -> None:
    """Writes into each "verdict" whether it holds together with all others: every way of every cell was a chance to be wrong."""
    looked_at = [(cell, way, figure) for cell in cells for way, figure in cell["ways"].items() if way != baseline and figure.get("ratio")]
    sure = figures.sure_together([figures.chance(figure["pairs"]) for _, _, figure in looked_at])
    holds = {(id(cell), way): one for (cell, way, _), one in zip(looked_at, sure, strict=True)}
    for cell in cells:
        given = cell.get("verdict")
        if given and given["word"] != NEUTRAL and not given["defect"]:
            given["together"] = holds[id(cell), given["way"]]


def summary(cells: Sequence[Mapping[str, Any]], whole: Mapping[str, Any] | None = None, baseline: str = NONE) -> dict[str, Any]:
    """`cells` with a "verdict"; `whole` = the slice of all of them (slices.py). `headline` for who reads nothing else; `advised` = what
    serves all of them best, where they are not told apart; not `decided` = for want of something surer."""
    found = [cell["verdict"] for cell in cells if cell.get("verdict")]
    counts = {word: sum(one["word"] == word and one["decided"] for one in found) for word in WORDS}
    counts["undecided"] = len(found) - sum(counts.values())
    if not found:
        return {"word": NEUTRAL, "headline": "Nothing was compared.", "counts": counts, "sentences": [], "advised": {}, "decided": False}
    subject = "Speculation" if baseline == NONE else f"Another way than {baseline}"
    word = next((word for word in (PAYS, COSTS) if 2 * counts[word] >= len(found)), NEUTRAL)
    headline, sentences, advised = _sentence(counts, len(found), subject), _ranges(cells), dict(found[0]["advised"])
    sentences, decided = sentences + _by_chance(cells), counts["undecided"] < len(found)
    if whole is not None and whole["ways"]:
        way, advised = _serves_all(cells, whole, baseline)
        sentences = [_together(whole), *sentences]
        if 2 * counts["undecided"] > len(found):  # then what they say together is what can be said
            word, sentences = whole["ways"][way]["word"], [headline, *sentences]
            decided = whole["ways"][way].get("decided", True)
            told = {
                PAYS: f"{subject.lower()} pays",
                NEUTRAL: "no difference was found" if decided else "it is too uncertain to say",
                COSTS: f"{subject.lower()} costs more than it gains",
            }
            headline = f"Over all cases together {told[word]}."
    return {"word": word, "headline": headline, "counts": counts, "sentences": sentences, "advised": advised, "decided": decided}


def _by_chance(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What not to make much of."""
    shaky = [cell["name"] for cell in cells if cell.get("verdict") and not cell["verdict"].get("together", True)]
    if not shaky:
        return []
    names = "; ".join(shaky[:4]) + (f"; and {len(shaky) - 4} more" if len(shaky) > 4 else "")
    return [f"May be chance, since so many cases were looked at ({len(cells)}), and would need more --repeats: {names}."]


def _serves_all(cells: Sequence[Mapping[str, Any]], whole: Mapping[str, Any], baseline: str) -> tuple[str, dict[str, Any]]:
    """The way that gains most over all cells, and what most of them would set for it."""
    held = {way: [(cell["ways"][way], cell["ways"].get(baseline)) for cell in cells if way in cell["ways"]] for way in whole["ways"]}
    adaptive = {way: any(figure.get("adaptive") for figure, _ in pairs) for way, pairs in held.items()}
    way = max(whole["ways"], key=lambda name: _rank(whole["ways"][name]["word"], adaptive[name], whole["ways"][name]["mean"]))
    word = COSTS if any(figure.get("differing") for figure, _ in held[way]) else whole["ways"][way]["word"]
    told = [_advised(word, way, figure, baseline, base) for figure, base in held[way]]
    return way, max(told, key=told.count)


def _rank(word: str, adaptive: bool, ratio: float) -> tuple[int, bool, float]:
    """Where nothing is gained, a service that may choose is the safer one."""
    return RANK[word], word == NEUTRAL and adaptive, ratio


def _together(whole: Mapping[str, Any]) -> str:
    parts = [
        f"{way} {one['mean']:.2f} times as fast" + ("" if one["low"] is None else f" ({one['low']:.2f} to {one['high']:.2f})")
        for way, one in whole["ways"].items()
    ]
    return f"Over all {whole['cells']} cases together: {', '.join(parts)}."


def _sentence(counts: Mapping[str, int], total: int, subject: str) -> str:
    every = {PAYS: "pays", COSTS: "costs more than it gains", NEUTRAL: "makes no difference"}
    for word, told in every.items():
        if counts[word] == total:
            return f"{subject} {told}{' everywhere it was measured' if total > 1 else ''}."
    if counts["undecided"] == total:
        return "The intervals are too wide to decide."
    parts = [f"pays in {counts[PAYS]} of {total} cases"]
    parts += [f"costs in {counts[COSTS]}"] if counts[COSTS] else []
    parts += [f"makes no difference in {counts[NEUTRAL]}"] if counts[NEUTRAL] else []
    parts += [f"is undecided in {counts['undecided']}"] if counts["undecided"] else []
    return f"{subject} {', '.join(parts)}."


def _ranges(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    sentences = []
    judged = [(cell, cell["verdict"]) for cell in cells if cell.get("verdict")]
    for word, decided, told in (
        (PAYS, True, "It pays"), (NEUTRAL, True, "It makes no difference"), (COSTS, True, "It costs"), (NEUTRAL, False, "Undecided")
    ):  # fmt: skip
        held = [(cell["name"], one["ratio"]) for cell, one in judged if (one["word"], one["decided"]) == (word, decided)]
        if held:
            ratios = [ratio for _, ratio in held]
            where = "; ".join(name for name, _ in held[:4]) + (f"; and {len(held) - 4} more" if len(held) > 4 else "")
            between = f"{min(ratios):.2f}" if len(ratios) == 1 else f"{min(ratios):.2f} to {max(ratios):.2f}"
            sentences.append(f"{told} ({between} times as fast) with {where}.")
            if not decided:
                sentences.append("There the interval is too wide to say: the same command with more --repeats goes on from here.")
    return sentences

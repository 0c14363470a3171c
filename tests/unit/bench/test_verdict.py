"""What a cell's figures are taken to mean, and what is said of it."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import scipy.stats

from specdec.bench import advice, economics, figures, tables, verdict
from specdec.bench.advice import Change
from specdec.bench.experiment import Experiment
from specdec.bench.report import Asked
from specdec.bench.timings import Limits
from specdec.bench.verdict import COSTS, NEUTRAL, PAYS
from specdec.runtime import names
from tests.unit.bench.made_up import AUTO, FIXED, GRID, NONE, made_up, runs

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("ratio", "low", "high", "word", "decided"),
    [
        (1.20, 1.10, 1.30, PAYS, True),
        (1.02, 1.01, 1.03, NEUTRAL, True),  # surely more than nothing, and still nothing to speak of
        (1.20, 0.99, 1.45, NEUTRAL, False),
        (1.00, 0.98, 1.02, NEUTRAL, True),
        (0.98, 0.97, 0.99, NEUTRAL, True),
        (0.90, 0.85, 0.95, COSTS, True),
        (0.90, 0.80, 1.01, NEUTRAL, False),
        (1.50, None, None, NEUTRAL, False),
    ],
)
def test_an_interval_against_one_with_a_margin(ratio: float, low: float | None, high: float | None, word: str, decided: bool) -> None:
    assert verdict.word_of(ratio, low, high, margin=0.03) == (word, decided)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return made_up(asked=Asked(Limits(150.0, 60.0)))


def cell(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["cells"] if one["name"] == name)


def test_what_was_put_in_comes_out(found: dict[str, Any]) -> None:
    """A good draft alone pays, the same with eight streams whose rows are dear costs, and the service's choice is neutral for a bad one."""
    given = {one["name"]: one["verdict"] for one in found["cells"]}
    assert {name: one["word"] for name, one in given.items()} == {
        "1 stream, T = 0, code": PAYS,
        "8 streams, T = 0, code": COSTS,
        "1 stream, T = 0, creative": NEUTRAL,
        "8 streams, T = 0, creative": NEUTRAL,
    }
    assert given["1 stream, T = 0, creative"]["way"] == AUTO and given["8 streams, T = 0, code"]["advised"]["drafts"] == 0
    code = cell(found, "1 stream, T = 0, code")["ways"][FIXED]
    assert code["economics"]["plain_round_ms"] == pytest.approx(20.0, rel=0.03)
    assert code["economics"]["block_round_ms"] == pytest.approx(28.0, rel=0.03) and code["economics"]["slot_ms"] == pytest.approx(
        2.0, rel=0.1
    )
    # E t(1) = t(5): 1 + a + … + a^4 = 1.4 at a = 0.296
    assert code["economics"]["break_even_acceptance"] == pytest.approx(0.296, abs=0.02)
    bad = cell(found, "8 streams, T = 0, creative")["ways"][FIXED]
    assert verdict.word_of(bad["ratio"]["mean"], bad["ratio"]["low"], bad["ratio"]["high"])[0] == COSTS
    assert given["1 stream, T = 0, creative"]["advised"]["enable_adaptive_verification"]


def test_reasons_tell_rounds_acceptance_goodput_and_defects(found: dict[str, Any]) -> None:
    words = "\n".join(tables.reasons(cell(found, "1 stream, T = 0, code")))
    assert "pays" in words and "it pays from 0.2" in words and "within the limits" in words and "num_speculative_tokens" in words
    ways = {NONE: figure(1.0), FIXED: figure(2.0, differing=1), AUTO: figure(1.5, errors=5)}
    given = verdict.verdict(ways, NONE)
    assert given is not None and given.word == COSTS and given.advised["disable_spec_decode"]
    assert "1 texts differ" in given.reasons[0] and "5 answers failed" in given.reasons[1] and given.defect == "texts differ"
    sound = verdict.verdict({**ways, AUTO: figure(1.5)}, NONE)
    assert sound is not None and (sound.word, sound.way) == (PAYS, AUTO)
    fails = verdict.verdict({NONE: figure(1.0), AUTO: figure(1.5, errors=5, answers=35)}, NONE)
    assert fails is not None and (fails.word, fails.defect) == (COSTS, "answers fail")
    some = verdict.verdict({NONE: figure(1.0), AUTO: figure(1.5, errors=4, answers=36)}, NONE)
    assert some is not None and (some.word, some.decided, some.defect) == (NEUTRAL, False, "") and "may be chance" in some.reasons[1]
    few = verdict.verdict({NONE: figure(1.0), AUTO: figure(1.5, errors=4, answers=500)}, NONE)
    assert few is not None and few.word == PAYS and "4 answers failed, 0 with no speculation" in few.reasons[0]
    slow = verdict.verdict({NONE: figure(1.0), FIXED: figure(1.3, first_token_ms_p50=30.0)}, NONE)
    assert slow is not None and any("first token comes later" in reason for reason in slow.reasons)
    assert verdict.verdict({NONE: figure(1.0)}, NONE) is None


def figure(ratio: float, **more: Any) -> dict[str, Any]:
    told = {"ratio": {"mean": ratio, "low": 0.95 * ratio, "high": 1.05 * ratio}, "differing": 0, "errors": 0, "first_token_ms_p50": 10.0}
    return {**told, "share_with_block": 0.0, "num_speculative_tokens": 3, "economics": {}, **more}


def test_another_baseline_is_named_and_advised() -> None:
    """Without the way none nothing is said of speculation as such, and no cost of a block is made up from rounds that have one."""
    experiment: Experiment = replace(GRID, ways=(FIXED, AUTO))
    told = made_up([run for run in runs() if run.turn.way != NONE], experiment)
    given = [one["verdict"] for one in told["cells"]]
    assert told["summary"]["headline"].startswith(("Another way than fixed", "Over all cases together"))
    assert all("of the way fixed" in one["reasons"][0] and not one["advised"].get("disable_spec_decode") for one in given)
    assert not any(figure["economics"] for one in told["cells"] for figure in one["ways"].values())
    dear = verdict.verdict({FIXED: figure(1.0, num_speculative_tokens=4), AUTO: figure(0.8, adaptive=True)}, FIXED)
    assert dear is not None and dear.word == COSTS
    assert dear.advised == {"enable_adaptive_verification": False, "num_speculative_tokens": 4, "drafts": 1}, "as the baseline was"


def test_repeats_in_which_others_failed_are_not_compared() -> None:
    """A turn that lost its answers to a restart is no measurement of the way; in an open loop both answers to a question must have come."""
    kept = runs()
    number = next(i for i, run in enumerate(kept) if (run.turn.way, run.turn.repeat) == (NONE, 1))
    lost = replace(kept[number].said[0], token_ids=(), arrivals=(), error="Unavailable: gone", total_s=0.01)
    kept[number] = replace(kept[number], said=(lost, *kept[number].said[1:]), seconds=30.0)
    told = made_up(kept)
    ways = cell(told, str(kept[number].turn.cell))["ways"]
    assert ways[FIXED]["left_out"] == 1 and ways[FIXED]["ratio"]["pairs"] == GRID.repeats - 1
    assert max(ways[FIXED]["pairs"]) < 4.0 and any("1 repeats are not in its ratio" in note for note in told["notes"])
    experiment = replace(GRID, rates=(2.0,), kinds=("code",))
    opened = runs(experiment)
    before = made_up(opened, experiment)["cells"][0]["ways"][FIXED]["ratio"]["mean"]
    for i, run in enumerate(opened):  # without speculation the slower half is refused
        if run.turn.way == NONE:
            slow = sorted(run.said, key=lambda one: one.total_s)[len(run.said) // 2 :]
            said = tuple(replace(one, error="Overloaded: no room", token_ids=()) if one in slow else one for one in run.said)
            opened[i] = replace(run, said=said)
    after = made_up(opened, experiment)["cells"][0]["ways"][FIXED]
    assert after["ratio"]["mean"] == pytest.approx(before, rel=0.05) and after["ratio"]["pairs"] == GRID.repeats


def test_a_draft_that_went_away_is_told_and_no_cost_is_made_of_noise() -> None:
    kept = runs()
    for i, one in enumerate(kept):
        if one.turn.way == FIXED and one.turn.repeat == 0:
            said = tuple(replace(said, stats={**said.stats, "num_draft_tokens": 0, "num_spec_steps": 0}) for said in one.said)
            kept[i] = replace(one, said=said)
        if one.turn.way == NONE:  # the machine was slow whenever there was no speculation
            times = [tuple((3.0 * at, count) for at, count in said.arrivals) for said in one.said]
            kept[i] = replace(one, said=tuple(replace(said, arrivals=at) for said, at in zip(one.said, times, strict=True)))
    told = made_up(kept)
    assert sum("fixed: no proposal was verified in 1 of 4 turns" in note for note in told["notes"]) == len(told["cells"])
    costs = [cell(told, name)["ways"][FIXED]["economics"] for name in ("1 stream, T = 0, code", "8 streams, T = 0, creative")]
    assert not costs[0] and costs[1]["block_round_ms"] > 0.5 * costs[1]["plain_round_ms"]


def test_a_queue_that_grows_is_told() -> None:
    experiment = replace(GRID, rates=(2.0,), kinds=("code",), batch=16)
    turns = [one for one in runs(experiment) if one.turn.way == NONE]
    slow = [replace(one, seconds=40.0, said=tuple(replace(one.said[0], seed=i, total_s=1.0 + 2.0 * i) for i in range(16))) for one in turns]
    quick = [replace(one, seconds=9.0, said=tuple(replace(one.said[0], seed=i) for i in range(16))) for one in turns]
    assert any("faster than they were answered" in note for note in made_up(slow, experiment)["notes"])
    assert not any("faster than they were answered" in note for note in made_up(quick, experiment)["notes"])
    burst = replace(experiment, rates=(400.0,))
    at_once = [replace(one, turn=replace(one.turn, cell=burst.cells[0])) for one in quick]
    assert any("a burst and no steady load" in note for note in made_up(at_once, burst)["notes"])


def test_texts_within_rounding_are_counted_and_no_defect() -> None:
    kept = [replace(one, settings={**one.settings, "batch_invariant": False}) for one in runs()]
    number = next(i for i, run in enumerate(kept) if run.turn.way == FIXED)
    kept[number] = replace(kept[number], said=(replace(kept[number].said[0], text_hash="other"), *kept[number].said[1:]))
    told = made_up(kept)
    assert told["differing"] == 0 == told["compared"] and not any(one["verdict"]["defect"] for one in told["cells"])
    assert any(note.startswith("1 of ") and "not promised" in note for note in told["notes"])


def test_of_many_cells_some_are_chance() -> None:
    """The more is looked at, the surer each must be. p by scipy."""
    pairs = [1.1, 1.2, 1.15, 1.3]
    assert figures.chance(pairs) == pytest.approx(scipy.stats.ttest_1samp(np.log(pairs), 0.0).pvalue)
    chances = np.random.default_rng(1).uniform(size=40) ** 3
    assert figures.sure_together(list(chances)) == (scipy.stats.false_discovery_control(chances) <= 0.05).tolist()
    assert (
        figures.sure_together([]) == [] and figures.chance([1.2]) == 1.0 == figures.chance([1.0, 1.0]) and figures.chance([2.0, 2.0]) == 0
    )
    assert [figures.more_often(*both) for both in ((5, 0), (4, 0), (9, 8), (20, 5), (0, 0))] == [True, False, False, True, False]
    # Ratios that are 1, measured with noise: single intervals call some of 200 cells, together hardly any holds.
    draw = np.random.default_rng(7)
    cells: list[dict[str, Any]] = []
    for number in range(200):
        pairs = list(np.exp(draw.normal(0.0, 0.1, 5)))
        ratio = figures.careful_ratio(pairs, [1.0] * 5)
        assert ratio is not None
        ways = {NONE: figure(1.0), FIXED: {**figure(ratio.mean), "ratio": asdict(ratio), "pairs": pairs}}
        given = verdict.verdict(ways, NONE)
        assert given is not None
        cells.append({"name": str(number), "ways": ways, "verdict": given.told()})
    verdict.judge_together(cells, NONE)
    decided = [one["verdict"] for one in cells if one["verdict"]["word"] != NEUTRAL]
    assert 3 <= len(decided) <= 20 and not any(one["together"] for one in decided)
    assert any("May be chance" in sentence and "200" in sentence for sentence in verdict.summary(cells)["sentences"])
    sure = {"name": "sure", "ways": {NONE: figure(1.0), FIXED: {**figure(1.5), "pairs": [1.5, 1.5001, 1.4999, 1.5]}}}
    given = verdict.verdict(sure["ways"], NONE)
    assert given is not None
    verdict.judge_together([*cells, sure | {"verdict": (told := given.told())}], NONE)
    assert told["together"]


def test_the_sweep_in_a_sentence() -> None:
    def of(*words: str) -> str:
        cells = [{"name": word, "verdict": {"word": word, "ratio": 1.0, "decided": True, "advised": {}}} for word in words]
        return str(verdict.summary(cells)["headline"])

    assert of(PAYS, PAYS) == "Speculation pays everywhere it was measured." and of(PAYS) == "Speculation pays."
    assert of(PAYS, COSTS, NEUTRAL) == "Speculation pays in 1 of 3 cases, costs in 1, makes no difference in 1."
    assert of(COSTS) == "Speculation costs more than it gains." and "no difference" in of(NEUTRAL)
    assert of(NEUTRAL, COSTS).startswith("Speculation pays in 0 of 2 cases, costs in 1") and of() == "Nothing was compared."
    unsure = verdict.summary([{"name": "a", "verdict": {"word": NEUTRAL, "ratio": 1.4, "decided": False, "advised": {}}}])
    assert "too wide to decide" in unsure["headline"] and "no difference" not in " ".join(unsure["sentences"])
    assert "--repeats" in unsure["sentences"][1]


def test_a_text_that_differs_is_found_in_its_cell_and_kind() -> None:
    kept = runs()
    number = next(i for i, run in enumerate(kept) if run.turn.way == FIXED and run.turn.repeat == 2)
    broken = (replace(kept[number].said[0], text_hash="other"), *kept[number].said[1:])
    kept[number] = replace(kept[number], said=broken)
    told = made_up(kept)
    assert told["differing"] == 1 and cell(told, str(kept[number].turn.cell))["ways"][FIXED]["differing"] == 1


def test_an_open_loop_compares_times_of_answers() -> None:
    experiment = replace(GRID, rates=(2.0,), kinds=("code",))
    told = made_up(runs(experiment), experiment)
    assert [one["name"] for one in told["cells"]] == ["2 questions/s, T = 0, code"]
    answer = {way: figure["answer_ms_p50"] for way, figure in told["cells"][0]["ways"].items()}
    assert told["cells"][0]["ways"][FIXED]["ratio"]["mean"] == pytest.approx(answer[NONE] / answer[FIXED], rel=0.1)
    assert "1/" in told["cells"][0]["verdict"]["reasons"][0]


def test_time_memory_and_drafts_by_what_was_seen(found: dict[str, Any]) -> None:
    code = cell(found, "1 stream, T = 0, code")["ways"]
    assert code[FIXED]["phases"]["forward"] == pytest.approx(19.6) and code[FIXED]["phases"]["draft"] == pytest.approx(34.0)
    assert code[FIXED]["draft_step_ms"] == pytest.approx(8.5) and code[NONE]["phases"]["draft"] == 0
    assert code[FIXED]["memory"][0]["peak_mib"] == 640.0
    busy = 1.7 * GRID.repeats / code[FIXED]["seconds"]
    assert code[FIXED]["draft_busy"] == pytest.approx(busy, rel=0.01)
    assert cell(found, "1 stream, T = 0, code")["verdict"]["advised"]["drafts"] == economics.drafts_needed(busy, 1)


def test_memory_of_processes_in_parts() -> None:
    """The most of every process; what is left of the peak; nothing where a part was not told."""
    target = {"name": "target-0", "role": "target", "peak_mib": 900.0, "resident_mib": 800.0, "weights_mib": 500.25, "kv_mib": 400.0}
    seen = [
        {**target, "kv_used_mib": 90.0, "kv_share": 0.2},
        {**target, "kv_used_mib": 110.0, "peak_mib": 950.0},
        {"name": "draft-0", "role": "draft", "peak_mib": 300.0, "weights_mib": 700.0, "kv_mib": 200.0, "kv_used_mib": 5.0,
         "device_mib": 910.0, "device_peak_mib": 1000.0},
        {"name": "orchestrator-0", "role": "orchestrator", "peak_mib": 120.0},
    ]  # fmt: skip
    parts = economics.most_of(seen)
    assert [one["rest_mib"] for one in parts] == [339.8, 100.0, None], "on a GPU of the GPU's peak, where all of the room is taken"
    assert economics.most_of([*parts, *seen]) == parts, "also of what was put together before"
    titles, *rows = tables.memory(parts)
    assert titles == ["MiB", "weights", "KV used", "KV room", "peak", "rest", "resident", "GPU", "GPU peak"]
    assert rows[0] == ["target-0", "500", "110", "400", "950", "340", "800", "", ""] and rows[2][:5] == ["orchestrator-0", *[""] * 3, "120"]
    target_line, draft_line, _ = csv.DictReader(io.StringIO(tables.memory_csv(parts)))
    assert (target_line["weights_mib"], target_line["kv_used_mib"], target_line["kv_share"]) == ("500.25", "110.0", "0.2")
    assert (draft_line["name"], draft_line["role"], draft_line["device_peak_mib"], draft_line["before_mib"]) == (
        "draft-0",
        "draft",
        "1000.0",
        "",
    )


def test_where_it_stops_paying_as_load_grows() -> None:
    experiment: Experiment = replace(GRID, kinds=("code",), concurrencies=(1, 4, 16), ways=(NONE, FIXED))
    (point,) = made_up(runs(experiment), experiment)["break_even_load"]
    assert point["way"] == FIXED and 4 < point["load"] < 16


def test_csv_has_a_line_for_every_cell_and_way(found: dict[str, Any]) -> None:
    lines = list(csv.DictReader(io.StringIO(tables.as_csv(found["cells"]))))
    assert (
        len(lines) == 12
        and {line["way"] for line in lines} == {NONE, FIXED, AUTO}
        and {line["kind"] for line in lines} == {"code", "creative"}
    )
    assert float(lines[1]["ratio"]) == cell(found, "1 stream, T = 0, code")["ways"][FIXED]["ratio"]["mean"]


def test_slices_are_the_pairs_of_their_cells_together(found: dict[str, Any]) -> None:
    """A slice is surer than its cells, and tells what was varied and nothing else."""
    told = {one["name"]: one for one in found["slices"]}
    assert list(told) == ["all cells", "kind code", "kind creative", "1 stream", "8 streams"]
    assert (told["all cells"]["cells"], told["kind code"]["cells"], told["all cells"]["ways"][FIXED]["pairs"]) == (4, 2, 4 * GRID.repeats)
    pairs = [pair for name in ("1 stream", "8 streams") for pair in cell(found, f"{name}, T = 0, code")["ways"][FIXED]["pairs"]]
    low, high = scipy.stats.t.interval(0.95, len(pairs) - 1, np.log(pairs).mean(), scipy.stats.sem(np.log(pairs)))
    one = told["kind code"]["ways"][FIXED]
    assert one["mean"] == pytest.approx(scipy.stats.gmean(pairs), abs=1e-3)
    assert one["low"] <= np.exp(low) + 1e-3 and one["high"] >= np.exp(high) - 1e-3
    assert told["kind creative"]["ways"][FIXED]["word"] == COSTS
    assert found["summary"]["sentences"][0].startswith("Over all 4 cases together: fixed ")
    # Most cells are decided, so they are the headline; what all of them should set goes by all of them.
    assert found["summary"]["advised"]["enable_adaptive_verification"] and "cases" in found["summary"]["headline"]
    rows = tables.slices(found["slices"])
    assert len(rows) == 6 and {len(row) for row in rows} == {4}


def test_an_open_question_says_about_how_many_repeats_answer_it() -> None:
    """As many as, with this spread and this ratio, put the interval on one side of 1, or inside the margin."""

    def told(*pairs: float) -> str:
        wide = figure(float(scipy.stats.gmean(pairs))) | {
            "pairs": pairs,
            "ratio": {"mean": scipy.stats.gmean(pairs), "low": 0.7, "high": 1.5},
        }
        given = verdict.verdict({NONE: figure(1.0), FIXED: wide}, NONE)
        assert given is not None and not given.decided
        return given.reasons[0].partition("too uncertain to say; ")[2]

    logs = np.log([1.3, 0.9, 1.25, 0.95])
    enough = next(n for n in range(5, 1000) if scipy.stats.t.ppf(0.975, n - 1) * logs.std(ddof=1) / n**0.5 <= logs.mean())
    assert told(1.3, 0.9, 1.25, 0.95) == f"about {enough} --repeats would tell" and 10 < enough < 30
    near = np.log([1.1, 0.9, 1.02, 0.98])
    reach = np.log(1.03) - abs(near.mean())
    enough = next(n for n in range(5, 1000) if scipy.stats.t.ppf(0.975, n - 1) * near.std(ddof=1) / n**0.5 <= reach)
    assert told(1.1, 0.9, 1.02, 0.98) == f"about {enough} --repeats would tell"
    assert told(1.3, 0.9) == "more --repeats would tell" and told(8.0, 0.12, 9.0, 0.13) == "not even 1000 --repeats would tell"


def test_where_cells_are_undecided_all_of_them_together_decide() -> None:
    """One cell by chance says that a fixed length pays, all of them that it costs: it is not what to set."""

    def of(ratio: float, low: float, high: float) -> dict[str, Any]:
        word, decided = verdict.word_of(ratio, low, high)
        ways = {FIXED: figure(ratio, economics={"best_k": 4}), AUTO: figure(1.0, adaptive=True)}
        told = {"word": word, "decided": decided, "ratio": ratio, "advised": {"num_speculative_tokens": 4, "drafts": 1}}
        return {"name": "a", "verdict": told, "ways": ways}

    cells = [of(1.2, 1.1, 1.3), *[of(0.8, 0.4, 1.6)] * 5]
    fixed, auto = {"mean": 0.88, "low": 0.8, "high": 0.96, "word": COSTS}, {"mean": 1.01, "low": 0.97, "high": 1.05, "word": NEUTRAL}
    told = verdict.summary(cells, {"cells": 6, "ways": {FIXED: fixed, AUTO: auto}})
    assert told["headline"] == "Over all cases together no difference was found." and told["word"] == NEUTRAL
    assert told["advised"]["enable_adaptive_verification"] and "undecided in 5" in told["sentences"][0]
    unsure = verdict.summary(cells, {"cells": 6, "ways": {AUTO: {"mean": 1.1, "low": 0.5, "high": 2.2, "word": NEUTRAL, "decided": False}}})
    assert unsure["headline"] == "Over all cases together it is too uncertain to say."
    assert told["decided"] and tables.to_set(told)[0] == "Set" and not unsure["decided"] and tables.to_set(unsure)[0].startswith("Until")
    wide = figure(1.5) | {"ratio": {"mean": 1.5, "low": 0.3, "high": 8.0}}
    both = verdict.verdict({NONE: figure(1.0), FIXED: wide, AUTO: figure(1.2)}, NONE)
    assert both is not None and both.way == AUTO and "fixed neutral? (1.50)" in both.reasons, "an open question is no neutral ratio"
    dear = verdict.summary(cells, {"cells": 6, "ways": {FIXED: fixed}})
    assert dear["word"] == COSTS and dear["advised"]["disable_spec_decode"]


# ---------------------------------------------------------------- advice


def test_advice_from_a_report_and_for_other_hardware(found: dict[str, Any]) -> None:
    lines = advice.of_report(found)
    assert lines[0].startswith("Speculation pays in") and any(line.startswith("Set: ") for line in lines)
    assert any("SPECDEC_ENABLE_ADAPTIVE_VERIFICATION=true SPECDEC_NUM_SPECULATIVE_TOKENS=" in line for line in lines)
    assert "SPECDEC_DRAFTS empty" in tables.where_to_set({"disable_spec_decode": True, "num_speculative_tokens": 0, "drafts": 0})
    named = set(re.findall(r"SPECDEC_([A-Z_]+)", "\n".join(lines)))
    assert named and named <= names.SETTINGS["orchestrator"], "a setting that there is"
    told = advice.setting_of(found)
    assert told is not None and told[0] == "1 stream, T = 0, code, fixed"
    now = advice.what_if(told[1])
    far = advice.what_if(Change(rtt_ms=200.0).of(told[1]))
    slow = advice.what_if(Change(draft_step_ms=500.0, acceptance=0.3).of(told[1]))
    assert (
        now["modelled"] and far["ratio"] > now["ratio"] > slow["ratio"] >= 1.0
    )  # a longer way makes rounds dearer, and blocks save rounds
    assert "modelled" in advice.said(now)[0] and len(now["by_k"]) == advice.MOST_K + 1

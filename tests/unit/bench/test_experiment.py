"""The experiment against a client that answers from a function: who is asked when, what is compared, what is said of it."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specdec.bench import experiment, page, tables
from specdec.bench import report as reports
from specdec.bench.experiment import Cell, Experiment, Outcome, Turn, run
from specdec.bench.load import PROMPTS, load_prompts
from specdec.bench.progress import Progress
from specdec.errors import InvalidRequest, Unavailable
from specdec.terms import RejectionMethod, SamplingParams
from tests.unit.bench.fake_client import FakeClient

pytestmark = pytest.mark.unit
SMALL = Experiment(
    prompts=[("code", "a"), ("chat", "b"), ("json", "c")],
    concurrencies=(1, 4),
    temperatures=(0.0, 1.0),
    repeats=3,
    batch=2,
    sampling=SamplingParams(max_tokens=4),
)


def measured(client: Any, experiment: Experiment = SMALL) -> Outcome:
    outcome = Outcome(experiment)
    asyncio.run(run(client, outcome, lambda turn, seconds: None))
    return outcome


def found(client: Any, experiment: Experiment = SMALL) -> dict[str, Any]:
    return reports.report(measured(client, experiment), {})


def test_every_way_is_asked_the_same_and_leads_equally_often() -> None:
    done = measured(FakeClient()).done
    asked: dict[tuple[Cell, int], set[Any]] = {}
    for one in done:
        asked.setdefault((one.turn.cell, one.turn.repeat), set()).add(one.questions)
    assert len(asked) == 12 and all(len(questions) == 1 for questions in asked.values())
    assert Counter(one.turn.way for one in done[::3]) == {"none": 4, "fixed": 4, "auto": 4}


def test_a_repeat_takes_the_next_prompts_and_seeds_of_its_own() -> None:
    turns = [Turn(Cell(1, 0.0), repeat, "none") for repeat in range(3)]
    questions = [question for turn in turns for question in SMALL.questions(turn)]
    assert [question.kind for question in questions] == ["code", "chat", "json"] * 2
    assert [question.seed for question in questions] == list(range(6))


def test_every_stream_has_as_many_questions() -> None:
    assert [len(dataclasses.replace(SMALL, batch=4).questions(Turn(Cell(c, 0.0), 0, "none"))) for c in (1, 3, 4, 8)] == [4, 6, 4, 8]


def test_no_more_streams_than_asked_for() -> None:
    client = FakeClient(pause_s=0.001)
    measured(client, dataclasses.replace(SMALL, concurrencies=(3,), temperatures=(0.0,), batch=9, repeats=1))
    assert client.most_open == 3


def test_figures_of_a_way() -> None:
    (cell, *_) = found(FakeClient(pause_s=0.01), dataclasses.replace(SMALL, concurrencies=(1,), temperatures=(0.0,)))["cells"]
    none, fixed = cell["ways"]["none"], cell["ways"]["fixed"]
    assert (none["answers"], none["tokens"], none["tokens_per_round"], none["mean_acceptance_length"]) == (6, 24, 1.0, None)
    assert (fixed["tokens_per_round"], fixed["mean_acceptance_length"], fixed["hit_rate"]) == (2.0, 2.0, 1.0)
    assert fixed["ratio"]["low"] < fixed["ratio"]["mean"] < fixed["ratio"]["high"] and fixed["ratio"]["mean"] > 1.3
    assert none["ratio"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "pairs": 3}
    assert none["time_per_token_ms_p50"] >= 10.0 and none["first_token_ms_p50"] >= 10.0


def test_a_text_that_differs_is_counted() -> None:
    """The broken twin of equality: one seed says something else with a fixed block length."""
    same = found(FakeClient())
    broken = found(FakeClient(lambda way, seed: [seed, 1, 2, 9 if (way, seed) == ("fixed", 1) else 3]))
    assert same["differing"] == 0
    assert broken["differing"] == 4  # once a cell
    assert all(cell["ways"]["fixed"]["differing"] == 1 and cell["ways"]["auto"]["differing"] == 0 for cell in broken["cells"])


def test_standard_promises_no_text_above_temperature_0() -> None:
    odd = found(FakeClient(lambda way, seed: [len(way)] * 4, method=RejectionMethod.STANDARD))
    figures = {(cell["temperature"], way): figure["differing"] for cell in odd["cells"] for way, figure in cell["ways"].items()}
    assert figures[1.0, "fixed"] is None and figures[0.0, "fixed"] > 0
    assert any("standard" in note for note in odd["notes"])


def test_a_way_that_is_not_served_is_left_out_with_a_note() -> None:
    outcome = measured(FakeClient(refused=("auto",)))
    assert outcome.complete and {one.turn.way for one in outcome.done} == {"none", "fixed"}
    assert outcome.notes[0].startswith("auto is left out") and "enable_adaptive_verification" in outcome.notes[0]
    with pytest.raises(InvalidRequest, match="--compare"):
        measured(FakeClient(refused=("auto",)), dataclasses.replace(SMALL, ways=("auto",)))


def test_a_failure_leaves_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "AWAY_S", 0.2)
    monkeypatch.setattr(experiment, "AWAY_PAUSE_S", 0.01)

    class Ending(FakeClient):
        async def generate(self, *a: Any, **k: Any) -> Any:  # type: ignore[override]
            if len(self.asked) > 60:
                raise Unavailable("gone")
            async for event in super().generate(*a, **k):
                yield event

    outcome = Outcome(SMALL)
    with pytest.raises(Unavailable):
        asyncio.run(run(Ending(), outcome, lambda turn, seconds: None))  # type: ignore[arg-type]
    told = reports.report(outcome, {"command": "c"})
    assert len(outcome.notes) == 1 and "asked again" in outcome.notes[0], "once, however often"
    assert not told["complete"] and told["cells"] and len(told["turns"]) == len(outcome.done) > 0
    json.dumps(told)


def test_tables_have_a_row_a_way() -> None:
    for cell in found(FakeClient())["cells"]:
        rows = tables.table(cell)
        assert [row[0] for row in rows[1:]] == ["none", "fixed", "auto"] and {len(row) for row in rows} == {len(tables.TITLES)}


# ---------------------------------------------------------------- prompts, progress


def test_prompt_files(tmp_path: Path) -> None:
    assert len(load_prompts(PROMPTS)) == 20
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"token_ids": [1, 2], "kind": "Code"}\n{"messages": [{"role": "system", "content": "x"}]}\n')
    assert load_prompts(file) == [
        ("all", [{"role": "user", "content": "a"}]), ("code", [1, 2]), ("all", [{"role": "system", "content": "x"}]),
    ]  # fmt: skip
    for bad in ("", "[]", "{}", "not json", '{"token_ids": ["x"]}', '{"prompt": 1, "messages": [{}]}'):
        file.write_text(bad)
        with pytest.raises(InvalidRequest, match="--prompts"):
            load_prompts(file)
    with pytest.raises(InvalidRequest, match="--prompts"):
        load_prompts(tmp_path / "none")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_time_left_is_learnt_by_kind() -> None:
    screen = Terminal()
    progress = Progress(["slow", "fast"] * 3, screen)
    assert progress.left_s() is None
    progress.end("a", 10.0)
    assert progress.left_s() == pytest.approx(50.0)
    progress.end("b", 2.0)
    assert progress.left_s() == pytest.approx(24.0)
    assert "2/6 b, 0:24 left" in screen.getvalue().split("\r")[-1]


def test_a_narrow_terminal_keeps_the_time_left_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (80, 50, 20, 5):
        monkeypatch.setenv("COLUMNS", str(columns))
        screen = Terminal()
        progress = Progress(["x"] * 3, screen)
        progress.end("16 streams, T = 0.7, creative, prompts of 2048, answers up to 512, fixed", 10.0)
        line = screen.getvalue().split("\x1b[K")[-1]
        assert len(line) < columns and ("0:20 left" in line or columns == 5)


def test_a_file_gets_few_lines() -> None:
    now, file = [0.0], io.StringIO()
    progress = Progress(["x"] * 100, file, lambda: now[0])
    for _ in range(100):
        progress.begin("x")
        now[0] += 1.0
        progress.end("x", 1.0)
    progress.close()
    assert len(file.getvalue().splitlines()) == 4 and "\x1b" not in file.getvalue()


def test_a_model_without_a_chat_template_is_asked_the_text() -> None:
    asked: list[Any] = []

    class Base(FakeClient):
        async def generate(self, prompt: Any, sampling: SamplingParams, **options: Any) -> Any:  # type: ignore[override]
            if not isinstance(prompt, str) and isinstance(prompt[0], dict):
                raise InvalidRequest("messages", "this model has no chat template; send text or token_ids")
            asked.append(prompt)
            async for event in super().generate(prompt, sampling, **options):
                yield event

    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    few = dataclasses.replace(SMALL, prompts=[("a", turns), ("b", [5, 6])], concurrencies=(1,), temperatures=(0.0,))
    outcome = measured(Base(), few)
    assert outcome.complete and len(outcome.done) == 9 and "no chat template" in outcome.notes[0]
    assert "Be brief.\n\nWhy?" in asked and [5, 6] in asked


def test_a_way_that_fails_at_the_warm_up_leaves_ctrl_c_as_it_was() -> None:
    """A group of tasks that failed once must not leave the measurement marked as being cancelled: a Ctrl-C would end in a traceback."""

    async def marked() -> int:
        outcome = Outcome(dataclasses.replace(SMALL, repeats=1, concurrencies=(1,)))
        await run(FakeClient(refused=("auto",)), outcome, lambda turn, seconds: None)  # type: ignore[arg-type]
        task = asyncio.current_task()
        assert task is not None and outcome.complete and len(outcome.experiment.ways) == 2
        return task.cancelling()

    assert asyncio.run(marked()) == 0


def test_a_cell_whose_questions_are_all_refused_has_no_times_and_ends_nothing() -> None:
    """An answer that cannot be as long as asked for is refused; the other cells are measured, and no time of 0 ms is made up."""

    class Short(FakeClient):
        async def generate(self, prompt: Any, sampling: SamplingParams, **options: Any) -> Any:  # type: ignore[override]
            if sampling.max_tokens == 7:
                raise InvalidRequest("sampling.max_tokens", "must leave room in the window")
            async for event in super().generate(prompt, sampling, **options):
                yield event

    grid = dataclasses.replace(SMALL, concurrencies=(1,), temperatures=(0.0,), output_lengths=(1, 7), repeats=2, primed=True)
    told = found(Short(), grid)
    one, refused = told["cells"]
    assert refused["verdict"] is None and [figure["errors"] for figure in refused["ways"].values()] == [4] * 3 and told["errors"] == 12
    assert one["ways"]["none"]["time_per_token_ms_p50"] is None is refused["ways"]["fixed"]["first_token_ms_p99"]
    assert tables.table(refused)[1][4:7] == ["", "", ""] and "must leave room" in str(told["turns"])
    assert "4" in page.page(told | {"machine": {}, "versions": {}})[0] and json.dumps(told, allow_nan=False)

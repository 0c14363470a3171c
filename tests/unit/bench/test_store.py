"""A sweep on the disk goes on where it ended, and nothing else is taken for a part of it."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.bench import experiment, watch
from specdec.bench.experiment import FIXED, Cell, Experiment, Outcome, Turn, run
from specdec.bench.prompts import lengthened, load_prompts
from specdec.bench.record import from_json, run_of, to_json
from specdec.bench.report import report
from specdec.bench.store import LOCK, RUNS, Store
from specdec.bench.watch import Process, Watch
from specdec.errors import InvalidRequest, Unavailable
from specdec.terms import SamplingParams
from tests.unit.bench.fake_client import FakeClient
from tests.unit.bench.made_up import GRID, runs

pytestmark = pytest.mark.unit
SMALL = Experiment(
    prompts=[("code", "a"), ("chat", "b")],
    concurrencies=(1, 2),
    temperatures=(0.0,),
    repeats=3,
    batch=2,
    sampling=SamplingParams(max_tokens=4),
)
PLAN = {"command": "c", "sweep": {"repeats": 3}}


def measured(client: Any, store: Store, experiment: Experiment = SMALL) -> Outcome:
    outcome = Outcome(experiment)
    asyncio.run(run(client, outcome, lambda turn, seconds: None, lambda done: store.add(run_of(done)), frozenset(store.turns)))
    return outcome


def test_a_turn_is_read_as_it_was_written(tmp_path: Path) -> None:
    kept = runs()[:6]
    assert [from_json(json.loads(json.dumps(to_json(one)))) for one in kept] == [
        dataclasses.replace(one, seen=json.loads(json.dumps(one.seen))) for one in kept
    ]


@pytest.mark.parametrize("ended_after", [0, 1, 7, 17])
def test_an_interrupted_sweep_goes_on_with_the_repeat_that_was_cut_short(tmp_path: Path, ended_after: int) -> None:
    class Ending(FakeClient):
        async def generate(self, *a: Any, **k: Any) -> Any:  # type: ignore[override]
            if (k.get("seed", 0), len(kept.turns)) and len(kept.turns) >= ended_after:
                raise KeyboardInterrupt
            async for event in super().generate(*a, **k):
                yield event

    kept = Store(tmp_path / "out", PLAN)
    with pytest.raises(KeyboardInterrupt):
        measured(Ending(), kept)
    assert len(kept.turns) == ended_after
    with (tmp_path / "out" / RUNS).open("ab") as file:
        file.write(b'{"concurrency": 1, "temperature"')  # the power went while a line was written
    again, client = Store(tmp_path / "out", PLAN), FakeClient()
    assert len(again.turns) == ended_after
    outcome = measured(client, again)
    asked = len(client.asked) - 3 * 2  # but for the warm-up: each way, as many as there are streams
    whole = ended_after // 3 * 3  # the ways of a repeat are compared since they were asked next to each other
    assert outcome.complete and len(again.turns) == 18 and asked == (18 - whole) * 2
    told = report(outcome, {}, again)
    assert [figure["turns"] for cell in told["cells"] for figure in cell["ways"].values()] == [3] * 6 and told["differing"] == 0
    assert len(Store(tmp_path / "out", PLAN).turns) == 18


def test_another_sweep_another_engine_and_broken_files_are_refused(tmp_path: Path) -> None:
    Store(tmp_path / "out", {"sweep": {"repeats": 4}})  # nobody answered: it measured nothing, and its folder is free
    store = Store(tmp_path / "out", PLAN)
    store.add(runs()[0])
    with pytest.raises(InvalidRequest, match="--out: .* holds another sweep .other --repeats."):
        Store(tmp_path / "out", {"sweep": {"repeats": 4}})
    with pytest.raises(InvalidRequest, match="measured on another model or engine"):
        store.add(dataclasses.replace(runs()[1], settings={"numerics_fingerprint": "g"}))
    with (tmp_path / "out" / RUNS).open("ab") as file:
        file.write(b"nonsense\n")
    with pytest.raises(InvalidRequest, match="byte .*: not a turn"):
        Store(tmp_path / "out", PLAN)
    with pytest.raises(InvalidRequest, match="--out"):
        Store(tmp_path / "not" / "there", PLAN)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="--out"):
        Store(tmp_path / "file", PLAN)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    folder = Store(tmp_path / "out", PLAN).folder
    words = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", words, str(folder / LOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(InvalidRequest, match="--out: .*: another specdec bench writes there"):
            Store(folder, PLAN)
        other.kill()
    Store(folder, PLAN)


def test_a_full_disk_is_told_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "out", PLAN)
    store.add(runs()[0])
    before = (tmp_path / "out" / RUNS).read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(InvalidRequest, match=r"--out: .*runs\.jsonl: No space left on device; .* the same command goes on"):
            store.add(runs()[1])
    assert (tmp_path / "out" / RUNS).read_bytes() == before
    assert [run.turn for run in store.of(runs()[0].turn.cell)] == [runs()[0].turn], "what is not on the disk is not reported"
    store.add(runs()[1])
    assert list(Store(tmp_path / "out", PLAN).turns) == [run.turn for run in runs()[:2]]


def test_another_machine_is_told(tmp_path: Path) -> None:
    Store(tmp_path / "out", {**PLAN, "machine": {"cores": 2, "processor": "a"}}).add(runs()[0])
    again = Store(tmp_path / "out", {**PLAN, "machine": {"cores": 8, "processor": "a"}})
    assert again.notes == ["begun with another machine (cores: 2, now 8): times of both are put together"]


def test_answers_that_fail_are_counted_and_a_service_that_is_gone_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(FakeClient):
        async def generate(self, prompt: Any, sampling: Any, **k: Any) -> Any:  # type: ignore[override]
            if k["seed"] % 2 and not k.get("disable_spec_decode") and len(self.asked) > 6:
                raise Unavailable("target lost")
            async for event in super().generate(prompt, sampling, **k):
                yield event

    store = Store(tmp_path / "out", PLAN)
    told = report(measured(Failing(), store), {}, store)
    assert told["errors"] == 12 * 1 and told["complete"]
    ways = told["cells"][0]["ways"]
    assert ways["none"]["errors"] == 0 < ways["fixed"]["errors"] and not told["cells"][0]["verdict"]["decided"]

    class Gone(FakeClient):
        async def generate(self, *a: Any, **k: Any) -> Any:  # type: ignore[override]
            if len(self.asked) > 20:
                raise Unavailable("gone")
            async for event in super().generate(*a, **k):
                yield event

    monkeypatch.setattr(experiment, "AWAY_PAUSE_S", 0.0)
    monkeypatch.setattr(experiment, "AWAY_S", 0.05)
    other = Store(tmp_path / "other", PLAN)
    with pytest.raises(Unavailable):
        measured(Gone(), other)
    assert 0 < len(other.turns) < 18

    class Restarted(FakeClient):
        away = 4  # answers: both of a turn, twice

        async def generate(self, *a: Any, **k: Any) -> Any:  # type: ignore[override]
            if len(self.asked) >= 20 and self.away:
                self.away -= 1
                raise Unavailable("the orchestrator is shutting down")
            async for event in super().generate(*a, **k):
                yield event

    monkeypatch.setattr(experiment, "AWAY_S", 60.0)
    outcome = measured(Restarted(), (back := Store(tmp_path / "back", PLAN)))
    assert outcome.complete and len(back.turns) == 18 and not report(outcome, {}, back)["errors"]
    assert any("asked again, since nobody was there" in note for note in outcome.notes)


def test_prompts_are_primed_once_before_a_repeats_ways(tmp_path: Path) -> None:
    client = FakeClient()
    measured(client, Store(tmp_path / "out", PLAN), dataclasses.replace(SMALL, primed=True, concurrencies=(1,), repeats=2))
    order = [way for way, _, _ in client.asked[3:]]  # behind the warm-up
    assert order == ["none"] * 2 + ["none"] * 2 + ["fixed"] * 2 + ["auto"] * 2 + ["none"] * 2 + ["fixed"] * 2 + ["auto"] * 2 + ["none"] * 2


# ---------------------------------------------------------------- prompts


def test_a_bad_line_is_named_by_its_number(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    for bad in ('{"prompt": ""}', '{"token_ids": []}', '{"token_ids": [-1]}', "[1]", '{"messages": [{"role": "user"}]}', '{"prompt": 3}'):
        file.write_text('{"prompt": "fine"}\n\n' + bad + "\n")
        with pytest.raises(InvalidRequest, match=r"--prompts: .*own\.jsonl:3: must be"):
            load_prompts(file)


def test_odd_lines_of_others_are_read_or_refused_in_words(tmp_path: Path) -> None:
    """A byte order mark, U+2028 inside a text and old line ends are read; wrong types are not guessed at, nor names that break a table."""
    file = tmp_path / "own.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b\xc2\x85"}\r\n{"prompt": "c", "kind": null}\r{"token_ids": [1], "kind": "Code x"}'
    )
    assert [kind for kind, _ in load_prompts(file)] == ["all", "all", "code x"]
    file.write_text('{"text": "Once upon a time"}')
    assert load_prompts(file) == [("all", "Once upon a time")]
    odd = {
        '{"token_ids": "123"}': "token_ids", '{"token_ids": [1.5]}': "token_ids", '{"token_ids": [true]}': "token_ids",
        '{"token_ids": [1e400]}': "token_ids", '{"token_ids": [4294967296]}': "token_ids", "[" * 100_000: "recursion",
        '{"prompt": "\\ud800"}': "half of a character", '{"messages": "abc"}': "list of", '{"messages": {"role": "user"}}': "list of",
        '{"prompt": "a", "kind": 3}': "kind", '{"prompt": "a", "kind": "a,b"}': "kind", '{"prompt": "a", "kind": "each"}': "each",
        '{"prompt": "a", "kind": "\\u001b[31m"}': "printable", '{"prompt": "a", "kind": "' + "k" * 65 + '"}': "1 to 64", "null": "null",
    }  # fmt: skip
    for line, told in odd.items():
        file.write_text(line + "\n")
        with pytest.raises(InvalidRequest, match=f"(?s)--prompts: .*own.jsonl:1: must be.*{told}"):
            load_prompts(file)
    file.write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(InvalidRequest, match=r"own\.jsonl:2: is not UTF-8"):
        load_prompts(file)


@pytest.mark.parametrize("prompt", ["What now?", [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What now?"}]])
def test_prompts_are_made_as_long_as_wanted(prompt: Any) -> None:
    async def count(asked: Any) -> int:
        return len((asked if isinstance(asked, str) else " ".join(turn["content"] for turn in asked)).split())

    async def lengths() -> list[int]:
        return [await count(await lengthened(prompt, tokens, 1, count)) for tokens in (1, 20, 64, 500)]

    own = asyncio.run(count(prompt))
    assert asyncio.run(lengths()) == [own, 20, 64, 500]
    long = asyncio.run(lengthened(prompt, 64, 1, count))
    assert long == asyncio.run(lengthened(prompt, 64, 1, count)) != asyncio.run(lengthened(prompt, 64, 2, count))
    assert "What now?" in str(long) and len(long) == len(prompt) or isinstance(prompt, str)
    assert asyncio.run(lengthened([5, 6, 7], 8, 1, count)) == [5, 6, 7, 5, 6, 5, 6, 7]


# ---------------------------------------------------------------- what is seen beside the answers


def test_memory_and_ports_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch.memory_of(os.getpid())["peak_mib"] >= watch.memory_of(os.getpid())["resident_mib"] * 0.9 > 1
    assert watch.memory_of(2**22 + 1) == {}
    (tmp_path / "processes.json").write_text(json.dumps([{"role": "target", "pid": os.getpid(), "port": 1, "metrics_port": 9}]))
    (process,) = watch.of_state(tmp_path)
    assert (process.name, process.metrics) == ("target-0", "127.0.0.1:9")
    with pytest.raises(InvalidRequest, match="--state"):
        watch.of_state(tmp_path / "none")
    assert [p.name for p in watch.of_metrics("draft=a:1, draft=b:2,target=c:3")] == ["draft-0", "draft-1", "target-0"]
    with pytest.raises(InvalidRequest, match="--metrics"):
        watch.of_metrics("painter=a:1")

    now = {"draft=a": 1.0, "kv_used": 2.0}

    async def told(address: str) -> Any:
        if address == "gone:1":
            raise Unavailable("no")
        name = ("specdec_step_duration_seconds_sum", frozenset[tuple[str, str]]())
        kinds = {"weights": 64.5, "kv": 512.0, "kv_used": now["kv_used"]}
        memory = {("specdec_memory_bytes", frozenset({("kind", kind)})): mib * 2**20 for kind, mib in kinds.items()}
        return {**memory, name: now["draft=a"], ("specdec_step_duration_seconds_count", frozenset[tuple[str, str]]()): 10 * now["draft=a"]}

    async def looked() -> Any:
        both = Watch([Process("draft", "draft-0", os.getpid(), "a:1"), Process("draft", "draft-1", None, "gone:1")])
        async with both.sampling():
            now.update({"draft=a": 3.5, "kv_used": 7.0})
            seen = await both.look()
            now["kv_used"] = 3.0
            return both, seen, await both.look()

    monkeypatch.setattr(watch, "scrape", told)
    both, seen, again = asyncio.run(looked())
    assert seen["phases"]["draft"] == [2.5, 25.0] and again["phases"]["draft"] == [0.0, 0.0] and both.missing == {"draft-1"}
    assert seen["processes"] == {"draft": 2} and seen["memory"][0]["before_mib"] > 1
    told_of = [{kind: one["memory"][0][f"{kind}_mib"] for kind in ("weights", "kv", "kv_used")} for one in (seen, again)]
    assert told_of == [{"weights": 64.5, "kv": 512.0, "kv_used": 7.0}, {"weights": 64.5, "kv": 512.0, "kv_used": 3.0}], "of one turn each"
    assert Turn(Cell(1, 0.0), 0, FIXED) != Turn(GRID.cells[0], 0, FIXED)

"""`specdec top`: its numbers from two looks, its words where nothing is known, and a terminal that is as it was."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest

from specdec.bench.scrape import parse, scrape
from specdec.cli import top
from specdec.cli.main import main
from specdec.cli.top_view import FALLBACKS, Look, Table, plain, tables
from specdec.errors import Unavailable
from specdec.runtime import extras
from specdec.runtime.telemetry import Telemetry
from tests.metric_names import sample_labels

BEFORE = """
target_info{service_name="specdec-orchestrator"} 1.0
specdec_spec_enabled 1.0
specdec_spec_wanted 1.0
specdec_ready 1.0
specdec_draft_tokens_total 100.0
specdec_accepted_tokens_total 90.0
specdec_accepted_tokens_per_position_total{position="0"} 50.0
specdec_accepted_tokens_per_position_total{position="1"} 40.0
specdec_draft_rounds_total 50.0
specdec_rounds_total 60.0
specdec_decided_tokens_total{origin="plain"} 150.0
specdec_delivered_tokens_total 150.0
specdec_lookahead_rounds_total{outcome="hit"} 40.0
specdec_lookahead_rounds_total{outcome="miss"} 10.0
specdec_draftless_rounds_total{reason="miss"} 10.0
specdec_pool_endpoints{pool="draft",state="up"} 2.0
specdec_pool_endpoints{pool="draft",state="ejected"} 1.0
specdec_requests_running 3.0
"""
AFTER = (
    BEFORE.replace("draft_tokens_total 100", "draft_tokens_total 300")
    .replace("accepted_tokens_total 90", "accepted_tokens_total 190")
    .replace('position="0"} 50', 'position="0"} 120')
    .replace('position="1"} 40', 'position="1"} 70')
    .replace("draft_rounds_total 50", "draft_rounds_total 150")
    .replace("specdec_rounds_total 60", "specdec_rounds_total 180")
    .replace('origin="plain"} 150', 'origin="plain"} 450')
    .replace("delivered_tokens_total 150", "delivered_tokens_total 450")
    .replace('outcome="hit"} 40', 'outcome="hit"} 130')
    .replace('outcome="miss"} 10', 'outcome="miss"} 20')
    .replace('reason="miss"} 10', 'reason="miss"} 20')
)
TARGET = """
target_info{service_name="specdec-target"} 1.0
specdec_kv_cache_utilization 0.25
specdec_sessions 3.0
specdec_step_duration_seconds_count 10.0
specdec_step_duration_seconds_sum 0.2
specdec_batch_size_count 10.0
specdec_batch_size_sum 40.0
"""


def view(before: str, after: str, seconds: float = 2.0, target: str = "") -> dict[str, Table]:
    looks = [Look(at, {"a:1": parse(text), **({"b:2": parse(target)} if target else {})}) for at, text in ((0.0, before), (seconds, after))]
    return {table.title: table for table in tables(*looks)}


def row(table: Table) -> dict[str, str]:
    (only,) = table.rows
    return dict(zip(table.columns, only, strict=True))


def test_rates_are_those_between_two_looks() -> None:
    found = view(BEFORE, AFTER)
    assert row(found["answers"])["tokens/s"] == "150" and row(found["answers"])["running"] == "3"
    speculation = row(found["speculation"])
    assert (speculation["is"], speculation["kept"], speculation["length"], speculation["tok/round"]) == ("on", "50%", "2.00", "2.50")
    assert (speculation["hit"], speculation["miss"], speculation["late"]) == ("90%", "10%", "0%")
    assert found["kept by slot of the block"].rows == (("70%", "30%"),)
    assert found["replicas, as the orchestrators see them"].rows == (("draft", "2", "–", "1", "–", "–"),)
    assert found["fallbacks"].rows == (("round without block", "miss", "5.0", "20"),)


def test_what_did_not_happen_is_a_dash_and_no_zero() -> None:
    found = view(AFTER, AFTER)
    assert row(found["speculation"])["kept"] == "–" and row(found["answers"])["tokens/s"] == "0.0"
    assert row(found["answers"])["first token"] == "–"


@pytest.mark.parametrize(("enabled", "wanted", "said"), [(1, 1, "on"), (0, 1, "OFF"), (0, 0, "not asked")])
def test_a_dead_pool_does_not_look_normal(enabled: int, wanted: int, said: str) -> None:
    text = AFTER.replace("spec_enabled 1", f"spec_enabled {enabled}").replace("spec_wanted 1", f"spec_wanted {wanted}")
    assert row(view(BEFORE, text)["speculation"])["is"] == said


def test_processes_and_those_that_are_away() -> None:
    later = TARGET.replace("10.0", "20.0").replace("_sum 0.2", "_sum 0.5").replace("_sum 40", "_sum 100")
    looks = [Look(at, {"a:1": parse(AFTER), "b:2": parse(text), "c:3": None}) for at, text in ((0.0, TARGET), (1.0, later))]
    (processes,) = (table for table in tables(*looks) if table.title == "processes")
    assert processes.rows[0][:4] == ("orchestrator", "a:1", "yes", "3")
    assert processes.rows[1] == ("target", "b:2", "–", "3", "25%", "6.0", "30.0 ms", "10.0", "–")
    assert processes.rows[2][:3] == ("?", "c:3", "away")


def test_a_restart_counts_from_zero() -> None:
    assert row(view(AFTER, BEFORE)["answers"])["tokens/s"] == "0.0"


def test_another_process_or_one_that_was_away_has_no_rates_yet() -> None:
    for before, strange in ((Look(0.0, {"a:1": parse(BEFORE)}), frozenset({"a:1"})), (Look(0.0, {"a:1": None}), frozenset[str]())):
        found = {table.title: table for table in tables(before, Look(2.0, {"a:1": parse(AFTER)}, strange))}
        assert row(found["answers"])["tokens/s"] == "0.0" and row(found["answers"])["running"] == "3"
        assert row(found["speculation"])["kept"] == "–"


DRAFT = """
target_info{service_name="specdec-draft"} 1.0
specdec_draft_proposed_tokens_total 200.0
specdec_draft_wasted_tokens_total 50.0
"""


def test_what_nobody_was_asked_for_is_said() -> None:
    """Each process tells its own; from orchestrators alone there are their words for the rest."""
    title = "not told by orchestrators"
    steps = "rounds at the targets, as the orchestrators see them"
    afar = (
        AFTER
        + """specdec_target_batch_size_count 10.0
specdec_target_batch_size_sum 60.0
specdec_round_duration_seconds_count{phase="engine"} 4.0
specdec_round_duration_seconds_sum{phase="engine"} 0.02
vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0.5
"""
    )
    alone = view("specdec_target_batch_size_count 0.0\n", afar)
    assert len(alone[title].rows) == 2 and all("--metrics" in needs for _, needs in alone[title].rows)
    told = row(alone[steps])
    assert (told["rows"], told["step"], told["KV"], told["wire"]) == ("6.0", "5.0 ms", "50%", "–")
    assert len(view(BEFORE.replace("spec_wanted 1", "spec_wanted 0"), AFTER.replace("spec_wanted 1", "spec_wanted 0"))[title].rows) == 1
    with_target = view(BEFORE, AFTER, target=TARGET)
    assert steps not in with_target and ["drafts" in what for what, _ in with_target[title].rows] == [True]
    looks = [Look(at, {"a:1": parse(AFTER), "b:2": parse(TARGET), "c:3": parse(draft)}) for at, draft in (
        (0.0, DRAFT.replace("200", "100").replace("50", "25")), (1.0, DRAFT))]  # fmt: skip
    everybody = {table.title: table for table in tables(*looks)}
    assert title not in everybody and row(everybody["speculation"])["waste"] == "25%"


def test_of_several_orchestrators_each_says_the_same_of_the_targets() -> None:
    text = parse(AFTER + 'vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0.5\n')
    found = {table.title: table for table in tables(*(Look(at, {"a:1": text, "b:2": text}) for at in (0.0, 1.0)))}
    assert row(found["rounds at the targets, as the orchestrators see them"])["KV"] == "50%"
    assert row(found["answers"])["running"] == "6"


def test_it_asks_for_what_there_is() -> None:
    assert set(FALLBACKS) <= set(sample_labels())
    source = Path(top.__file__).with_name("top_view.py").read_text()
    for name in set(re.findall(r'"((?:specdec|gen_ai)_\w+)"', source)):
        assert name in sample_labels() or f"{name}_count" in sample_labels() or f"{name}_total" in sample_labels(), name


def test_eighty_columns_are_enough() -> None:
    text = plain(tables(*(Look(at, {f"127.0.0.1:{port}": parse(AFTER) for port in range(40000, 40004)}) for at in (0.0, 1.0))))
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert "FALLBACKS" in text and "none" not in text


def test_a_long_table_is_cut_to_a_terminal_and_whole_for_a_script() -> None:
    """`age` is the last column: a step's age was cut off at 80 columns, however wide or no terminal."""
    aged = TARGET + "specdec_step_age_seconds 0.0082\nspecdec_ready 1.0\n"
    looks = [Look(at, {"draft-0.drafts.default.svc.cluster.local:39671": parse(text)}) for at, text in ((0.0, BEFORE), (1.0, aged))]
    whole, cut = plain(tables(*looks)), plain(tables(*looks), 80)
    assert "8.2 ms" in whole and "…" not in whole and max(map(len, whole.splitlines())) > 80
    assert "8.2 ms" not in cut and "…" in cut and max(map(len, cut.splitlines())) <= 80


def test_why_begins_with_the_reason() -> None:
    moved = 'specdec_session_replacements_total{fingerprint="equal",reason="target_lost"} 3.0\n'
    assert view(BEFORE, AFTER + moved)["fallbacks"].rows[-1][:2] == ("session moved", "target_lost equal")


# ---------------------------------------------------------------- the command


@pytest.fixture
def serving() -> Iterator[Telemetry]:
    telemetry = Telemetry("orchestrator", metrics_port=0)
    telemetry.gauge("specdec.spec_enabled", lambda: 0)
    telemetry.gauge("specdec.spec_wanted", lambda: 1)
    yield telemetry
    telemetry.close()


def test_once(serving: Telemetry, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    port = serving.metrics_port
    assert main(["top", "--once", "--interval", "0.1", "--metrics", f"127.0.0.1:{port},127.0.0.1:1"]) == 0
    out = capsys.readouterr().out
    assert "OFF" in out and "away" in out and "\x1b" not in out
    entries = [
        {"role": "orchestrator", "pid": 1, "port": 2, "metrics_port": port},
        {"role": "draft", "pid": 1, "port": 2, "metrics_port": -1},
    ]
    (tmp_path / "processes.json").write_text(json.dumps(entries))
    assert main(["top", "--once", "--interval", "0.1", "--state", str(tmp_path)]) == 0
    assert f"127.0.0.1:{port}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--metrics", "nonsense"], "'nonsense': must be HOST:PORT"),
        (["--metrics", ""], "0 metrics ports"),
        (["--state", "/nowhere"], "nothing runs from /nowhere"),
        (["--metrics", "127.0.0.1:1"], "nobody answers at 127.0.0.1"),
        (["--metrics", "a:1", "--interval", "0"], "--interval"),
        ([], "--state --metrics"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["top", "--once", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\r\n\r\n",  # a port that speaks gRPC
        b"HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n<html>\nhello world\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\nspecdec_ready 1\nspecdec_rounds_total 12",  # of 1234, perhaps
        b"",
    ],
)
def test_what_is_no_metrics_port_is_unavailable(answer: bytes) -> None:
    async def told() -> None:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            with pytest.raises(Unavailable, match=f"no metrics at {host}:{port}: ."):
                await scrape(f"{host}:{port}")

    asyncio.run(told())
    assert parse("a NaN\nb +Inf\nc text\nd 1") == {("d", frozenset()): 1.0}


def test_without_rich_it_says_what_to_install(
    serving: Telemetry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["top", "--metrics", f"127.0.0.1:{serving.metrics_port}"]) == 2
    assert "pip install 'specdec[tools]'" in capsys.readouterr().err


def test_ctrl_c_leaves_the_terminal_as_it_was(serving: Telemetry) -> None:
    """In a terminal of 80 columns: the other screen is left, the cursor is back, no traceback."""
    ours, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    words = ["-m", "specdec.cli.main", "top", "--interval", "0.1", "--metrics", f"127.0.0.1:{serving.metrics_port}"]
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen([sys.executable, *words], stdin=its, stdout=its, stderr=its, env=environment) as process:
        os.close(its)
        seen, deadline, asked = b"", time.monotonic() + 60, False
        with contextlib.suppress(OSError):  # what a closed terminal gives
            while piece := os.read(ours, 65536):
                seen += piece
                if time.monotonic() > deadline:
                    process.kill()
                    raise AssertionError(seen[-2000:])
                if not asked and seen.count(b"OFF") >= 2:
                    process.send_signal(signal.SIGINT)
                    asked = True
        assert process.wait(10) == 130
    os.close(ours)
    assert seen.index(b"\x1b[?1049h") < seen.index(b"\x1b[?1049l") and seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
    assert b"Traceback" not in seen


def test_the_live_view_fits_into_eighty_columns() -> None:
    from rich.console import Console

    drawn = io.StringIO()
    looks = [Look(at, {f"127.0.0.1:{port}": parse(text) for port, text in ((45553, AFTER), (45554, TARGET))}) for at in (0.0, 1.0)]
    Console(file=drawn, width=80).print(top._group(tables(*looks)))
    text = drawn.getvalue()
    assert "127.0.0.1:45554" in text and "…" not in text and "fallbacks" in text
    assert text.index("fallbacks") < text.index("processes")


def test_a_ctrl_c_that_a_look_swallows_is_heard() -> None:
    """With Python's own handler `asyncio.run` only cancels, and what is over or deaf to that returns as if nothing had been."""

    async def deaf() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0)

    asyncio.run(deaf())
    with pytest.raises(KeyboardInterrupt), top._heard_interrupts():
        asyncio.run(deaf())


def test_a_ctrl_c_inside_a_look_waits_for_its_end_and_a_second_one_does_not() -> None:
    """Raised there it would be lost in some task, or told with the stack of whatever ran."""
    ended = []

    async def looking() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt), top._heard_interrupts() as rest:
        asyncio.run(looking())
        rest(60.0)
    with pytest.raises(KeyboardInterrupt), top._heard_interrupts() as rest:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        ended.append(False)
    assert ended == [True]

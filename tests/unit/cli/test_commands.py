"""The command line without a system: help, refused input, how the demo draws."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.bench.system import default_pins
from specdec.cli import demo, paint, up
from specdec.cli.main import main
from specdec.cli.system import System, parse_pins
from specdec.errors import InvalidRequest
from specdec.terms import Origin

pytestmark = pytest.mark.unit
A, T = Origin.ACCEPTED, Origin.CORRECTED


def test_help_is_grouped_and_fast() -> None:
    """Neither torch nor gRPC is loaded for it."""
    script = "import sys\nfrom specdec.cli.main import main\ntry: main(['generate', '--help'])\nexcept SystemExit: pass\n"
    check = script + "assert not {'torch', 'grpc', 'numpy', 'transformers'} & set(sys.modules), sys.modules"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and "--resume-ids" in done.stdout, done.stderr


def test_top_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert text.index("run:") < text.index("demo") < text.index("use:") < text.index("generate") < text.index("measure:")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("generate --promt hi", "specdec generate: unrecognized arguments: --promt (did you mean --prompt?); see specdec generate --help"),
        ("generate --prompt hi --temprature=1", "--temprature (did you mean --temperature?)"),
        ("generate --prompt hi --nonsense", "unrecognized arguments: --nonsense; see"),
        ("up --target 2", "--target (did you mean --targets?)"),
        ("demo --draft-modle x", "--draft-modle (did you mean --draft-model?)"),
        ("down --sate x", "--sate (did you mean --state?)"),
        ("tokenize --endpiont a:1", "--endpiont (did you mean --endpoint?)"),
        ("detokenize --endpont a:1", "--endpont (did you mean --endpoint?)"),
        ("top --endpoit a:1", "--endpoit (did you mean --endpoint?)"),
        ("bench --repeat 3", "--repeat (did you mean --repeats?)"),
        ("advise --endpoints a:1", "--endpoints (did you mean --endpoint?)"),
        ("bench-step --modle x", "--modle (did you mean --model?)"),
        ("up --report-f 3", "unrecognized arguments: --report-f; see"),
        ("genrate --prompt hi", "specdec: there is no command 'genrate' (did you mean generate?); commands are demo, "),
    ],
)
def test_what_is_mistyped_is_answered_by_what_was_meant(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line. A flag that nobody is told of is not guessed at."""
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and told in line


def test_what_only_looks_like_a_flag_is_taken_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "--promt or not", "--stop=--promt", "--endpoint", "nowhere"]) == 2
    assert "--endpoint: must be host:port" in capsys.readouterr().err


def test_no_file_of_the_command_imports_torch() -> None:
    folder = Path(str(paint.__file__)).parent
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) else []
            )
            assert not [n for n in names if n and n.split(".")[0] in ("torch", "transformers", "grpc")], path


# ---------------------------------------------------------------- up, demo, bench-step


def test_missing_models_say_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in (["up"], ["demo"]):
        assert main([*words, "--target-model", str(tmp_path)]) == 2
        assert "--target-model" in (err := capsys.readouterr().err) and "make setup" in err
    assert main(["bench-step", "--model", str(tmp_path)]) == 2
    assert "make setup" in capsys.readouterr().err
    assert main(["bench-step", "--rows", "1,x"]) == 2


def test_the_demo_refuses_before_it_loads_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    models = ["--target-model", str(tmp_path), "--draft-model", str(tmp_path)]
    for words, field in ((["--max-tokens", "0"], "max_tokens"), (["--temperature", "-2"], "temperature")):
        assert main(["demo", *words, *models]) == 2
        told = capsys.readouterr()
        assert f"sampling.{field}: must be" in told.err and told.out == ""


def test_pins() -> None:
    assert parse_pins("") == {}
    assert parse_pins("target=0,draft=1,orchestrator=1") == {"target": "0", "draft": "1", "orchestrator": "1"}
    assert parse_pins("target=0-2+7") == {"target": "0,1,2,7"}
    for bad in ("target", "target=", "target=a", "other=1"):
        with pytest.raises(InvalidRequest):
            parse_pins(bad)
    assert default_pins([0]) == {} and default_pins([3, 5, 7]) == {"target": "3", "draft": "5", "orchestrator": "5"}


def test_cpus_that_nobody_may_use_are_refused_before_models_load(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "own_cpus", lambda: [0, 1])
    assert main(["up", "--pin", "target=0,draft=7", "--target-model", str(tmp_path)]) == 2
    assert "--pin: draft=7: this process may use CPU 0, 1" in capsys.readouterr().err


def test_plans_carry_only_known_settings() -> None:
    from specdec.runtime import names

    system = System(num_speculative_tokens=4, speculative_fanout=3, pins={"target": "0"}, targets=2)
    plans = [*system.pool_plans(), system.orchestrator_plan([])]
    assert [plan.name for plan in plans] == ["target-0", "target-1", "draft-0", "orchestrator-0"]
    assert all(plan.settings.keys() <= names.SETTINGS[plan.role] for plan in plans)
    assert plans[2].settings["SPECULATIVE_FANOUT"] == "3" and "SPECULATIVE_FANOUT" not in plans[0].settings
    assert plans[2].settings["NICE"] == "10" and plans[3].settings["NUM_SPECULATIVE_TOKENS"] == "4"


def test_the_demo_has_one_prompt_of_each_kind() -> None:
    assert [prompt.kind for prompt in demo.load_prompts()] == ["code", "json", "chat", "creative"]


def test_the_demo_says_what_its_table_is_of() -> None:
    made = SimpleNamespace(finished=SimpleNamespace(settings=SimpleNamespace(num_speculative_tokens=2)))
    told = demo.asked([SimpleNamespace(speculative=made)], 0.0)  # type: ignore[list-item]
    assert "one answer at a time, temperature 0, every block of 2;" in told and "specdec bench" in told


BYTES = {0: b"de", 1: b"f ", 2: "ü".encode()[:1], 3: "ü".encode()[1:], 4: b"x", 5: b"\n"}


def decode(ids: Sequence[int]) -> str:
    return b"".join(BYTES[i] for i in ids).decode(errors="replace")


def paint_all(colour: bool, *tokens: tuple[int, Origin]) -> str:
    painter = paint.Painter(decode, colour)
    return "".join(painter.feed([token], [origin]) for token, origin in tokens) + painter.end()


def test_marks_and_colours() -> None:
    tokens = ((0, T), (1, A), (4, A), (5, T))
    assert paint_all(False, *tokens) == "de‹f x›\n"
    assert paint_all(True, *tokens) == f"de{paint.GREEN}f x{paint.RESET}\n"
    assert paint_all(False, (4, A)) == "‹x›"


def test_a_character_of_two_tokens_is_shown_once_whole() -> None:
    assert paint_all(False, (4, T), (2, A), (3, T), (4, T)) == "xüx"


def test_long_texts_are_shown_once() -> None:
    tokens = [(i % 2, A if i % 3 else T) for i in range(200)] + [(2, A), (3, A)]
    plain = paint_all(False, *tokens).replace("‹", "").replace("›", "")
    assert plain == decode([token for token, _ in tokens])


def test_table() -> None:
    assert paint.table([["a", "b"], ["long", "1"]]) == "a     b\n----  -\nlong  1"


@pytest.mark.parametrize(
    ("flags", "cpus", "pinned"),
    [
        ([], [2, 5], True),
        (["--pin", ""], [2, 5], False),
        (["--drafts", "2"], [2, 5], False),
        (["--drafts", "0"], [2, 5], False),
        ([], [0], False),
        ([], [0, 1, 2], False),
    ],
)
def test_up_shares_two_cpus_out(monkeypatch: pytest.MonkeyPatch, flags: list[str], cpus: list[int], pinned: bool) -> None:
    """One target and one draft that take turns on both would never be ready for each other."""
    monkeypatch.delenv("SPECDEC_CPU_AFFINITY", raising=False)
    monkeypatch.setattr(up, "own_cpus", lambda: cpus)
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    assert up._pins(parser.parse_args(flags)) == ({"target": "2", "draft": "5", "orchestrator": "5"} if pinned else {})
    monkeypatch.setenv("SPECDEC_CPU_AFFINITY", "1")
    assert up._pins(parser.parse_args(flags)) == {}

"""`specdec generate`, `tokenize`, `detokenize`: every flag reaches the request, what is refused names the flag, what is printed."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main as command
from specdec.cli import request
from specdec.cli.main import main
from specdec.client import SyncClient, generate_request
from specdec.seeds import answer_seed
from specdec.terms import SamplingParams
from specdec.v1 import common_pb2, generation_pb2

pytestmark = pytest.mark.unit
CHAT = '[{"role": "user", "content": "hi"}]'
REPORT = ["text", "token_ids", "logprobs", "seed", "model", "finish_reason", "usage", "timing", "speculative"]


def made(*words: str, prompt: tuple[str, ...] = ("--prompt", "hi")) -> generation_pb2.GenerateRequest:
    """What these flags ask for."""
    arguments = command._parser().parse_args(["generate", "--endpoint", "127.0.0.1:1", *prompt, *words])
    text, sampling, options = request.request_of(arguments)
    return generate_request(text, sampling, **options)


# ---------------------------------------------------------------- every field has a flag

# Field, flags, what the message holds.
REQUEST: dict[str, tuple[list[str], Any]] = {
    "output_token_ids": (["--resume-ids", "[7, 8]"], [7, 8]),
    "seed": (["--seed", str(2**64 - 1)], 2**64 - 1),
    "n": (["--n", "3"], 3),
    "priority": (["--priority", "-3"], -3),
    "stop": (["--stop", "a", "--stop", "b"], ["a", "b"]),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
    "num_speculative_tokens": (["--num-speculative-tokens", "0"], 0),
    "enable_adaptive_verification": (["--enable-adaptive-verification"], True),
    "disable_spec_decode": (["--no-spec"], True),
    "rejection_sample_method": (["--rejection-sample-method", "standard"], common_pb2.REJECTION_SAMPLE_METHOD_STANDARD),
    "draft_sample_method": (["--draft-sample-method", "greedy"], common_pb2.DRAFT_SAMPLE_METHOD_GREEDY),
    "model": (["--model", "m"], "m"),
    "request_id": (["--request-id", "r"], "r"),
    "use_heterogeneous_vocab": (["--use-heterogeneous-vocab"], True),
}
SAMPLING: dict[str, tuple[list[str], Any]] = {
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_k": (["--top-k", "7"], 7),
    "top_p": (["--top-p", "0.25"], 0.25),
    "min_p": (["--min-p", "0.125"], 0.125),
    "frequency_penalty": (["--frequency-penalty", "-2"], -2.0),
    "presence_penalty": (["--presence-penalty", "1.5"], 1.5),
    "repetition_penalty": (["--repetition-penalty", "1.25"], 1.25),
    "logit_bias": (["--logit-bias", '{"4": -100, "5": 1.5}'], {4: -100.0, 5: 1.5}),
    "allowed_token_ids": (["--allowed-token-ids", "[4, 5]"], [4, 5]),
    "banned_token_ids": (["--banned-token-ids", "[6]"], [6]),
    "max_tokens": (["--max-tokens", "11"], 11),
    "min_tokens": (["--min-tokens", "3"], 3),
    "ignore_eos": (["--ignore-eos"], True),
    "stop_token_ids": (["--stop-token-ids", "[8]"], [8]),
    "logprobs": (["--logprobs", "1"], 1),
    "prompt_logprobs": (["--prompt-logprobs", "2"], 2),
    "grammar": (["--regex", "a+"], common_pb2.Grammar(regex="a+")),
}
GRAMMAR: dict[str, tuple[list[str], Any]] = {
    "json_schema": (["--json-schema", '{"b": 1,  "a": 2}'], '{"b": 1,  "a": 2}'),
    "regex": (["--regex", "a+"], "a+"),
    "choice": (["--choice", "yes", "--choice", "no"], common_pb2.Choice(options=["yes", "no"])),
    "ebnf": (["--ebnf", 'root ::= "a"'], 'root ::= "a"'),
    "start_after": (["--regex", "a+", "--start-after", "</think>"], "</think>"),
}
MESSAGES: dict[str, tuple[list[str], Any]] = {
    "messages": ([], [generation_pb2.Message(role="user", content="hi")]),
    "template_args": (["--template-arg", "a=false", "--template-arg", 'b="x=y"'], {"a": "false", "b": '"x=y"'}),
    "add_generation_prompt": (["--no-generation-prompt"], False),
}
PROMPTS = {"text": ("--prompt", "hi"), "messages": ("--messages", CHAT), "token_ids": ("--token-ids", "[1, 2]")}


def test_every_field_has_a_flag() -> None:
    for message, table in (
        (generation_pb2.GenerateRequest, REQUEST.keys() | PROMPTS.keys() | {"sampling"}),
        (common_pb2.SamplingParams, SAMPLING.keys()),
        (common_pb2.Grammar, GRAMMAR.keys()),
        (generation_pb2.Messages, MESSAGES.keys()),
    ):
        assert {field.name for field in message.DESCRIPTOR.fields} == table
    tried = {word for table in (REQUEST, SAMPLING, GRAMMAR, MESSAGES) for words, _ in table.values() for word in words}
    prompts = {"--prompt", "--prompt-file", "--messages", "--token-ids"}
    assert {flag.name for flag in request.ALL} <= {word.replace("--no-skip-", "--skip-") for word in tried} | prompts


@pytest.mark.parametrize("name", REQUEST)
def test_fields_of_a_request(name: str) -> None:
    words, wanted = REQUEST[name]
    request = made(*words)
    assert getattr(request, name) == wanted
    assert {field.name for field, _ in request.ListFields()} == {name, "text", "sampling"}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_parameters(name: str) -> None:
    words, wanted = SAMPLING[name]
    assert getattr(made(*words).sampling, name) == wanted != getattr(made().sampling, name)


@pytest.mark.parametrize("name", GRAMMAR)
def test_forms_of_a_grammar(name: str) -> None:
    words, wanted = GRAMMAR[name]
    assert getattr(made(*words, "--resume-ids", "[1]").sampling.grammar, name) == wanted


@pytest.mark.parametrize("name", MESSAGES)
def test_fields_of_a_chat(name: str) -> None:
    words, wanted = MESSAGES[name]
    assert getattr(made(*words, prompt=PROMPTS["messages"]).messages, name) == wanted


def test_files_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_text('{"type": "object"}')
    assert made("--json-schema", f"@{tmp_path / 'f'}").sampling.grammar.json_schema == '{"type": "object"}'
    assert made("--ebnf", f"@{tmp_path / 'f'}").sampling.grammar.ebnf == '{"type": "object"}'
    (tmp_path / "f").write_text("[1, 2]")
    assert list(made(prompt=("--token-ids", f"@{tmp_path / 'f'}")).token_ids.ids) == [1, 2]
    (tmp_path / "f").write_text("two\nlines\n")
    assert made(prompt=("--prompt-file", str(tmp_path / "f"))).text == "two\nlines\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(CHAT))
    assert made(prompt=("--messages", "@-")).messages.messages[0].content == "hi"
    assert list(made("--choice", '["yes", "no"]').sampling.grammar.choice.options) == ["yes", "no"]
    assert list(made("--choice", "[x", "--choice", "@y").sampling.grammar.choice.options) == ["[x", "@y"]


# ---------------------------------------------------------------- help and refusals


def test_help_has_groups_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    out = capsys.readouterr().out
    text = " ".join(out.split())
    titles = ("connection", "prompt", "sampling", "limits and ends", "output", "structure of the answer", "speculation", "request")
    assert sorted(titles, key=lambda title: out.index(f"\n{title}")) == list(titles)
    assert all(f"{flag.name}" in text and flag.help.replace("%%", "%").split("(")[0].strip() in text for flag in request.ALL)
    helps = {flag.field: flag.help for flag in request.ALL}
    for field in dataclasses.fields(SamplingParams):
        if isinstance(field.default, float) or (isinstance(field.default, int) and not isinstance(field.default, bool)):
            assert f"(default: {field.default:g})" in helps[f"sampling.{field.name}"]


HERE = ["--prompt", "x"]
REFUSED = {  # found out before anybody is asked
    "--seed: must be a whole number from 0 to 18446744073709551615, got -1": [*HERE, "--seed", "-1"],
    "--top-k (sampling.top_k): must be a number in [0, 2147483647], got -5": [*HERE, "--top-k", "-5"],
    "--n: must be a whole number from 1 on, got 0": [*HERE, "--n", "0"],
    "--max-tokens (sampling.max_tokens): must be a number in [1, 2147483647], got 0": [*HERE, "--max-tokens", "0"],
    "--max-tokens (sampling.max_tokens): must be a number in [1": [*HERE, "--max-tokens", "-1"],
    "--max-tokens: must be a whole number, got '1.5'": [*HERE, "--max-tokens", "1.5"],
    "--temperature: must be a number, got 'hot'": [*HERE, "--temperature", "hot"],
    "--temperature (sampling.temperature): must be a number in [0, 10000], got nan": [*HERE, "--temperature", "nan"],
    "--top-p (sampling.top_p): must be a number in [0, 1], got 2.0": [*HERE, "--top-p", "2"],
    "--logprobs (sampling.logprobs): must be a number in [0, 20]": [*HERE, "--logprobs", "21"],
    "--min-tokens (sampling.min_tokens): must not exceed max_tokens (1)": [*HERE, "--min-tokens", "2", "--max-tokens", "1"],
    "--priority: must be a whole number from -2147483648": [*HERE, "--priority", "-3000000000"],
    "--num-speculative-tokens: must be a whole number from 0": [*HERE, "--num-speculative-tokens", "-1"],
    "--rejection-sample-method: must be one of: coupled, standard; got 'x'": [*HERE, "--rejection-sample-method", "x"],
    "--token-ids: must be a JSON list": ["--token-ids", "1,2"],
    "--token-ids: must be a JSON list of whole numbers from 0 on": ["--token-ids", '["a"]'],
    "--stop-token-ids: must be a JSON list of whole": [*HERE, "--stop-token-ids", "[-1]"],
    "--resume-ids: must be a JSON list": [*HERE, "--resume-ids", "{}"],
    '--logit-bias: must be a JSON object of token ids and numbers, e.g. {"42"': [*HERE, "--logit-bias", '{"a": 1}'],
    "--logit-bias: must be a JSON object": [*HERE, "--logit-bias", '{"1": "2"}'],
    "--logit-bias: must be a JSON object of": [*HERE, "--logit-bias", '{"-1": 2}'],
    "--logit-bias (sampling.logit_bias): values must be in [-100, 100]": [*HERE, "--logit-bias", '{"1": 101}'],
    "--messages: each turn": ["--messages", '[{"role": "user"}]'],
    "--messages: each": ["--messages", "[]"],
    "--messages (messages.messages): each turn": ["--messages", '[{"role": "user", "content": 3}]'],
    "--template-arg: must be NAME=JSON": ["--messages", CHAT, "--template-arg", "a=x"],
    "--template-arg (messages.template_args): goes with a chat": [*HERE, "--template-arg", "a=1"],
    "--no-generation-prompt (messages.add_generation_prompt): goes with a chat": [*HERE, "--no-generation-prompt"],
    "--json-schema: must be a JSON schema": [*HERE, "--json-schema", "{"],
    '--json-schema: must be a JSON schema, e.g. {"type": "object"}, or @FILE': [*HERE, "--json-schema", "[]"],
    "--json-schema: /nonexistent: ": [*HERE, "--json-schema", "@/nonexistent"],
    "--regex (sampling.grammar.regex): must not be empty": [*HERE, "--regex", ""],
    "--choice: must be a JSON list of strings": [*HERE, "--choice", "[1]"],
    "--choice (sampling.grammar.choice): must hold 1 to 1024": [*HERE, "--choice", ""],
    "--start-after: needs one of: --json-schema, --regex, --choice, --ebnf": [*HERE, "--start-after", "x"],
    "--prompt-file: /nonexistent": ["--prompt-file", "/nonexistent"],
}  # fmt: skip
REFUSED_THERE = {
    "sampling.top_p: must be in (0, 1]": ["--prompt", "invalid"],
    "all places are taken": ["--prompt", "full"],
    # The model's name is the field that the scripted service refuses.
    "--ignore-eos (sampling.ignore_eos): told to": ["--prompt", "fields", "--ignore-eos", "--model", "sampling.ignore_eos"],
    "generate: --n: told to": ["--prompt", "fields", "--n", "2", "--model", "n"],
    "--stop (stop[0]): told to": ["--prompt", "fields", "--stop", "a", "--model", "stop[0]"],
    "--template-arg (messages.template_args[a]): told to": [
        *("--messages", CHAT.replace("hi", "fields")), *("--template-arg", "a=1", "--model", "messages.template_args[a]"),
    ],
    "--prompt (text): told to": ["--prompt", "fields", "--model", "text"],
    "specdec generate: stop[0]: told to": ["--prompt", "fields", "--model", "stop[0]"],
    "specdec generate: texture: told to": ["--prompt", "fields", "--model", "texture"],
}  # fmt: skip
NOT_A_COMMAND = {
    "--regex: not allowed with argument --ebnf; see specdec generate --help": [*HERE, "--ebnf", "a", "--regex", "b"],
    "--no-spec: not allowed with argument --num-speculative-tokens": [*HERE, "--num-speculative-tokens", "1", "--no-spec"],
    "one of the arguments --prompt --prompt-file --messages --token-ids is required": [],
    "--seed: expected one argument": [*HERE, "--seed"],
    "unrecognized arguments: --nonsense; see specdec generate --help": [*HERE, "--nonsense"],
}


def one_line(captured: Any) -> str:
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("specdec generate: ")
    return str(line)


@pytest.mark.parametrize("words", REFUSED)
def test_bad_values_exit_2_with_flag_and_remedy_before_anybody_is_asked(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--endpoint", "127.0.0.1:1", *REFUSED[words]]) == 2
    assert one_line(capsys.readouterr()).startswith(f"specdec generate: {words}")


@pytest.mark.parametrize("words", REFUSED_THERE)
def test_what_the_service_refuses_exits_2_and_names_the_flag_that_said_it(
    words: str, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--endpoint", endpoint, *REFUSED_THERE[words]]) == 2
    assert words in one_line(capsys.readouterr())


@pytest.mark.parametrize("words", NOT_A_COMMAND)
def test_a_command_that_makes_no_sense_exits_2_in_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--endpoint", "127.0.0.1:1", *NOT_A_COMMAND[words]])
    assert ended.value.code == 2 and words in one_line(capsys.readouterr())


def test_endpoints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.cli.connection.CONNECT_S", 0.2)
    assert main(["generate", "--endpoint", "nowhere", "--prompt", "x"]) == 2
    assert "--endpoint: must be host:port" in one_line(capsys.readouterr())
    assert main(["generate", "--endpoint", "http://127.0.0.1:1", "--prompt", "x"]) == 2
    assert "--endpoint: must be host:port without http://" in one_line(capsys.readouterr())
    assert main(["generate", "--endpoint", "127.0.0.1:1", "--prompt-file", "/no/file"]) == 2
    assert one_line(capsys.readouterr()).endswith("--prompt-file: /no/file: No such file or directory")
    assert main(["generate", "--endpoint", "127.0.0.1:1", "--prompt", "x"]) == 2
    assert "127.0.0.1:1: nobody answers" in one_line(capsys.readouterr())
    assert main(["generate", "--prompt", "x"]) == 2
    assert "--endpoint: is missing" in one_line(capsys.readouterr())


def test_of_several_endpoints_the_next_takes_over(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["generate", "--prompt", "hi"], ["tokenize", "--prompt", "four"], ["detokenize", "--token-ids", "[1]"]):
        assert main([words[0], "--endpoint", f"127.0.0.1:1, {endpoint}", *words[1:]]) == 0
        assert capsys.readouterr().out
    with SyncClient(f"127.0.0.1:1,{endpoint}") as client:
        assert client.complete("hi").text == "Hello wörld" and client.tokenize("four") == (4, 1)


def test_a_state_folder_names_the_endpoint(endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say = ["tokenize", "--state", str(tmp_path), "--prompt", "four"]
    assert main(say) == 2 and "--state: no system runs from" in capsys.readouterr().err
    (tmp_path / "endpoint").write_text(endpoint + "\n")
    assert main(say) == 0
    (tmp_path / "tls").mkdir()
    for name in ("ca.crt", "client.crt", "client.key"):
        (tmp_path / "tls" / name).write_text("no certificate")
    assert main(say) == 2, "what is there is used"


# ---------------------------------------------------------------- what is printed


def test_json_contract(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-tokens", "3", "--temperature", "0", "--seed", "7", "--logprobs", "1", "--no-spec", "--json"]
    assert main(["generate", "--endpoint", endpoint, "--prompt", "hi", *flags]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert list(report) == REPORT
    assert (report["text"], report["token_ids"], report["seed"], report["model"]) == ("Hello wörld", [10, 11, 12], 7, "fake")
    assert report["logprobs"][0] == {"logprob": -0.5, "top_ids": [1], "top_logprobs": [-0.25]} and report["finish_reason"] == "length"
    assert report["usage"] == {"prompt_tokens": 5, "completion_tokens": 3}
    assert 0 < report["timing"]["ttft_s"] <= report["timing"]["total_s"]
    assert list(report["speculative"]) == [
        "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_draft_tokens",
        "num_accepted_draft_tokens", "num_spec_steps", "num_spec_tokens", "hit_rate",
    ]  # fmt: skip
    assert report["speculative"]["num_draft_tokens"] == 0  # --no-spec is the same as --num-speculative-tokens 0


def test_json_of_several_answers(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same object for each, in order; the prompt's log-probabilities on the first."""
    words = ["--n", "3", "--seed", "4", "--prompt-logprobs", "1", "--json"]
    assert main(["generate", "--endpoint", endpoint, "--prompt", "hi", *words]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    whole = json.loads(line)
    assert list(whole) == ["answers"]
    first, *others = whole["answers"]
    assert first.pop("prompt_logprobs") == [{"logprob": -0.5, "top_ids": [1], "top_logprobs": [-0.25]}]
    assert all(list(answer) == REPORT and answer["logprobs"] is None for answer in (first, *others))
    assert [answer["text"] for answer in (first, *others)] == ["Hello wörld" * (i + 1) for i in range(3)]
    assert [answer["seed"] for answer in (first, *others)] == [answer_seed(4, i) for i in range(3)]
    assert main(["generate", "--endpoint", endpoint, "--prompt", "hi", "--n", "1", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == REPORT


def test_plain_text_streams(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--endpoint", endpoint, "--token-ids", "[1, 2]", "--resume-ids", "[10]"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "lo wörld\n" and "mean acceptance length 2.50" in captured.err
    assert "[answer" not in captured.err
    assert main(["generate", "--endpoint", endpoint, "--prompt", "hi", "--no-spec"]) == 0
    told = capsys.readouterr().err
    assert "; no round had a block; seed" in told and "acceptance" not in told


def test_several_answers_in_plain_text_come_in_order(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The service is ahead with the later ones; they wait for their turn."""
    assert main(["generate", "--endpoint", endpoint, "--prompt", "hi", "--n", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "".join("Hello wörld" * (i + 1) + "\n" for i in range(3))
    words = captured.err.splitlines()
    assert words[::2] == ["[answer 0]", "[answer 1]", "[answer 2]"] and ["tokens/s" in line for line in words[1::2]] == [True] * 3


def test_a_text_that_breaks_off_ends_its_line(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--endpoint", endpoint, "--prompt", "broken"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "Hel\n" and captured.err == "specdec generate: the last target is gone\n"
    assert main(["generate", "--endpoint", endpoint, "--prompt", "cut"]) == 2
    assert "the stream ended before the answer did" in one_line(capsys.readouterr())


def test_more_answers_than_asked_for_are_a_fault(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--endpoint", endpoint, "--prompt", "too many", "--json"]) == 2
    assert "answer 1 came, 1 were asked for" in one_line(capsys.readouterr())


# ---------------------------------------------------------------- tokenize, detokenize


def test_tokenize(endpoint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def ids(*words: str) -> Any:
        assert main(["tokenize", "--endpoint", endpoint, *words]) == 0
        return json.loads(capsys.readouterr().out)

    (tmp_path / "p").write_text("seven..")
    assert ids("--prompt", "four") == [4, 1]
    assert ids("--prompt-file", str(tmp_path / "p"), "--no-special-tokens", "--json") == {"token_ids": [7, 0]}
    assert ids("--messages", CHAT) == [2]
    assert ids("--messages", CHAT, "--no-generation-prompt", "--template-arg", "a=1") == [2, 0, 1]
    assert main(["tokenize", "--endpoint", endpoint, "--prompt", "x", "--template-arg", "a=1"]) == 2
    assert capsys.readouterr().err.startswith("specdec tokenize: --template-arg (messages.template_args): goes with a chat")
    with pytest.raises(SystemExit):
        main(["tokenize", "--endpoint", endpoint])


def test_detokenize(endpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["detokenize", "--endpoint", endpoint, "--token-ids", "[1, 2]"]) == 0
    assert capsys.readouterr().out == "[1, 2] False\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("[3]"))
    assert main(["detokenize", "--endpoint", endpoint, "--token-ids", "@-", "--skip-special-tokens", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"text": "[3] True"}
    assert main(["detokenize", "--endpoint", endpoint, "--token-ids", "{}"]) == 2
    assert capsys.readouterr().err == "specdec detokenize: --token-ids: must be a JSON list, e.g. [1, 2, 3]\n"

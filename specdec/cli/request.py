"""The flags of `specdec generate` that make the request: everything GenerateRequest holds, in the groups of its help."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from specdec.cli import flags
from specdec.cli.flags import Flag
from specdec.errors import InvalidRequest
from specdec.terms import DraftMethod, RejectionMethod, SamplingParams

if TYPE_CHECKING:  # gRPC is loaded when it is needed: `--help` should not wait for it
    from specdec.client import Options, Prompt

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
_ANY_ID = 1 << 32  # a vocabulary that no id is outside of: only the service knows the real one
_RENAMED = {"rejection_sample_method": "rejection_method", "draft_sample_method": "draft_method"}


def _of(name: str, words: str) -> str:
    """Help with the default, where specdec.terms fixes one."""
    default = _DEFAULTS[name]
    return words if default in (None, ()) else f"{words} (default: {default:g})"


CHAT = (
    Flag("--template-arg", "messages.template_args", "a variable of the chat template; repeatable", "NAME=JSON", flags.variable, many=True),
    Flag("--no-generation-prompt", "messages.add_generation_prompt", "do not open an answer at the end of a chat", value=False),
)
TEXT = (
    Flag("--prompt", "text", "raw text, no chat template", "TEXT", flags.text, instead_of="prompt", required=True),
    Flag("--prompt-file", "text", "raw text from a file, - = standard input", "FILE", flags.read_file, instead_of="prompt"),
    Flag("--messages", "messages", 'a chat: [{"role": "user", "content": "…"}]', "JSON", flags.turns, instead_of="prompt"),
)
IDS = Flag("--token-ids", "token_ids", "token ids, used as they are: [1, 2, 3]", "JSON", flags.ids, instead_of="prompt")
SAMPLING = (
    Flag("--temperature", "sampling.temperature", _of("temperature", "0 = the likeliest token always"), "T", flags.number),
    Flag("--top-k", "sampling.top_k", _of("top_k", "keep the K likeliest tokens, 0 = all"), "K", flags.whole),
    Flag("--top-p", "sampling.top_p", _of("top_p", "keep the likeliest tokens that reach this mass"), "P", flags.number),
    Flag("--min-p", "sampling.min_p", _of("min_p", "keep tokens at least P times as likely as the likeliest"), "P", flags.number),
    Flag("--seed", "seed", "the same seed gives the same text (default: drawn, and told)", "S", flags.whole),
    Flag("--frequency-penalty", "sampling.frequency_penalty", _of("frequency_penalty", "per occurrence in the output"), "X", flags.number),
    Flag("--presence-penalty", "sampling.presence_penalty", _of("presence_penalty", "once for what the output has"), "X", flags.number),
    Flag(
        "--repetition-penalty", "sampling.repetition_penalty", _of("repetition_penalty", "for what prompt or output has"), "X", flags.number
    ),
    Flag("--logit-bias", "sampling.logit_bias", 'added to the scores of ids: {"42": -100}', "JSON", flags.bias),
    Flag("--allowed-token-ids", "sampling.allowed_token_ids", "only these ids are decided", "JSON", flags.some_ids),
    Flag("--banned-token-ids", "sampling.banned_token_ids", "these ids are never decided", "JSON", flags.some_ids),
)
ENDS = (
    Flag("--max-tokens", "sampling.max_tokens", "most tokens of the answer (default: what the window leaves)", "N", flags.whole),
    Flag("--min-tokens", "sampling.min_tokens", _of("min_tokens", "no end before so many tokens"), "N", flags.whole),
    Flag("--stop", "stop", "text that ends the answer; repeatable", "TEXT", flags.text, many=True),
    Flag("--stop-token-ids", "sampling.stop_token_ids", "ids that end the answer", "JSON", flags.some_ids),
    Flag("--ignore-eos", "sampling.ignore_eos", "end-of-sequence ids are ordinary tokens", value=True),
    Flag("--include-stop-str-in-output", "include_stop_str_in_output", "leave the stop text in the answer", value=True),
)
OUTPUT = (
    Flag("--skip-special-tokens", "skip_special_tokens", "leave special tokens out of the text (default: leave out)", pair=True),
    Flag("--logprobs", "sampling.logprobs", "with --json: log-probabilities of the tokens and of N alternatives", "N", flags.whole),
    Flag("--prompt-logprobs", "sampling.prompt_logprobs", "with --json: the same for the prompt's tokens", "N", flags.whole),
    Flag("--n", "n", "so many answers, up to 16, each with a seed of its own (default: 1)", "N", flags.count),
)
STRUCTURE = (
    Flag(
        "--json-schema", "sampling.grammar.json_schema", "a JSON document of this schema", "JSON|@FILE", flags.schema, instead_of="grammar"
    ),
    Flag("--regex", "sampling.grammar.regex", "what this regular expression matches", "REGEX", flags.text, instead_of="grammar"),
    Flag(
        "--choice",
        "sampling.grammar.choice",
        "one of these texts; repeatable, or a JSON list",
        "TEXT|JSON",
        flags.text,
        many=True,
        instead_of="grammar",
    ),
    Flag("--ebnf", "sampling.grammar.ebnf", "a grammar, GBNF or Lark", "TEXT|@FILE", flags.text_or_file, instead_of="grammar"),
    Flag("--start-after", "sampling.grammar.start_after", "begin behind this text; free until then", "TEXT", flags.text),
)
SPECULATION = (
    Flag("--num-speculative-tokens", "num_speculative_tokens", "proposed tokens per round", "K", flags.whole, instead_of="K"),
    Flag("--no-spec", "disable_spec_decode", "the target alone; the same as K = 0", value=True, instead_of="K"),
    Flag(
        "--rejection-sample-method",
        "rejection_sample_method",
        "how proposals are verified",
        "coupled|standard",
        flags.one_of(RejectionMethod),
    ),
    Flag(
        "--draft-sample-method",
        "draft_sample_method",
        "how the draft picks them",
        "gumbel|greedy|probabilistic",
        flags.one_of(DraftMethod),
    ),
    Flag("--enable-adaptive-verification", "enable_adaptive_verification", "let the service choose K per round", pair=True),
    Flag("--use-heterogeneous-vocab", "use_heterogeneous_vocab", "map the tokens of a draft with another tokenizer", value=True),
)
REQUEST = (
    Flag("--model", "model", "refuse another model than this one", "NAME", flags.text),
    Flag("--request-id", "request_id", "name of the request (default: drawn)", "NAME", flags.text),
    Flag("--priority", "priority", "lower first (default: 0)", "N", flags.whole),
    Flag("--resume-ids", "output_token_ids", "ids of this answer that were delivered already", "JSON", flags.ids),
)
GROUPS: dict[str, tuple[Flag, ...]] = {
    "prompt": (*TEXT, IDS, *CHAT),
    "sampling": SAMPLING,
    "limits and ends": ENDS,
    "output": OUTPUT,
    "structure of the answer, one form": STRUCTURE,
    "speculation": SPECULATION,
    "request": REQUEST,
}
ALL = tuple(flag for group in GROUPS.values() for flag in group)


def prompt_of(arguments: argparse.Namespace) -> Prompt:
    """What the flags of the prompt say. Raises InvalidRequest."""
    prompt: Prompt
    (prompt,) = (flag.given(arguments) for flag in (*TEXT, IDS) if getattr(arguments, flag.key, None) is not None)
    return prompt


def chat_options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {flag.field.rpartition(".")[2]: flag.given(arguments) for flag in CHAT}
    pairs = given["template_args"]
    return {**given, "template_args": None if pairs is None else dict(pairs)}


def request_of(arguments: argparse.Namespace) -> tuple[Prompt, SamplingParams, Options]:
    """Prompt, sampling parameters and options as the client takes them. Raises InvalidRequest naming flag or field."""
    sampling: dict[str, Any] = {}
    options: dict[str, Any] = chat_options(arguments)
    for flag in (*SAMPLING, *ENDS, *OUTPUT, *STRUCTURE, *SPECULATION, *REQUEST):
        if (value := flag.given(arguments)) is None:
            continue
        owner, _, name = flag.field.rpartition(".")
        if owner == "sampling":
            sampling[name] = value
        else:
            options[_RENAMED.get(name, name)] = flags.options(value) if name == "choice" else value
    forms = {flag.key: flag.name for flag in STRUCTURE if flag.instead_of}
    if "start_after" in options and not forms.keys() & options.keys():
        raise InvalidRequest("--start-after", "needs one of: " + ", ".join(forms.values()))
    params = SamplingParams(**sampling)
    params.check(_ANY_ID)
    return prompt_of(arguments), params, options  # type: ignore[return-value]

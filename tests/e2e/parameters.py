"""The parameters of a request, a row each: what is set, and what is given beside it so that it shows.

Without the row's own fields the answer is another one, unless the row is `silent`: documented to change no answer. Rows speak of ids by
their tokens, so that one table does for every model whose vocabulary has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from specdec.v1 import common_pb2
from specdec.v1 import generation_pb2 as pb

PROMPTS = frozenset(pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["prompt"].fields[i].name for i in range(3))
SAMPLING = frozenset(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
LETTERS = ("a", "b", "e", "h", "t", "Ġthe")
WORDS = (*LETTERS, "th", "the", "at", "Ġa", "hat", "an", "er")
END, SPECIAL = "<|im_end|>", "<|endoftext|>"
SCHEMA = (
    '{"type": "object", "properties": {"other": {"enum": ["the", "hat", 12]}, "at": {"type": "boolean"}}, "required": ["other", "at"], '
    '"additionalProperties": false}'
)
GBNF = 'root ::= word (" " word)*\nword ::= "the" | "hat" | "other" | [a-e]+'
Fields = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Fields of SamplingParams and of GenerateRequest; their names do not meet."""

    fields: Fields
    given: Fields = field(default_factory=dict)
    silent: bool = False


def row(given: Fields | None = None, silent: bool = False, **fields: Any) -> Row:
    return Row(fields, given or {}, silent)


def table(token_id: Callable[[str], int], *, lure: float, end_lure: float, heat: float) -> dict[str, Row]:
    """What it takes with a model that its tokens turn up every few places: a bias, that of the end, a temperature among few letters."""

    def ids(*tokens: str) -> tuple[int, ...]:
        return tuple(map(token_id, tokens))

    end, special, colon = ids(END, SPECIAL, ":")
    letters = {"allowed_token_ids": ids(*LETTERS), "temperature": heat}
    words = {"allowed_token_ids": ids(*WORDS), "temperature": heat}
    strings = {**words, "stop": ["the", "hat a"]}
    specials = {"allowed_token_ids": ids(SPECIAL, *LETTERS), "temperature": heat}
    may_end = {"ignore_eos": False, "logit_bias": {end: end_lure}}
    room = {"max_tokens": 40}
    grammar = common_pb2.Grammar
    return {
        "temperature 0": row(temperature=0.0),
        "temperature 1e-6": row(temperature=1e-6),
        "temperature 0.3": row(temperature=0.3),
        "temperature 3": row(temperature=3.0),
        "top_k": row(top_k=2),
        "top_p": row(top_p=0.3),
        "min_p": row(min_p=0.4),
        "seed": row(seed=12),
        "frequency_penalty 2": row(letters, frequency_penalty=2.0),
        "frequency_penalty -2": row(letters, frequency_penalty=-2.0),
        "presence_penalty 2": row(letters, presence_penalty=2.0),
        "presence_penalty -2": row(letters, presence_penalty=-2.0),
        "repetition_penalty 1.6": row(letters, repetition_penalty=1.6),
        "repetition_penalty 0.5": row(letters, repetition_penalty=0.5),
        "logit_bias": row(logit_bias=dict(zip(ids("Ġthe", "a", ":"), (lure / 2, lure / 2, -100.0), strict=True))),
        "allowed_token_ids": row(allowed_token_ids=ids(*LETTERS)),
        "banned_token_ids": row(words, banned_token_ids=ids("at", "hat", "Ġthe")),
        "min_tokens and the end": row(may_end, min_tokens=9),
        "min_tokens and a stop id": row({**words, "stop_token_ids": ids("at", "Ġthe")}, min_tokens=9),
        "min_tokens and a stop string": row(strings, min_tokens=9),
        **{f"max_tokens {n}": row(max_tokens=n) for n in range(1, 13)},
        "ignore_eos": row({"logit_bias": {end: end_lure}}, ignore_eos=False),
        "stop_token_ids": row(words, stop_token_ids=ids("th", "Ġa")),
        "stop": row(words, stop=["the", "hat a"]),
        "stop across tokens": row(letters, stop=["thebex", "hebet", "ebhtt"]),
        "include_stop_str_in_output": row(strings, include_stop_str_in_output=True),
        "skip_special_tokens": row(specials, skip_special_tokens=False),
        "logprobs 0": row(logprobs=0),
        "logprobs 20": row(logprobs=20),
        "prompt_logprobs 0": row(prompt_logprobs=0),
        "prompt_logprobs 5": row(prompt_logprobs=5),
        "n": row(n=3),
        "json_schema": row({**room, "ignore_eos": False}, grammar=grammar(json_schema=SCHEMA)),
        "regex": row({**room, **may_end}, grammar=grammar(regex="(the|hat|[0-9]{3}| )+")),
        "choice": row(room, grammar=grammar(choice=common_pb2.Choice(options=["the other hat", "the hat", "an otter", "at the other"]))),
        "ebnf": row({**room, "ignore_eos": False}, grammar=grammar(ebnf=GBNF)),
        "start_after": row({**room, "logit_bias": {colon: lure}}, grammar=grammar(regex="[0-9]{2,6}", start_after=":")),
        "text": row(text="the hat of the other"),
        "messages": row(messages=pb.Messages(messages=[pb.Message(role="user", content="the hat")])),
        "standard at temperature 0": row(temperature=0.0, rejection_sample_method=common_pb2.REJECTION_SAMPLE_METHOD_STANDARD),
        "draft_sample_method": row(silent=True, draft_sample_method=common_pb2.DRAFT_SAMPLE_METHOD_GREEDY),
        "priority": row(silent=True, priority=-5),
    }


# Fields that no row sets: who is asked and by what name, how it is speculated (the tests turn these), what is resumed (they do that to
# every row), and what is refused.
NOT_IN_THE_TABLE = {
    "token_ids", "sampling", "model", "request_id", "num_speculative_tokens", "disable_spec_decode", "output_token_ids",
    "enable_adaptive_verification", "use_heterogeneous_vocab",
}  # fmt: skip


def merged(*several: Mapping[str, Any]) -> Fields:
    """Later ones win; biases add up, and there is one prompt."""
    result: Fields = {}
    for fields in several:
        if PROMPTS & fields.keys():
            result = {name: value for name, value in result.items() if name not in PROMPTS}
        bias = {**result.get("logit_bias", {}), **fields.get("logit_bias", {})}
        result |= fields
        if bias:
            result["logit_bias"] = bias
    return result


def together(*rows: Row) -> Row:
    """One row that is several."""
    return Row(merged(*(r.fields for r in rows)), merged(*(r.given for r in rows)))


def pairs(rows: Mapping[str, Row]) -> Iterator[tuple[str, str]]:
    """Any two rows that set different fields."""
    for one, other in combinations(rows, 2):
        a, b = rows[one].fields.keys(), rows[other].fields.keys()
        if not a & b and not (a & PROMPTS and b & PROMPTS):
            yield one, other


def request(fields: Mapping[str, Any]) -> pb.GenerateRequest:
    sampling = {name: value for name, value in fields.items() if name in SAMPLING}
    others = {name: value for name, value in fields.items() if name not in SAMPLING}
    if "token_ids" in others:
        others["token_ids"] = pb.TokenIds(ids=others["token_ids"])
    return pb.GenerateRequest(sampling=common_pb2.SamplingParams(**sampling), **others)

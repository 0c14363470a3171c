"""F16: every field of a request either has its documented effect or is refused by name. There is no third outcome.

The effects of sampling parameters are compared with a slow greedy loop over transformers in float64. A field that is added to the proto
and not to these tables fails the first test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from specdec.terms import SamplingParams
from specdec.v1 import common_pb2
from specdec.v1 import generation_pb2 as pb
from tests.e2e.raw import RawClient, Reply
from tests.e2e.stack import Stack
from tests.tiny import tiny_llama

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90)]
PROMPT = [10, 11, 12, 13, 11, 10]
SEED, LENGTH, VOCAB, EOS = 11, 24, 320, 2
STOP, LENGTH_REACHED = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


@pytest.fixture(scope="module")
def client(questioned: Stack) -> Iterator[RawClient]:
    with RawClient(questioned.endpoint) as client:
        yield client


# ---------------------------------------------------------------- the slow way


class Oracle:
    """The model's own greedy answers, one whole forward pass per token."""

    def __init__(self) -> None:
        self._model = tiny_llama(0, vocab=VOCAB).float().double()  # the folder holds float32
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}

    def row(self, tokens: Sequence[int]) -> torch.Tensor:
        if (key := tuple(tokens)) not in self._rows:
            with torch.no_grad():
                self._rows[key] = self._model(torch.tensor([list(tokens)])).logits[0, -1]
        return self._rows[key].clone()

    def greedy(self, params: SamplingParams) -> list[int]:
        """As documented in common.proto, field by field, with loops."""
        output: list[int] = []
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        while len(output) < (params.max_tokens or LENGTH):
            row = self.row([*PROMPT, *output])
            for token in range(VOCAB):
                if params.allowed_token_ids and token not in params.allowed_token_ids:
                    row[token] = -torch.inf
                if token in params.banned_token_ids or (len(output) < params.min_tokens and token in stops):
                    row[token] = -torch.inf
                row[token] += params.logit_bias.get(token, 0.0)
                if token in PROMPT or token in output:
                    row[token] = row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
                if token in output:
                    row[token] -= output.count(token) * params.frequency_penalty + params.presence_penalty
            best = int(row.argmax())
            if best in stops:
                break
            output.append(best)
        return output


ORACLE = Oracle()


def greedy(**fields: Any) -> tuple[dict[str, Any], list[int]]:
    """The parameters at temperature 0, and what they must give."""
    told = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, **fields}
    return told, ORACLE.greedy(SamplingParams(**{k: tuple(v) if isinstance(v, list) else v for k, v in told.items()}))


Case = Callable[[RawClient], None]


def ask(client: RawClient, sampling: dict[str, Any] | None = None, **fields: Any) -> Reply:
    params = {"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True, **(sampling or {})}
    if not {"text", "messages", "token_ids"} & fields.keys():
        fields["token_ids"] = pb.TokenIds(ids=PROMPT)
    return client.generate(pb.GenerateRequest(**{"seed": SEED, "sampling": common_pb2.SamplingParams(**params), **fields}))


def good(reply: Reply) -> Any:
    assert (reply.code, reply.details) == ("OK", "")
    return reply.finished


def refused(reply: Reply, field: str, code: str = "UNIMPLEMENTED") -> None:
    assert (reply.code, reply.field) == (code, field), reply.details
    assert reply.started is None


# ---------------------------------------------------------------- SamplingParams


def matches_the_oracle(**fields: Any) -> Case:
    """At temperature 0 the answer is the slow loop's; without the field it is another."""

    def check(client: RawClient) -> None:
        told, want = greedy(**fields)
        reply = ask(client, told)
        finished = good(reply)
        assert reply.token_ids == want != greedy()[1]
        for name in fields:
            assert getattr(finished.settings.sampling, name) == getattr(common_pb2.SamplingParams(**told), name), name

    return check


def is_greedy(**fields: Any) -> Case:
    """A cut so sharp that only the best id is left, at temperature 1."""

    def check(client: RawClient) -> None:
        reply = ask(client, fields)
        good(reply)
        assert reply.token_ids == greedy()[1] != ask(client).token_ids

    return check


def temperature(client: RawClient) -> None:
    is_greedy(temperature=0.0)(client)
    hot = ask(client, {"temperature": 3.0})
    assert hot.token_ids != ask(client).token_ids and good(hot).settings.sampling.temperature == 3.0


def max_tokens(client: RawClient) -> None:
    reply = ask(client, {"max_tokens": 5})
    assert good(reply).finish_reason == LENGTH_REACHED
    assert reply.token_ids == ask(client).token_ids[:5]


def min_tokens(client: RawClient) -> None:
    stop = greedy()[1][2]
    told, want = greedy(min_tokens=10, stop_token_ids=[stop])
    reply = ask(client, told)
    good(reply)
    assert reply.token_ids == want and len(want) >= 10
    assert len(ask(client, {**told, "min_tokens": 0}).token_ids) == 2


def ignore_eos(client: RawClient) -> None:
    wanted = {"logit_bias": {EOS: 100.0}}
    assert ask(client, wanted).token_ids == [EOS] * LENGTH
    ended = ask(client, {**wanted, "ignore_eos": False})
    assert good(ended).finish_reason == STOP and ended.token_ids == [] and good(ended).stop_reason == str(EOS)


def stop_token_ids(client: RawClient) -> None:
    plain = ask(client).token_ids
    reply = ask(client, {"stop_token_ids": [plain[7]]})
    assert good(reply).finish_reason == STOP and good(reply).stop_reason == str(plain[7])
    assert reply.token_ids == plain[: plain.index(plain[7])]


def logprobs(client: RawClient) -> None:
    reply = ask(client, {"logprobs": 3})
    good(reply)
    assert len(reply.logprobs) == len(reply.token_ids) == LENGTH
    for i, (token, told) in enumerate(zip(reply.token_ids, reply.logprobs, strict=True)):
        exact = torch.log_softmax(ORACLE.row([*PROMPT, *reply.token_ids[:i]]), -1)
        top = exact.topk(3)
        assert told.top_ids == top.indices.tolist()
        assert told.logprob == pytest.approx(float(exact[token]), rel=1e-4)  # transformers' norms round to float32
        assert told.top_logprobs == pytest.approx(top.values.tolist(), rel=1e-4)
    assert not ask(client).logprobs


def unserved(**fields: Any) -> Case:
    (name,) = fields
    return lambda client: refused(ask(client, fields), f"sampling.{name}")


FAVOURITES = greedy()[1]
SAMPLING: dict[str, Case] = {
    "temperature": temperature,
    "top_k": is_greedy(top_k=1),
    "top_p": is_greedy(top_p=1e-9),
    "min_p": is_greedy(min_p=1.0),
    "frequency_penalty": matches_the_oracle(frequency_penalty=2.0),
    "presence_penalty": matches_the_oracle(presence_penalty=2.0),
    "repetition_penalty": matches_the_oracle(repetition_penalty=3.0),
    "logit_bias": matches_the_oracle(logit_bias={FAVOURITES[0]: -100.0, FAVOURITES[3]: 2.5}),
    "allowed_token_ids": matches_the_oracle(allowed_token_ids=[5, 40, 41, 200, 300]),
    "banned_token_ids": matches_the_oracle(banned_token_ids=FAVOURITES[:2]),
    "max_tokens": max_tokens,
    "min_tokens": min_tokens,
    "ignore_eos": ignore_eos,
    "stop_token_ids": stop_token_ids,
    "logprobs": logprobs,
    "prompt_logprobs": unserved(prompt_logprobs=1),
    "grammar": unserved(grammar=common_pb2.Grammar(regex="a*")),
}


# ---------------------------------------------------------------- GenerateRequest


def text(client: RawClient) -> None:
    ids = client.unary("Tokenize", pb.TokenizeRequest(text="the hat"), pb.TokenizeResponse).token_ids
    assert ask(client, text="the hat").token_ids == ask(client, token_ids=pb.TokenIds(ids=ids)).token_ids


def token_ids(client: RawClient) -> None:
    reply = ask(client, token_ids=pb.TokenIds(ids=[33]))
    assert reply.started is not None and reply.started.prompt_tokens == 1
    assert reply.token_ids != ask(client).token_ids


def messages(client: RawClient) -> None:
    chat = pb.Messages(messages=[pb.Message(role="user", content="the hat")])
    ids = client.unary("Tokenize", pb.TokenizeRequest(messages=chat), pb.TokenizeResponse).token_ids
    assert ask(client, messages=chat).token_ids == ask(client, token_ids=pb.TokenIds(ids=ids)).token_ids


def output_token_ids(client: RawClient) -> None:
    whole = ask(client)
    reply = ask(client, output_token_ids=whole.token_ids[:9])
    assert good(reply).usage.completion_tokens == LENGTH
    assert reply.token_ids == whole.token_ids[9:]


def sampling(client: RawClient) -> None:
    assert ask(client, {"top_k": 1}).token_ids != ask(client).token_ids


def seed(client: RawClient) -> None:
    reply = ask(client, seed=SEED + 1)
    assert reply.started is not None and reply.started.seed == SEED + 1
    assert reply.token_ids != ask(client).token_ids == ask(client).token_ids


def priority(client: RawClient) -> None:
    """Order among requests only: never the text."""
    reply = ask(client, priority=-5)
    good(reply)
    assert reply.token_ids == ask(client).token_ids


def ending(client: RawClient) -> tuple[Reply, str]:
    """An answer, and some text of its middle that is whole characters."""
    reply = ask(client)
    middle = next(reply.text[i : i + 2] for i in range(3, len(reply.text)) if reply.text[i : i + 2].isascii())
    assert len(middle) == 2
    return reply, middle


def stop(client: RawClient) -> None:
    plain, middle = ending(client)
    reply = ask(client, stop=[middle])
    assert good(reply).finish_reason == STOP and good(reply).stop_reason == middle
    assert reply.text == plain.text[: plain.text.index(middle)]
    assert reply.token_ids == plain.token_ids[: len(reply.token_ids)]


def include_stop_str_in_output(client: RawClient) -> None:
    plain, middle = ending(client)
    reply = ask(client, stop=[middle], include_stop_str_in_output=True)
    good(reply)
    assert reply.text == plain.text[: plain.text.index(middle) + len(middle)]


def skip_special_tokens(client: RawClient) -> None:
    only = {"allowed_token_ids": [0], "max_tokens": 3}
    assert ask(client, only, skip_special_tokens=False).text == "<|endoftext|>" * 3
    assert ask(client, only).text == ""


def num_speculative_tokens(client: RawClient) -> None:
    reply, default = ask(client, num_speculative_tokens=1), ask(client)
    assert len(good(reply).speculative.acceptance_histogram) <= 2 < len(good(default).speculative.acceptance_histogram)
    assert good(reply).settings.num_speculative_tokens == 1
    assert reply.token_ids == default.token_ids


def disable_spec_decode(client: RawClient) -> None:
    reply = ask(client, disable_spec_decode=True)
    assert good(reply).speculative.num_spec_steps == 0 and good(reply).settings.num_speculative_tokens == 0
    assert set(reply.origins) == {pb.TOKEN_ORIGIN_PLAIN}


def rejection_sample_method(client: RawClient) -> None:
    reply = ask(client, rejection_sample_method=common_pb2.REJECTION_SAMPLE_METHOD_STANDARD)
    settings = good(reply).settings
    assert settings.rejection_sample_method == common_pb2.REJECTION_SAMPLE_METHOD_STANDARD
    assert settings.draft_sample_method == common_pb2.DRAFT_SAMPLE_METHOD_PROBABILISTIC
    assert good(ask(client)).settings.rejection_sample_method == common_pb2.REJECTION_SAMPLE_METHOD_COUPLED


def draft_sample_method(client: RawClient) -> None:
    """A greedy draft proposes another token than the sampler decides; a gumbel one with the target's own weights never does."""
    reply, default = ask(client, draft_sample_method=common_pb2.DRAFT_SAMPLE_METHOD_GREEDY), ask(client)
    assert good(reply).settings.draft_sample_method == common_pb2.DRAFT_SAMPLE_METHOD_GREEDY
    assert good(reply).speculative.draft_acceptance_rate < 1.0 == good(default).speculative.draft_acceptance_rate
    assert reply.token_ids == default.token_ids
    illegal = ask(client, draft_sample_method=common_pb2.DRAFT_SAMPLE_METHOD_PROBABILISTIC)
    refused(illegal, "draft_sample_method", "INVALID_ARGUMENT")


def model(client: RawClient) -> None:
    refused(ask(client, model="another"), "model", "NOT_FOUND")
    assert getattr(ask(client, model="tiny").started, "model", None) == "tiny"


def request_id(client: RawClient) -> None:
    assert getattr(ask(client, request_id="mine").started, "request_id", None) == "mine"


def refused_field(**fields: Any) -> Case:
    (name,) = fields
    return lambda client: refused(ask(client, **fields), name)


REQUEST: dict[str, Case] = {
    "text": text,
    "token_ids": token_ids,
    "messages": messages,
    "output_token_ids": output_token_ids,
    "sampling": sampling,
    "seed": seed,
    "n": refused_field(n=2),
    "priority": priority,
    "stop": stop,
    "include_stop_str_in_output": include_stop_str_in_output,
    "skip_special_tokens": skip_special_tokens,
    "num_speculative_tokens": num_speculative_tokens,
    "enable_adaptive_verification": refused_field(enable_adaptive_verification=True),
    "disable_spec_decode": disable_spec_decode,
    "rejection_sample_method": rejection_sample_method,
    "draft_sample_method": draft_sample_method,
    "model": model,
    "request_id": request_id,
    "use_heterogeneous_vocab": refused_field(use_heterogeneous_vocab=True),
}


# ---------------------------------------------------------------- Messages


def turns(client: RawClient) -> None:
    two = [pb.Message(role="system", content="a"), pb.Message(role="user", content="b")]
    long, short = (ask(client, messages=pb.Messages(messages=chat)) for chat in (two, two[1:]))
    assert long.started is not None and short.started is not None
    assert long.started.prompt_tokens > short.started.prompt_tokens


def chat_of(**more: Any) -> pb.Messages:
    return pb.Messages(messages=[pb.Message(role="user", content="the hat")], **more)


def template_args(client: RawClient) -> None:
    """A variable that the template does not use changes nothing; what is no JSON, or set elsewhere, is refused."""
    assert ask(client, messages=chat_of(template_args={"other": "[1]"})).token_ids == ask(client, messages=chat_of()).token_ids
    broken = ask(client, messages=chat_of(template_args={"other": "{"}))
    refused(broken, "messages.template_args[other]", "INVALID_ARGUMENT")
    reserved = ask(client, messages=chat_of(template_args={"messages": "[]"}))
    refused(reserved, "messages.template_args[messages]", "INVALID_ARGUMENT")


def add_generation_prompt(client: RawClient) -> None:
    bare, opened = ask(client, messages=chat_of(add_generation_prompt=False)), ask(client, messages=chat_of())
    assert bare.started is not None and opened.started is not None
    assert bare.started.prompt_tokens < opened.started.prompt_tokens


MESSAGES: dict[str, Case] = {"messages": turns, "template_args": template_args, "add_generation_prompt": add_generation_prompt}
TABLES = {pb.GenerateRequest: REQUEST, common_pb2.SamplingParams: SAMPLING, pb.Messages: MESSAGES}


@pytest.mark.parametrize("message", TABLES, ids=lambda message: message.DESCRIPTOR.name)
def test_F16_no_field_is_forgotten(message: Any) -> None:
    assert {field.name for field in message.DESCRIPTOR.fields} == TABLES[message].keys()


@pytest.mark.parametrize(
    ("message", "field"),
    [(message, field) for message, table in TABLES.items() for field in table],
    ids=lambda value: value if isinstance(value, str) else value.DESCRIPTOR.name,
)
def test_F16(client: RawClient, message: Any, field: str) -> None:
    TABLES[message][field](client)

"""GenerateRequest → Request. Every field is read or refused by name; nothing is ignored, nothing that is set is replaced by a default.

Errors name the field as the proto does. Unset and zero differ wherever the proto says `optional`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.request import Chat, Ids, Request, Text, check_ids, check_sampling
from specdec import wire
from specdec.errors import InvalidRequest, Unsupported
from specdec.terms import DraftMethod, RejectionMethod, SamplingParams
from specdec.v1 import generation_pb2 as pb

MAX_PROMPT_BYTES = 4 << 20  # of a text, or of all messages and template arguments together
MAX_PROMPT_TOKENS = 1 << 20  # ids of a prompt, or of the output it resumes
MAX_MESSAGES = 4096
MAX_TEMPLATE_ARGS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 512  # of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024  # entries
MAX_N = 16  # answers of one request
LONGEST_BLOCK, FIXED_BLOCK = 5, 2  # tokens: with adaptive lengths a bound, without them the length that does least harm anywhere
MAX_DETOKENIZE_IDS = 1 << 17


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the service puts where a request is silent. `num_speculative_tokens` None = what is usual with adaptive lengths, or without."""

    num_speculative_tokens: int | None
    adaptive: bool
    rejection_method: RejectionMethod
    draft_method: DraftMethod | None

    def block_length(self, adaptive: bool) -> int:
        """The longest block, or the length of every block."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return LONGEST_BLOCK if adaptive else FIXED_BLOCK


def parse(message: pb.GenerateRequest, defaults: Defaults, vocab_size: int, eos_ids: tuple[int, ...]) -> Request:
    """Raises InvalidRequest, or Unsupported for what this version does not serve. Needs no target."""
    _refuse_unserved(message)
    sampling = _sampling(message, vocab_size, eos_ids)
    rejection, draft = wire.methods_from_wire(
        message.rejection_sample_method, message.draft_sample_method, defaults.rejection_method, defaults.draft_method
    )
    output_ids = _ids(message.output_token_ids, vocab_size, "output_token_ids")
    return Request(
        prompt=_prompt(message, vocab_size),
        sampling=sampling,
        rejection_method=rejection,
        draft_method=draft,
        num_speculative_tokens=_num_speculative_tokens(message),
        adaptive=message.enable_adaptive_verification if message.HasField("enable_adaptive_verification") else None,
        output_ids=output_ids,
        seed=message.seed if message.HasField("seed") else None,
        n=_n(message),
        priority=message.priority,
        stop=_stop(message),
        include_stop=message.include_stop_str_in_output,
        skip_special=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        model=message.model if message.HasField("model") else None,
        request_id=wire.name_from_wire(message.request_id, "request_id") if message.HasField("request_id") else None,
    )


def _refuse_unserved(message: pb.GenerateRequest) -> None:
    if message.use_heterogeneous_vocab:
        raise Unsupported("use_heterogeneous_vocab", "draft and target share one vocabulary")


def _n(message: pb.GenerateRequest) -> int:
    n = message.n if message.HasField("n") else 1
    if not 1 <= n <= MAX_N:
        raise InvalidRequest("n", f"must be 1 to {MAX_N} (MAX_N), got {n}")
    if n > 1 and message.output_token_ids:
        raise InvalidRequest("n", "must be 1 beside output_token_ids: resume each answer by itself, with the seed of its first message")
    return n


def _sampling(message: pb.GenerateRequest, vocab_size: int, eos_ids: tuple[int, ...]) -> SamplingParams:
    wire.bounded(tuple(message.sampling.logit_bias), MAX_LOGIT_BIAS, "sampling.logit_bias", "MAX_LOGIT_BIAS")
    wire.bounded(message.sampling.stop_token_ids, MAX_STOP_TOKEN_IDS, "sampling.stop_token_ids", "MAX_STOP_TOKEN_IDS")
    sampling = wire.sampling_from_wire(message.sampling)
    check_sampling(sampling, vocab_size, eos_ids)
    return sampling


def _num_speculative_tokens(message: pb.GenerateRequest) -> int | None:
    """disable_spec_decode outranks a block length: it can only be meant."""
    if message.disable_spec_decode:
        return 0
    return message.num_speculative_tokens if message.HasField("num_speculative_tokens") else None


def _stop(message: pb.GenerateRequest) -> tuple[str, ...]:
    wire.bounded(message.stop, MAX_STOP_STRINGS, "stop", "MAX_STOP_STRINGS")
    for i, stop in enumerate(message.stop):
        if not stop or len(stop.encode()) > MAX_STOP_BYTES:
            raise InvalidRequest(f"stop[{i}]", f"must be 1 to {MAX_STOP_BYTES} bytes long (MAX_STOP_BYTES)")
    return tuple(message.stop)


def _prompt(message: pb.GenerateRequest, vocab_size: int) -> Text | Ids | Chat:
    kind = message.WhichOneof("prompt")
    if kind == "token_ids":
        return Ids(_ids(message.token_ids.ids, vocab_size, "token_ids.ids"))
    if kind is None:
        raise InvalidRequest("prompt", "set exactly one of: text, token_ids, messages")
    return text_or_chat(message)


def text_or_chat(message: pb.GenerateRequest | pb.TokenizeRequest) -> Text | Chat:
    """The two forms of a prompt that need a tokenizer."""
    kind = message.WhichOneof("prompt")
    if kind == "text":
        _sized(len(message.text.encode()), "text")
        return Text(message.text)
    if kind != "messages":
        raise InvalidRequest("prompt", "set exactly one of: text, messages")
    chat = message.messages
    if not chat.messages:
        raise InvalidRequest("messages.messages", "must hold at least one message")
    wire.bounded(chat.messages, MAX_MESSAGES, "messages.messages", "MAX_MESSAGES")
    wire.bounded(tuple(chat.template_args), MAX_TEMPLATE_ARGS, "messages.template_args", "MAX_TEMPLATE_ARGS")
    _sized(chat.ByteSize(), "messages")
    return Chat(
        messages=tuple({"role": turn.role, "content": turn.content} for turn in chat.messages),
        template_args=dict(chat.template_args),
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
    )


def _sized(size: int, field: str) -> None:
    if size > MAX_PROMPT_BYTES:
        raise InvalidRequest(field, f"at most {MAX_PROMPT_BYTES} bytes (MAX_PROMPT_BYTES), got {size}")


def _ids(values: Sequence[int], vocab_size: int, field: str) -> tuple[int, ...]:
    wire.bounded(values, MAX_PROMPT_TOKENS, field, "MAX_PROMPT_TOKENS")
    ids = tuple(values)
    check_ids(ids, vocab_size, field)
    return ids

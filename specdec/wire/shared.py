"""What messages share: enums, sampling parameters, log-probabilities, distributions, and the limit of every list."""

from __future__ import annotations

import array
import math
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from specdec import terms
from specdec.errors import InvalidRequest, ProtocolFault
from specdec.v1 import common_pb2, generation_pb2

MAX_ITEMS = 1024  # items, commands, answers or events in one message
MAX_TOKENS = 1 << 20  # ids in one list
MAX_ID_LIST = 1 << 16  # ids in one list of SamplingParams, or in one distribution
MAX_DISTRIBUTIONS = 256  # distributions in one Step or Proposal
MAX_MESSAGE_CHARS = 1000  # text for humans inside an answer

_E = TypeVar("_E")
INVALID_ARGUMENT = 3  # gRPC status code number, as Failed carries it

# ---------------------------------------------------------------- enums

_REJECTION = {
    common_pb2.REJECTION_SAMPLE_METHOD_COUPLED: terms.RejectionMethod.COUPLED,
    common_pb2.REJECTION_SAMPLE_METHOD_STANDARD: terms.RejectionMethod.STANDARD,
}
_DRAFT = {
    common_pb2.DRAFT_SAMPLE_METHOD_GUMBEL: terms.DraftMethod.GUMBEL,
    common_pb2.DRAFT_SAMPLE_METHOD_GREEDY: terms.DraftMethod.GREEDY,
    common_pb2.DRAFT_SAMPLE_METHOD_PROBABILISTIC: terms.DraftMethod.PROBABILISTIC,
}
_FINISH = {
    common_pb2.FINISH_REASON_STOP: terms.FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: terms.FinishReason.LENGTH,
}
_ORIGIN = {
    generation_pb2.TOKEN_ORIGIN_ACCEPTED: terms.Origin.ACCEPTED,
    generation_pb2.TOKEN_ORIGIN_CORRECTED: terms.Origin.CORRECTED,
    generation_pb2.TOKEN_ORIGIN_BONUS: terms.Origin.BONUS,
    generation_pb2.TOKEN_ORIGIN_PLAIN: terms.Origin.PLAIN,
}
_REJECTION_OUT = {term: number for number, term in _REJECTION.items()}
_DRAFT_OUT = {term: number for number, term in _DRAFT.items()}
_FINISH_OUT = {term: number for number, term in _FINISH.items()}
_ORIGIN_OUT = {term: number for number, term in _ORIGIN.items()}


def rejection_method_to_wire(method: terms.RejectionMethod) -> common_pb2.RejectionSampleMethod:
    return _REJECTION_OUT[method]


def draft_method_to_wire(method: terms.DraftMethod) -> common_pb2.DraftSampleMethod:
    return _DRAFT_OUT[method]


def finish_to_wire(finish: terms.FinishReason | None) -> common_pb2.FinishReason:
    return common_pb2.FINISH_REASON_UNSPECIFIED if finish is None else _FINISH_OUT[finish]


def origin_to_wire(origin: terms.Origin) -> generation_pb2.TokenOrigin:
    return _ORIGIN_OUT[origin]


def origin_from_wire(number: int) -> terms.Origin | None:
    """None for an origin that is not told or that a newer server invented."""
    return _ORIGIN.get(number)  # type: ignore[call-overload, no-any-return]


def finish_from_wire(number: int) -> terms.FinishReason | None:
    """None = not finished. An unknown number is a fault of the peer."""
    if number == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    return known(_FINISH, number, "finish_reason")


def methods_from_wire(
    rejection: int,
    draft: int,
    default: terms.RejectionMethod = terms.RejectionMethod.COUPLED,
    default_draft: terms.DraftMethod | None = None,
) -> tuple[terms.RejectionMethod, terms.DraftMethod]:
    """Both methods, defaults filled in: `default` for an unset rejection method; for an unset draft method
    `default_draft` where it is legal, else the rejection method's own default.

    Raises InvalidRequest for unknown numbers and illegal pairs.
    """
    method = default if rejection == 0 else known(_REJECTION, rejection, "rejection_sample_method")
    legal = terms.LEGAL_METHODS[method]
    if draft == 0:
        return method, default_draft if default_draft in legal else legal[0]
    chosen = known(_DRAFT, draft, "draft_sample_method")
    if chosen not in legal:
        allowed = " or ".join(m.value for m in legal)
        raise InvalidRequest("draft_sample_method", f"{chosen.value} does not go with {method.value}; use {allowed}")
    return method, chosen


# ---------------------------------------------------------------- checks


def known(table: dict[Any, _E], number: int, field: str) -> _E:
    if number not in table:
        names = ", ".join(term.value for term in table.values())  # type: ignore[attr-defined]
        raise InvalidRequest(field, f"enum value {number} is not known here; use one of: {names}")
    return table[number]


def bounded(values: Sequence[Any], limit: int, field: str, name: str) -> None:
    if len(values) > limit:
        raise InvalidRequest(field, f"at most {limit} entries ({name}), got {len(values)}")


def ids(values: Sequence[int], field: str) -> tuple[int, ...]:
    found = tuple(values)
    if len(found) > MAX_TOKENS:
        bounded(found, MAX_TOKENS, field, "MAX_TOKENS")
    return found


def name_from_wire(text: str, field: str) -> str:
    """A session, request or orchestrator id: 1 to 128 bytes of UTF-8."""
    if not text or len(text.encode()) > terms.MAX_ID_BYTES:
        raise InvalidRequest(field, f"must be 1 to {terms.MAX_ID_BYTES} bytes long")
    return text


def link_from_wire(text: str, field: str) -> str:
    """The name of a connection, or none."""
    return name_from_wire(text, field) if text else ""


def counted(number: int, field: str) -> int:
    if number < 1:
        raise InvalidRequest(field, "counts from 1")
    return number


def _float_bytes(probs: bytes) -> array.array[float]:
    numbers = array.array("f", probs)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


# ---------------------------------------------------------------- shared pieces

_SCALARS = (
    "temperature", "top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs",
)  # fmt: skip
_LISTS = ("allowed_token_ids", "banned_token_ids", "stop_token_ids")


def sampling_to_wire(params: terms.SamplingParams) -> common_pb2.SamplingParams:
    """Raises InvalidRequest for what the wire cannot carry, e.g. a negative max_tokens."""
    message, name = common_pb2.SamplingParams(), ""
    try:
        for name in _SCALARS:
            if (value := getattr(params, name)) is not None:
                setattr(message, name, value)
        for name in _LISTS:
            if values := getattr(params, name):
                getattr(message, name).extend(values)
        name = "logit_bias"
        if params.logit_bias:
            message.logit_bias.update(params.logit_bias)
        name = "grammar"
        if params.grammar is not None:
            message.grammar.CopyFrom(grammar_to_wire(params.grammar))
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"sampling.{name}", str(error)) from error
    return message


def sampling_from_wire(message: common_pb2.SamplingParams, field: str = "sampling") -> terms.SamplingParams:
    """Unset → the default in terms; explicit zero stays. Ranges are not checked here: see `SamplingParams.check`."""
    values: dict[str, Any] = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    for name in (*_LISTS, "logit_bias"):
        bounded(getattr(message, name), MAX_ID_LIST, f"{field}.{name}", "MAX_ID_LIST")
    for name in _LISTS:
        values[name] = tuple(getattr(message, name))
    grammar = grammar_from_wire(message.grammar, f"{field}.grammar") if message.HasField("grammar") else None
    return terms.SamplingParams(logit_bias=dict(message.logit_bias), grammar=grammar, **values)


def grammar_to_wire(grammar: terms.Grammar) -> common_pb2.Grammar:
    message = common_pb2.Grammar(start_after=grammar.start_after)
    if grammar.form is terms.GrammarForm.CHOICE:
        message.choice.options.extend(grammar.options)
    else:
        setattr(message, grammar.form.value, grammar.text)
    return message


def grammar_from_wire(message: common_pb2.Grammar, field: str) -> terms.Grammar:
    """Sizes are not checked here: see `Grammar.check`."""
    form = message.WhichOneof("form")
    if form is None:
        raise InvalidRequest(field, "set exactly one of: " + ", ".join(form.value for form in terms.GrammarForm))
    start_after = message.start_after if message.HasField("start_after") else None
    if form == "choice":
        return terms.Grammar(terms.GrammarForm.CHOICE, options=tuple(message.choice.options), start_after=start_after)
    return terms.Grammar(terms.GrammarForm(form), getattr(message, form), start_after=start_after)


def logprobs_to_wire(entry: terms.TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(logprob=entry.logprob, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs)


def logprobs_from_wire(message: common_pb2.TokenLogprobs) -> terms.TokenLogprobs:
    if len(message.top_ids) != len(message.top_logprobs):
        raise ProtocolFault("logprobs: top_ids and top_logprobs differ in length")
    return terms.TokenLogprobs(message.logprob, tuple(message.top_ids), tuple(message.top_logprobs))


def distribution_to_wire(q: terms.DraftDistribution | None) -> common_pb2.DraftDistribution:
    return common_pb2.DraftDistribution() if q is None else common_pb2.DraftDistribution(ids=q.ids, probs=q.probs)


def distribution_from_wire(message: common_pb2.DraftDistribution, field: str) -> terms.DraftDistribution | None:
    """None (no ids) = one-hot. Numbers must be finite, in [0, 1] and sum to 1 within 1e-3."""
    if not message.ids and not message.probs:
        return None
    bounded(message.ids, MAX_ID_LIST, field, "MAX_ID_LIST")
    if len(message.probs) != 4 * len(message.ids):
        raise InvalidRequest(f"{field}.probs", f"must hold {len(message.ids)} float32, got {len(message.probs)} bytes")
    numbers = _float_bytes(message.probs)
    if not (min(numbers) >= 0.0 and max(numbers) <= 1.0 and abs(math.fsum(numbers) - 1.0) <= 1e-3):  # a NaN makes the sum one
        raise InvalidRequest(f"{field}.probs", "must be finite numbers in [0, 1] that sum to 1")
    return terms.DraftDistribution(tuple(message.ids), message.probs)


def distributions(messages: Sequence[Any], count: int, field: str) -> tuple[terms.DraftDistribution | None, ...]:
    if not messages:
        return ()
    bounded(messages, MAX_DISTRIBUTIONS, field, "MAX_DISTRIBUTIONS")
    if len(messages) != count:
        raise InvalidRequest(field, f"one per proposal or none: {count} proposals, {len(messages)} distributions")
    return tuple(distribution_from_wire(m, f"{field}[{i}]") for i, m in enumerate(messages))


def model_info_to_wire(info: terms.ModelInfo) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(**{name: getattr(info, name) for name in terms.ModelInfo.__dataclass_fields__})


def model_info_from_wire(message: common_pb2.ModelInfo) -> terms.ModelInfo:
    values = {name: getattr(message, name) for name in terms.ModelInfo.__dataclass_fields__}
    return terms.ModelInfo(**{**values, "eos_token_ids": tuple(message.eos_token_ids)})

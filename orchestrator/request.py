"""A request as the core understands it, and what admission makes of it. Pure; knows no wire, no tokenizer.

Every front parses its own messages into `Request`; from there on they are alike. `admit` fills in what the client left open: after it
nothing has a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.events import Admitted
from specdec.errors import InvalidRequest, NotFound
from specdec.seeds import answer_seed
from specdec.terms import MAX_PROMPT_LOGPROBS, DraftMethod, ModelInfo, RejectionMethod, SamplingParams

MAX_BLOCK = 1024  # proposals, whatever a target says that it takes


@dataclass(frozen=True, slots=True)
class Text:
    """Raw text, with the special tokens the tokenizer adds."""

    text: str


@dataclass(frozen=True, slots=True)
class Ids:
    """Ids, used as they are."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages (role, content) for the chat template, with its extra variables as JSON texts."""

    messages: tuple[Mapping[str, str], ...]
    template_args: Mapping[str, str]
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """What one client asked for, validated as far as that goes without a target. None = left open."""

    prompt: Text | Ids | Chat
    sampling: SamplingParams
    rejection_method: RejectionMethod
    draft_method: DraftMethod
    num_speculative_tokens: int | None = None
    adaptive: bool | None = None
    output_ids: tuple[int, ...] = ()
    seed: int | None = None
    n: int = 1
    priority: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    model: str | None = None
    request_id: str | None = None


def check_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raises InvalidRequest for an id the tokenizer does not know."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(field, f"token id {bad} is not in the vocabulary (0 to {vocab_size - 1})")


def check_sampling(sampling: SamplingParams, vocab_size: int, eos_ids: Sequence[int]) -> None:
    """Ranges, ids, and that some id may be decided at all."""
    sampling.check(vocab_size)
    never = set(sampling.banned_token_ids)
    if sampling.min_tokens:
        never.update(sampling.stop_token_ids, () if sampling.ignore_eos else eos_ids)
    allowed = set(sampling.allowed_token_ids)
    if allowed and allowed <= never:
        raise InvalidRequest("sampling.allowed_token_ids", "no id is left: the others are banned, or end the answer before min_tokens")
    if len(never) >= vocab_size:
        raise InvalidRequest("sampling.banned_token_ids", "leave at least one id")


def check_resumed(output_ids: Sequence[int], info: ModelInfo) -> None:
    """Before anything is made of them: to read ids takes time for each, and more than a window holds cannot have been said."""
    window = info.max_model_len
    if len(output_ids) >= window:
        raise InvalidRequest("output_token_ids", f"at most {window - 1} tokens fit behind a prompt (window {window})")


def admit(
    request: Request,
    prompt: Sequence[int],
    info: ModelInfo,
    *,
    session_id: str,
    seed: int,
    num_speculative_tokens: int,
    adaptive: bool = False,
    traceparent: str,
) -> Admitted:
    """Completes a request for the target described by `info`: its answer 0, `others` makes the rest.

    `prompt` = its ids; `seed` and `num_speculative_tokens` = what holds where the request leaves them open; `adaptive` = what holds.
    `max_tokens` becomes the smaller of what was asked for and what the window leaves; 0 = the answer is complete already.

    Raises InvalidRequest and NotFound.
    """
    if request.model is not None and request.model != info.model:
        raise NotFound(f"model: {request.model!r} is not served here; this is {info.model!r}")
    room = info.max_model_len - len(prompt)
    if not prompt:
        raise InvalidRequest("prompt", "must hold at least one token; this tokenizer adds none of its own")
    if room < 0:
        raise InvalidRequest("prompt", f"{len(prompt)} tokens do not fit the window of {info.max_model_len}")
    if len(request.output_ids) > room:
        raise InvalidRequest("output_token_ids", f"at most {room} tokens fit behind the prompt (window {info.max_model_len})")
    sampling = request.sampling
    max_tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest("sampling.min_tokens", f"the window leaves {max_tokens} tokens")
    _check_prompt_logprobs(sampling, len(prompt), info)
    most = min(info.max_num_speculative_tokens, MAX_BLOCK)
    asked = request.num_speculative_tokens
    if asked is not None and asked > most:
        raise InvalidRequest("num_speculative_tokens", f"at most {most} here")
    k = min(most, num_speculative_tokens) if asked is None else asked
    return Admitted(
        session_id=session_id,
        tokens=(*prompt, *request.output_ids),
        prompt_length=len(prompt),
        sampling=replace(sampling, max_tokens=max_tokens),
        seed=seed if request.seed is None else request.seed,
        window=info.max_model_len,
        num_speculative_tokens=k,
        max_block=most,
        rejection_method=request.rejection_method,
        draft_method=request.draft_method,
        traceparent=traceparent,
        priority=request.priority,
        adaptive=adaptive and k > 0,
        vocab_size=info.vocab_size,
        eos_ids=info.eos_token_ids,
    )


def _check_prompt_logprobs(sampling: SamplingParams, prompt_tokens: int, info: ModelInfo) -> None:
    if sampling.prompt_logprobs is None:
        return
    if prompt_tokens * (1 + sampling.prompt_logprobs) > MAX_PROMPT_LOGPROBS:
        asked = f"{prompt_tokens} tokens with {1 + sampling.prompt_logprobs} entries each"
        raise InvalidRequest("sampling.prompt_logprobs", f"{asked} are more than {MAX_PROMPT_LOGPROBS} (MAX_PROMPT_LOGPROBS)")
    if prompt_tokens == info.max_model_len:
        raise InvalidRequest("sampling.prompt_logprobs", f"leave room for one token behind the prompt (window {info.max_model_len})")


def others(first: Admitted, session_ids: Sequence[str]) -> tuple[Admitted, ...]:
    """Answers 1, 2, ... of the request whose answer 0 is `first`. Log-probabilities of the prompt come with answer 0 alone."""
    return tuple(
        replace(
            first,
            session_id=session_id,
            seed=answer_seed(first.seed, index),
            sampling=replace(first.sampling, prompt_logprobs=None),
            fork_session_id=first.session_id,
        )
        for index, session_id in enumerate(session_ids, 1)
    )


def is_complete(admitted: Admitted) -> bool:
    """Whether nothing is left to decide: the window or max_tokens was reached by what is there already."""
    return len(admitted.tokens) - admitted.prompt_length >= (admitted.sampling.max_tokens or 0)

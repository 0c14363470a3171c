"""What a peer may get wrong, found before it can touch a session. Pure.

A target is believed what it decided and held to what it was asked for; a draft is believed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.breaker import Trouble
from orchestrator.events import Admitted
from specdec import terms
from specdec.errors import InvalidRequest, ProtocolFault, Unavailable, Unsupported

BLAMELESS = (InvalidRequest.code, Unsupported.code, Unavailable.code)  # what a target may fail a session with and be none the worse


def check_result(result: terms.Result, request: Admitted, committed: int, block: Sequence[int], prompt_entries: int) -> None:
    """Raises ProtocolFault for a result that cannot be the answer to a round after `committed` tokens with these proposals.

    `prompt_entries` = log-probabilities of prompt tokens that were asked for with it."""
    tokens, accepted, verified = result.tokens, result.num_accepted, result.num_verified
    n = len(tokens)
    if result.prefix_length != committed:
        raise ProtocolFault(f"a result after {result.prefix_length} tokens came for a session of {committed}")
    if verified > len(block) or accepted > verified or accepted > n or n > accepted + 1:
        counts = f"{accepted} of {verified} proposals in {n} tokens"
        raise ProtocolFault(f"a result that accepts {counts} came for a block of {len(block)}")
    if accepted and tokens[:accepted] != tuple(block[:accepted]):
        raise ProtocolFault(f"a result accepts {accepted} proposals that are not those of the block")
    if tokens and max(tokens) >= request.vocab_size:
        raise ProtocolFault(f"the target decided token id {max(tokens)}, of a vocabulary of {request.vocab_size}")
    _check_end(result, request, committed + n - request.prompt_length)
    if request.sampling.logprobs is not None or prompt_entries or result.logprobs or result.prompt_logprobs:
        _check_logprobs(result, request, prompt_entries)


def _check_end(result: terms.Result, request: Admitted, decided: int) -> None:
    """`decided` = output tokens, those of the result included."""
    sampling, stop = request.sampling, result.stop_token_id
    most = request.window - request.prompt_length
    most = most if sampling.max_tokens is None else min(most, sampling.max_tokens)
    if decided > most:
        raise ProtocolFault(f"the target decided {decided} tokens of an answer of at most {most}")
    if result.finish is None:
        if not result.tokens:
            raise ProtocolFault("the target decided nothing")
    elif result.finish is terms.FinishReason.LENGTH:
        if decided < most:
            raise ProtocolFault(f"the target ended an answer for its length after {decided} of {most} tokens")
    elif stop is None:
        if sampling.grammar is None:
            raise ProtocolFault("the target ended an answer without a stop token, and there is no grammar that ended it")
    elif decided < sampling.min_tokens or not _may_stop(stop, request):
        raise ProtocolFault(f"the target ended an answer after {decided} tokens with token id {stop}, which cannot end it there")


def _may_stop(token: int, request: Admitted) -> bool:
    if token in request.sampling.stop_token_ids or request.eos_ids is None:
        return token < request.vocab_size
    return token in request.eos_ids and not request.sampling.ignore_eos


def _check_logprobs(result: terms.Result, request: Admitted, prompt_entries: int) -> None:
    asked = 0 if request.sampling.logprobs is None else len(result.tokens)
    if len(result.logprobs) != asked:
        raise ProtocolFault(f"{len(result.logprobs)} log-probabilities came where {asked} were asked for")
    if len(result.prompt_logprobs) != prompt_entries:
        raise ProtocolFault(f"{len(result.prompt_logprobs)} log-probabilities of prompt tokens came where {prompt_entries} were asked for")
    for entry in (*result.logprobs, *result.prompt_logprobs):
        if not (math.isfinite(entry.logprob) and all(map(math.isfinite, entry.top_logprobs))):
            raise ProtocolFault("a log-probability came that is no finite number")
        if entry.top_ids and max(entry.top_ids) >= request.vocab_size:
            raise ProtocolFault(f"a log-probability of token id {max(entry.top_ids)} came, of a vocabulary of {request.vocab_size}")


def conduct_of_target(answers: Sequence[terms.Answer]) -> tuple[bool, Trouble | None]:
    """Whether one message of a target was of use, and whether it failed a session for no fault of the session's own."""
    of_use, trouble = False, None
    for answer in answers:
        if isinstance(answer.outcome, terms.Result):
            of_use = True
        elif isinstance(answer.outcome, terms.Failed) and answer.outcome.code not in BLAMELESS:
            trouble = Trouble.FAILED
    return of_use, trouble


def without_foreign_ids(answer: terms.Answer, vocab_size: int) -> terms.Answer:
    """The answer itself, or one without its forced ids. They are a proposal, and what a target proposes need not be taken: the next one
    might have to refuse it."""
    outcome = answer.outcome
    if isinstance(outcome, terms.Result) and outcome.forced and max(outcome.forced) >= vocab_size:
        return replace(answer, outcome=replace(outcome, forced=()))
    return answer


def _are_sound(distributions: Sequence[terms.DraftDistribution | None], vocab_size: int) -> bool:
    try:
        for q in distributions:
            if q is not None:
                q.check(vocab_size)
    except InvalidRequest:
        return False
    return True


def is_sound(proposal: terms.Proposal, vocab_size: int) -> bool:
    """Whether it may be sent to a target, which checks it too and would fail the session for it."""
    if proposal.distributions and not _are_sound(proposal.distributions, vocab_size):
        return False
    return bool(proposal.tokens) and max(proposal.tokens) < vocab_size

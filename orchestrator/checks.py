"""What a peer may get wrong, found before it can touch a session. Pure.

A target is believed what it decided and held to what it was asked for; a draft is believed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.breaker import Trouble
from specdec import terms
from specdec.errors import InternalFault, InvalidRequest, ProtocolFault, fault


def check_result(result: terms.Result, *, committed: int, block: int, prompt_entries: int) -> None:
    """Raises ProtocolFault for a result that cannot be the answer to a round after `committed` tokens with `block` proposals.

    `prompt_entries` = log-probabilities of prompt tokens that were asked for with it."""
    if result.prefix_length != committed:
        raise ProtocolFault(f"a result after {result.prefix_length} tokens came for a session of {committed}")
    if result.num_verified > block or result.num_accepted > min(len(result.tokens), result.num_verified):
        counts = f"{result.num_accepted} of {result.num_verified} proposals in {len(result.tokens)} tokens"
        raise ProtocolFault(f"a result that accepts {counts} came for a block of {block}")
    if not result.tokens and result.finish is None:
        raise ProtocolFault("the target decided nothing")
    if len(result.prompt_logprobs) != prompt_entries:
        raise ProtocolFault(f"{len(result.prompt_logprobs)} log-probabilities of prompt tokens came where {prompt_entries} were asked for")


def conduct_of_target(answers: Sequence[terms.Answer]) -> tuple[bool, Trouble | None]:
    """Whether one message of a target was of use, and whether it failed a session for no fault of the session's own."""
    of_use, trouble = False, None
    for answer in answers:
        if isinstance(answer.outcome, terms.Result):
            of_use = True
        elif isinstance(answer.outcome, terms.Failed) and isinstance(fault(answer.outcome.code, ""), InternalFault):
            trouble = Trouble.FAILED
    return of_use, trouble


def without_foreign_ids(answer: terms.Answer, vocab_size: int) -> terms.Answer:
    """The answer itself, or one without its forced ids. They are a proposal, and what a target proposes need not be taken: the next one
    might have to refuse it."""
    outcome = answer.outcome
    if isinstance(outcome, terms.Result) and outcome.forced and max(outcome.forced) >= vocab_size:
        return replace(answer, outcome=replace(outcome, forced=()))
    return answer


def is_sound(proposal: terms.Proposal, vocab_size: int) -> bool:
    """Whether it may be sent to a target, which checks it too and would fail the session for it."""
    try:
        for q in proposal.distributions:
            if q is not None:
                q.check(vocab_size)
    except InvalidRequest:
        return False
    return bool(proposal.tokens) and max(proposal.tokens) < vocab_size

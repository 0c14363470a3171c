"""What a request's grammar says before the first token. Pure; may take long for a large grammar.

A grammar that allows only ids which the rest of the request rules out is refused here where that shows at the first token; where it
shows later, the target fails the session with the same words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.errors import InvalidRequest
from specdec.grammar import Allowed, GrammarCompiler
from specdec.terms import SamplingParams


def is_whole_sentence(grammars: GrammarCompiler, sampling: SamplingParams, output: Sequence[int], eos_ids: Sequence[int]) -> bool:
    """Whether nothing may follow `output` (ids of a resumed answer), so that no target is needed. False without a grammar.

    Raises InvalidRequest naming the grammar's form when it is none, `output_token_ids` when they begin no sentence of it, and
    `sampling.grammar` when no first token is left."""
    if sampling.grammar is None:
        return False
    constraint = grammars.compile(sampling.grammar)
    try:
        allowed = constraint.at(output)
    except InvalidRequest as error:
        if not output:
            raise
        raise InvalidRequest("output_token_ids", f"must begin a text of sampling.grammar: {error.remedy}") from error
    if not (output or allowed.must_end or _may_begin(allowed, sampling, eos_ids)):
        others = "allowed_token_ids, banned_token_ids and min_tokens"
        raise InvalidRequest("sampling.grammar", f"no first token is left: {others} rule out all that it allows")
    return allowed.must_end


def _may_begin(allowed: Allowed, sampling: SamplingParams, eos_ids: Sequence[int]) -> bool:
    """As the target's sampler has it: ends are legal where a sentence is complete, bans and min_tokens come on top."""
    if allowed.mask is None:
        return True
    ends = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)]
    legal = allowed.mask.copy()
    legal[ends] = allowed.may_end and not sampling.min_tokens
    if sampling.allowed_token_ids:
        wanted = np.zeros_like(legal)
        wanted[list(sampling.allowed_token_ids)] = True
        legal &= wanted
    legal[list(sampling.banned_token_ids)] = False
    return bool(legal.any())

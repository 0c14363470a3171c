"""`python -m tests.e2e.broken_target`: a target with faults that speculation has had elsewhere, for the tests that must notice them.

Behind the first row of a block it forgets penalties (F11, F12), min_p (F14) and min_tokens (F46). Without blocks it is as it should be.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import target_service.executor
from specdec import acceptance
from specdec.acceptance import Verdict
from specdec.sampling import Sampler
from target_service.__main__ import main

FORGOTTEN: dict[str, Any] = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0, "min_tokens": 0}
verify, decide = acceptance.verify, acceptance.decide
before_the_block = 0  # decided tokens; one engine thread decides


def forgetful(row: Any, proposal: Any, q: Any, sampler: Sampler, history: Sequence[int], method: Any) -> tuple[int, bool]:
    if len(history) > before_the_block:
        sampler = copy.copy(sampler)
        sampler.params = replace(sampler.params, **FORGOTTEN)
    return decide(row, proposal, q, sampler, history, method)


def remembering(logits: Any, block: Any, distributions: Any, sampler: Sampler, output: Sequence[int], method: Any, room: Any) -> Verdict:
    global before_the_block
    before_the_block = len(output)
    return verify(logits, block, distributions, sampler, output, method, room)


if __name__ == "__main__":
    acceptance.decide = forgetful
    target_service.executor.verify = remembering
    sys.exit(main())

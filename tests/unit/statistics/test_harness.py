"""The vectorised harness decides as the product does: draft_choice, then verify, seed by seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.acceptance import verify
from specdec.sampling import Sampler, draft_choice
from specdec.terms import DraftMethod, RejectionMethod, SamplingParams
from tests.unit.statistics.harness import markov, seeds_from

METHODS = [
    ("coupled", RejectionMethod.COUPLED, DraftMethod.GUMBEL),
    ("standard", RejectionMethod.STANDARD, DraftMethod.PROBABILISTIC),
]


def generate(chain, seed, num_proposed, length, rejection, drafting):
    """Rounds of one session with the product's own functions; the first `length` tokens as a cell number."""
    target_rows, draft_rows = torch.from_numpy(np.log(chain.p)), torch.from_numpy(np.log(chain.q))
    sampler = Sampler(SamplingParams(), seed, len(chain.p), [], chain.prompt.tolist())
    output = []
    while len(output) < length:
        text, block, distributions = [0, *output], [], []
        for _ in range(num_proposed):
            choice = draft_choice(sampler, draft_rows[text[-1]], len(text), text[1:], drafting)
            block.append(choice.token)
            distributions.append(choice.distribution)
            text.append(choice.token)
        rows = target_rows[[([0, *output])[-1], *block]]
        sent = distributions if rejection is RejectionMethod.STANDARD else ()
        output += verify(rows, block, sent, sampler, output, rejection).tokens
    return int(sum(token * len(chain.p) ** (length - 1 - i) for i, token in enumerate(output[:length])))


@pytest.mark.parametrize(("name", "rejection", "drafting"), METHODS)
@pytest.mark.parametrize("num_proposed", [0, 1, 2, 3, 4])
def test_harness_equals_the_product(name, rejection, drafting, num_proposed):
    chain = markov(seeds_from(1000, 250))
    cells = chain.run(num_proposed, 4, name)
    assert cells.tolist() == [generate(chain, seed, num_proposed, 4, rejection, drafting) for seed in chain.seeds.tolist()]

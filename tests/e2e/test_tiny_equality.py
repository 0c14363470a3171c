"""On = off, id for id: tiny random models in float64, over real processes, with every kind of draft there is.

One target serves four orchestrators at once, each with a draft of its own kind: the target itself (every block is accepted), another
random model (hardly any is), the target with its head negated (none is, at temperature 0), and none at all.
"""

from __future__ import annotations

import random

import pytest
import torch

from specdec.terms import RejectionMethod, SamplingParams
from tests.e2e.ask import Ask, answers, same
from tests.e2e.drafts import DRAFTS, SPECULATING, EveryDraft
from tests.e2e.stack import Process
from tests.tiny import tiny_llama

pytestmark = [pytest.mark.pair, pytest.mark.timeout(240)]
BLOCK_LENGTHS = (1, pytest.param(2, marks=pytest.mark.long), 4, 8)
TEMPERATURES = (0.0, 1.0)
NUM_PROMPTS, NUM_TOKENS = 10, 32


@pytest.fixture(scope="module")
def orchestrators(drafts: EveryDraft) -> dict[str, Process]:
    return drafts.orchestrators


def questions(temperature: float, k: int) -> list[Ask]:
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 320) for _ in range(draw.choice((1, 5, 20, 70)))] for _ in range(NUM_PROMPTS)]
    sampling = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, logprobs=2, ignore_eos=temperature == 0.0)
    return [Ask(prompt, sampling, {"seed": 1000 + i, "num_speculative_tokens": k}) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def reference(orchestrators: dict[str, Process]) -> dict[float, list]:  # type: ignore[type-arg]
    """One at a time, no block, no draft."""
    return {t: answers(orchestrators["none"].endpoint, questions(t, 0), at_once=1) for t in TEMPERATURES}


@pytest.mark.parametrize("k", (0, *BLOCK_LENGTHS))
@pytest.mark.parametrize("kind", DRAFTS)
def test_on_equals_off(orchestrators: dict[str, Process], reference: dict[float, list], kind: str, k: int) -> None:  # type: ignore[type-arg]
    for temperature in TEMPERATURES:
        for got, want in zip(answers(orchestrators[kind].endpoint, questions(temperature, k)), reference[temperature], strict=True):
            same(got, want)


def test_the_drafts_are_what_they_claim(orchestrators: dict[str, Process]) -> None:
    """Without this, equality would also hold for drafts that never propose anything."""
    kept: dict[str, float] = {}
    for kind in SPECULATING:
        got, drafted = [], 0
        for _ in range(10):  # on a busy machine a draft is late now and then
            got += answers(orchestrators[kind].endpoint, questions(0.0, 4))
            drafted = sum(a.finished.speculative.num_draft_tokens for a in got)
            if drafted > NUM_PROMPTS * NUM_TOKENS / 2:
                break
        kept[kind] = sum(a.finished.speculative.num_accepted_draft_tokens for a in got) / drafted
        assert drafted > NUM_PROMPTS * NUM_TOKENS / 2
        for a in got:
            stats = a.finished.speculative
            assert sum(stats.acceptance_histogram) == stats.num_spec_steps
            assert sum(j * n for j, n in enumerate(stats.acceptance_histogram)) == stats.num_accepted_draft_tokens
    assert kept["self"] == 1.0 and kept["never"] == 0.0 and kept["random"] < 0.2


def test_standard_equals_off_at_temperature_0(orchestrators: dict[str, Process], reference: dict[float, list]) -> None:  # type: ignore[type-arg]
    asks = questions(0.0, 4)
    for ask in asks:
        ask.options["rejection_method"] = RejectionMethod.STANDARD
    for kind in ("self", "random"):
        for got, want in zip(answers(orchestrators[kind].endpoint, asks), reference[0.0], strict=True):
            same(got, want)


def test_off_equals_transformers(reference: dict[float, list]) -> None:  # type: ignore[type-arg]
    """The reference itself is the model's own greedy text."""
    model = tiny_llama(0, vocab=320).float().double()  # the folder holds float32
    for ask, answer in zip(questions(0.0, 0), reference[0.0], strict=True):
        prompt = torch.tensor([list(ask.prompt)])
        config = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), **config)
        assert tuple(text[0, prompt.shape[1] :].tolist()) == answer.token_ids

"""Adaptive block lengths over real processes, as a service has them by default: the text is what it is without speculation, at one stream
and at many, with drafts that are always and hardly ever right, while sessions come, rest, try and go.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specdec.client import Client, Completion
from specdec.terms import RejectionMethod, SamplingParams
from tests.e2e.ask import Ask, answers, same
from tests.e2e.drafts import FLOAT64
from tests.e2e.stack import Process, Stack, running, start, wait_ready
from tests.e2e.test_whole_path_statistics import IDS, LENGTH, P_LEAST, PROMPT, TEMPERATURE, exact, p_values
from tests.tiny import save_tiny

pytestmark = [pytest.mark.pair, pytest.mark.timeout(120)]
TOKENS = 48
DEFAULTS = {"ENABLE_ADAPTIVE_VERIFICATION": "true"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two orchestrators: the draft of the first is the target itself, that of the other a random model."""
    folder = tmp_path_factory.mktemp("models")
    target, other = save_tiny(folder / "target", seed=0), save_tiny(folder / "other", seed=9, layers=1)
    with running(target, target, target=FLOAT64, draft=FLOAT64, orchestrator=DEFAULTS) as stack:
        stack.add_orchestrator(DRAFTS=wait_ready(stack.begin_draft(MODEL=str(other))).endpoint)
        yield stack


@pytest.fixture(scope="module")
def references(stack: Stack) -> dict[float, list[Completion]]:
    """By temperature, without speculation."""
    return {temperature: answers(stack.endpoint, questions(24, temperature, disable_spec_decode=True)) for temperature in (0.0, 1.0)}


@pytest.fixture(scope="module")
def whimsical(stack: Stack) -> Callable[[int], Process]:
    """An orchestrator of whims with that draft."""

    @functools.cache
    def with_draft(draft: int) -> Process:
        settings = {"TOKENIZER": str(stack.target_model), "TARGETS": stack.targets[0].endpoint, "DRAFTS": stack.drafts[draft].endpoint}
        settings["AHEAD"] = "false"  # so that rounds wait for the draft, which here is no faster than the target
        stack.orchestrators.append(wait_ready(start("orchestrator", "tests.e2e.whimsical", settings, stack.folder)))
        return stack.orchestrators[-1]

    return with_draft


def questions(count: int, temperature: float, **options: object) -> list[Ask]:
    """Prompts that differ in length around the pieces in which they are computed; some repeat each other, or begin alike."""
    draw = random.Random(count)
    prompts = [[draw.randrange(3, 320) for _ in range(length)] for length in (1, 8, 9, 17, 63, 64, 65, 90)]
    prompts[3] = prompts[1][:4] + prompts[3]
    asked = [prompts[0], prompts[1], prompts[0], *prompts[2:], prompts[0]]
    sampling = SamplingParams(temperature=temperature, max_tokens=TOKENS, logprobs=1, ignore_eos=True)
    return [Ask(asked[i % len(asked)], sampling, {"seed": 100 + i, **options}) for i in range(count)]


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("kind", [0, 1], ids=["own", "random"])
def test_F85_F115_F123_F125_on_equals_off(stack: Stack, kind: int, at_once: int) -> None:
    endpoint = stack.orchestrators[kind].endpoint
    for temperature in (0.0, 1.0):
        want = answers(endpoint, questions(10, temperature, disable_spec_decode=True), at_once=4)
        for got, wanted in zip(answers(endpoint, questions(10, temperature), at_once=at_once), want, strict=True):
            same(got, wanted)
            settings = got.finished.settings
            assert settings.enable_adaptive_verification and settings.num_speculative_tokens == 5


@pytest.mark.parametrize("kind", [0, 1], ids=["own", "random"])
def test_F126_any_lengths_and_rests_leave_the_text_alone(
    stack: Stack, whimsical: Callable[[int], Process], references: dict[float, list[Completion]], kind: int
) -> None:
    """Drafts that are sent to rest and woken at any commit agree with the committed tokens afterwards: with the target's own weights all
    that they propose is right."""
    whims = whimsical(kind)
    for temperature in (0.0, 1.0):
        got = answers(whims.endpoint, questions(24, temperature))
        for one, wanted in zip(got, references[temperature], strict=True):
            same(one, wanted)
        stats = [one.finished.speculative for one in got]
        verified, accepted = sum(s.num_draft_tokens for s in stats), sum(s.num_accepted_draft_tokens for s in stats)
        assert verified > 20
        assert kind == 1 or accepted > 0.95 * verified
    assert stack.defects() == []


def test_F116_what_was_refused_is_nowhere(stack: Stack) -> None:
    """Prompts that are an earlier prompt and its answer, asked while others speculate: as if nothing had been there before."""
    endpoint = stack.orchestrators[1].endpoint
    first = answers(endpoint, questions(4, 0.0), at_once=4)
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    again = [Ask([*ask.prompt, *got.token_ids[:24]], sampling) for ask, got in zip(questions(4, 0.0), first, strict=True)]
    for got, before in zip(answers(endpoint, again, at_once=4), first, strict=True):
        assert got.token_ids[: TOKENS - 24] == before.token_ids[24:]


def test_exact_lengths_on_request(stack: Stack) -> None:
    fields = {"enable_adaptive_verification": False}
    (got,) = answers(stack.endpoint, questions(1, 0.0, **fields, num_speculative_tokens=3))
    assert not got.finished.settings.enable_adaptive_verification
    assert len(got.finished.speculative.acceptance_histogram) == 4
    (usual,) = answers(stack.endpoint, questions(1, 0.0, **fields))
    assert usual.finished.settings.num_speculative_tokens == 2


def test_a_bound_is_never_passed(stack: Stack) -> None:
    for k in (1, 3):
        for got in answers(stack.endpoint, questions(6, 1.0, num_speculative_tokens=k)):
            assert len(got.finished.speculative.acceptance_histogram) <= k + 1
            assert got.finished.settings.num_speculative_tokens == k


def test_standard_at_temperature_0_and_beside_coupled(stack: Stack) -> None:
    want = answers(stack.endpoint, questions(8, 0.0, disable_spec_decode=True))
    mixed = questions(8, 0.0)
    for ask in mixed[::2]:
        ask.options["rejection_method"] = RejectionMethod.STANDARD
    for got, wanted in zip(answers(stack.endpoint, mixed), want, strict=True):
        assert got.token_ids == wanted.token_ids


def test_a_draft_that_dies_and_comes_back_while_sessions_rest_and_try(stack: Stack, tmp_path: Path) -> None:
    """The draft is lost for good in the middle of answers; those, and the ones after them, are what they would have been."""
    draft = wait_ready(stack.begin_draft())
    orchestrator = stack.add_orchestrator(DRAFTS=draft.endpoint)
    asked = questions(12, 1.0)
    want = answers(orchestrator.endpoint, questions(12, 1.0, disable_spec_decode=True))

    async def scene() -> list[Completion]:
        async with Client(orchestrator.endpoint) as client:
            running_ = [asyncio.create_task(client.complete(a.prompt, a.sampling, timeout_s=60, **a.options)) for a in asked]
            await asyncio.sleep(0.3)
            await asyncio.to_thread(draft.kill)
            return list(await asyncio.gather(*running_))

    for got, wanted in zip(asyncio.run(scene()), want, strict=True):
        same(got, wanted)
    assert stack.defects() == []


def test_standard_with_lengths_of_any_kind_keeps_the_distribution(whimsical: Callable[[int], Process]) -> None:
    """The joint of the answer's tokens against the exact one. What the real pace chooses is in tests/unit/statistics/test_adaptive.py."""
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=LENGTH, allowed_token_ids=IDS, ignore_eos=True)
    options = {"rejection_method": RejectionMethod.STANDARD}
    asked = [Ask(PROMPT, sampling, {"seed": 10**6 + i, **options}) for i in range(600)]
    got = answers(whimsical(1).endpoint, asked, at_once=32)
    stats = [answer.finished.speculative for answer in got]
    verified, accepted = sum(s.num_draft_tokens for s in stats), sum(s.num_accepted_draft_tokens for s in stats)
    assert verified > 100 and 0 < accepted < verified
    found = np.array([[IDS.index(token) for token in answer.token_ids] for answer in got])
    assert min(p_values(found, exact(0)).values()) > P_LEAST

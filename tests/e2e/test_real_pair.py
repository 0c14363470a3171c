"""The real pair on the int8 engine: ids and log-probabilities bit-equal with and without speculation, no tolerance."""

from __future__ import annotations

import pytest

from specdec.client import Completion
from specdec.terms import SamplingParams
from tests.e2e.ask import Ask, answers, same
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.pair, pytest.mark.alone, pytest.mark.timeout(300)]
NUM_TOKENS = 40
SHORT = (
    "Write a Python function that reverses a list.",
    "Return a JSON object with the keys name, age and city.",
    "What is the capital of France, and why?",
    "Tell me a short story about a lighthouse.",
)
LONG = (
    "Here is a log of a long day. "
    + "".join(
        f"At {h % 24:02d}:{h * 7 % 60:02d} the keeper wrote line {h}: wind {h * 3 % 40} knots, sea {'calm' if h % 3 else 'rough'}. "
        for h in range(24)
    )
    + "Summarise the day."
)


def questions(k: int) -> list[Ask]:
    """Eight streams: four short and two long prompts, greedy and sampled."""
    prompts = [(text, temperature) for text in SHORT[:3] for temperature in (0.0, 1.0)] + [(LONG, 0.0), (LONG + " Briefly.", 1.0)]
    return [
        Ask(
            [{"role": "user", "content": text}],
            SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, logprobs=3),
            {"seed": 7 + i, "num_speculative_tokens": k},
        )
        for i, (text, temperature) in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def reference(pair: Stack) -> list[Completion]:
    """Alone, without speculation."""
    return answers(pair.endpoint, questions(0), at_once=1)


def test_the_long_prompt_is_long(reference: list[Completion]) -> None:
    assert reference[-1].started.prompt_tokens > 500
    assert all(len(a.token_ids) == len(a.logprobs) > 0 for a in reference)


@pytest.mark.parametrize("k", [3, 5])
def test_alone(pair: Stack, reference: list[Completion], k: int) -> None:
    for got, want in zip(answers(pair.endpoint, questions(k), at_once=1), reference, strict=True):
        same(got, want)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_among_eight(pair: Stack, reference: list[Completion], k: int) -> None:
    for got, want in zip(answers(pair.endpoint, questions(k), at_once=8), reference, strict=True):
        same(got, want)


def test_the_draft_helps(pair: Stack) -> None:
    """What equality alone would not notice: a draft that is never right."""
    got = answers(pair.endpoint, questions(3)[:6], at_once=1)
    rounds = sum(a.finished.speculative.num_spec_steps for a in got)
    accepted = sum(a.finished.speculative.num_accepted_draft_tokens for a in got)
    assert accepted / rounds > 0.4
    assert all(a.finished.settings.batch_invariant for a in got)


def test_memory(pair: Stack) -> None:
    """Peak resident memory after all of the above: orchestrator below 250 MB, target below 1.5 GB."""
    assert _peak_mb(pair.orchestrators[0].popen.pid) < 250
    assert _peak_mb(pair.targets[0].popen.pid) < 1500


def _peak_mb(pid: int) -> float:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

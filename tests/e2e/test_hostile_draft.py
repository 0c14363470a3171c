"""F51: a draft that says anything at all. The text is the target's alone, nothing falls over, and what was wrong is counted.

Every lie is told beside right proposals, so that the streams it meets do speculate.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from specdec.client import Completion
from specdec.terms import FinishReason, RejectionMethod, SamplingParams
from specdec.vocabulary import vocabulary
from tests.e2e.ask import Ask, gather_answers, same
from tests.e2e.hostile import HostileDraft, honest
from tests.e2e.lies import LIES, VOCAB, K, beside_the_truth
from tests.e2e.stack import Stack, running
from tests.tiny import save_tiny

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90), pytest.mark.asyncio(loop_scope="module")]
FLOAT64 = {"DTYPE": "float64", "SELF_TEST": "false"}
NUM_TOKENS = 24
PROMPTS = ([10, 11, 12], list(range(40, 75)), [200])


@dataclass
class Scene:
    stack: Stack
    draft: HostileDraft
    reference: dict[float, list[Completion]]

    def asks(self, temperature: float, **options: object) -> list[Ask]:
        sampling = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, logprobs=2, ignore_eos=True)
        return [Ask(prompt, sampling, {"seed": 77 + i, "num_speculative_tokens": K, **options}) for i, prompt in enumerate(PROMPTS)]

    async def ask(self, asks: list[Ask]) -> list[Completion]:
        return await gather_answers(self.stack.endpoint, asks, at_once=len(asks))

    async def check_coupled(self) -> list[Completion]:
        """Six streams at once, greedy and sampled, against the target alone."""
        everything: list[Completion] = []
        for temperature in (0.0, 1.0):
            self.draft.truths = {
                tuple(prompt): (*prompt, *answer.token_ids) for prompt, answer in zip(PROMPTS, self.reference[temperature], strict=True)
            }
            got = await self.ask(self.asks(temperature))
            for mine, want in zip(got, self.reference[temperature], strict=True):
                same(mine, want)
            everything += got
        return everything

    async def kept(self, enough: Callable[[list[int]], bool]) -> bool:
        """Whether enough proposals are accepted, by stream. Asked again, since on a busy machine they may be late."""
        for _ in range(20):
            if enough([answer.finished.speculative.num_accepted_draft_tokens for answer in await self.check_coupled()]):
                return True
        return False

    async def check_standard(self) -> None:
        """At temperature 0 the text is the same; above it, every stream has all its tokens and a good end."""
        for got, want in zip(await self.ask(self.asks(0.0, rejection_method=RejectionMethod.STANDARD)), self.reference[0.0], strict=True):
            same(got, want)
        for answer in await self.ask(self.asks(1.0, rejection_method=RejectionMethod.STANDARD)):
            assert len(answer.token_ids) == len(answer.logprobs) == NUM_TOKENS
            assert answer.finished.finish_reason is FinishReason.LENGTH
            assert all(0 <= token < VOCAB for token in answer.token_ids)

    def count(self, metric: str) -> float:
        return self.stack.orchestrators[0].metric(metric)

    def healthy(self) -> None:
        """Nobody fell over, nobody saw a defect."""
        for process in (*self.stack.targets, *self.stack.orchestrators):
            assert process.popen.poll() is None, process.log_tail()
            entries = [json.loads(line) for line in process.log.read_text().splitlines() if line.startswith("{")]
            assert not [entry for entry in entries if entry["level"] in ("error", "critical")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    model: Path = await asyncio.to_thread(save_tiny, tmp_path_factory.mktemp("model") / "tiny", 0)
    draft = HostileDraft(vocabulary(model))
    async with draft.serving() as endpoint:
        with contextlib.ExitStack() as cleanup:
            settings = {"DRAFTS": endpoint, "MAX_GRACE_MS": "20", "MAX_EJECTION_MS": "0"}  # whatever it says, it is listened to
            stack = await asyncio.to_thread(cleanup.enter_context, running(model, None, target=FLOAT64, orchestrator=settings))
            scene = Scene(stack, draft, {})
            for temperature in (0.0, 1.0):
                asks = scene.asks(temperature, disable_spec_decode=True)
                scene.reference[temperature] = await gather_answers(stack.endpoint, asks, at_once=1)
            yield scene


@pytest_asyncio.fixture(loop_scope="module")
async def connected(scene: Scene) -> Scene:
    """The draft is quiet and on the line."""
    scene.draft.behave, scene.draft.mute = honest, False
    deadline = time.monotonic() + 10
    while not any(
        value == 1 for key, value in scene.stack.orchestrators[0].metrics().items() if 'pool="draft"' in key and 'state="up"' in key
    ):
        assert time.monotonic() < deadline, f"the draft is not on the line: {scene.stack.orchestrators[0].metrics()}"
        await asyncio.sleep(0.05)
    return scene


async def test_without_lies_it_is_a_good_draft(connected: Scene) -> None:
    """Otherwise the lies would meet streams that do not speculate."""
    assert await connected.kept(lambda kept: sum(kept) > len(kept) * NUM_TOKENS / 4)
    connected.healthy()


@pytest.mark.parametrize("name", LIES)
async def test_F51(connected: Scene, name: str) -> None:
    lie = LIES[name]
    before = connected.count(lie.counted) if lie.counted else 0
    connected.draft.behave = beside_the_truth(lie.tell)
    await connected.check_coupled()
    connected.healthy()
    assert lie.counted is None or connected.count(lie.counted) > before


@pytest.mark.parametrize("name", ["distributions", "2^31-1", "wrong tokens", "K+5 ids", "hanging up"])
async def test_F51_standard(connected: Scene, name: str) -> None:
    connected.draft.behave = beside_the_truth(LIES[name].tell)
    for _ in range(3 if name == "distributions" else 1):
        await connected.check_standard()
    connected.healthy()


async def test_F51_all_at_once(connected: Scene) -> None:
    """Any lie at any time, both methods; afterwards an honest draft is used again."""
    tells = [lie.tell for name, lie in LIES.items() if name not in ("refused", "beyond the limit")]
    connected.draft.behave = lambda held, draw: beside_the_truth(draw.choice(tells))(held, draw)
    for _ in range(3):
        await asyncio.gather(connected.check_coupled(), connected.check_standard())
    connected.healthy()


async def test_F51_honest_again(connected: Scene) -> None:
    assert await connected.kept(lambda kept: all(kept))


DEAF: dict[str, Callable[[tuple[int, ...]], dict[str, Any]]] = {
    "logit_bias": lambda ids: {"logit_bias": dict.fromkeys(ids[2:14:3], -100.0)},
    "banned_token_ids": lambda ids: {"banned_token_ids": ids[2:14:3]},
    "min_p": lambda ids: {"min_p": 1.0},
    "frequency_penalty": lambda ids: {"frequency_penalty": 2.0, "allowed_token_ids": ids[:6]},
}


@pytest.mark.parametrize("parameter", DEAF)
async def test_F13_F14_a_deaf_draft(connected: Scene, parameter: str) -> None:
    """It proposes, at every slot, what would have been decided without the parameter."""
    for prompt, plain, ask in zip(PROMPTS, connected.reference[1.0], connected.asks(1.0), strict=True):
        connected.draft.truths = {tuple(prompt): (*prompt, *plain.token_ids)}
        sampling = replace(ask.sampling, **DEAF[parameter](plain.token_ids))
        options = {**ask.options, "num_speculative_tokens": 0}
        for _ in range(20):  # on a busy machine its proposals may all be late
            got, want = await connected.ask([Ask(prompt, sampling, ask.options), Ask(prompt, sampling, options)])
            same(got, want)
            if got.finished.speculative.num_draft_tokens:
                break
        assert got.token_ids != plain.token_ids
        assert not {*sampling.logit_bias, *sampling.banned_token_ids} & {*got.token_ids}
        assert got.finished.speculative.num_draft_tokens > got.finished.speculative.num_accepted_draft_tokens


async def test_F51_silence(connected: Scene) -> None:
    """Not even a sign of life: the draft is given up within the silence limit, the streams never wait for it longer than a few graces."""
    connected.draft.behave, connected.draft.mute = (lambda held, draw: ()), True
    begun = time.monotonic()
    await connected.check_coupled()
    assert time.monotonic() - begun < 10
    connected.healthy()


async def test_F51_F82_a_liar_is_shut_out(connected: Scene) -> None:
    """The targets go on alone; a counter, a gauge and one log line say so, and one session at a time sees whether it has mended."""
    connected.draft.behave = LIES["-1"].tell
    more = {"DRAFTS": connected.stack.orchestrator_settings["DRAFTS"], "MAX_EJECTION_MS": "1000"}
    orchestrator = await asyncio.to_thread(lambda: connected.stack.add_orchestrator(**more))
    asks = connected.asks(1.0) * 2
    for mine, want in zip(await gather_answers(orchestrator.endpoint, asks), connected.reference[1.0] * 2, strict=True):
        same(mine, want)
    assert orchestrator.metrics()['specdec_pool_ejections_total{pool="draft",reason="malformed"}'] >= 1
    deadline = time.monotonic() + 20
    while orchestrator.metric("specdec_spec_enabled"):  # a slow machine looks when the time of the first one is over
        assert time.monotonic() < deadline
        await gather_answers(orchestrator.endpoint, asks[:1])
    assert "replica is shut out for a while" in orchestrator.log.read_text()
    connected.draft.behave, deadline = honest, time.monotonic() + 20
    connected.draft.truths = {
        tuple(ask.prompt): (*ask.prompt, *r.token_ids) for ask, r in zip(asks, connected.reference[1.0], strict=False)
    }
    while True:
        (answer,) = await gather_answers(orchestrator.endpoint, asks[:1])
        if answer.finished.speculative.num_accepted_draft_tokens and orchestrator.metric("specdec_spec_enabled"):
            break
        assert time.monotonic() < deadline
    await asyncio.to_thread(orchestrator.kill, signal.SIGTERM)


async def test_F51_another_vocabulary(connected: Scene) -> None:
    """A draft of other words is not spoken to at all."""
    words = vocabulary(connected.stack.target_model)
    stranger = HostileDraft(replace(words, fingerprint=bytes(reversed(words.fingerprint))))
    stranger.behave = honest
    async with stranger.serving() as endpoint:
        orchestrator = await asyncio.to_thread(lambda: connected.stack.add_orchestrator(DRAFTS=endpoint))
        got = await gather_answers(orchestrator.endpoint, connected.asks(1.0))
    for mine, want in zip(got, connected.reference[1.0], strict=True):
        same(mine, want)
    assert stranger.seen["open"] == 0

"""The shipped draft on its int8 engine: what eight sessions are told at once is, bit for bit, what each is told alone."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.lookahead import Lookahead
from specdec.engine import Engine, EngineConfig, load_engine
from specdec.runtime.channels import open_channel
from tests.service.draft_client import Process, Stream, commit_of, naive, open_of, sent_of
from tests.tools import require_model

pytestmark = [pytest.mark.pair, pytest.mark.alone, pytest.mark.timeout(120)]
ROUNDS = 6


@pytest.fixture(scope="module")
def model() -> Path:
    return require_model("smollm2-draft")


@pytest.fixture(scope="module")
def reference(model: Path) -> Engine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces another home for its int8 kernels
        return load_engine(EngineConfig(model_dir=model, kv_tokens=4096, reduced_head=True, self_test=False))


@pytest.fixture(scope="module")
def process(model: Path) -> Iterator[Process]:
    with Process(model, DTYPE="int8", KV_TOKENS=8192) as running:
        yield running


async def test_eight_sessions_are_told_what_each_alone_is_told(process: Process, reference: Engine) -> None:
    committed = {f"s{i}": [1000 + 7 * i + j for j in range(5 + 9 * i)] for i in range(8)}
    trees = {name: Lookahead(tokens) for name, tokens in committed.items()}
    async with open_channel(process.endpoint) as channel:
        stream = Stream(channel)
        await stream.send(*(open_of(name, tokens) for name, tokens in committed.items()))
        for number in range(ROUNDS):
            while any(len(tree.block(3).tokens) < 3 for tree in trees.values()):
                event = await stream.event()
                trees[event.session_id].add(event)
            for i, (name, tokens) in enumerate(committed.items()):
                block = list(trees[name].block(3).tokens)
                assert block == naive(reference, tokens, 3), (number, name)
                keep = (number + i) % 5
                true = naive(reference, tokens, 4)
                decided = true if keep == 4 else [*true[:keep], 17 + number]
                await stream.send(sent_of(tokens, 3, session_id=name), commit_of(tokens, decided, name))
                tokens += decided
                trees[name].commit(decided)
        stream.cancel()


@pytest.mark.parametrize("k", [3, 5])
async def test_time_of_a_block_after_a_correction(process: Process, k: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Shown, not judged: absolute times mean nothing on a shared machine."""
    tokens, took_ms = list(range(1000, 1100)), []
    async with open_channel(process.endpoint) as channel:
        stream = Stream(channel)
        await stream.send(open_of(tokens=tokens, k=k))
        await stream.proposed(k)
        for correction in range(2000, 2030):
            began = time.perf_counter()
            await stream.send(commit_of(tokens, [correction]))
            tokens.append(correction)
            await stream.proposed(k)
            took_ms.append(1000 * (time.perf_counter() - began))
        stream.cancel()
    with capsys.disabled():
        print(f" [K={k}: {statistics.median(took_ms):.1f} ms, best {min(took_ms):.1f}]", end="")

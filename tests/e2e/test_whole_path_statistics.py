"""Draft → wire → target, counted: the tokens of many short answers against the exact distribution, and drafts that must be caught.

The model is random and tiny, five ids are allowed, so all 625 answers of four tokens can be enumerated with transformers in float64. The
first token of an answer is decided without a block, the next ones by blocks. Neighbouring seeds throughout.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import product, takewhile

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
from scipy import stats

from specdec import noise
from specdec.seeds import ACCEPTANCE
from specdec.terms import RejectionMethod, SamplingParams
from specdec.v1 import common_pb2
from specdec.vocabulary import vocabulary
from tests.e2e.ask import Ask, gather_answers
from tests.e2e.hostile import Behaviour, Held, HostileDraft, Said
from tests.e2e.stack import Process, Stack, running
from tests.tiny import save_tiny, tiny_llama

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]
PROMPT = [10, 11, 12]
IDS = (40, 77, 123, 200, 251)
LENGTH, TEMPERATURE = 4, 2.0
P_LEAST = 1e-4
MANY, FEW = 1250, 500  # answers; draws are LENGTH times as many. FEW is enough to see each twin
FOR_LONG = 12_500
LISTENS = {"MAX_EJECTION_MS": "0"}  # a draft that is late on a busy machine is waited for again
SETTINGS = {"DTYPE": "float64", "SELF_TEST": "false", "MAX_SESSIONS": "256", "KV_TOKENS": "65536"}
Table = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


# ---------------------------------------------------------------- what must come out


def exact(top_k: int) -> Table:
    """Probability of every answer [5, 5, 5, 5]; top_k 0 = no cut."""
    model = tiny_llama(0, vocab=320).float().double()  # the folder holds float32
    table = np.ones((len(IDS),) * LENGTH)
    for place in range(LENGTH):
        rows = [[*PROMPT, *history] for history in product(IDS, repeat=place)]
        with torch.no_grad():
            scores = model(torch.tensor(rows)).logits[:, -1, list(IDS)] / TEMPERATURE
        if top_k:
            scores[scores < scores.topk(top_k).values[:, -1:]] = -torch.inf
        p = torch.softmax(scores, -1).numpy().reshape((len(IDS),) * (place + 1))
        table *= p.reshape(p.shape + (1,) * (LENGTH - place - 1))
    return table


def p_value(counts: Counts, p: Table) -> float:
    """Chi-square; cells that expect fewer than five are one cell. An impossible answer is an outright failure."""
    if counts[p == 0].any():
        return 0.0
    expected = p * counts.sum()
    rare = expected < 5
    seen, wanted = counts[~rare].astype(float), expected[~rare]
    if expected[rare].sum() >= 5:
        seen, wanted = np.append(seen, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    return float(stats.chisquare(seen, wanted * (seen.sum() / wanted.sum())).pvalue)


def p_values(answers: Counts, table: Table) -> dict[str, float]:
    """answers [n, LENGTH], as indices. Joint of two consecutive positions behind the first token, and of everything."""
    counts = np.zeros(table.shape, dtype=np.int64)
    np.add.at(counts, tuple(answers.T), 1)
    pairs = {f"{i + 1} and {i + 2}": tuple(j for j in range(LENGTH) if j not in (i, i + 1)) for i in range(1, LENGTH - 1)}
    return {"all": p_value(counts, table)} | {name: p_value(counts.sum(rest), table.sum(rest)) for name, rest in pairs.items()}


# ---------------------------------------------------------------- drafts of a fixed q


Q = np.array([0.35, 0.3, 0.2, 0.1, 0.05], dtype=np.float32)
Q_SENT = common_pb2.DraftDistribution(ids=IDS, probs=struct.pack(f"<{len(IDS)}f", *Q))


def says(held: Held, tokens: Sequence[int]) -> Iterable[Said]:
    """`tokens`, as indices, with q beside each of them."""
    if tokens:
        yield held.proposal([IDS[t] for t in tokens], distributions=[Q_SENT] * len(tokens))


def fair(held: Held, draw: random.Random) -> Iterable[Said]:
    return says(held, draw.choices(range(len(IDS)), Q, k=held.k))


def sends_raw_q(held: Held, draw: random.Random) -> Iterable[Said]:
    """Draws from the two best ids, says that it drew from all."""
    return says(held, draw.choices((0, 1), Q[:2], k=held.k))


def draws_with_the_tests_noise(held: Held, draw: random.Random) -> Iterable[Said]:
    """Each token is from q by itself, but by the very number that will be compared with p/q."""
    places = range(len(held.tokens), len(held.tokens) + held.k)
    numbers = [noise.uniform_one(held.open.seed, ACCEPTANCE, place, 0) for place in places]
    return says(held, [min(len(IDS) - 1, int(np.searchsorted(Q.cumsum(), u))) for u in numbers])


def peeks(held: Held, draw: random.Random) -> Iterable[Said]:
    """Stops in front of a token that looks unlikely, instead of behind it."""
    return says(held, list(takewhile(lambda t: Q[t] >= 0.25, draw.choices(range(len(IDS)), Q, k=held.k))))


# ---------------------------------------------------------------- the scene


@dataclass
class Scene:
    stack: Stack
    own: Process  # its draft is another random model
    odd: Process  # its draft lives here
    draft: HostileDraft
    seed: int = 0

    async def answers(self, at: Process, count: int, method: RejectionMethod, top_k: int = 0) -> Counts:
        """[count, LENGTH] indices into IDS, after a look at whether blocks were verified at all."""
        sampling = SamplingParams(temperature=TEMPERATURE, top_k=top_k, max_tokens=LENGTH, allowed_token_ids=IDS, ignore_eos=True)
        options = {"num_speculative_tokens": 3, "rejection_method": method}
        asks = [Ask(PROMPT, sampling, {"seed": self.seed + i, **options}) for i in range(count)]
        self.seed += count
        got = await gather_answers(at.endpoint, asks, at_once=64)
        verified = sum(answer.finished.speculative.num_draft_tokens for answer in got)
        accepted = sum(answer.finished.speculative.num_accepted_draft_tokens for answer in got)
        assert verified > count / 2, "hardly any block was verified"
        assert count / 20 < accepted < 0.95 * verified, "both outcomes of a proposal have to occur"
        return np.array([[IDS.index(token) for token in answer.token_ids] for answer in got])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("models")
    target = await asyncio.to_thread(save_tiny, folder / "target", 0)
    other = await asyncio.to_thread(lambda: save_tiny(folder / "other", 9, layers=1))
    draft = HostileDraft(vocabulary(target))
    async with draft.serving() as endpoint:
        with contextlib.ExitStack() as cleanup:
            stack = await asyncio.to_thread(
                lambda: cleanup.enter_context(
                    running(target, other, target=SETTINGS, draft=SETTINGS, orchestrator=LISTENS | {"MAX_GRACE_MS": "1000"})
                )
            )
            odd = await asyncio.to_thread(lambda: stack.add_orchestrator(DRAFTS=endpoint, MAX_GRACE_MS="250"))
            yield Scene(stack, stack.orchestrators[0], odd, draft)


WAYS = [(RejectionMethod.COUPLED, 0), (RejectionMethod.STANDARD, 0), (RejectionMethod.STANDARD, 3)]
NAMES = ["coupled", "standard", "standard-top_k"]


@pytest.mark.parametrize(("method", "top_k"), WAYS, ids=NAMES)
async def test_the_text_has_the_targets_distribution(scene: Scene, method: RejectionMethod, top_k: int) -> None:
    found = p_values(await scene.answers(scene.own, MANY, method, top_k), exact(top_k))
    assert min(found.values()) > P_LEAST, found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("method", "top_k"), WAYS, ids=NAMES)
async def test_the_text_has_the_targets_distribution_long(scene: Scene, method: RejectionMethod, top_k: int) -> None:
    found = p_values(await scene.answers(scene.own, FOR_LONG, method, top_k), exact(top_k))
    assert min(found.values()) > P_LEAST, found


async def test_a_fair_draft_passes(scene: Scene) -> None:
    """The control of the next test: the same q, honestly drawn."""
    scene.draft.behave = fair
    found = p_values(await scene.answers(scene.odd, FEW, RejectionMethod.STANDARD), exact(0))
    assert min(found.values()) > P_LEAST, found


@pytest.mark.parametrize("twin", [sends_raw_q, draws_with_the_tests_noise, peeks])
async def test_broken_twins_are_caught(scene: Scene, twin: Behaviour) -> None:
    """The standard method is right only for drafts that say what they drew from, with noise of their own, without looking first."""
    scene.draft.behave = twin
    found = p_values(await scene.answers(scene.odd, FEW, RejectionMethod.STANDARD), exact(0))
    assert min(found.values()) < P_LEAST, found


@pytest.mark.parametrize("twin", [sends_raw_q, peeks])
async def test_under_coupled_no_draft_can_bias(scene: Scene, twin: Behaviour) -> None:
    """The same drafts, and the very same answers as without any."""
    scene.draft.behave = twin
    scene.seed = 0
    count = FEW // 4
    got = await scene.answers(scene.odd, count, RejectionMethod.COUPLED)
    scene.seed = 0
    assert (got == await scene.answers(scene.own, count, RejectionMethod.COUPLED)).all()

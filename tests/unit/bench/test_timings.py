"""Statistics of raw timings, as they come back from the disk, against numpy and scipy; intervals cover as often as they say."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.stats

from specdec.bench import figures, timings
from specdec.bench.arrivals import poisson
from specdec.bench.experiment import FIXED, Cell, Turn
from specdec.bench.record import Run, Said
from specdec.bench.store import Store
from specdec.bench.timings import Limits
from tests.unit.bench.made_up import GRID, K, runs

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Turns of one cell and way, written and read again."""
    store = Store(tmp_path_factory.mktemp("raw") / "out", {"sweep": {}})
    for run in runs():
        store.add(run)
    found = [run for run in store.of(GRID.cells[1]) if run.turn.way == FIXED]
    assert len(found) == GRID.repeats and found[0].turn.cell.concurrency == 8
    return found


def test_times_are_those_of_numpy(stored: Sequence[Run]) -> None:
    answers = [one for run in stored for one in run.answers]
    times = [np.array([at for at, _ in one.arrivals]) for one in answers]
    counts = [np.array([count for _, count in one.arrivals]) for one in answers]
    first = np.array([at[0] for at in times])
    per_token = np.array([(at[-1] - at[0]) / count[1:].sum() for at, count in zip(times, counts, strict=True)])
    gaps = np.concatenate([np.diff(at) for at in times])
    found = timings.latencies(stored)
    for name, values in (("first_token", first), ("time_per_token", per_token), ("between_arrivals", gaps)):
        for share in (50, 95, 99):
            assert found[f"{name}_ms_p{share}"] == pytest.approx(1e3 * np.percentile(values, share), abs=0.006)
    assert found["jitter_ms"] == pytest.approx(1e3 * np.mean([np.diff(at).std() for at in times]), abs=0.006)
    told = timings.throughput(stored, Limits())
    assert told["tokens_per_s"] == pytest.approx(sum(run.tokens for run in stored) / sum(run.seconds for run in stored), abs=0.006)
    assert told["goodput_per_s"] is None and told["errors"] == 0 and told["prompt_tokens"] == 32


def test_goodput_counts_answers_within_both_limits() -> None:
    good = Said("a", 1, (1, 2, 3), "", "PPP", ((0.1, 1), (0.12, 1), (0.14, 1)), 0.14)
    late = Said("a", 2, (1, 2, 3), "", "PPP", ((0.3, 1), (0.32, 1), (0.34, 1)), 0.34)
    slow = Said("a", 3, (1, 2, 3), "", "PPP", ((0.1, 1), (0.2, 1), (0.3, 1)), 0.3)
    failed = Said("a", 4, (), "", "", (), 0.01, error="Unavailable: gone")
    run = Run(Turn(Cell(4, 0.0), 0, FIXED), 2.0, (good, late, slow, failed))
    told = timings.throughput([run], Limits(first_token_ms=200, between_ms=50))
    assert (told["goodput_per_s"], told["goodput_share"], told["answers"], told["errors"]) == (0.5, 0.25, 3, 1)
    assert timings.throughput([run], Limits(first_token_ms=200))["goodput_share"] == 0.5
    assert timings.throughput([run], Limits(between_ms=50))["goodput_share"] == 0.5


def test_acceptance_by_slot_is_what_was_put_in(stored: Sequence[Run]) -> None:
    told = timings.acceptance(stored)
    assert told["alpha"] == pytest.approx([0.85] * K, abs=0.08) and told["mean_block"] == K
    accepted = sum(one.origins.count("A") for run in stored for one in run.answers)
    rounds = sum(one.origins.count("B") + one.origins.count("C") for run in stored for one in run.answers)
    assert told["mean_acceptance_length"] == pytest.approx(1 + accepted / rounds, abs=0.01)
    assert set(told["alpha_by_kind"]) == {"code"} and told["share_with_block"] == pytest.approx(1.0)
    assert timings.round_ms(stored) == pytest.approx(1e3 * (0.020 + K * 0.016), rel=0.02)


def test_the_bootstrap_is_that_of_scipy(stored: Sequence[Run]) -> None:
    values = np.random.default_rng(5).lognormal(0, 0.3, 40)
    got = figures.bootstrap(list(values), lambda drawn: float(np.mean(drawn)), resamples=2000)
    want = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=4000, rng=np.random.default_rng(1)
    ).confidence_interval
    assert got is not None and got == pytest.approx((want.low, want.high), rel=0.02)
    gaps = [timings.gaps_s(one) for run in stored for one in run.answers[:1]]
    for share in (0.5, 0.99):
        slow = figures.bootstrap(gaps, lambda drawn, share=share: float(np.quantile(np.concatenate(drawn), share)), resamples=300)
        assert figures.bootstrap_quantile(gaps, share, resamples=300) == pytest.approx(slow)
    assert figures.bootstrap_quantile(gaps, 0.5) == figures.bootstrap_quantile(gaps, 0.5), "the same seed gives the same interval"
    assert figures.bootstrap([1.0], lambda drawn: 1.0) is None is figures.bootstrap_quantile([[1.0], []], 0.5)


def test_the_careful_interval_covers_the_truth_where_the_bootstrap_alone_does_not() -> None:
    draw, careful, alone = np.random.default_rng(7), 0, 0
    for _ in range(250):
        ours = list(1.2 * np.exp(draw.normal(0, 0.1, 5)))
        got = figures.careful_ratio(ours, [1.0] * 5)
        plain = figures.bootstrap(list(np.log(ours)), lambda drawn: float(np.mean(drawn)), resamples=100)
        assert got is not None and got.low is not None and got.high is not None and plain is not None
        careful += got.low < 1.2 < got.high
        alone += plain[0] < np.log(1.2) < plain[1]
    assert careful / 250 >= 0.93 and alone / 250 < 0.9


def test_poisson_arrivals_come_at_their_rate_and_the_same_for_every_way() -> None:
    times = poisson(5.0, 4000, seed=3)
    assert times[0] == 0.0 and times == poisson(5.0, 4000, seed=3) != poisson(5.0, 4000, seed=4)
    assert scipy.stats.kstest(np.diff(times), scipy.stats.expon(scale=0.2).cdf).pvalue > 1e-3
    assert random.Random(3).expovariate(5.0) == times[1]

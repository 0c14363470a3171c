"""What sessions computed is found by what it says and by nothing else; with a warm cache the answers are those of a cold one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specdec.engine import KvBudget
from specdec.terms import Close, Failed, Result, SamplingParams
from target_service import prefix
from target_service.plan import Drop, Fork, Keep
from target_service.prefix import Entry, PrefixCache, chain_of
from target_service.verifier import Verifier
from tests.fakes import hashed_script
from tests.tiny import tiny_engine
from tests.unit.target.forking import starts
from tests.unit.target.harness import SAMPLED, VOCAB, Bench, Caller, first_step, next_step, only, oracle, reference, run_all

SCRIPT = hashed_script(VOCAB)
BLOCK = 8


def bench_of(**more: object) -> Bench:
    return Bench(prefix_block_tokens=BLOCK, **more)  # type: ignore[arg-type]


def text(length: int, seed: int = 0) -> list[int]:
    return [(seed * 29 + i * i + 3 * i) % VOCAB for i in range(length)]


def once(bench: Bench, tokens: Sequence[int], session: str = "s", **more: object) -> int:
    """A session of one token, from its beginning to its end. Returns where its first row began; its token is the reference's."""
    stream = bench.hello()
    bench.engine.log.clear()
    more.setdefault("sampling", SAMPLED)
    bench.send(stream, first_step(tokens, session=session, **more))  # type: ignore[arg-type]
    sampling, seed = more["sampling"], more.get("seed", 7)
    assert only(bench.until_answered(stream)).tokens == tuple(reference(SCRIPT, tokens, 1, sampling=sampling, seed=seed))  # type: ignore[arg-type]
    first = bench.engine.log[0][0].start
    bench.send(stream, Close(session, 1))
    bench.settle()
    return first


def entries(bench: Bench) -> list[list[int]]:
    """What the cache says it has, after the engine was seen to hold just that."""
    kept = bench.verifier.room._cache._entries
    for resident, entry in kept.items():
        assert bench.engine.kv.slots[bench.executor._slots[resident]] == list(entry.tokens)
    return [list(entry.tokens) for entry in kept.values()]


@pytest.mark.parametrize(
    ("shared", "length", "start"),
    [(4, 24, 0), (8, 24, 8), (23, 24, 16), (24, 24, 16), (24, 25, 24), (24, 40, 24), (15, 40, 8), (0, 24, 0)],
    ids=["4", "a block", "all but 1", "all", "all and one more", "the beginning", "a part", "nothing"],
)
def test_f114_a_warm_cache_answers_as_a_cold_one(shared: int, length: int, start: int) -> None:
    """The last token of a prompt is always computed, also when all of it is known."""
    bench = bench_of()
    assert once(bench, text(24)) == 0
    assert once(bench, [*text(24)[:shared], *text(length, seed=1)[shared:]], seed=9) == start
    assert bench.verifier.room.hit_tokens == start and bench.verifier.room.asked_tokens == 24 + length


def test_by_content_and_never_by_name() -> None:
    bench = bench_of()
    once(bench, text(20), session="a")
    assert once(bench, text(20, seed=1), session="a") == 0
    stream = bench.hello("another orchestrator")
    bench.send(stream, first_step(text(20), session="b"))
    bench.turn()
    assert starts(bench) == [16]


def test_blocks_match_in_their_place_only() -> None:
    bench = bench_of()
    a, b = text(BLOCK), text(BLOCK, seed=1)
    once(bench, [*a, *b, 1])
    assert [once(bench, [*b, *a, 1]), once(bench, [*b, 1, 2]), once(bench, [*a, *a, 1]), once(bench, [*a, *b, 2])] == [0, 8, 8, 16]


def broken_chain(tokens: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """Each block by itself, whatever stands before it."""
    return tuple(chain_of(tokens[end - block_tokens : end], block_tokens)[0] for end in range(block_tokens, len(tokens) + 1, block_tokens))


class Trusting(tuple[int, ...]):
    """Tokens that are compared by their number."""

    def __getitem__(self, part: object) -> Trusting:  # type: ignore[override]
        return Trusting(super().__getitem__(part))  # type: ignore[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and len(self) == len(other)

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("compared", [True, False], ids=["tokens are compared", "the hash decides"])
def test_a_hash_that_ignores_what_stands_before_a_block_is_found_out(compared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: alone it costs hits, and where the hash decides it is a wrong answer."""
    monkeypatch.setattr(prefix, "chain_of", broken_chain)
    if not compared:
        monkeypatch.setattr(prefix, "Entry", lambda resident, tokens, chain: Entry(resident, Trusting(tokens), chain))
    bench = bench_of()
    a, b, c = (text(BLOCK, seed) for seed in range(3))
    once(bench, [*a, *b, 1])
    if compared:
        assert once(bench, [*c, *b, 2]) == 0
    else:
        with pytest.raises(AssertionError):
            once(bench, [*c, *b, 2])


# ------------------------------------------------------------ taken over, forked, kept


def test_an_entry_that_is_all_wanted_is_taken_over() -> None:
    """No fork, no copy; and nothing of the session before: neither its sampler nor its seed."""
    bench = bench_of()
    stream = bench.hello()
    once(bench, text(17), sampling=replace(SAMPLED, repetition_penalty=5.0), seed=3)
    assert entries(bench) == [text(16)]
    bench.send(stream, first_step(text(20), sampling=SAMPLED, seed=9))
    plan = bench.plan()
    assert plan is not None and plan.changes == () and (plan.rows[0].resident, plan.rows[0].start) == (1, 16)
    assert entries(bench) == []
    bench.finish(plan)
    assert only(bench.heard()).tokens == tuple(reference(SCRIPT, text(20), 1, sampling=SAMPLED, seed=9))


def test_an_entry_that_says_more_is_forked_and_stays() -> None:
    bench = bench_of()
    stream = bench.hello()
    once(bench, text(30))
    bench.send(stream, first_step([*text(16), 1, 2]))
    plan = bench.plan()
    assert plan is not None and plan.changes == (Fork(2, 1, 16),)
    bench.finish(plan)
    assert entries(bench) == [text(24)]


def test_a_session_that_lives_is_a_donor_too() -> None:
    bench = bench_of()
    stream = bench.hello()
    bench.send(stream, first_step(text(30), session="a"))
    committed = [*text(30), *only(bench.turn()).tokens]
    bench.send(stream, next_step(committed, [1, 2], round_=2, session="a"), first_step([*text(20), 1, 2], session="b", sampling=SAMPLED))
    answers = {a.session_id: a.outcome for _, a in bench.turn()}
    assert starts(bench) == [30, 16]
    assert answers["b"].tokens == tuple(reference(SCRIPT, [*text(20), 1, 2], 1, sampling=SAMPLED))


def test_a_little_of_a_long_text_is_not_worth_a_fork() -> None:
    """A first fork moves all that its donor holds."""
    bench = bench_of()
    once(bench, text(BLOCK * 17 + 1))
    assert once(bench, [*text(8), 1, 2]) == 0
    assert once(bench, [*text(16), 1, 2]) == 16


def test_no_entry_is_the_beginning_of_another() -> None:
    bench = bench_of()
    once(bench, text(20))
    once(bench, [*text(10), 1, 2, 3])
    assert entries(bench) == [text(16)], "a shorter one adds nothing"
    stream = bench.hello()
    for session in ("a", "b"):
        bench.send(stream, first_step(text(18), session=session))
    bench.turn()
    bench.send(stream, Close("a", 1), Close("b", 1))
    plan = bench.plan()
    assert plan is not None and plan.changes == (Keep(1, 16), Keep(3, 16), Drop(3))
    bench.finish(plan)
    assert entries(bench) == [text(16)]
    assert bench.verifier.room.live_tokens == 0


def test_the_number_of_entries_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "MAX_ENTRIES", 2)
    bench = bench_of()
    for seed in range(3):
        once(bench, text(10, seed))
    assert entries(bench) == [text(8, 1), text(8, 2)]


def test_who_asks_for_the_prompts_logprobs_computes_the_prompt() -> None:
    bench = bench_of()
    once(bench, text(20))
    assert once(bench, text(20), sampling=replace(SAMPLED, prompt_logprobs=0)) == 0


def test_a_later_placement_finds_what_the_earlier_one_computed() -> None:
    bench = bench_of()
    stream = bench.hello()
    bench.send(stream, first_step(text(20)))
    committed = [*text(20), *only(bench.turn()).tokens]
    bench.send(stream, first_step(committed, epoch=2, prompt_length=20))
    assert only(bench.turn()).tokens == tuple(reference(SCRIPT, text(20), 2)[1:])
    assert starts(bench) == [16]


def test_f115_repeated_prompts_in_a_mixed_batch() -> None:
    bench = bench_of()
    a, b, c = (text(20, seed) for seed in range(3))
    once(bench, a)
    stream = bench.hello()
    draft = oracle(SCRIPT, 20, 3, lambda n: n % 4)
    made = [Caller(bench, stream, tokens, session=f"s{i}", want=12, draft=draft) for i, tokens in enumerate([a, b, a, c, a])]
    run_all(bench, made)
    assert [caller.output[:12] for caller in made] == [reference(SCRIPT, tokens, 12) for tokens in (a, b, a, c, a)]


# ------------------------------------------------------------ what must not be kept


@pytest.mark.parametrize("slot", range(5))
def test_f116_only_committed_tokens_are_kept(slot: int) -> None:
    """A block refused at each slot; then prompts that go on with what was decided and with what was refused."""
    bench = bench_of(max_num_speculative_tokens=8)
    stream = bench.hello()
    draft = oracle(SCRIPT, 12, 4, lambda n: slot)
    caller = Caller(bench, stream, text(12), want=12, draft=draft)
    run_all(bench, [caller])
    bench.settle()
    [kept] = entries(bench)
    assert kept == caller.committed[: len(kept)]
    refused = [*caller.committed[:12], *draft(caller.committed[:12])]
    once(bench, [*refused, *text(12, seed=1)], session="refused")
    assert once(bench, caller.committed, session="decided") >= 16


def test_f91_nothing_stays_of_a_row_that_is_not_finite() -> None:
    bench = bench_of()
    stream = bench.hello()
    bench.send(stream, first_step(text(20)), first_step(text(20, seed=1), session="t"))
    committed = [*text(20), *next(a.outcome for _, a in bench.turn() if a.session_id == "s").tokens]
    bench.engine.nan_when = lambda prefix: list(prefix[:20]) == text(20)
    bench.send(stream, next_step(committed, round_=2))
    assert isinstance(only(bench.turn()), Failed)
    bench.engine.nan_when = None
    bench.settle()
    bench.send(stream, Close("t", 1))
    bench.settle()
    assert entries(bench) == [text(16, seed=1)]


def test_nothing_stays_of_who_ends_while_it_is_in_the_engine() -> None:
    """Its row may turn out to be not finite, and then nobody is left to say so."""
    bench = bench_of()
    stream = bench.hello()
    bench.send(stream, first_step(text(20)))
    committed = [*text(20), *only(bench.turn()).tokens]
    bench.send(stream, next_step(committed, round_=2))
    plan = bench.plan()
    assert plan is not None
    bench.send(stream, first_step([1, 2], epoch=2))
    bench.finish(plan)
    bench.settle()
    assert entries(bench) == []


# ------------------------------------------------------------ room


def test_entries_go_first_the_least_recently_used_before_others() -> None:
    bench = bench_of(pool=64, reserve_tokens=0)
    gone = bench.hello("gone")
    bench.send(gone, first_step(text(8, seed=9), session="orphan"))
    bench.turn()
    bench.verifier.detach(gone, bench.now)
    for seed in range(3):
        once(bench, text(15, seed), session=f"s{seed}")
    assert bench.verifier.room.cached_tokens == 45 and bench.verifier.room.live_tokens == 8
    stream = bench.hello()
    bench.send(stream, first_step([*text(8), 1, 2], session="uses the first"))
    bench.turn()
    bench.send(stream, first_step(text(20, seed=7), session="new"))
    bench.turn()
    assert entries(bench) == [text(8, seed=2)], "the first was taken over, the second was the least recently used"
    assert bench.verifier._sessions["gone", "orphan"].resident is not None
    bench.send(stream, first_step(text(28, seed=8), session="large"))
    assert entries(bench) == [] and bench.verifier._sessions["gone", "orphan"].resident is None


def test_live_sessions_never_lose_kv_to_entries() -> None:
    bench = bench_of(pool=48, reserve_tokens=0)
    stream = bench.hello()
    once(bench, text(17, seed=1))
    bench.send(stream, first_step(text(16), session="old"), first_step(text(12, seed=2), session="young"))
    committed = {a.session_id: list(a.outcome.tokens) for _, a in bench.turn()}
    old = [*text(16), *committed["old"]]
    bench.send(stream, next_step(old, [7] * 8, round_=2, session="old"))
    assert isinstance(only(bench.until_answered(stream)), Result)
    assert entries(bench) == [] and all(s.resident is not None for s in bench.verifier._sessions.values())


def test_room_that_entries_hold_counts_as_free() -> None:
    """Whoever places sessions sees what is live."""
    bench = bench_of(pool=BLOCK * 8)
    once(bench, text(20))
    assert bench.verifier.budget.used_tokens == 20 and bench.verifier.room.live_tokens == 0
    stream = bench.hello()
    assert bench.send(stream, first_step(text(50, seed=1))) == []
    bench.turn()
    assert bench.verifier.room.live_tokens == bench.pool.used_tokens == 50


def test_a_session_alone_finds_room_whatever_is_kept() -> None:
    bench = bench_of(pool=50, window=50, reserve_tokens=100)
    stream = bench.hello()
    for turn in range(4):
        caller = Caller(bench, stream, text(20), session=f"s{turn}", want=20)
        run_all(bench, [caller])
        assert caller.output[:20] == reference(SCRIPT, text(20), 20)


def test_switched_off_nothing_is_kept() -> None:
    bench = Bench(prefix_block_tokens=0)
    assert [once(bench, text(200)), once(bench, text(200))] == [0, 0]
    assert bench.pool.held == {} and bench.engine.kv.slots == {}


# ------------------------------------------------------------ the cache itself


def test_a_hash_that_two_texts_share_costs_a_hit_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "chain_of", lambda tokens, size: tuple(range(len(tokens) // size)))
    cache = PrefixCache(2)
    assert cache.add(1, [1, 2, 3, 4]) == []
    assert cache.add(2, [5, 6, 7, 8]) == [2]
    assert cache.add(3, [5, 6]) == [3]
    assert cache.find([5, 6, 7, 8, 9]) is None
    found = cache.find([1, 2, 9, 9, 9])
    assert found is not None and (found[0].resident, found[1]) == (1, 2)


def test_the_chain_is_that_of_the_sequence_from_its_start() -> None:
    from specdec.hashing import prefix_hash

    assert chain_of([*range(10)], 4) == (prefix_hash(range(4)), prefix_hash(range(8)))


# ------------------------------------------------------------ the engine's own numbers


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_warm_and_cold_are_equal_bit_for_bit(dtype: str) -> None:
    """Texts and log-probabilities of sessions that find all, a part and nothing, beside each other, on the real store."""
    base = [(7 * i) % 120 for i in range(210)]
    prompts = [base, base[:130], [*base[:70], *range(60, 120)], [*base[:128], 5], base]
    params = SamplingParams(temperature=0.7, logprobs=3, max_tokens=1000)
    told = {}
    for block_tokens in (64, 0):
        engine = tiny_engine(dtype=dtype, kv_tokens=64 * 16)
        bench = Bench(vocab=128, max_num_speculative_tokens=3, reserve_tokens=8, max_step_rows=48, prefix_block_tokens=block_tokens)
        bench.engine = bench.executor._engine = engine
        bench.pool = bench.verifier.budget = KvBudget(engine.info.kv_total_tokens)
        bench.verifier = Verifier(bench.limits, bench.pool)
        stream = bench.hello()

        def caller(i: int, prompt: list[int], bench: Bench = bench, stream: int = stream) -> Caller:
            draft = lambda committed: [sum(committed[-4:]) % 128, 5, 9][: len(committed) % 4]  # noqa: E731
            return Caller(bench, stream, prompt, session=f"c{i}", sampling=params, seed=50 + i, want=9 + 7 * (i % 3), draft=draft)

        made = [caller(i, prompt) for i, prompt in enumerate(prompts)]
        for one in made:
            run_all(bench, [one])
        again = [caller(10 + i, prompt) for i, prompt in enumerate(prompts)]
        run_all(bench, again)
        told[block_tokens] = [(c.output, [p for r in c.results for p in r.logprobs]) for c in [*made, *again]]
        hits = bench.verifier.room.hit_tokens
        assert (hits >= 64 * 12) if block_tokens else hits == 0
        bench.settle()
        assert bench.verifier.room.live_tokens == 0 and engine.kv.used_tokens == bench.pool.used_tokens
    assert told[64] == told[0]
    assert all(math.isfinite(p.logprob) and len(p.top_ids) == 3 for _, logprobs in told[0] for p in logprobs)

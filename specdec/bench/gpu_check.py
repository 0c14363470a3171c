"""What the engine does on a GPU: is it right, and how far is it from what the memory allows?

python -m specdec.bench.gpu_check [--device cuda|cpu] [--tiny] [--output FILE] [--seconds N] [--no-replay]

Models are drawn at random on the device, in the shapes of real ones: nothing is read but this package. One JSON object goes to standard
output and to FILE; what goes wrong in one section is written there, the others run all the same, and the exit status is 1. Figures under
`modelled` are computed from measured step times and an assumed acceptance; everything else is measured.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.bench.in_process import BLOCK, SEED, Scripted, SelfDraft, filled, prompt_of, read, speak
from specdec.bench.random_llama import LARGE, TINY, RandomWeights, Shape
from specdec.engine import Engine, EngineConfig, Segment, load_engine_from_module, load_engine_from_weights
from specdec.errors import SpecdecError
from specdec.sampling import Sampler
from specdec.terms import SamplingParams

GREEDY, WARM = SamplingParams(temperature=0.0, ignore_eos=True), SamplingParams(temperature=1.0, ignore_eos=True)
SAMPLING = {"greedy": GREEDY, "t1": WARM, "topp": SamplingParams(temperature=0.8, top_p=0.95)}
ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class Bench:
    """How much of everything. `rows` = rows of one session in a step, `crowds` = sessions in a step."""

    device: torch.device
    tiny: bool
    repeats: int
    context: int
    prefill: int
    rows: tuple[int, ...]
    crowds: tuple[int, ...]
    tokens: int
    replay: bool

    @classmethod
    def of(cls, device: str, tiny: bool, replay: bool) -> Bench:
        if tiny:
            return cls(torch.device(device), tiny, 3, 70, 100, (1, 2, 5), (1, 3), 24, replay)
        return cls(torch.device(device), tiny, 25, 512, 1024, (1, 2, 4, 6, 8, 16, 32), (1, 4, 8, 16, 32), 64, replay)

    def engine(
        self, shape: Shape, dtype: str, *, seed: int = 0, spread: float = 0.3, replay: bool = True, self_test: bool = False
    ) -> Engine:
        weights = RandomWeights(shape, getattr(torch, dtype), self.device, spread, seed)
        room = max(self.crowds) * (self.context + 64 + 2 * max(self.rows)) + 2 * self.prefill + 1024
        config = EngineConfig(
            dtype=dtype,
            device=self.device.type,
            kv_tokens=room,
            max_rows=max(1024, self.prefill),
            window=4096,
            replay=replay and self.replay,
            self_test=self_test,
        )
        return load_engine_from_weights(shape.config(), weights, config, digest=f"random {seed} {asdict(shape)}")

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object], repeats: int = 0, warm_up: int = 4) -> float:
        """Median of a call that has finished when the device is idle. The warm-up lets a shape recur until it is replayed."""
        taken = []
        for _ in range(warm_up + (repeats or self.repeats)):
            self.wait()
            begun = time.perf_counter()
            call()
            self.wait()
            taken.append(1e3 * (time.perf_counter() - begun))
        return round(statistics.median(taken[warm_up:]), 4)


def machine(bench: Bench) -> dict[str, Any]:
    """Who computes, and how fast a copy moves bytes here, read and written together."""
    mebibytes = 16 if bench.tiny else 2048
    source = torch.ones(mebibytes << 18, device=bench.device)
    target = torch.empty_like(source)
    ms = bench.milliseconds(lambda: target.copy_(source))
    cuda = bench.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_bytes_per_s": round(2 * source.nbytes / (1e-3 * ms)),
    }


def exactness(bench: Bench) -> dict[str, Any]:
    """float64: blocks of several sessions in one call, against their rows one by one, as logits and as what the sampler makes of them."""
    engine = bench.engine(TINY, "float64")
    texts = [prompt_of(n + BLOCK + 1, TINY.vocab, n) for n in (3, 40, 63, 64, 65, 130, 200)]
    slots = [filled(engine, text[: -BLOCK - 1]) for text in texts]
    starts = [engine.kv.length(slot) for slot in slots]
    counts = [1 + i % (BLOCK + 1) for i in range(len(texts))]
    calls = [Segment(s, at, text[at : at + n], 0) for s, at, text, n in zip(slots, starts, texts, counts, strict=True)]
    blocks = engine.forward(calls)
    difference, differing, compared = 0.0, 0, 0
    for call, text, rows in zip(calls, texts, blocks, strict=True):
        engine.kv.truncate(call.slot, call.start)
        single = torch.cat([engine.forward([Segment(call.slot, call.start + i, (t,), 0)])[0] for i, t in enumerate(call.tokens)])
        difference = max(difference, float((single - rows).abs().max()))
        for params, (i, row) in itertools.product((GREEDY, WARM), enumerate(rows)):
            sampler = Sampler(params, SEED, TINY.vocab, (2,), text[: call.start + 1])
            output = call.tokens[1 : i + 1]
            compared += 1
            differing += sampler.choose(row, call.start + 1 + i, output) != sampler.choose(single[i], call.start + 1 + i, output)
    report = {"rows_compared": compared, "ids_that_differ": differing, "largest_difference": difference}
    if differing or difference > 1e-9:
        raise AssertionError(f"a block and its rows one by one disagree: {report}")
    return report


def require_equal(what: str, a: Tensor, b: Tensor, limit: float = 1e-9) -> dict[str, Any]:
    difference = float((a - b).abs().max())
    if not difference < limit:
        raise AssertionError(f"{what} differ by {difference}")
    return {"largest_difference": difference}


def replayed_steps(bench: Bench) -> dict[str, Any]:
    """float64: steps that are replayed say what launched ones say, across the edges of blocks and tables."""
    text = prompt_of(300, TINY.vocab, 8)
    recorded, single = (bench.engine(TINY, "float64", replay=on) for on in (True, False))
    return require_equal("replayed and launched steps", read(recorded, text, 1), read(single, text, 60))


def forks(bench: Bench) -> dict[str, Any]:
    """float64: a fork goes on as if it had read the text itself, while its parent writes something else."""
    engine = bench.engine(TINY, "float64")
    text, other = prompt_of(150, TINY.vocab, 6), prompt_of(40, TINY.vocab, 7)
    parent = filled(engine, text[:140])
    child = engine.kv.fork(parent, 100)
    engine.kv.truncate(parent, 90)
    engine.forward([Segment(parent, 90, other, 0)])
    rows = engine.forward([Segment(child, 100, text[100:], 0)])[0]
    return require_equal("a fork and its text read alone", rows, read(engine, text, 150)[100:])


def generic(bench: Bench) -> dict[str, Any]:
    """float64: transformers' own modules say what the lean path says. On a GPU they take float32 sines and cosines there, the lean path
    takes them on the host: the angles differ in their last bits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    module = LlamaForCausalLM(LlamaConfig(**{**TINY.config(), "pad_token_id": None})).double().requires_grad_(False)
    weights = RandomWeights(TINY, torch.float64, torch.device("cpu"), 0.3)
    module.load_state_dict(dict(weights))
    text, device = prompt_of(90, TINY.vocab, 2), bench.device.type
    rows = []
    for path in ("lean", "generic"):
        config = EngineConfig(dtype="float64", path=path, device=device, kv_tokens=1024, self_test=False)
        rows.append(read(load_engine_from_module(module, config), text, 30))
    return require_equal("lean and generic path", rows[0], rows[1], limit=1e-9 if device == "cpu" else 1e-4)


def speculation(bench: Bench) -> dict[str, Any]:
    """float64: the text with a good and with a bad draft is the text without one."""
    target = bench.engine(TINY, "float64")
    drafts = {"itself": bench.engine(TINY, "float64"), "another": bench.engine(TINY, "float64", seed=1)}
    prompt = prompt_of(50, TINY.vocab, 5)
    report: dict[str, Any] = {}
    for (name, draft), (heat, params) in itertools.product(drafts.items(), (("t0", GREEDY), ("t1", WARM))):
        plain = speak(target, prompt, params, bench.tokens, lambda output: ())
        spoken = speak(target, prompt, params, bench.tokens, SelfDraft(draft, prompt, params))
        if spoken.tokens != plain.tokens:
            raise AssertionError(f"with draft {name} at {heat} the text differs: {spoken.tokens} instead of {plain.tokens}")
        report[f"{name}_{heat}"] = {"equal": True, "rounds": spoken.rounds, "accepted": spoken.accepted, "tokens": len(plain.tokens)}
    return report


def invariance(bench: Bench) -> dict[str, Any]:
    """What the self-test measures for each number format."""
    engines = {dtype: bench.engine(TINY, dtype, self_test=True) for dtype in ("float64", "float32", "bfloat16")}
    return {dtype: {"batch_invariant": engine.info.batch_invariant} for dtype, engine in engines.items()}


def host_waits(bench: Bench, step: Callable[[], object]) -> int | None:
    """How often one step waits for the device besides the one wait for its answers, by torch's own count."""
    if bench.device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def steps(bench: Bench, engine: Engine, slots: Sequence[int], rows: Sequence[int]) -> dict[str, float]:
    """Milliseconds of a step, logits on the host, for each number of rows per session."""
    text = prompt_of(max(rows), engine.info.vocab_size, 9)
    taken = {}
    for n in rows:
        call = [Segment(slot, bench.context, text[:n], 0) for slot in slots]
        taken[str(n)] = bench.milliseconds(lambda call=call: step(engine, call))  # type: ignore[misc]
    return taken


def step(engine: Engine, segments: Sequence[Segment]) -> list[Tensor]:
    rows = engine.forward(segments)
    for segment in segments:
        engine.kv.truncate(segment.slot, segment.start)
    return rows


def sampling(bench: Bench, engine: Engine, row: Tensor) -> dict[str, float]:
    """Milliseconds a row on the host, noise included: a fresh position each time."""
    report = {}
    for name, params in SAMPLING.items():
        sampler = Sampler(params, SEED, engine.info.vocab_size, (), ())
        positions = itertools.count()
        report[name] = bench.milliseconds(lambda s=sampler, p=positions: _choose(s, row, next(p)))  # type: ignore[misc]
    return report


def _choose(sampler: Sampler, row: Tensor, position: int) -> int:
    return sampler.choose(row, position, [5] * position)


def kernels(bench: Bench, call: Callable[[], object], times: int = 5) -> dict[str, tuple[int, float]] | None:
    """What the device did in one call: {kernel: (launches, microseconds)}, longest first."""
    if bench.device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            call()
        bench.wait()
    longest = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)[:16]
    return {event.key[:90]: (event.count // times, round(event.self_device_time_total / times, 1)) for event in longest}


def speed(bench: Bench, shape: Shape, bytes_per_s: float, report: dict[str, Any]) -> dict[str, Any]:
    """bfloat16: step times by rows and by sessions, replayed and launched one by one; sampling; prefill; and what speculation makes of it.

    Fills `report` as it goes, so that an error keeps what came before.
    """
    spread = 0.3 if bench.tiny else 0.02
    begun = time.perf_counter()
    engine = bench.engine(shape, "bfloat16", spread=spread)
    report |= {"weights_gb": round(2e-9 * shape.step_weights(), 3), "load_s": round(time.perf_counter() - begun, 1)}
    floor = 2e3 * shape.step_weights() / bytes_per_s
    slots = [filled(engine, prompt_of(bench.context, shape.vocab, i)) for i in range(max(bench.crowds))]
    by_rows = steps(bench, engine, slots[:1], bench.rows)
    report |= {
        "floor_ms": round(floor, 4),
        "step_ms_by_rows": by_rows,
        "share_of_floor_by_rows": {n: round(floor / ms, 3) for n, ms in by_rows.items()},
        "modelled": modelled(by_rows),
    }
    report["step_ms_by_sessions_and_rows"] = {str(n): steps(bench, engine, slots[:n], (1, BLOCK + 1)) for n in bench.crowds}
    call = [Segment(slots[0], bench.context, (5, 6, 7, 8, 9), 0)]
    report["sampling_ms_per_row"] = sampling(bench, engine, step(engine, call)[0][0])
    report["waits_in_a_step"] = host_waits(bench, lambda: step(engine, call))
    for slot in slots:
        engine.kv.close(slot)
    report["prefill_ms"] = {str(bench.prefill): bench.milliseconds(lambda: prefill(bench, engine), repeats=5, warm_up=2)}
    report["scripted_acceptance"] = scripted(bench, engine)
    return report


def launched(bench: Bench, shape: Shape) -> dict[str, Any]:
    """bfloat16, every kernel of a step launched by itself: what replaying saves, and what the kernels are."""
    engine = bench.engine(shape, "bfloat16", spread=0.02, replay=False)
    slots = [filled(engine, prompt_of(bench.context, shape.vocab, 0))]
    call = [Segment(slots[0], bench.context, (5, 6, 7, 8, 9), 0)]
    return {
        "step_ms_by_rows": steps(bench, engine, slots, bench.rows[:3]),
        "kernels_in_a_step": kernels(bench, lambda: step(engine, call)),
    }


def prefill(bench: Bench, engine: Engine) -> None:
    engine.kv.close(filled(engine, prompt_of(bench.prefill, engine.info.vocab_size, 3)))


def modelled(by_rows: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """E * t(1) / t(K + 1), E = (1 - a^(K + 1)) / (1 - a) tokens a round at acceptance a: a draft that is always ready and costs nothing."""
    return {
        f"k{int(rows) - 1}": {str(a): round((1 - a ** int(rows)) / (1 - a) * by_rows["1"] / ms, 3) for a in ACCEPTANCES}
        for rows, ms in by_rows.items()
        if int(rows) > 1
    }


def scripted(bench: Bench, engine: Engine) -> dict[str, Any]:
    """Whole rounds, sampling included, with proposals from a known text that are wrong every so often: what a free draft would give."""
    prompt = prompt_of(bench.context, engine.info.vocab_size, 4)
    report: dict[str, Any] = {}
    for heat, params in (("t0", GREEDY), ("t1", WARM)):
        speak(engine, prompt, params, bench.tokens, lambda output: ())  # shapes recur
        plain = speak(engine, prompt, params, bench.tokens, lambda output: ())
        report[heat] = {"plain": plain.figures()}
        for share in (0.7, 0.9):
            draft = Scripted(plain.tokens, share)
            speak(engine, prompt, params, bench.tokens, draft)
            spoken = speak(engine, prompt, params, bench.tokens, draft)
            report[heat][str(share)] = {
                **spoken.figures(),
                "speed_up": round(plain.seconds / spoken.seconds, 3),
                "text_equals_plain": spoken.tokens == plain.tokens,  # not promised in bfloat16
            }
    return report


def run(device: str, tiny: bool, seconds: float = 330.0, replay: bool = True) -> dict[str, Any]:
    """Every section by name; `failed` names those that did not end well. No section begins after `seconds`."""
    bench, begun = Bench.of(device, tiny, replay), time.perf_counter()
    report: dict[str, Any] = {"schema": 1, "tiny": tiny, "replay": replay, "failed": []}

    def section(name: str, call: Callable[[], Any]) -> None:
        spent = time.perf_counter() - begun
        if spent > seconds:
            report[name] = {"skipped": f"{spent:.0f} s were spent"}
            return
        report[name] = {}
        gc.collect()  # engines of the section before
        if device == "cuda":
            torch.cuda.empty_cache()
        try:
            report[name] |= call()
        except (SpecdecError, AssertionError, AttributeError, RuntimeError, ValueError, TypeError, LookupError) as error:
            report[name] |= {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc(limit=-6)}
            report["failed"].append(name)
        print(f"{name}: {time.perf_counter() - begun - spent:.1f} s {json.dumps(report[name])}", file=sys.stderr, flush=True)

    for check in (machine, exactness, speculation, replayed_steps, forks, generic, invariance):
        section(check.__name__, lambda check=check: check(bench))  # type: ignore[misc]
    rate = report["machine"].get("copy_bytes_per_s", 4.3e12)
    for name, shape in ({"tiny": TINY} if tiny else LARGE).items():
        section(name, lambda name=name, shape=shape: speed(bench, shape, rate, report[name]))  # type: ignore[misc]
        section(f"{name} launched", lambda shape=shape: launched(bench, shape))  # type: ignore[misc]
    report["seconds"] = round(time.perf_counter() - begun, 1)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specdec.bench.gpu_check", description="checks and times the engine on a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="only models of a few thousand weights: shows that the script runs")
    parser.add_argument("--output", type=Path, default=Path("build/gpu-check.json"), metavar="FILE", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=330.0, metavar="N", help="begin no section after so long (default: %(default)s)")
    parser.add_argument("--no-replay", action="store_true", help="launch every kernel by itself, as where recording a step does not work")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU on this machine; --device cpu --tiny shows that the script runs")
    report = run(arguments.device, arguments.tiny, arguments.seconds, not arguments.no_replay)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

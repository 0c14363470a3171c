"""The time from a row of real logits to its token, for every kind of sampling parameters: a plain round of `verify`, one row each.

Everything a row costs is in it: bans, a grammar's mask, penalties, cuts, noise, log-probabilities, and an output that grows. The cases take
turns, so a slow second touches all of them. Rows are those of the model's own answers to the built-in prompts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from specdec.acceptance import verify
from specdec.bench.agreement import encode, greedy_texts, load_prompts
from specdec.engine import Engine, EngineConfig, EngineInfo, Segment, load_engine
from specdec.grammar import GrammarCompiler
from specdec.sampling import Sampler, draft_choice
from specdec.terms import DraftMethod, Grammar, GrammarForm, RejectionMethod, SamplingParams
from specdec.vocabulary import load_tokenizer

TURNS, ROWS = 5, 60  # of every case: turns, and rows timed in one; the first WARM_UP of a turn are not counted
WARM_UP = 4
SAID = 500  # tokens of the output before the first row
LOGPROBS = (0, 20)
SCHEMA = (
    '{"type": "object", "properties": {"title": {"type": "string"}, "year": {"type": "integer"}, '
    '"tags": {"type": "array", "items": {"type": "string"}}}, "required": ["title", "year", "tags"]}'
)


@dataclass(frozen=True)
class Case:
    """One line of the report. `draft` = what is timed is draft_choice by that method."""

    params: SamplingParams
    method: RejectionMethod = RejectionMethod.COUPLED
    draft: DraftMethod | None = None


def cases(vocab_size: int) -> dict[str, Case]:
    """Every kind of parameters, alone and together, for a vocabulary of at least 20,000 ids."""
    draw = np.random.default_rng(0)
    biased = {int(i): float(bias) for i, bias in zip(draw.choice(vocab_size, 300, replace=False), draw.normal(0, 5, 300), strict=True)}
    penalties: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.4, "presence_penalty": 0.3}
    some = tuple(sorted(draw.choice(vocab_size, 20_000, replace=False).tolist()))
    named: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        **{f"temperature {value:g}": {"temperature": value} for value in (1.0, 0.7, 3.0)},
        **{f"top_k {value}": {"top_k": value} for value in (1, 50, 5000)},
        **{f"top_p {value:g}": {"top_p": value} for value in (0.1, 0.9, 0.99, 0.999)},
        "top_p 0.9, temperature 3": {"top_p": 0.9, "temperature": 3.0},
        "min_p 0.05": {"min_p": 0.05},
        "top_k 50, top_p 0.9, min_p 0.02": {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
        "top_k 5000, top_p 0.95, min_p 1e-4": {"top_k": 5000, "top_p": 0.95, "min_p": 1e-4},
        **{f"{name} {value:g}": {name: value} for name, value in penalties.items()},
        "all penalties": penalties,
        "logit_bias of 300 ids": {"logit_bias": biased},
        "10 ids allowed": {"allowed_token_ids": some[:10]},
        "20,000 ids allowed": {"allowed_token_ids": some},
        "300 ids banned": {"banned_token_ids": tuple(sorted(biased))},
        "min_tokens": {"min_tokens": 10_000},
        "grammar: a JSON schema": {"grammar": Grammar(GrammarForm.JSON_SCHEMA, SCHEMA)},
        "grammar: any text": {"grammar": Grammar(GrammarForm.REGEX, r"(?s:.*)")},
        "everything": {
            **penalties,
            "temperature": 0.8,
            "top_k": 50,
            "top_p": 0.9,
            "min_p": 0.02,
            "logit_bias": biased,
            "banned_token_ids": some[:300],
            "min_tokens": 10_000,
        },
    }
    plain, cut = SamplingParams(), SamplingParams(top_p=0.9)
    standard = {
        "standard": Case(plain, RejectionMethod.STANDARD),
        "standard, top_p 0.9": Case(cut, RejectionMethod.STANDARD),
    }
    drafts = {
        "draft: gumbel": Case(plain, draft=DraftMethod.GUMBEL),
        "draft: gumbel, top_p 0.9": Case(cut, draft=DraftMethod.GUMBEL),
        "draft: greedy": Case(plain, draft=DraftMethod.GREEDY),
        "draft: probabilistic": Case(plain, RejectionMethod.STANDARD, DraftMethod.PROBABILISTIC),
    }
    return {name: Case(SamplingParams(**fields)) for name, fields in named.items()} | standard | drafts


def run_bench_sampling(model: Path | str, turns: int = TURNS, rows: int = ROWS) -> dict[str, Any]:
    """{"vocab_size", "rows", "cases": {name: {"": {"median_ms", "p99_ms"}, "logprobs 0": …, "logprobs 20": …}}}; drafts have only ""."""
    engine = load_engine(EngineConfig(model, threads=1, self_test=False))
    timer = _Timer(*_answers(engine, Path(model), turns * rows), engine.info, GrammarCompiler(load_tokenizer(model)))
    lines = {
        (name, wanted): replace(case, params=replace(case.params, logprobs=wanted))
        for name, case in cases(engine.info.vocab_size).items()
        for wanted in (None, *(LOGPROBS if case.draft is None else ()))
    }
    times: dict[tuple[str, int | None], list[float]] = {line: [] for line in lines}
    for turn in range(turns):
        for line, case in lines.items():
            times[line] += timer.turn(case, turn * rows, rows)
    report: dict[str, dict[str, dict[str, float]]] = {}
    for (name, wanted), taken in times.items():
        figures = {"median_ms": round(float(np.median(taken)), 4), "p99_ms": round(float(np.percentile(taken, 99)), 4)}
        report.setdefault(name, {})["" if wanted is None else f"logprobs {wanted}"] = figures
    return {"vocab_size": engine.info.vocab_size, "rows": turns * rows, "cases": report}


def _answers(engine: Engine, model: Path, count: int) -> tuple[list[Tensor], list[int]]:
    """`count` rows from the middle of answers to the built-in prompts, and the answers' tokens."""
    rows: list[Tensor] = []
    tokens: list[int] = []
    for text in greedy_texts(engine, encode(model, load_prompts(None)), count):
        slot = engine.kv.open()
        rows += engine.forward([Segment(slot, 0, tuple(text.tokens), text.prompt_length - 1)])[0]
        engine.kv.close(slot)
        tokens += text.tokens[text.prompt_length :]
    return rows, tokens


class _Timer:
    def __init__(self, rows: list[Tensor], said: list[int], info: EngineInfo, grammars: GrammarCompiler) -> None:
        self._rows, self._said, self._info, self._grammars = rows, (said * SAID)[:SAID], info, grammars

    def turn(self, case: Case, first: int, count: int) -> list[float]:
        """Milliseconds of `count` rows from row `first` on."""
        taken: list[float] = []
        sampler, output = self._session(case)
        for i in range(-WARM_UP, count):
            row = self._rows[(first + i) % len(self._rows)].clone()  # where a forward pass would just have written it
            begun = time.perf_counter()
            token = self._decided(case, row, sampler, output)
            taken.append(1e3 * (time.perf_counter() - begun))
            if token is None:
                sampler, output = self._session(case)
            else:
                output.append(token)
        return taken[WARM_UP:]

    def _session(self, case: Case) -> tuple[Sampler, list[int]]:
        """A sampler that has decided SAID tokens, with a grammar none."""
        grammar = case.params.grammar
        constraint = None if grammar is None else self._grammars.compile(grammar)
        sampler = Sampler(case.params, 0, self._info.vocab_size, self._info.eos_ids, self._said[:100], constraint=constraint)
        return sampler, [] if constraint else list(self._said)

    def _decided(self, case: Case, row: Tensor, sampler: Sampler, output: list[int]) -> int | None:
        """The next token, None at the end of the text."""
        if case.draft is not None:
            choice = draft_choice(sampler, row, sampler.prompt_length + len(output), output, case.draft)
            return None if choice is None else choice.token
        verdict = verify([row], (), (), sampler, output, case.method)
        return verdict.tokens[0] if verdict.finish is None else None

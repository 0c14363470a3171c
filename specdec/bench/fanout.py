"""How often is the next block there before the target asks? Hit rate against fan-out, without services, on real logits.

    python -m specdec.bench.fanout --target-model DIR --draft-model DIR [--num-speculative-tokens 2] [--temperature 0] [--max-tokens 64]

The target's text of each prompt is cut into rounds as a draft that is always in time would see them: its block, how far the text agrees,
the token that follows. For each fan-out the branches that specdec/odds.py would have drafted are looked up; a hit is a branch that begins
with what followed. Prints a table and, with --json, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.bench.agreement import encode, load_prompts
from specdec.bench.system import DRAFT_DTYPE, DRAFT_MODEL, TARGET_MODEL
from specdec.engine import Engine, EngineConfig, Segment, load_engine
from specdec.guesses import Guesses
from specdec.odds import Ending, Odds
from specdec.sampling import Sampler, draft_choice
from specdec.terms import DraftMethod, SamplingParams

FANOUTS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class Place:
    """What a draft says at one place: its token, and what else could have followed."""

    token: int
    confidence: float
    guesses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """`places`: of the block, and of the bonus; `accepted` of the block, then `token` followed."""

    places: tuple[Place, ...]
    accepted: int
    token: int

    @property
    def ending(self) -> Ending:
        block = self.places[:-1]
        refused, here = self.accepted < len(block), self.places[self.accepted]
        order = here.guesses if refused else (here.token, *here.guesses)
        confidences = tuple(place.confidence for place in block[: self.accepted + refused])
        return Ending(confidences, refused, order.index(self.token) if self.token in order else None)


class Line:
    """One text at an engine: feeds what is new, takes back what is wrong."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._slot, self._fed = engine, engine.kv.open(), list[int]()

    def row(self, tokens: Sequence[int]) -> Any:
        """Logits of what follows `tokens`."""
        keep = next((i for i, (a, b) in enumerate(zip(self._fed, tokens, strict=False)) if a != b), min(len(self._fed), len(tokens) - 1))
        self._engine.kv.truncate(self._slot, keep)
        rows = None
        for start in range(keep, len(tokens), self._engine.info.max_rows):
            piece = tuple(tokens[start : start + self._engine.info.max_rows])
            rows = self._engine.forward([Segment(self._slot, start, piece, len(piece) - 1)])[0]
        assert rows is not None
        self._fed = list(tokens)
        return rows[0]

    def close(self) -> None:
        self._engine.kv.close(self._slot)


def spoken(engine: Engine, prompt: Sequence[int], sampler: Sampler, count: int) -> list[int]:
    """The target's text, at most `count` tokens."""
    line, output = Line(engine), list[int]()
    while len(output) < count and not (output and output[-1] in engine.info.eos_ids):
        output.append(sampler.choose(line.row([*prompt, *output]), len(prompt) + len(output), output))
    line.close()
    return output


def rounds(engine: Engine, prompt: Sequence[int], sampler: Sampler, text: Sequence[int], k: int) -> list[Round]:
    """How a draft's blocks of `k` fare against `text`, whose first token is decided without one."""
    line, found, done = Line(engine), list[Round](), 1
    while done + k < len(text):
        places, output = list[Place](), list(text[:done])
        for _ in range(k + 1):
            position = len(prompt) + len(output)
            choice = draft_choice(sampler, line.row([*prompt, *output]), position, output, DraftMethod.GUMBEL)
            assert choice is not None  # there is no grammar
            guesses = Guesses(sampler, choice.scores, position, DraftMethod.GUMBEL, choice.token)
            places.append(Place(choice.token, choice.confidence, guesses.ranked()))
            output.append(choice.token)
        accepted = next((i for i, place in enumerate(places[:-1]) if place.token != text[done + i]), len(places) - 1)
        found.append(Round(tuple(places), accepted, text[done + accepted]))
        done += accepted + 1
    line.close()
    return found


def hit_rate(found: Sequence[Round], fanout: int, floor: float) -> tuple[float, float]:
    """Share of rounds whose ending was among the branches; branches per round."""
    odds, hits, drafted = Odds(), 0, 0
    for round_ in found:
        ending = round_.ending
        wishes = odds.wishes([place.confidence for place in round_.places[:-1]], fanout, floor)
        hits += any((wish.place, wish.rank) == (round_.accepted, ending.rank) for wish in wishes)
        drafted += len(wishes)
        odds.learn(ending)
    return hits / max(1, len(found)), drafted / max(1, len(found))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    target = load_engine(EngineConfig(options.target_model, self_test=False))
    draft = load_engine(EngineConfig(options.draft_model, dtype=DRAFT_DTYPE, self_test=False, reduced_head=True))
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    found: list[Round] = []
    for seed, (_, prompt) in enumerate(encode(options.target_model, load_prompts(options.prompts))):
        samplers = [Sampler(params, seed, target.info.vocab_size, target.info.eos_ids, prompt, ids) for ids in (None, draft.info.draft_ids)]
        text = spoken(target, prompt, samplers[0], options.max_tokens)
        found += rounds(draft, prompt, samplers[1], text, options.num_speculative_tokens)
        print(f"\r{seed + 1} texts, {len(found)} rounds", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    curve = {fanout: hit_rate(found, fanout, options.floor) for fanout in FANOUTS}
    return {
        "rounds": len(found),
        "accepted_whole": round(sum(r.accepted == len(r.places) - 1 for r in found) / len(found), 3),
        "tokens_per_round": round(1 + sum(r.accepted for r in found) / len(found), 3),
        "curve": [{"fanout": f, "hit_rate": round(hits, 3), "branches": round(n, 2)} for f, (hits, n) in curve.items()],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specdec.bench.fanout", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--target-model", type=Path, default=TARGET_MODEL)
    parser.add_argument("--draft-model", type=Path, default=DRAFT_MODEL)
    parser.add_argument("--prompts", type=Path, help='JSON lines with "kind" and "prompt"; the built-in twenty by default')
    parser.add_argument("--num-speculative-tokens", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--floor", type=float, default=0.0, help="smallest chance of a branch")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    report = measure(options)
    if options.json:
        print(json.dumps(report))
        return 0
    print(f"{report['rounds']} rounds, {report['accepted_whole']:.1%} accepted whole, {report['tokens_per_round']} tokens per round")
    print(f"{'fan-out':>8} {'hits':>6} {'branches':>9}")
    for point in report["curve"]:
        print(f"{point['fanout']:>8} {point['hit_rate']:>6.3f} {point['branches']:>9.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How often a quantised engine names the same best token as float32, on the float32 model's own greedy text.

python -m specdec.bench.agreement --model DIR [--prompts FILE] [--positions 2000] [--yardstick PATH]

Three answers for the same teacher-forced positions: float32 (the truth), our engine, and the method to compare with: per-row int8 by the
fast kernel with plain attention, either from a script that defines Model, int8 and reads argv like ours, or the one built in here.
One JSON object on standard output.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.engine import Engine, EngineConfig, Segment, load_engine

CHUNK = 256
Scorer = Callable[[list[int]], Tensor]
"""Token ids of one whole text → logits [len, vocab]."""


class Text(NamedTuple):
    """Positions prompt_length-1 … len(tokens)-2 are judged: each row is to name the next token of float32's text."""

    kind: str
    tokens: list[int]
    prompt_length: int


def load_prompts(path: Path | None) -> list[dict[str, str]]:
    source = path.read_text() if path else (resources.files("specdec.bench") / "prompts.jsonl").read_text()
    return [json.loads(line) for line in source.splitlines() if line.strip()]


def encode(model: Path, prompts: Sequence[dict[str, str]]) -> list[tuple[str, list[int]]]:
    """(kind, ids) of each prompt as the model's chat template wraps it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": p["prompt"]}] for p in prompts]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [(p["kind"], tokenizer(text, add_special_tokens=False)["input_ids"]) for p, text in zip(prompts, texts, strict=True)]


def greedy_texts(engine: Engine, prompts: Sequence[tuple[str, list[int]]], positions: int) -> list[Text]:
    """All prompts side by side until there are `positions` tokens; where one ends early the others go on longer."""
    texts = [Text(kind, list(ids), len(ids)) for kind, ids in prompts]
    slots = [engine.kv.open() for _ in texts]
    last = [engine.forward([Segment(s, 0, tuple(t.tokens), len(t.tokens) - 1)])[0] for s, t in zip(slots, texts, strict=True)]
    nexts = [int(row[0].argmax()) for row in last]
    live, made = set(range(len(texts))), 0
    while live and made < positions:
        for i in live:
            texts[i].tokens.append(nexts[i])
        made += len(live)
        live = {i for i in live if nexts[i] not in engine.info.eos_ids and len(texts[i].tokens) < engine.info.window - 1}
        order = sorted(live)
        if order:
            rows = engine.forward([Segment(slots[i], engine.kv.length(slots[i]), (nexts[i],), 0) for i in order])
            for i, row in zip(order, rows, strict=True):
                nexts[i] = int(row[0].argmax())
    for slot in slots:
        engine.kv.close(slot)
    return texts


def engine_scorer(engine: Engine) -> Scorer:
    def score(tokens: list[int]) -> Tensor:
        slot = engine.kv.open()
        pieces = [tokens[i : i + CHUNK] for i in range(0, len(tokens), CHUNK)]
        rows = torch.cat([engine.forward([Segment(slot, CHUNK * i, tuple(piece), 0)])[0] for i, piece in enumerate(pieces)])
        engine.kv.close(slot)
        return rows

    return score


def script_scorer(path: Path, model: Path) -> Scorer:
    """From a script whose part before its first inference block defines Model(linear), int8 and forward(ids, start)."""
    source = path.read_text().split("\nwith torch.inference_mode():")[0]
    names: dict[str, Any] = {"__name__": "yardstick"}
    argv, sys.argv = sys.argv, [str(path), str(model), "1"]
    try:
        exec(compile(source, str(path), "exec"), names)
    finally:
        sys.argv = argv
    with torch.inference_mode():
        scored = names["Model"](names["int8"])

    def score(tokens: list[int]) -> Tensor:
        scored.reset()
        rows: Tensor = scored.forward(torch.tensor(tokens), 0)
        return rows

    return score


def plain_scorer(model: Path) -> Scorer:
    """Built in: transformers' modules with every linear layer quantised per row and the library's own attention."""
    from transformers import AutoModelForCausalLM

    from specdec.engine.generic import quantise
    from specdec.engine.quantize import Linears

    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    quantise(module, Linears("int8", 8192))

    def score(tokens: list[int]) -> Tensor:
        rows: Tensor = module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return rows

    return score


@torch.inference_mode()
def agreement(texts: Sequence[Text], truth: Scorer, others: dict[str, Scorer]) -> dict[str, Any]:
    """Shares of positions with equal argmax in percent, and mean KL(float32 || other) in nats, of each of `others`; by kind as well."""
    hits: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in others}
    total: collections.Counter[str] = collections.Counter()
    kl = dict.fromkeys(others, 0.0)
    for text in texts:
        judged = slice(text.prompt_length - 1, len(text.tokens) - 1)
        want = truth(text.tokens)[judged].log_softmax(-1)
        total[text.kind] += len(want)
        for name, scorer in others.items():
            got = scorer(text.tokens)[judged].log_softmax(-1)
            hits[name][text.kind] += int((got.argmax(-1) == want.argmax(-1)).sum())
            kl[name] += float((want.exp() * (want - got)).sum())
    positions = total.total()
    return {
        "positions": positions,
        **{
            name: {
                "agreement_percent": round(100 * hits[name].total() / positions, 2),
                "kl": round(kl[name] / positions, 5),
                "by_kind": {kind: round(100 * hits[name][kind] / total[kind], 2) for kind in sorted(total)},
            }
            for name in others
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Agreement of the int8 engine with float32, teacher-forced.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, help='lines of {"kind", "prompt"}; the built-in twenty by default')
    parser.add_argument("--positions", type=int, default=2000)
    parser.add_argument("--yardstick", type=Path, help="script to compare with; the built-in method by default")
    options = parser.parse_args(arguments)
    prompts = encode(options.model, load_prompts(options.prompts))
    room = sum(len(ids) for _, ids in prompts) + options.positions + 64 * len(prompts)
    exact = load_engine(EngineConfig(options.model, dtype="float32", self_test=False, kv_tokens=room))
    texts = greedy_texts(exact, prompts, options.positions)
    others = {
        "ours": engine_scorer(load_engine(EngineConfig(options.model, self_test=False))),
        "yardstick": script_scorer(options.yardstick, options.model) if options.yardstick else plain_scorer(options.model),
    }
    print(json.dumps(agreement(texts, engine_scorer(exact), others)))


if __name__ == "__main__":
    main()

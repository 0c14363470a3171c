"""The whole service with both models on one device: three processes over loopback, with and without speculation.

python -m tests.gpu_service [--device cuda|cpu] [--no-speed]

Prints one JSON object. `equal` counts answers with equal ids at K = 0 and K = 4. `tokens_per_s` is of a model drawn at random in the shape
of a 1B one, without speculation: what the host adds to the engine's step. Exit status 1 when an answer differs or a log tells of a defect.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from specdec.client import SyncClient
from specdec.terms import SamplingParams
from tests.e2e.ask import Ask, answers
from tests.e2e.stack import running
from tests.tiny import save_tiny

PROMPTS = ("the cat sat on the mat", "def f(x):", "A lighthouse is", "1 2 3 4 5 6 7 8", "x", "hello hello hello hello")
SHAPE_1B = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def equality(target: Path, draft: Path, device: str, dtype: str) -> dict[str, Any]:
    """Every prompt at temperature 0 and 1; then several answers and a language, which only have to come."""
    settings = {"DEVICE": device, "DTYPE": dtype}
    equal = 0
    with running(target, draft, target=settings, draft=settings) as stack:
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=48, ignore_eos=True)
            plain, blocks = (
                answers(stack.endpoint, [Ask(p, params, {"seed": 5, "num_speculative_tokens": k}) for p in PROMPTS]) for k in (0, 4)
            )
            equal += sum(a.token_ids == b.token_ids for a, b in zip(plain, blocks, strict=True))
        with SyncClient(stack.endpoint) as client:
            several = client.completions("the cat", SamplingParams(max_tokens=24, ignore_eos=True, prompt_logprobs=1), seed=3, n=4)
            number = client.complete("the cat", SamplingParams(max_tokens=40), seed=3, regex="[0-9]{3}-[a-z]{4}")
        return {
            "equal": equal,
            "of": 2 * len(PROMPTS),
            "tokens_of_4_answers": [len(answer.token_ids) for answer in several],
            "regex": number.text,
            "batch_invariant": blocks[0].finished.settings.batch_invariant,
            "defects": stack.defects(),
        }


def speed(folder: Path, device: str) -> dict[str, Any]:
    """Tokens per second over 256 tokens of one and of eight streams, K = 0, after a run that is not counted."""
    settings = {"DEVICE": device, "DTYPE": "bfloat16", "SELF_TEST": "false", "KV_TOKENS": "65536"}
    params = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
    rates = {}
    with running(folder, None, target=settings) as stack:
        for streams in (1, 8):
            asks = [Ask(f"the cat {i}", params, {"disable_spec_decode": True}) for i in range(streams)]
            answers(stack.endpoint, asks)
            began = time.perf_counter()
            got = answers(stack.endpoint, asks)
            rates[f"{streams} streams"] = round(sum(len(a.token_ids) for a in got) / (time.perf_counter() - began), 1)
        return {"tokens_per_s": rates, "defects": stack.defects()}


def save_1b(folder: Path, tokenizer: Path, device: str) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE_1B)).bfloat16()
    model.save_pretrained(folder)
    for file in (*tokenizer.glob("tokenizer*"), *tokenizer.glob("chat_template*")):
        shutil.copy(file, folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--no-speed", action="store_true", help="equality only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        target, other = save_tiny(Path(name) / "target", 0), save_tiny(Path(name) / "draft", 1)
        runs = {"float64, own draft": (target, "float64"), "float64, other draft": (other, "float64")}
        if arguments.device == "cuda":
            runs["bfloat16, own draft"] = (target, "bfloat16")
        report = {run: equality(target, draft, arguments.device, dtype) for run, (draft, dtype) in runs.items()}
        if not arguments.no_speed:
            report["1B shape"] = speed(save_1b(Path(name) / "1b", target, arguments.device), arguments.device)
    print(json.dumps(report, indent=1))
    return int(any(part["defects"] or part.get("equal") != part.get("of") for part in report.values()))


if __name__ == "__main__":
    sys.exit(main())

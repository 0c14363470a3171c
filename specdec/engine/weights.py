"""Model folders: config, weights straight from the mapped files, end-of-sequence ids, the reduced vocabulary, a hash over all weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specdec.engine.api import UnsupportedModel

PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})


class FolderWeights(Mapping[str, Tensor]):
    """Tensors of a folder's safetensors files by name. Each look-up reads from the mapped file; nothing stays in memory."""

    def __init__(self, folder: Path) -> None:
        files = safetensors_of(folder)
        opened: list[Any] = [safe_open(file, framework="pt") for file in files]
        self._file_of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - not a dictionary

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def safetensors_of(folder: Path) -> list[Path]:
    """The only kind of weights that is read: the others are pickles, and whoever reads one runs the code in it. Pickles that lie beside
    are never opened. Raises UnsupportedModel, naming them where there is nothing else, or a file that this process may not read."""
    try:
        names = sorted(os.listdir(folder))  # glob takes a folder that it may not read for an empty one,
        found = [folder / name for name in names if name.endswith(".safetensors")]
        for path in found:
            path.open("rb").close()  # and safetensors says of any such file that there is none
    except OSError as error:
        raise _unreadable(error) from error
    if found:
        return found
    pickles = [name for name in names if Path(name).suffix in PICKLES]
    if pickles:
        raise UnsupportedModel(
            f"{folder} has no .safetensors file, and {', '.join(pickles[:3])} is not opened: such a file can run any code;"
            " convert it where you trust it, by loading it with transformers and saving it again"
        )
    raise UnsupportedModel(f"{folder} has no .safetensors file")


def _unreadable(error: OSError) -> UnsupportedModel:
    remedy = "; give that user the right to read it, and to enter the folders above it" if isinstance(error, PermissionError) else ""
    return UnsupportedModel(f"{error.filename} cannot be read by uid {os.geteuid()}: {error.strerror}{remedy}")


def read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UnsupportedModel(f"{folder} is no model folder: it has no config.json") from None
    except OSError as error:
        raise _unreadable(error) from error
    return config


def read_eos_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Of config.json and generation_config.json together: chat models often name their end of turn only in the latter."""
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    return eos_ids(config, generation)


def eos_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        found |= set() if value is None else {value} if isinstance(value, int) else set(value)
    return tuple(sorted(found))


def read_draft_ids(folder: Path, vocab_size: int) -> tuple[int, ...] | None:
    """Target ids of a reduced head's rows, ascending; None when the folder has no draft_vocab.json."""
    path = folder / "draft_vocab.json"
    if not path.is_file():
        return None
    ids = json.loads(path.read_text())
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= vocab_size:
        raise UnsupportedModel(f"{path} must be a list of ascending ids below {vocab_size}")
    return tuple(ids)


def stacked(weights: Mapping[str, Tensor], names: Sequence[str]) -> Tensor | None:
    """Several tensors as one, rows behind rows; None where the model has none of them."""
    return torch.cat([weights[name] for name in names]) if names[0] in weights else None


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the memory that they lie on, on whatever device; a byte that several see counts once."""
    ends: dict[torch.device, list[tuple[int, int]]] = {}
    for tensor in tensors:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            ends.setdefault(tensor.device, []).append((start, start + (last + 1) * tensor.element_size()))
    return sum(_covered(ranges) for ranges in ends.values())


def _covered(ranges: Sequence[tuple[int, int]]) -> int:
    total, seen = 0, 0
    for start, end in sorted(ranges):
        total += max(0, end - max(start, seen))
        seen = max(seen, end)
    return total


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Over names, shapes, dtypes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()

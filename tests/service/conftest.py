"""One tiny model, one target on it for each file, and transformers' own copy of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.service.target_process import TargetProcess
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def target(model: Path) -> Iterator[TargetProcess]:
    process = TargetProcess(model)
    yield process
    process.end()


@pytest.fixture(scope="module")
def hf(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)

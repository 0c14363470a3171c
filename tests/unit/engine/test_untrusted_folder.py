"""A model's folder is data: nothing in it runs. Weights are safetensors; pickles and code that lie there are never opened."""

from __future__ import annotations

import json
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specdec.engine import EngineConfig, UnsupportedModel, load_engine
from tests.tiny import save_tiny
from tests.tools import ROOT


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, sprung: Path) -> None:
        self._sprung = sprung

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._sprung,)


def config(folder: Path, path: str) -> EngineConfig:
    return EngineConfig(model_dir=folder, dtype="float64", path=path, kv_tokens=256, self_test=False)


@pytest.mark.parametrize("path", ["lean", "generic"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "consolidated.00.pkl"])
def test_a_pickle_is_refused_by_name_and_never_opened(tmp_path: Path, name: str, path: str) -> None:
    folder, sprung = save_tiny(tmp_path / "model"), tmp_path / "sprung"
    (folder / name).write_bytes(pickle.dumps(Trap(sprung)))
    load_engine(config(folder, path))  # beside weights that can be read it does no harm
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(UnsupportedModel, match=f"{name} is not opened"):
        load_engine(config(folder, path))
    assert not sprung.exists()
    pickle.loads((folder / name).read_bytes())
    assert sprung.exists()  # it was a trap


def test_code_in_the_folder_does_not_run(tmp_path: Path) -> None:
    folder, sprung = save_tiny(tmp_path / "model"), tmp_path / "sprung"
    (folder / "modeling_own.py").write_text(f"open({str(sprung)!r}, 'w')\n")
    stored = json.loads((folder / "config.json").read_text())
    own = {"auto_map": {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}}
    (folder / "config.json").write_text(json.dumps({**stored, **own, "model_type": "own", "architectures": ["Model"]}))
    with pytest.raises(UnsupportedModel):
        load_engine(config(folder, "generic"))
    assert not sprung.exists()


def test_nobody_asks_for_code_from_a_model_or_for_a_pickle() -> None:
    """In all sources, tools and tests included: neither the flag that trusts a checkpoint's code nor torch's pickle reader."""
    words = "trust_remote_code *= *True|torch\\.load\\(|pickle\\.load|weights_only *= *False"
    found = subprocess.run(["git", "grep", "-nE", words, "--", "*.py"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    lines = [line for line in found.stdout.splitlines() if not line.startswith(str(Path(__file__).relative_to(ROOT)))]
    assert found.returncode in (0, 1) and not lines, lines

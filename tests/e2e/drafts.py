"""One tiny target in float64 and an orchestrator for each kind of draft there is.

self     the target's own weights: every proposal is right, so blocks are as long as they can be
random   another random model: hardly any is
never    the target with its head negated: at temperature 0 none is
none     no draft at all
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.e2e.stack import Process, Stack, running, wait_ready
from tests.tiny import save_tiny

SPECULATING = ("self", "random", "never")
DRAFTS = (*SPECULATING, "none")
FLOAT64 = {"DTYPE": "float64", "SELF_TEST": "false"}
FORGIVING = {"MAX_EJECTION_MS": "0"}  # a machine that holds the draft up for a second is not to decide whether a test sees blocks


@dataclass
class EveryDraft:
    stack: Stack
    orchestrators: dict[str, Process]

    def endpoint(self, kind: str) -> str:
        return self.orchestrators[kind].endpoint

    @property
    def self_draft(self) -> Process:
        return self.stack.drafts[0]


def never_right(folder: Path) -> Path:
    """A copy of the target of seed 0 whose favourite is the target's least likely token."""
    save_tiny(folder, seed=0)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = -weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextlib.contextmanager
def every_draft(folder: Path) -> Iterator[EveryDraft]:
    target = save_tiny(folder / "target", seed=0)
    others = {"random": save_tiny(folder / "random", seed=9, layers=1), "never": never_right(folder / "never")}
    with running(target, target, target=FLOAT64, draft=FLOAT64, orchestrator=FORGIVING) as stack:
        orchestrators = {"self": stack.orchestrators[0]}
        drafts = {kind: stack.begin_draft(MODEL=str(model)) for kind, model in others.items()}
        for kind, draft in drafts.items():
            orchestrators[kind] = stack.add_orchestrator(DRAFTS=wait_ready(draft).endpoint)
        orchestrators["none"] = stack.add_orchestrator(DRAFTS="")
        yield EveryDraft(stack, orchestrators)

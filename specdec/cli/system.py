"""A whole system on this machine: which processes, with which settings, pinned where. Knows no process yet; supervisor.py runs them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdec.cli import authority, checking
from specdec.cli.supervisor import Child, Plan, Supervisor
from specdec.errors import InvalidRequest
from specdec.runtime.extras import need

HOST = "127.0.0.1"
ROLES = ("target", "draft", "orchestrator")
TARGET_MODEL, DRAFT_MODEL = Path("models/smollm2-135m"), Path("models/smollm2-draft")
DRAFT_NICE = 10  # the draft may fill every gap of a core, and must not make the others wait
DRAIN_MS = {"target": 1000, "draft": 1000, "orchestrator": 3000}  # whoever runs this sits in front of it
_PIN = re.compile(r"\d+(-\d+)?(\+\d+(-\d+)?)*")


@dataclass(frozen=True, slots=True)
class System:
    target_model: Path = TARGET_MODEL
    draft_model: Path = DRAFT_MODEL
    targets: int = 1
    drafts: int = 1
    num_speculative_tokens: int | None = None
    speculative_fanout: int | None = None
    port: int = 0
    pins: dict[str, str] = field(default_factory=dict)  # role → SPECDEC_CPU_AFFINITY
    tls: Path | None = None  # folder of authority.py; None = plain text

    def check(self) -> None:
        """Raises NotInstalled where nothing can compute, InvalidRequest for models that are not there."""
        need("model")
        wanted = [("--target-model", self.target_model)] + ([("--draft-model", self.draft_model)] if self.drafts else [])
        for flag, folder in wanted:
            if not (folder / "config.json").is_file():
                raise InvalidRequest(
                    flag,
                    f"{folder} holds no model (no config.json); name a folder that does, or start where `make setup` made models/",
                )

    def pool_plans(self) -> list[Plan]:
        pools = ([("target", i) for i in range(self.targets)]) + [("draft", i) for i in range(self.drafts)]
        return [Plan(f"{role}-{i}", role, self._model_settings(role)) for role, i in pools]

    def orchestrator_plan(self, pools: Sequence[Child]) -> Plan:
        return self._orchestrator_at({role: ",".join(c.endpoint for c in pools if c.plan.role == role) for role in ("target", "draft")})

    def _orchestrator_at(self, addresses: Mapping[str, str]) -> Plan:
        settings = {
            **self._common("orchestrator"),
            "PORT": str(self.port),
            "TARGETS": addresses["target"],
            "DRAFTS": addresses["draft"],
            "TOKENIZER": str(self.target_model),
        }
        if self.num_speculative_tokens is not None:
            settings["NUM_SPECULATIVE_TOKENS"] = str(self.num_speculative_tokens)
        return Plan("orchestrator-0", "orchestrator", settings)

    def start(self, supervisor: Supervisor) -> list[Child]:
        """Pools first, since their addresses are known only then. The orchestrator comes last in the list. Raises SettingsError before
        anything is started."""
        first = {plan.role: plan for plan in reversed(self.pool_plans())}
        checking.check([*first.values(), self._orchestrator_at(dict.fromkeys(("target", "draft"), f"{HOST}:1"))])
        pools = supervisor.start(self.pool_plans())
        return pools + supervisor.start([self.orchestrator_plan(pools)])

    def _model_settings(self, role: str) -> dict[str, str]:
        model = self.target_model if role == "target" else self.draft_model
        own = {"NICE": str(DRAFT_NICE)} if role == "draft" else {}
        if role == "draft" and self.speculative_fanout is not None:
            own["SPECULATIVE_FANOUT"] = str(self.speculative_fanout)
        return {**self._common(role), **own, "MODEL": str(model), "PORT": "0"}

    def _common(self, role: str) -> dict[str, str]:
        # Health answers on the main ports; a port of its own from our environment would be the same for all of them.
        common = {"HOST": HOST, "METRICS_PORT": "0", "HEALTH_PORT": "-1", "PRE_DRAIN_MS": "0", "DRAIN_MS": str(DRAIN_MS[role])}
        if self.tls is not None:
            common |= authority.serving(self.tls, role)
        return {**common, "CPU_AFFINITY": self.pins[role]} if role in self.pins else common


def parse_pins(text: str) -> dict[str, str]:
    """`target=0,draft=1,orchestrator=1`; several CPUs of one role: `target=0+2` or `target=0-3`."""
    pins: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        role, _, cpus = part.partition("=")
        if role not in ROLES or not _PIN.fullmatch(cpus):
            raise InvalidRequest(
                "--pin", f"{part!r} is not role=CPU, with role one of {', '.join(ROLES)}, e.g. target=0,draft=1,orchestrator=1"
            )
        pins[role] = ",".join(str(cpu) for piece in cpus.split("+") for cpu in _expand(piece))
    return pins


def _expand(piece: str) -> range:
    low, _, high = piece.partition("-")
    return range(int(low), int(high or low) + 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `up` and `demo` share."""
    parser.add_argument("--target-model", type=Path, default=TARGET_MODEL, metavar="DIR", help="the large model (default: %(default)s)")
    parser.add_argument("--draft-model", type=Path, default=DRAFT_MODEL, metavar="DIR", help="the small model (default: %(default)s)")
    parser.add_argument("--num-speculative-tokens", type=int, metavar="K", help="proposed tokens per round (default: the service's)")
    parser.add_argument("--speculative-fanout", type=int, metavar="F", help="outcomes of a round a draft works on (default: the service's)")

"""Settings of the orchestrator: SPECDEC_* variables, read once by specdec.runtime.settings."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from orchestrator.discovery.names import problems
from specdec.runtime.security import FrontSettings
from specdec.runtime.settings import setting
from specdec.terms import LEGAL_METHODS, DraftMethod, RejectionMethod


@dataclass(frozen=True, kw_only=True)
class OrchestratorSettings(FrontSettings):
    tokenizer: Path = setting(doc="folder with the target's tokenizer.json and config.json; no weights are read")
    targets: tuple[str, ...] = setting(
        doc="host:port of every target, dns:///name:port for one per record of a name, kubernetes:///service:port for one per endpoint of "
        "a Service; comma separated, each perhaps with the name of a pool in front: pool=host:port"
    )
    drafts: tuple[str, ...] = setting((), doc="the drafts, likewise; empty = no speculation")
    discovery_poll_ms: int = setting(5000, low=50, high=600_000, doc="pace at which the names among them are asked for")
    discovery_keep_ms: int = setting(
        60_000, low=0, high=86_400_000, doc="how long the last records of a name stand once it has none at all"
    )
    num_speculative_tokens: int | None = setting(
        None, low=0, high=64, doc="longest block when the request does not say (empty = 5), exact without adaptive verification (empty = 2)"
    )
    enable_adaptive_verification: bool = setting(
        True, doc="each block is as long as pays at the moment, when the request does not say; false = always num_speculative_tokens"
    )
    rejection_sample_method: RejectionMethod = setting(RejectionMethod.COUPLED, doc="coupled or standard")
    draft_sample_method: DraftMethod | None = setting(None, doc="gumbel, greedy or probabilistic; empty = the method's default")
    prompt_lookup_min: int = setting(
        3,
        low=0,
        high=16,
        doc="tokens that must have occurred before for what followed to be proposed when the draft has nothing; 0 = never",
    )
    max_run_ahead: int = setting(
        16,
        low=0,
        high=64,
        doc="plain tokens that a target may decide on its own between two words from here, in rounds without a block; 0 = none",
    )
    ahead: bool = setting(True, doc="proposals wait at the target for the round before them, so that it need not wait for the network")
    max_running: int = setting(256, low=1, high=65_536, doc="generations that run at once")
    max_waiting: int = setting(1024, low=0, high=1_048_576, doc="generations that wait for a place; beyond it RESOURCE_EXHAUSTED")
    max_waiting_tokens: int = setting(1 << 22, low=1, doc="tokens of the prompts that wait for a place, all together")
    max_wait_ms: float = setting(
        30_000.0, low=1, high=3_600_000, doc="longest wait for a place; who is expected to wait longer is turned away at once, ms"
    )
    priority_age_ms: float = setting(
        1000.0, low=1, high=3_600_000, doc="a waiting request gains one level of priority in this time, ms; 16 levels either way count"
    )
    max_unread_ms: float = setting(
        60_000.0, low=1, high=86_400_000, doc="an answer whose client reads nothing for so long, while it is held for it, is given up, ms"
    )
    trace_content: bool = setting(False, doc="prompts and answers go into the spans of their requests, up to 4096 characters each")
    max_grace_ms: float = setting(50.0, low=0, high=10_000, doc="longest wait of a round for the draft")
    step_deadline_ms: int = setting(30_000, low=100, high=600_000, doc="longest a target may take for a round, queue included")
    placement_wait_ms: int = setting(30_000, low=100, high=600_000, doc="longest a session waits for any target")
    scaling_queue_ms: float = setting(
        50.0, low=1, high=60_000, doc="backlog that makes one target's worth of the signal `queue` that targets are scaled by, ms"
    )
    scaler_port: int = setting(-1, low=-1, high=65535, doc="plaintext port of KEDA's external scaler; 0 = any free one, -1 = off")
    peers: tuple[str, ...] = setting(
        (), doc="the orchestrators' scaler ports, in the forms of targets; one that is asked adds up how many calls wait at all of them"
    )
    max_ejection_ms: int = setting(
        30_000, low=0, high=3_600_000, doc="longest a replica that keeps failing is left alone until it is tried again, ms; 0 = never"
    )

    def problems(self) -> list[str]:
        found = [
            f"SPECDEC_{pool}: {problem}"
            for pool, entries in (("TARGETS", self.targets), ("DRAFTS", self.drafts), ("PEERS", self.peers))
            for problem in problems(entries)
        ]
        if not self.targets:
            found.append("SPECDEC_TARGETS names no target")
        legal = LEGAL_METHODS[self.rejection_sample_method]
        if self.draft_sample_method is not None and self.draft_sample_method not in legal:
            names = " or ".join(method.value for method in legal)
            found.append(f"SPECDEC_DRAFT_SAMPLE_METHOD must be {names} with {self.rejection_sample_method.value}")
        return found


if __name__ == "__main__":
    from specdec.runtime.listening import checked

    sys.exit(checked("orchestrator", OrchestratorSettings))

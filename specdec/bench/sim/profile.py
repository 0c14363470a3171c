"""Where the CPU time of a service goes: `python -m specdec.bench.sim.profile MODULE OUT.json` runs the module as `python -m MODULE` would.

SIGUSR1 begins, the next one ends and writes. In between the kernel's profiling timer (CPU time of the process, all threads) interrupts the
main thread, and the innermost frame that belongs to a room of ours, or to a library, takes the sample. A service that is not started this
way pays nothing.
"""

from __future__ import annotations

import json
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

EVERY_S = 0.002
SECTIONS = (
    ("wire", ("/specdec/wire/", "/specdec/v1/", "/google/protobuf/", "/orchestrator/fronts/responses")),
    ("metrics", ("/opentelemetry/", "/runtime/telemetry", "/prometheus_client/", "/orchestrator/observe", "/orchestrator/fronts/meters")),
    ("grpc", ("/grpc/", "/orchestrator/peers", "/orchestrator/fronts/relay", "/runtime/interceptor")),
    ("text", ("/orchestrator/answer", "/orchestrator/detokenise", "/orchestrator/stops", "/orchestrator/text")),
    ("proposals", (
        "/orchestrator/lookahead", "/orchestrator/sources", "/orchestrator/ngram", "/orchestrator/drafting", "/specdec/hashing",
        "/orchestrator/pac", "/orchestrator/control/",
    )),
    ("generation", (
        "/orchestrator/generation", "/orchestrator/targeting", "/orchestrator/going", "/orchestrator/tally", "/orchestrator/patience",
        "/orchestrator/checks", "/orchestrator/events", "/orchestrator/moving",
    )),
    ("grpc", ("/orchestrator/handle",)),  # what grpc does in C is seen at the first line of Python behind it
    ("driver", tuple(f"/orchestrator/{name}" for name in (
        "driver", "pools", "place", "live", "door", "alarms", "admission", "ejection", "breaker", "handover", "hunger", "prefix",
    ))),
)  # fmt: skip
REST = "event loop"


def section(frame: FrameType | None) -> tuple[str, str]:
    """(section, function) of the innermost frame that has one."""
    while frame is not None:
        name = frame.f_code.co_filename
        for title, parts in SECTIONS:
            if any(part in name for part in parts):
                return (
                    title,
                    f"{name.rsplit('/', 1)[-1]}:{frame.f_code.co_qualname}",
                )
        frame = frame.f_back
    return REST, ""


class Sampler:
    def __init__(self, out: Path) -> None:
        self._out, self._running = out, False
        self._sections, self._functions = Counter[str](), Counter[str]()

    def toggle(self, number: int, frame: FrameType | None) -> None:
        self._running = not self._running
        signal.setitimer(signal.ITIMER_PROF, EVERY_S * self._running, EVERY_S * self._running)
        if not self._running:
            told = {"samples": sum(self._sections.values()), "sections": self._sections, "functions": dict(self._functions.most_common(60))}
            self._out.write_text(json.dumps(told))

    def sample(self, number: int, frame: FrameType | None) -> None:
        title, function = section(frame)
        self._sections[title] += 1
        self._functions[f"{title} {function}"] += 1


def main() -> None:
    module, out = sys.argv[1:3]
    sampler = Sampler(Path(out))
    signal.signal(signal.SIGUSR1, sampler.toggle)
    signal.signal(signal.SIGPROF, sampler.sample)
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

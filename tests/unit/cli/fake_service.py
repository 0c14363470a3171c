"""A service without a model: the real process shell around nothing. FAKE_* variables make it misbehave."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from specdec.errors import Mismatch
from specdec.runtime.server import Runtime, Service, serve
from specdec.runtime.settings import CommonSettings, setting


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    model: str = setting("", doc="ignored")
    targets: str = setting("", doc="ignored")
    drafts: str = setting("", doc="ignored")
    tokenizer: str = setting("", doc="ignored")
    num_speculative_tokens: int = setting(0, doc="ignored")


async def build(settings: Settings, runtime: Runtime) -> Service:
    if os.environ.get("FAKE_FAIL") == runtime.role:
        raise Mismatch("this fake was told to fail")
    print(f"affinity {sorted(os.sched_getaffinity(0))} nice {os.nice(0)} targets {settings.targets}", file=sys.stderr)
    return Service(add=lambda server: None)


if __name__ == "__main__":
    if os.environ.get("FAKE_SLOW") == sys.argv[1]:
        time.sleep(60)
    sys.exit(serve(sys.argv[1], Settings, build))

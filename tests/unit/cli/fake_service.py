"""A service without a model: the real process shell around nothing. FAKE_* variables make it misbehave."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import Mismatch
from specdec.runtime.listening import checked
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
    role, _, path = os.environ.get("FAKE_DIES", "").partition(":")
    if role == runtime.role:
        asyncio.get_running_loop().call_soon(die_when_there, runtime, Path(path))
    return Service(add=lambda server: None)


def die_when_there(runtime: Runtime, path: Path) -> None:
    if path.exists():
        runtime.fail("this fake was told to die")
    else:
        asyncio.get_running_loop().call_later(0.05, die_when_there, runtime, path)


if __name__ == "__main__":
    if sys.argv[2:] == ["--check"]:
        sys.exit(checked(sys.argv[1], Settings))
    if os.environ.get("FAKE_SLOW") == sys.argv[1]:
        time.sleep(60)
    if os.environ.get("FAKE_SLOW_AGAIN", "").startswith(f"{sys.argv[1]}:"):
        here = Path(os.environ["FAKE_SLOW_AGAIN"].partition(":")[2])
        if here.exists():
            time.sleep(60)
        here.touch()
    sys.exit(serve(sys.argv[1], Settings, build))

"""The image of target and draft, built by the Dockerfile's own steps: kernels compiled in it, and a whole system of two images."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from specdec.client import Client
from specdec.native import build
from specdec.terms import SamplingParams
from tests.images.conftest import offline
from tests.images.container import Container, Image, content, unprivileged
from tests.images.dockerfile import Dockerfile
from tests.images.test_slim import told_size
from tests.tiny import save_tiny

pytestmark = [pytest.mark.chart, pytest.mark.long, pytest.mark.timeout(1200)]
TOKENS = 32
LIBRARIES = """
from specdec.native.build import KERNELS, NOISE, variant
from specdec.native import loud
found = [library.find(variant(), library.places()[:1]) for library in (KERNELS, NOISE)]
assert all(found), found
from specdec.engine.native import kernels
assert loud.load() is not None
print(*found)
"""


def test_a_system_of_two_images(dockerfile: Dockerfile, tmp_path: Path, workshop: Path) -> None:
    made = offline(dockerfile, workshop, ["model"], quick=False)
    model, slim = (Image(dockerfile, name, made.build(name)) for name in ("model", "slim"))
    megabytes = model.megabytes()
    assert told_size("model") == pytest.approx(megabytes, rel=0.1), f"docs/kubernetes.md: the model image adds {megabytes} MB"
    with contextlib.suppress(build.BuildFailed):
        build.variant()  # raises on a machine that could not use them
        libraries = model.python(LIBRARIES)
        assert libraries.returncode == 0 and libraries.stdout.count("/opt/specdec/") == 2, libraries
    before = content(model.tree)
    mounts = {"/model": save_tiny(tmp_path / "tiny", seed=0, window=256)}
    for file in mounts["/model"].iterdir():
        file.chmod(0o644)  # weights are saved for their owner alone, who is somebody else here
    pool = {"MODEL": "/model", "DTYPE": "float32", "KV_TOKENS": "4096", "PORT": "0", "METRICS_PORT": "0", "HEALTH_PORT": "0"}
    with contextlib.ExitStack() as running:
        target, draft = (
            running.enter_context(model.run(tmp_path / f"{role}.log", pool, mounts, [f"{role}_service"])) for role in ("target", "draft")
        )
        settings = {
            **{name: "0" for name in ("PORT", "METRICS_PORT", "HEALTH_PORT")},
            "TOKENIZER": "/model",
            "TARGETS": f"127.0.0.1:{target.wait_ready().port}",
            "DRAFTS": f"127.0.0.1:{draft.wait_ready().port}",
        }
        orchestrator = running.enter_context(slim.run(tmp_path / "orchestrator.log", settings, mounts))
        texts = asyncio.run(_texts(orchestrator.wait_ready()))
        assert len(texts) == 2 and texts[0] == texts[1] and len(texts[0]) == TOKENS
        for container in (orchestrator, draft, target):
            assert unprivileged(container.who()) and container.writable() == ["/tmp"]
            assert container.stop() == 0, container.log.read_text()
            log = container.log.read_text()
            assert "Traceback" not in log and "Read-only" not in log and "not compiled" not in log, log
    assert content(model.tree) == before
    _stopped_while_it_loads(model, tmp_path, pool, mounts)


async def _texts(container: Container) -> list[list[int]]:
    async with Client(f"127.0.0.1:{container.port}") as client:
        sampling = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True)
        while not (await client.get_model_info()).draft_available:
            await asyncio.sleep(0.05)
        fixed = {"seed": 3, "enable_adaptive_verification": False}
        answers = [await client.complete("Once upon a time", sampling, num_speculative_tokens=k, **fixed) for k in (0, 4)]
        assert answers[1].finished.speculative.num_draft_tokens > 0
        return [list(answer.token_ids) for answer in answers]


def _stopped_while_it_loads(model: Image, tmp_path: Path, pool: dict[str, str], mounts: dict[str, Path]) -> None:
    """F141: before it is ready it listens to SIGTERM too."""
    with model.run(tmp_path / "early.log", pool, mounts) as container:
        deadline = time.monotonic() + 30
        while "python" not in _program(container) and time.monotonic() < deadline:
            time.sleep(0.01)
        while not _hears(container, signal.SIGTERM) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(container.pid, signal.SIGTERM)
        assert container.popen.wait(30) == 0 and "ready role" not in container.log.read_text()


def _program(container: Container) -> str:
    with contextlib.suppress(OSError, IndexError):
        return os.readlink(f"/proc/{container.pid}/exe")
    return ""


def _hears(container: Container, number: int) -> bool:
    return bool(int(container.who()["SigCgt"], 16) >> (number - 1) & 1)

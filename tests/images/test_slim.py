"""The image of orchestrator and commands, built by the Dockerfile's own steps and run as Kubernetes would run it."""

from __future__ import annotations

import asyncio
import json
import re
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from specdec.bench.sim import folder as simulated
from specdec.bench.sim.path import Path as Text
from specdec.cli.main import GROUPS
from specdec.client import Client
from specdec.simulation import Simulation
from specdec.terms import SamplingParams
from tests.e2e import stack
from tests.images.builder import Builder
from tests.images.conftest import offline, online
from tests.images.container import Container, Image, content, unprivileged
from tests.images.dockerfile import Dockerfile
from tests.tools import ROOT
from tools.audit import pins

pytestmark = pytest.mark.chart
PROMPT = [20, 30, 40]
TOKENS = 24
PACKAGES = ("specdec/", "orchestrator/", "target_service/", "draft_service/")
LEFT_OUT = ("torch", "transformers", "safetensors", "matplotlib", "rich", "pytest", "scipy")
LISTED = """
import importlib.util, json
from importlib import metadata
print(json.dumps({"versions": {d.name: d.version for d in metadata.distributions()},
    "there": [name for name in %r if importlib.util.find_spec(name)]}))
"""
LIBRARIES = "from specdec.native.build import *; print([l.name for l in (KERNELS, NOISE) for k in VARIANTS if l.find(k, l.places()[:1])])"
NEEDS_MODEL = ("up", "demo", "bench", "bench-step", "bench-step --sampling")
COMMANDS = """
import contextlib, io, json
from specdec.cli.main import GROUPS, main
def said(words, terminal=False):
    out = io.StringIO()
    out.isatty = lambda: terminal
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(words)
    except SystemExit as end:
        code = end.code
    return code, out.getvalue()
found = {words: said(words.split()) for words in %r}
top = ["top", "--metrics", %r]
found["top"], found["once"] = said(top, terminal=True), said([*top, "--once", "--interval", "0.2"])
found["helped"] = sorted(name for group in GROUPS.values() for name in group if said([name, "--help"])[0] == 0)
print(json.dumps(found))
"""


@pytest.mark.timeout(300)
def test_the_slim_image(dockerfile: Dockerfile, tmp_path: Path, workshop: Path) -> None:
    """F141 as well: Python as the first process hears SIGTERM."""
    model = tmp_path / "model"
    model.mkdir()
    vocabulary = simulated.write(model)
    settings = {"ENGINE_PATH": "sim", "KV_TOKENS": "4096", "MODEL": str(model), "SIM": "step-ms=1,row_ms=0"}
    pools = [stack.start(role, f"{role}_service", settings, tmp_path) for role in ("target", "draft")]
    try:
        made = offline(dockerfile, workshop)
        image = Image(dockerfile, "slim", made.build("slim"))
        carries_every_file(made)
        has_what_it_should(image)
        before = content(image.tree)
        target, draft = (stack.wait_ready(process).endpoint for process in pools)
        settings = {"TOKENIZER": "/model", "TARGETS": target, "DRAFTS": draft, "PORT": "0", "METRICS_PORT": "0", "HEALTH_PORT": "0"}
        with image.run(tmp_path / "orchestrator.log", settings, {"/model": model}) as container:
            container.wait_ready()
            right = Text(Simulation(), vocabulary.size, PROMPT).upto(len(PROMPT) + TOKENS)[len(PROMPT) : len(PROMPT) + TOKENS]
            answers(container, right)
            commands_work(image, container, right)
            assert unprivileged(container.who()), container.who()
            assert container.writable() == ["/tmp"]
            assert container.left_in_tmp() == []
            assert container.stop() == 0, container.log.read_text()
        log = container.log.read_text()
        assert "Traceback" not in log and "Read-only" not in log and "Permission" not in log, log
        assert content(image.tree) == before
    finally:
        for process in pools:
            process.kill()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_slim_image_of_what_the_registry_has(dockerfile: Dockerfile, workshop: Path) -> None:
    """With compiled kernels and bytecode; its size is the one that the docs tell."""
    image = Image(dockerfile, "slim", online(dockerfile, workshop).build("slim"))
    has_what_it_should(image)
    megabytes = image.megabytes()
    assert told_size("slim") == pytest.approx(megabytes, rel=0.1), f"docs/kubernetes.md: the slim image adds {megabytes} MB"


def told_size(name: str) -> int:
    """Megabytes that docs/kubernetes.md says an image adds to its base."""
    found = re.search(rf"^\| `{name}`.*\| (\d+) MB \|", (ROOT / "docs/kubernetes.md").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def carries_every_file(made: Builder) -> None:
    """The wheel has all of our packages that went to the builder: modules, stubs, native sources, prompts, the mark of types."""
    (wheel,) = (made.built["own"] / "dist").iterdir()
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sent = {str(path.relative_to(made.context)) for path in made.context.rglob("*") if path.is_file()}
    assert packed == {path for path in sent if path.startswith(PACKAGES)}
    assert {"specdec/py.typed", "specdec/bench/prompts.jsonl", "specdec/v1/target_pb2.pyi", "specdec/native/src/noise.cpp"} <= packed


def has_what_it_should(image: Image) -> None:
    found = json.loads(image.python(LISTED % (LEFT_OUT,)).stdout)
    assert found["there"] == []
    locked, _ = pins((ROOT / "requirements.lock").read_text())
    foreign = {name: version for name, version in found["versions"].items() if locked.get(name.lower().replace("_", "-")) != version}
    assert foreign == {"specdec": metadata.version("specdec")}
    told = image.python(LIBRARIES)
    assert told.stdout.strip() == str(["kernels", "kernels", "noise", "noise"]), told
    # What is written is written by nobody but the builder.
    refused = image.call(["sh", "-c", "touch /opt/specdec/x; touch /x; touch /dev/null2; touch /tmp/x && echo only there"])
    assert refused.stdout == "only there\n" and refused.stderr.count("Read-only") == 3, refused


def answers(container: Container, right: list[int]) -> None:
    async def ask() -> None:
        async with Client(f"127.0.0.1:{container.port}") as client:
            sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
            for k in (0, 4):
                answer = await client.complete(PROMPT, sampling, seed=1, num_speculative_tokens=k)
                assert list(answer.token_ids) == right

    asyncio.run(ask())


def commands_work(image: Image, container: Container, right: list[int]) -> None:
    """All tell their flags. Those that compute or draw say what to install, those that only ask work."""
    told = image.python(COMMANDS % (NEEDS_MODEL, f"127.0.0.1:{container.metrics_port}"))
    found = json.loads(told.stdout)
    assert found.pop("helped") == sorted(name for group in GROUPS.values() for name in group), told
    code, said = found.pop("once")
    assert code == 0 and "ANSWERS" in said, (code, said)
    for words, (code, said) in found.items():
        extra = "tools" if words == "top" else "model"
        assert code == 2 and f"not installed here; pip install 'specdec[{extra}]'" in said, (words, code, said)
    for role in ("target", "draft"):
        refused = image.call(["python", "-m", f"{role}_service"])
        assert refused.returncode == 1 and refused.stderr.startswith(f"{role}: torch is not installed here; pip install"), refused
    asked = f"specdec generate --endpoint 127.0.0.1:{container.port} --token-ids '{PROMPT}' --max-tokens {TOKENS} --temperature 0"
    answer = image.call(["sh", "-c", f"{asked} --ignore-eos --json"])
    assert json.loads(answer.stdout)["token_ids"] == right, answer

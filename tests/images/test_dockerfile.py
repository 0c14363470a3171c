"""What the Dockerfile and .dockerignore say, without building anything."""

from __future__ import annotations

import platform
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from specdec.runtime.extras import EXTRAS
from tests.images import context, sandbox
from tests.images.builder import APT, SYSTEM_PACKAGES
from tests.images.conftest import tracked
from tests.images.dockerfile import Dockerfile, read
from tests.tools import ROOT, missing, require_tool
from tools import build_images, build_kernels
from tools.image_requirements import requirements

pytestmark = pytest.mark.chart
TARGETS = ("slim", "model")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_linter_has_nothing_to_say() -> None:
    done = subprocess.run([require_tool("hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_images_are_pinned_and_told_apart(dockerfile: Dockerfile) -> None:
    image, digest = dockerfile.arguments["PYTHON_IMAGE"], dockerfile.arguments["PYTHON_DIGEST"]
    assert re.fullmatch(r"[\w./-]+/python:3\.\d+\.\d+-slim-\w+", image), "a tag that names version and system"
    assert digest == "" or re.fullmatch(r"@sha256:[0-9a-f]{64}", digest)
    bases = {stage.base for stage in dockerfile.stages.values()} - dockerfile.stages.keys()
    assert bases == {"${PYTHON_IMAGE}${PYTHON_DIGEST}"}
    assert dockerfile.pairs("slim", "ARG")["VERSION"] == PROJECT["version"]


@pytest.mark.parametrize("name", TARGETS)
def test_what_runs(dockerfile: Dockerfile, name: str) -> None:
    entry, command = dockerfile.process(name)  # raises where a shell stands in between
    assert entry == ["/opt/specdec/bin/python", "-m"] and command == [{"slim": "orchestrator", "model": "target_service"}[name]]
    assert dockerfile.steps(name, "USER")[-1].rest == f"{sandbox.UID}:{sandbox.UID}"
    assert dockerfile.steps(name, "WORKDIR")[-1].rest == "/"
    assert dockerfile.steps(name, "RUN") == [], "what runs is copied from where it was built: no compiler, no cache"
    labels, prefix = dockerfile.pairs(name, "LABEL"), "org.opencontainers.image."
    assert labels[f"{prefix}title"] == f"specdec-{name}" and labels[f"{prefix}licenses"] == PROJECT["license"]
    assert {f"{prefix}{key}" for key in ("version", "revision", "created", "source", "base.name", "description")} <= labels.keys()
    assert dockerfile.pairs(name, "ENV")["PYTHONSAFEPATH"] == "1"


def test_every_stage_and_every_package_of_the_system_is_used(dockerfile: Dockerfile) -> None:
    used, waiting = set(), list(TARGETS)
    while waiting:
        for stage in dockerfile.line(waiting.pop()):
            used.add(stage.name)
            waiting += [step.flags["from"] for step in stage.steps if "from" in step.flags and step.flags["from"] not in used]
    assert used == dockerfile.stages.keys()
    installed = [APT.search(step.rest) for stage in dockerfile.stages.values() for step in stage.steps if "apt-get" in step.rest]
    assert [match["packages"] if match else None for match in installed] == [" ".join(SYSTEM_PACKAGES)]


@pytest.mark.parametrize("text", ["FROM a AS b\nADD x y\n", "FROM a AS b\nSHELL x\n", "RUN x\n", "FROM a AS b\nHEALTHCHECK CMD x\n"])
def test_an_instruction_that_nobody_tried_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "Dockerfile").write_text(text)
    with pytest.raises(ValueError, match="Dockerfile:"):
        read(tmp_path / "Dockerfile")


def test_only_what_is_listed_goes_to_the_builder(dockerfile: Dockerfile) -> None:
    sent = context.files(ROOT, tracked())
    folders = {path.split("/")[0] if "/" in path else "." for path in sent}
    assert folders == {".", "specdec", "orchestrator", "target_service", "draft_service", "tools"}
    copied = [
        source
        for stage in dockerfile.stages.values()
        for step in stage.steps
        if step.word == "COPY" and "from" not in step.flags
        for source in step.rest.split()[:-1]
    ]
    for source in copied:
        assert source in sent or any(path.startswith(source) for path in sent), f"{source} is copied and does not go to the builder"
    assert all(path in copied or any(path.startswith(source) for source in copied if source.endswith("/")) for path in sent)
    kept = context.Ignore((ROOT / ".dockerignore").read_text())
    made_here = (
        ".git/config", ".venv/bin/python", "models/a/model.safetensors", "tests/conftest.py", "specdec/__pycache__/a.pyc", "tools/audit.py",
        "specdec/native/built/noise-avx2-0-0.so", "specdec/.env", "specdec/engine/native/built/x", "specdec.egg-info/PKG-INFO", "id_rsa",
    )  # fmt: skip
    assert [path for path in made_here if kept.passes(path)] == []


def test_extras_are_those_of_the_package() -> None:
    names = {extra: {re.split(r"[<>=\[]", text)[0] for text in requirements(ROOT / "pyproject.toml", [extra])} for extra in EXTRAS}
    base = {re.split(r"[<>=\[]", text)[0] for text in requirements(ROOT / "pyproject.toml", [])}
    assert {extra: set(modules) for extra, modules in EXTRAS.items()} == {extra: found - base for extra, found in names.items()}
    assert not base & {module for modules in EXTRAS.values() for module in modules}
    with pytest.raises(SystemExit, match="no extra 'modle', only: model"):
        requirements(ROOT / "pyproject.toml", ["modle"])


def test_kernels_that_are_required_and_missing_end_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "specdec"
    for path in context.files(ROOT, tracked()):
        if path.startswith(("specdec/native/", "specdec/engine/native/")):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    monkeypatch.setattr(build_kernels, "package", lambda installed: package)
    monkeypatch.setattr("sys.argv", ["build_kernels.py", "--installed", "--required"])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert build_kernels.main() == 1
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert build_kernels.main() == 0
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert build_kernels.main() == 0
    assert len(list(package.rglob("built/*.so"))) == 4
    assert not (tmp_path / "home").exists()


def test_a_container_ends_with_whoever_started_it(tmp_path: Path) -> None:
    if (reason := sandbox.missing()) is not None:
        missing(*reason)
    words, tree = ["sh", "-c", "echo up && exec sleep 600"], tmp_path / "tree"
    tree.mkdir()
    popen = subprocess.Popen(sandbox.Sandbox(tree).command(words, {"PATH": "/usr/bin:/bin"}), stdout=subprocess.PIPE, text=True)
    assert popen.stdout is not None and popen.stdout.readline() == "up\n"
    popen.kill()
    assert popen.stdout.read() == ""  # the end of file: nobody is left who could write
    popen.wait()
    popen.stdout.close()


def test_make_images_says_what_it_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert build_images.main(["--print", "--registry", "registry.example/team", "--tag", "1.2.3", "--cuda"]) == 0
    slim, model = capsys.readouterr().out.strip().splitlines()
    assert "--target slim" in slim and "--tag registry.example/team/specdec-slim:1.2.3" in slim and "TORCH_INDEX" not in slim
    assert "--target model" in model and "--tag registry.example/team/specdec-model:1.2.3-cuda" in model
    assert "--build-arg TORCH_INDEX= " in model and "--build-arg VERSION=1.2.3" in model
    assert build_images.main(["--print", "--only", "slim", "--digest", "sha256:" + "0" * 64]) == 0
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert "--build-arg PYTHON_DIGEST=@sha256:000" in line and "specdec-slim:" + PROJECT["version"] in line
    with pytest.raises(SystemExit, match="64 hexadecimal"):
        build_images.main(["--print", "--digest", "sha256:abc"])


def test_make_images_without_an_engine_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="neither docker nor podman"):
        build_images.main([])
    asleep = tmp_path / "docker"
    asleep.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    asleep.chmod(0o755)
    with pytest.raises(SystemExit, match="docker is installed and does not answer: Cannot connect"):
        build_images.main([])


def test_make_images_builds_each_image_then_pushes_it_and_stops_at_the_first_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "podman"
    engine.write_text('#!/bin/sh\necho "asked: $1"\ncase "$*" in *--target\\ model*) exit 3;; esac\n')
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(build_images, "ENGINES", ("podman",))
    assert build_images.main(["--push", "--tag", "1"]) == 3
    asked = [line for line in capfd.readouterr().out.splitlines() if line.startswith("asked:")]
    assert asked == ["asked: build", "asked: push", "asked: build"]

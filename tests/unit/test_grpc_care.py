"""What gRPC for Python asks of those who use it: F133, F137, F147, F148, F151."""

from __future__ import annotations

import ast
import asyncio
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.client import Client, FailoverClient
from specdec.errors import Unavailable

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("specdec", "draft_service", "target_service", "orchestrator")
GENERATED = sorted((ROOT / "specdec" / "v1").glob("*_pb2*.py"))


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path not in GENERATED:
                yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def lowest(package: str) -> tuple[int, ...]:
    """That pyproject.toml lets in."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = [match[1] for line in wanted if (match := re.fullmatch(rf"{package}>=([0-9.]+)", line))]
    return version(bound)


@pytest.mark.parametrize("path", [p for p in GENERATED if p.name.endswith("_pb2.py")], ids=lambda p: p.name)
def test_F151_the_lowest_protobuf_can_import_the_generated_code(path: Path) -> None:
    """Code from a newer generator than the runtime refuses to be imported."""
    (made_by,) = re.findall(r"^# Protobuf Python Version: ([0-9.]+)$", path.read_text(), re.MULTILINE)
    assert lowest("protobuf") >= version(made_by)


@pytest.mark.parametrize("path", [p for p in GENERATED if p.name.endswith("_grpc.py")], ids=lambda p: p.name)
def test_F151_the_lowest_grpcio_can_import_the_generated_code(path: Path) -> None:
    for made_by in re.findall(r"^GRPC_GENERATED_VERSION = '([0-9.]+)'$", path.read_text(), re.MULTILINE):
        assert lowest("grpcio") >= version(made_by)


def test_F137_no_server_has_threads_that_a_cancelled_stream_could_keep() -> None:
    blocking = [
        f"{name}:{node.lineno}"
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "grpc.server"
    ]
    assert blocking == []


def test_F147_F148_channels_and_servers_are_made_inside_the_one_loop_of_a_process() -> None:
    """Nothing of gRPC is made while a module is imported."""
    early: list[str] = []
    for name, tree in sources():
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            made = [ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)]
            early += [f"{name}: {call}" for call in made if re.fullmatch(r"grpc\.(aio\.)?(server|\w+_channel)|open_channel", call)]
    assert early == []


def test_F133_nothing_is_forked_where_gRPC_is() -> None:
    """A copy of a process with channels hangs. Workers are spawned; the one program that forks has no gRPC in it."""
    forks, started = [], []
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                forks += [name] if re.fullmatch(r"os\.(fork|forkpty)|pty\.fork", called) else []
                if called.startswith("multiprocessing.") and not called.endswith(("get_context", "parent_process")):
                    started.append(f"{name}:{node.lineno}")
                if called.endswith("get_context"):
                    assert [ast.unparse(word) for word in node.args] == ["'spawn'"], f"{name}:{node.lineno}"
    assert started == [] and forks == ["specdec/runtime/trial.py"]
    there = "import sys, specdec.runtime.trial; sys.exit(any(name.startswith('grpc') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", there], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_F148_clients_that_were_made_before_the_loop_work_in_it() -> None:
    alone, several = Client("127.0.0.1:1"), FailoverClient(["127.0.0.1:1", "127.0.0.1:2"], retry_s=0.0)

    async def use() -> None:
        for client in (alone, several):
            with pytest.raises(Unavailable):
                await client.get_model_info()
            await client.close()

    asyncio.run(use())

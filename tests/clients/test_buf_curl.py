"""buf curl without any schema file: everything it knows comes from the servers' reflection."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.rpc import error_details_pb2

from specdec.client import SyncClient
from specdec.terms import SamplingParams
from tests.e2e.ask import Ask, answers
from tests.e2e.stack import Process, Stack
from tests.tools import require_tool

pytestmark = [pytest.mark.clients, pytest.mark.timeout(60)]
SEED = 2**64 - 5
HEALTH = {"grpc.health.v1.Health/Check", "grpc.health.v1.Health/List", "grpc.health.v1.Health/Watch"}
METHODS = {
    "target": {"specdec.v1.TargetService/Verify", "specdec.v1.TargetService/GetModelInfo"},
    "draft": {"specdec.v1.DraftService/Draft", "specdec.v1.DraftService/GetModelInfo"},
    "orchestrator": {
        f"specdec.v1.GenerationService/{name}" for name in ("Generate", "GetModelInfo", "Tokenize", "Detokenize", "GetMetrics")
    },
}  # fmt: skip
Curl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def curl(tmp_path: Path) -> Curl:
    """Runs in an empty folder, so that no schema can be found by accident."""
    program = require_tool("buf")

    def run(process: Process, path: str = "", *more: str) -> subprocess.CompletedProcess[str]:
        url = f"http://{process.endpoint}" + (f"/{path}" if path else "")
        command = [program, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *more, url]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)

    return run


def service_of(stack: Stack, role: str) -> Process:
    return {"target": stack.targets, "draft": stack.drafts, "orchestrator": stack.orchestrators}[role][0]


def replies(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The JSON documents on stdout, one after the other."""
    assert done.returncode == 0, done.stderr
    decoder, text, found = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        document, end = decoder.raw_decode(text)
        found.append(document)
        text = text[end:].lstrip()
    return found


@pytest.mark.parametrize("role", METHODS)
def test_reflection_lists_every_method(curl: Curl, stack: Stack, role: str) -> None:
    done = curl(service_of(stack, role), "", "--list-methods")
    assert done.returncode == 0, done.stderr
    listed = set(done.stdout.split())
    assert {name for name in listed if name.startswith("specdec.")} == METHODS[role]
    assert HEALTH & listed >= {"grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"}


@pytest.mark.parametrize("role", METHODS)
def test_model_info_of_each_service(curl: Curl, stack: Stack, role: str) -> None:
    service = next(iter(METHODS[role])).split("/")[0]
    (reply,) = replies(curl(service_of(stack, role), f"{service}/GetModelInfo"))
    assert reply["info"]["vocabSize"] == 320
    assert reply["info"]["dtype"] == "float64"


@pytest.mark.parametrize("role", METHODS)
@pytest.mark.parametrize("name", ["", "liveness", "own"])
def test_health_of_each_service(curl: Curl, stack: Stack, role: str, name: str) -> None:
    asked = next(iter(METHODS[role])).split("/")[0] if name == "own" else name
    (reply,) = replies(curl(service_of(stack, role), "grpc.health.v1.Health/Check", "-d", json.dumps({"service": asked})))
    assert reply == {"status": "SERVING"}


def test_health_of_an_unknown_service(curl: Curl, stack: Stack) -> None:
    done = curl(stack.targets[0], "grpc.health.v1.Health/Check", "-d", '{"service": "specdec.v1.GenerationService"}')
    assert done.returncode != 0
    assert json.loads(done.stderr)["code"] == "not_found"


def test_text_to_tokens_and_back(curl: Curl, stack: Stack) -> None:
    service = service_of(stack, "orchestrator")
    text = "the hat, für 日本"
    (ids,) = replies(curl(service, "specdec.v1.GenerationService/Tokenize", "-d", json.dumps({"text": text})))
    (back,) = replies(curl(service, "specdec.v1.GenerationService/Detokenize", "-d", json.dumps(ids)))
    assert back == {"text": text}


def test_what_an_orchestrator_counts(curl: Curl, stack: Stack) -> None:
    (metrics,) = replies(curl(service_of(stack, "orchestrator"), "specdec.v1.GenerationService/GetMetrics", "-d", "{}"))
    assert "\nspecdec_rounds_total " in metrics["text"]


def test_a_chat_to_tokens(curl: Curl, stack: Stack) -> None:
    """With the template's own opening of an answer and without it, as our client counts them."""
    chat = [{"role": "user", "content": "the hat"}]
    request = {"messages": {"messages": chat, "addGenerationPrompt": False, "templateArgs": {"other": "[1]"}}}
    (ids,) = replies(curl(service_of(stack, "orchestrator"), "specdec.v1.GenerationService/Tokenize", "-d", json.dumps(request)))
    with SyncClient(stack.endpoint) as client:
        assert tuple(ids["tokenIds"]) == client.tokenize(chat, add_generation_prompt=False) != client.tokenize(chat)


def test_generate(curl: Curl, stack: Stack) -> None:
    """The stream as protobuf's JSON shows it: the same tokens, text and seed as our own client gets."""
    request = {"tokenIds": {"ids": [10, 11]}, "seed": str(SEED), "sampling": {"maxTokens": 24, "logprobs": 1}}
    told = replies(curl(service_of(stack, "orchestrator"), "specdec.v1.GenerationService/Generate", "-d", json.dumps(request)))
    want = answers(stack.endpoint, [Ask([10, 11], SamplingParams(max_tokens=24, logprobs=1), {"seed": SEED})])[0]
    assert list(told[0]) == ["started"] and list(told[-1]) == ["finished"]
    deltas = [message["delta"] for message in told[1:-1]]
    assert tuple(token for delta in deltas for token in delta.get("tokenIds", ())) == want.token_ids
    assert "".join(delta.get("text", "") for delta in deltas) == want.text
    assert sum(len(delta.get("logprobs", ())) for delta in deltas) == len(want.token_ids)
    assert int(told[0]["started"]["seed"]) == SEED
    assert told[-1]["finished"]["finishReason"] == f"FINISH_REASON_{want.finished.finish_reason.name}"


def test_errors_carry_the_field(curl: Curl, stack: Stack) -> None:
    """Rich details arrive as well: BadRequest with the field's name."""
    request = json.dumps({"text": "a", "sampling": {"topP": 2}})
    done = curl(service_of(stack, "orchestrator"), "specdec.v1.GenerationService/Generate", "-d", request)
    assert done.returncode != 0
    error = json.loads(done.stderr)
    assert error["code"] == "invalid_argument"
    assert error["message"].startswith("sampling.top_p: ")
    (detail,) = error["details"]
    assert detail["type"] == "google.rpc.BadRequest"
    packed = base64.b64decode(detail["value"] + "==")  # without padding on the wire
    assert error_details_pb2.BadRequest.FromString(packed).field_violations[0].field == "sampling.top_p"

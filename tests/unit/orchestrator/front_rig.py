"""GenerationService over a real connection, with a scripted core behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from orchestrator.fronts.grpc import GenerationServicer
from orchestrator.fronts.meters import Meters
from orchestrator.fronts.requests import Defaults
from orchestrator.text import TextModel
from specdec.runtime.channels import channel_options, server_options
from specdec.runtime.guard import Guard
from specdec.runtime.interceptor import CallInterceptor
from specdec.runtime.telemetry import Telemetry
from specdec.status import error_from_rpc
from specdec.terms import RejectionMethod
from specdec.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.fakes_driver import ScriptedBackend, model_info
from tests.unit.orchestrator.tokenizers_here import byte_level

TOKENIZER = byte_level()
END = 2  # ends a text
TEMPLATE = "{% for m in messages %}<|im_end|>{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def text_model_in(folder: Path) -> TextModel:
    TOKENIZER.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END}))
    return TextModel(folder)


class Service:
    """The front on a port, its scripted core, and a client."""

    def __init__(self, backend: ScriptedBackend, stub: Any) -> None:
        self.backend, self.stub = backend, stub

    def call(self, **fields: Any) -> Any:
        return self.stub.Generate(request(**fields))

    async def collect(self, **fields: Any) -> list[generation_pb2.GenerateResponse]:
        return [message async for message in self.call(**fields)]

    async def quiet(self) -> None:
        """Until nothing runs any more."""
        async with asyncio.timeout(5.0):
            while self.backend.live:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    text_model: TextModel, telemetry: Telemetry | None = None, *, show_metrics: bool = False, guard: Guard | None = None
) -> AsyncIterator[Service]:
    telemetry = telemetry or Telemetry("orchestrator", metrics_port=-1)
    backend = ScriptedBackend(info=model_info(TOKENIZER.get_vocab_size()))
    defaults = Defaults(3, False, RejectionMethod.COUPLED, None)
    servicer = GenerationServicer(backend, text_model, defaults, Meters(telemetry), show_metrics=show_metrics)
    server = grpc.aio.server(interceptors=[CallInterceptor(telemetry, guard=guard)], options=server_options())
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        yield Service(backend, generation_pb2_grpc.GenerationServiceStub(channel))
    await server.stop(None)
    servicer.close()
    telemetry.close()


def request(sampling: dict[str, Any] | None = None, **fields: Any) -> generation_pb2.GenerateRequest:
    if not {"text", "token_ids", "messages"} & fields.keys():
        fields["text"] = "the"
    params = None if sampling is None else common_pb2.SamplingParams(**sampling)
    return generation_pb2.GenerateRequest(sampling=params, **fields)


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def texts(messages: list[generation_pb2.GenerateResponse]) -> str:
    return "".join(message.delta.text for message in messages if message.HasField("delta"))


def tokens(messages: list[generation_pb2.GenerateResponse]) -> list[int]:
    return [i for message in messages if message.HasField("delta") for i in message.delta.token_ids]


async def failure(call: Any) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return error_from_rpc(caught.value)

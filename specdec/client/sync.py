"""The calls without async."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from specdec.client.answers import Completion, Event, ServiceInfo
from specdec.client.credentials import OPEN, Credentials
from specdec.client.failover import client_of
from specdec.client.requests import CallOptions, Prompt
from specdec.terms import SamplingParams

_T = TypeVar("_T")


class SyncClient:
    """Client without async, for scripts: one event loop of its own, driven only while a call waits. Several endpoints, with commas between
    them, are used as FailoverClient does. Raises InvalidRequest for what is no endpoint."""

    def __init__(self, endpoint: str, credentials: Credentials = OPEN) -> None:
        self._client = client_of(endpoint, credentials)
        self._runner = asyncio.Runner()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._run(self._client.close)
        self._runner.close()

    def generate(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[CallOptions]) -> Iterator[Event]:
        events = self._client.generate(prompt, sampling, **options)
        try:
            while True:
                try:
                    yield self._run(events.__anext__)
                except StopAsyncIteration:
                    return
        finally:
            self._run(events.aclose)

    def complete(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[CallOptions]) -> Completion:
        return self._run(lambda: self._client.complete(prompt, sampling, **options))

    def completions(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[CallOptions]) -> tuple[Completion, ...]:
        return self._run(lambda: self._client.completions(prompt, sampling, **options))

    def get_model_info(self) -> ServiceInfo:
        return self._run(self._client.get_model_info)

    def get_metrics(self) -> str:
        return self._run(self._client.get_metrics)

    def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        add_special_tokens: bool = True,
        template_args: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
    ) -> tuple[int, ...]:
        return self._run(
            lambda: self._client.tokenize(
                prompt,
                add_special_tokens=add_special_tokens,
                template_args=template_args,
                add_generation_prompt=add_generation_prompt,
            )
        )

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._run(lambda: self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens))

    def _run(self, call: Callable[[], Awaitable[_T]]) -> _T:
        async def inside() -> _T:
            return await call()

        return self._runner.run(inside())

"""The front of the orchestrator, shared by the tests that talk to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from orchestrator.text import TextModel
from tests.unit.orchestrator.front_rig import Service, serving, text_model_in


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model_in(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def service(text_model: TextModel) -> AsyncIterator[Service]:
    async with serving(text_model) as running:
        yield running

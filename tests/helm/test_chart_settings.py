"""tools/chart_settings.py: the settings' dataclasses and the chart's schema say the same."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.runtime.settings import CommonSettings, setting
from tests.helm.programs import CHART
from tools import chart_settings
from tools.chart_settings import DECIDED, config_schema, laid_out

pytestmark = [pytest.mark.chart, pytest.mark.timeout(60)]


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Sample(CommonSettings):
    model: Path = setting(doc="decided by the chart")
    some_tokens: int = setting(7, low=1, high=9, doc="tokens")
    some_share: float = setting(0.5, low=0, high=0.75, doc="a share")
    some_colour: Colour | None = setting(None, doc="a colour")
    some_names: tuple[str, ...] = setting((), doc="names")


def test_each_type_has_its_schema() -> None:
    found = config_schema(Sample)["properties"]
    assert found["someTokens"] == {
        "description": "SPECDEC_SOME_TOKENS: tokens",
        "type": "integer",
        "minimum": 1,
        "maximum": 9,
        "default": 7,
    }
    assert found["someShare"]["maximum"] == 0.75
    assert found["someColour"] == {"description": "SPECDEC_SOME_COLOUR: a colour", "type": "string", "enum": ["red"]}
    assert found["someNames"] == {"description": "SPECDEC_SOME_NAMES: names", "type": "array", "items": {"type": "string"}}
    assert found["logLevel"]["enum"] == ["debug", "info", "warning", "error"]
    assert "model" not in found


def test_the_schema_is_up_to_date_and_the_check_sees_when_it_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert chart_settings.main(["--check"]) == 0
    copy = tmp_path / "values.schema.json"
    text = chart_settings.SCHEMA.read_text()
    copy.write_text(text.replace('"minimum": 64', '"minimum": 65', 1))
    monkeypatch.setattr(chart_settings, "SCHEMA", copy)
    assert chart_settings.main(["--check"]) == 1
    assert chart_settings.main([]) == 0
    assert copy.read_text() == text


def test_what_the_chart_decides_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECIDED, "NO_SUCH", "")
    assert chart_settings.main(["--check"]) == 1


def test_the_reasons_name_keys_of_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name, reason in DECIDED.items():
        for key in re.findall(r"`([^`]+)`", reason):
            for component in ("target", "draft") if key.startswith("<component>") else ("",):
                found: Any = values
                for part in key.replace("<component>", component).split("."):
                    assert part in found, f"{name}: {key}"
                    found = found[part]


def test_long_json_is_broken_and_means_the_same() -> None:
    value = {"a": [{"b": "x" * 100}, {"c": ["y" * 100, {}]}], "d": {"e": {}, "f": "ä" * 120}}
    text = laid_out(value)
    assert json.loads(text) == value and laid_out(json.loads(text)) == text
    assert max(map(len, text.splitlines())) <= chart_settings.LINE

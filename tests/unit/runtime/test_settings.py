"""Settings: what is read, what is refused and how it is said."""

from __future__ import annotations

import enum
import importlib
import logging
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path

import pytest

from specdec.runtime import names
from specdec.runtime.settings import CommonSettings, SettingsError, load, setting


class Method(enum.Enum):
    COUPLED = "coupled"
    STANDARD = "standard"


@dataclass(frozen=True, kw_only=True)
class Sample(CommonSettings):
    model: Path = setting(doc="folder of the model")
    kv_tokens: int = setting(8192, low=64, doc="room, tokens")
    share: float = setting(0.5, low=0, high=1, doc="share")
    method: Method = setting(Method.COUPLED, doc="method")
    targets: tuple[str, ...] = setting((), doc="addresses")
    limit: int | None = setting(None, low=1, doc="limit")

    def problems(self) -> list[str]:
        return ["SPECDEC_SHARE must be below SPECDEC_LIMIT"] if self.limit is not None and self.share >= self.limit else []


MODEL = {"SPECDEC_MODEL": "m"}
GOOD = {
    "SPECDEC_KV_TOKENS=64": ("kv_tokens", 64),
    "SPECDEC_SHARE=1": ("share", 1.0),
    "SPECDEC_METHOD=standard": ("method", Method.STANDARD),
    "SPECDEC_TARGETS=a:1, b:2": ("targets", ("a:1", "b:2")),
    "SPECDEC_TARGETS=": ("targets", ()),
    "SPECDEC_LIMIT=": ("limit", None),
    "SPECDEC_LIMIT=7": ("limit", 7),
    "SPECDEC_CPU_AFFINITY=0,1": ("cpu_affinity", (0, 1)),
    "SPECDEC_DIE_WITH_PARENT=yes": ("die_with_parent", True),
    "SPECDEC_DIE_WITH_PARENT=0": ("die_with_parent", False),
    "SPECDEC_HOST=": ("host", ""),
    "SPECDEC_PORT=65535": ("port", 65535),
}
BAD = {
    "SPECDEC_KV_TOKENS=63": "at least 64",
    "SPECDEC_KV_TOKENS=1.5": "whole number",
    "SPECDEC_KV_TOKENS=": "whole number",
    "SPECDEC_SHARE=nan": "finite",
    "SPECDEC_SHARE=x": "a number",
    "SPECDEC_SHARE=1.01": "0 to 1",
    "SPECDEC_METHOD=best": "coupled, standard",
    "SPECDEC_DIE_WITH_PARENT=maybe": "true or false",
    "SPECDEC_LOG_LEVEL=loud": "debug, info, warning, error",
    "SPECDEC_PORT=65536": "0 to 65535",
    "SPECDEC_CPU_AFFINITY=0,-1": "0 to 4095",
    "SPECDEC_LIMIT=0": "at least 1",
    "SPECDEC_MODEL=": "a path",
    "SPECDEC_KV_TOKEN=9": "did you mean SPECDEC_KV_TOKENS?",
    "SPECDEC_QQQQQ=9": "known are",
}


def pair(assignment: str) -> dict[str, str]:
    name, _, value = assignment.partition("=")
    return {name: value}


def test_defaults() -> None:
    settings = load(Sample, MODEL)
    assert settings == Sample(model=Path("m")) and settings.host == "127.0.0.1" and settings.metrics_port == 0
    with pytest.raises(FrozenInstanceError):
        settings.port = 1  # type: ignore[misc]


@pytest.mark.parametrize("assignment", GOOD)
def test_good_values(assignment: str) -> None:
    field, expected = GOOD[assignment]
    assert getattr(load(Sample, MODEL | pair(assignment)), field) == expected


@pytest.mark.parametrize("assignment", BAD)
def test_bad_values_are_named_with_what_would_be_accepted(assignment: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(Sample, MODEL | pair(assignment))
    assert assignment.partition("=")[0] in str(caught.value) and BAD[assignment] in str(caught.value)


def test_all_problems_in_one_message() -> None:
    with pytest.raises(SettingsError) as caught:
        load(Sample, {"SPECDEC_PORT": "x", "SPECDEC_SHARE": "2", "SPECDEC_NOPE": ""})
    assert all(name in str(caught.value) for name in ("PORT", "SHARE", "NOPE", "SPECDEC_MODEL is required"))
    assert len(str(caught.value).splitlines()) == 5


def test_rules_between_fields() -> None:
    with pytest.raises(SettingsError, match="must be below"):
        load(Sample, MODEL | {"SPECDEC_SHARE": "1", "SPECDEC_LIMIT": "1"})


LINKS = {
    "SPECDEC_TARGET_SERVICE_HOST": "10.0.0.1",
    "SPECDEC_TARGET_SERVICE_PORT": "8000",
    "SPECDEC_TARGET_SERVICE_PORT_GRPC": "8000",
    "SPECDEC_TARGET_PORT": "tcp://10.0.0.1:8000",
    "SPECDEC_PORT": "tcp://10.0.0.1:8000",  # of a Service called just "specdec": our own name, not our value
    "SPECDEC_METRICS_PORT": "tcp://10.0.0.2:9000",
    "SPECDEC_TARGET_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "SPECDEC_TARGET_PORT_8000_TCP_PROTO": "tcp",
    "SPECDEC_TARGET_PORT_8000_TCP_PORT": "8000",
    "SPECDEC_TARGET_PORT_8000_TCP_ADDR": "10.0.0.1",
}


def test_service_links_and_neighbours_names_cost_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    settings = load(Sample, MODEL | LINKS | {"SPECDEC_MAX_RUNNING": "not even a number", "OTHER": "x", "SPECDEC_NICE": "3"})
    assert (settings.port, settings.metrics_port, settings.nice) == (0, 0, 3)
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in (*LINKS, "SPECDEC_MAX_RUNNING")) and "NICE" not in record.getMessage()


@pytest.mark.parametrize("name", ["SPECDEC_TARGET_PORT", "SPECDEC_TARGET_PORT_X_TCP", "SPECDEC_SERVICE_HOSTS"])
def test_what_only_resembles_a_service_link_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        load(Sample, MODEL | {name: "8000"})


def test_no_setting_of_ours_looks_like_a_service_link() -> None:
    from specdec.runtime.settings import PREFIX, _is_service_link

    assert not [name for name in names.known_elsewhere() if _is_service_link(PREFIX + name, "1")]


def settings_of(role: str) -> type[CommonSettings]:
    package = {"target": "target_service", "draft": "draft_service"}.get(role, role)
    module = importlib.import_module(f"{package}.settings")
    (cls,) = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__ and issubclass(c, CommonSettings)]
    return cls


@pytest.mark.parametrize("role", names.SETTINGS)
def test_the_table_of_names_equals_the_dataclasses(role: str) -> None:
    cls = settings_of(role)
    fields = {name.upper() for name in cls.__dataclass_fields__}
    assert fields == names.SETTINGS[role]
    assert fields >= names.COMMON == {name.upper() for name in CommonSettings.__dataclass_fields__}


AT_ONCE = {"STEP_DEADLINE_MS", "PLACEMENT_WAIT_MS", "HUNG_STEP_MS"}  # 0 would end every round, session or process


@pytest.mark.parametrize("role", names.SETTINGS)
def test_F82_F170_no_wait_is_negative_or_without_end(role: str) -> None:
    """-1 means "for ever" in some places, "at once" in others. And who hangs is noticed within a minute unless told otherwise."""
    cls = settings_of(role)
    waits = [name for name in names.SETTINGS[role] if name.endswith("_MS")]
    assert len(waits) > 3
    for name in waits:
        for value in ("-1", "inf", "nan", *(["0"] if name in AT_ONCE else [])):
            with pytest.raises(SettingsError, match=f"SPECDEC_{name}\\b"):
                load(cls, {"SPECDEC_MODEL": "m", "SPECDEC_TOKENIZER": "t", "SPECDEC_TARGETS": "a:1", f"SPECDEC_{name}": value})
    if "HUNG_STEP_MS" in waits:
        assert cls.__dataclass_fields__["hung_step_ms"].default <= 60_000


@pytest.mark.parametrize("service", ["draft_service", "target_service"])
def test_few_bits_on_a_gpu_are_refused_with_what_would_do(service: str) -> None:
    settings = importlib.import_module(f"{service}.settings").Settings
    on_gpu = {"SPECDEC_MODEL": "m", "SPECDEC_DEVICE": "cuda"}
    usual = {"draft_service": "int4", "target_service": "int8"}[service]
    for given, dtype in (({}, usual), ({"SPECDEC_DTYPE": "int8"}, "int8")):
        with pytest.raises(SettingsError, match=f"SPECDEC_DTYPE={dtype} runs on the CPU only; .* bfloat16"):
            load(settings, {**on_gpu, **given})
    assert load(settings, {**on_gpu, "SPECDEC_DTYPE": "bfloat16"}).device == "cuda"

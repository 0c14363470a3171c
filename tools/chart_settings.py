"""The services' settings in the chart: values.schema.json gets `<component>.config` from the settings' dataclasses.

    python tools/chart_settings.py          # rewrites helm/specdec/values.schema.json
    python tools/chart_settings.py --check  # only tells what is out of date; exit code 1 then

A setting is either a key of `<component>.config` (camelCase: SPECDEC_KV_TOKENS is kvTokens) or one that the chart decides (DECIDED).
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import math
import sys
import types
import typing
from pathlib import Path
from typing import Any

from draft_service.settings import Settings as DraftSettings
from orchestrator.settings import OrchestratorSettings
from specdec.runtime import names
from specdec.runtime.settings import PREFIX
from target_service.settings import Settings as TargetSettings

SCHEMA = Path(__file__).resolve().parent.parent / "helm" / "specdec" / "values.schema.json"
COMPONENTS: dict[str, type[Any]] = {"orchestrator": OrchestratorSettings, "target": TargetSettings, "draft": DraftSettings}
LINE = 140

# Settings that no `config` takes, and why. In backticks the keys of values that decide instead.
DECIDED: dict[str, str] = {
    "HOST": "`network.listenAddress`: pods are called by their address, all of them alike",
    "PORT": "fixed: Services, policies and SPECDEC_TARGETS name it",
    "METRICS_PORT": "fixed: the PodMonitor and policies name it",
    "HEALTH_PORT": "fixed: probes name it",
    "SCALER_PORT": "fixed; on where `<component>.autoscaling.keda.trigger` is external",
    "PEERS": "the orchestrators' headless Service, where the scaler is on",
    "TARGETS": "`target.pools`, `discovery.type`, `discovery.extraTargets`",
    "DRAFTS": "`draft.pools`, `discovery.type`, `discovery.extraDrafts`",
    "MODEL": "where `<component>.model` is mounted",
    "TOKENIZER": "where `orchestrator.tokenizer` is mounted",
    "DEVICE": "`<component>.gpu.count`: above 0 it is cuda",
    "OTLP_ENDPOINT": "`telemetry.otlpEndpoint`: one collector for all",
    "TLS_CERT": "`tls`: where the Secret is mounted",
    "TLS_KEY": "`tls`: where the Secret is mounted",
    "TLS_CLIENT_CA": "`tls`: where the Secret is mounted",
    "ALLOWED_IDENTITIES": "`tls.front.allowedIdentities`, `tls.internal.allowedIdentities`",
    "TLS_CA": "`tls.internal`: where the Secret is mounted",
    "TLS_CLIENT_CERT": "`tls.internal`: where the Secret is mounted",
    "TLS_CLIENT_KEY": "`tls.internal`: where the Secret is mounted",
    "TLS_SERVER_NAME": "`tls.internal.serverName`",
    "TOKENS_FILE": "`auth.existingSecret`: where it is mounted",
    "ALLOW_INSECURE_TOKENS": "`auth.allowInsecure`",
    "PARENT_PIPE": "for a parent on the same machine; a container's service has none",
    "DIE_WITH_PARENT": "for a parent on the same machine; a container's service has none",
}


def config_key(name: str) -> str:
    """KV_TOKENS or kv_tokens as a key of values: kvTokens."""
    first, *rest = name.lower().split("_")
    return first + "".join(part.capitalize() for part in rest)


def config_schema(settings: type[Any]) -> dict[str, Any]:
    """JSON schema (draft 7) of a component's `config`."""
    kinds = typing.get_type_hints(settings)
    fields = [field for field in dataclasses.fields(settings) if field.name.upper() not in DECIDED]
    properties = {config_key(field.name): _property(field, kinds[field.name]) for field in sorted(fields, key=lambda f: f.name)}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(field: dataclasses.Field[Any], kind: Any) -> dict[str, Any]:
    """One setting: its documentation, type, bounds and the service's own default."""
    made: dict[str, Any] = {"description": f"{PREFIX}{field.name.upper()}: {field.metadata['doc']}"}
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is tuple:
        made |= {"type": "array", "items": _scalar(field, typing.get_args(kind)[0])}
    else:
        made |= _scalar(field, kind)
    if isinstance(field.default, enum.Enum):
        made["default"] = field.default.value
    elif isinstance(field.default, bool | int | float | str):
        made["default"] = field.default
    return made


def _scalar(field: dataclasses.Field[Any], kind: Any) -> dict[str, Any]:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"type": "string", "enum": [str(member.value) for member in kind]}
    made: dict[str, Any] = {"type": {bool: "boolean", int: "integer", float: "number"}.get(kind, "string")}
    if field.metadata["choices"]:
        made["enum"] = list(field.metadata["choices"])
    for word, bound in (("minimum", field.metadata["low"]), ("maximum", field.metadata["high"])):
        if bound is not None:
            made[word] = int(bound) if math.floor(bound) == bound else bound
    return made


def problems() -> list[str]:
    """What is wrong with DECIDED itself."""
    known = frozenset().union(*names.SETTINGS.values())
    return [f"DECIDED names {name}, which is a setting of no service" for name in sorted(DECIDED) if name not in known]


def generated(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` with the configs' definitions written anew; everything else stays."""
    configs = {f"{component}Config": config_schema(settings) for component, settings in COMPONENTS.items()}
    return {**schema, "definitions": {**schema["definitions"], **configs}}


def laid_out(value: Any, depth: int = 0, room: int = LINE) -> str:
    """JSON in which whatever fits on a line is on one. `room` = columns left on the first line."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) <= room or not value or not isinstance(value, dict | list):
        return flat
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, list):
        lines = [inner + laid_out(item, depth + 1, LINE - len(inner) - 1) for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{outer}]"
    lines = []
    for key, item in value.items():
        start = f"{inner}{json.dumps(key, ensure_ascii=False)}: "
        lines.append(start + laid_out(item, depth + 1, LINE - len(start) - 1))
    return "{\n" + ",\n".join(lines) + f"\n{outer}}}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when something is out of date")
    check = parser.parse_args(arguments).check
    if told := problems():
        print("tools/chart_settings.py:", *told, sep="\n  ", file=sys.stderr)
        return 1
    found = SCHEMA.read_text()
    wanted = laid_out(generated(json.loads(found))) + "\n"
    if found == wanted:
        return 0
    if check:
        print("helm/specdec/values.schema.json is out of date: .venv/bin/python tools/chart_settings.py", file=sys.stderr)
        return 1
    SCHEMA.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""SPECDEC_* variables → a frozen dataclass, read once and checked at once. The only reader of the environment.

    @dataclass(frozen=True, kw_only=True)
    class Settings(CommonSettings):
        model: Path = setting(doc="folder of the model")           # no default: required
        kv_tokens: int = setting(8192, low=64, doc="room for keys and values, tokens")

    settings = load(Settings)

Field `kv_tokens` is SPECDEC_KV_TOKENS. Types: str, int, float, bool, Path, an Enum (by value), tuple of one of these (comma
separated), and `X | None` (empty = None). An unknown SPECDEC_* name, a value that does not parse and a value out of bounds stop the
start; one message names all of them. A class may add `problems(self) -> list[str]` for rules between fields.

Two kinds of foreign names are ignored with one log line. Kubernetes puts addresses of Services into every container's environment,
and a Service called `specdec-target` makes SPECDEC_TARGET_PORT=tcp://…; and one environment may serve several services of ours.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import logging
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar

from specdec.errors import SpecdecError
from specdec.runtime import names

PREFIX = "SPECDEC_"
_SERVICE_LINK = re.compile(r".*(_SERVICE_HOST|_SERVICE_PORT(_.*)?|_PORT_\d+_TCP(_(PROTO|PORT|ADDR))?)$")
_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_T = TypeVar("_T")
log = logging.getLogger(__name__)


class SettingsError(SpecdecError):
    """The environment cannot be turned into settings; the message names every problem, one a line."""


def setting(default: Any = MISSING, *, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = (), doc: str) -> Any:
    """A field with bounds (both inclusive; of each entry where the type is a tuple), or with the only strings it accepts."""
    metadata = {"low": low, "high": high, "choices": choices, "doc": doc}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """What every service understands."""

    host: str = setting("127.0.0.1", doc="address to listen on, for gRPC and metrics")
    port: int = setting(0, low=0, high=65535, doc="gRPC port; 0 = any free one")
    metrics_port: int = setting(0, low=-1, high=65535, doc="Prometheus port; 0 = any free one, -1 = off")
    health_port: int = setting(-1, low=-1, high=65535, doc="plaintext port for health alone; 0 = any free one, -1 = off")
    log_level: str = setting("info", choices=("debug", "info", "warning", "error"), doc="least severe level that is logged")
    cpu_affinity: tuple[int, ...] = setting((), low=0, high=4095, doc="CPUs this process may use; empty = all")
    nice: int = setting(0, low=0, high=19, doc="how much to lower this process's priority")
    drain_ms: int = setting(10_000, low=0, high=3_600_000, doc="longest wait at SIGTERM for running work, ms")
    pre_drain_ms: int = setting(
        300, low=0, high=600_000, doc="how long everything is still taken after SIGTERM, while peers and balancers learn of it, ms"
    )
    otlp_endpoint: str = setting("", doc="http(s)://host:port of an OpenTelemetry collector for spans; empty = no spans")
    otlp_sample_ratio: float = setting(
        1.0, low=0.0, high=1.0, doc="share of requests whose spans are recorded, where the caller's trace context does not decide"
    )
    otlp_metrics_ms: int = setting(
        0, low=0, high=3_600_000, doc="pace at which otlp_endpoint is told the metrics, too, ms; 0 = they are only scraped"
    )
    parent_pipe: int = setting(
        -1, low=-1, high=1 << 20, doc="inherited file descriptor; the process ends when it reads end-of-file; -1 = none"
    )
    tls_cert: Path | None = setting(None, doc="PEM certificate chain of this service; set = callers must speak TLS; needs tls_key")
    tls_key: Path | None = setting(None, doc="PEM private key of tls_cert")
    tls_client_ca: Path | None = setting(None, doc="PEM file of authorities; set = callers must show a certificate of theirs (mutual TLS)")
    allowed_identities: tuple[str, ...] = setting(
        (), doc="DNS names and URIs, one of which a caller's certificate must carry; empty = any certificate of tls_client_ca"
    )
    reflection: bool = setting(True, doc="tell anybody who asks which methods and messages there are (gRPC reflection)")
    die_with_parent: bool = setting(False, doc="ask the kernel for SIGTERM when the parent's main thread ends (Linux)")

    def problems(self) -> list[str]:
        """Rules between fields; a subclass adds to them."""
        given = {"SPECDEC_TLS_CERT": self.tls_cert, "SPECDEC_TLS_KEY": self.tls_key}
        missing = [name for name, value in given.items() if value is None]
        needed = [name for name, value in given.items() if value is not None]
        if self.tls_client_ca is not None:
            needed.append("SPECDEC_TLS_CLIENT_CA")
        found = [f"{name} is missing: {needed[-1]} is set and needs it" for name in missing] if needed else []
        if self.allowed_identities and self.tls_client_ca is None:
            found.append("SPECDEC_TLS_CLIENT_CA is missing: SPECDEC_ALLOWED_IDENTITIES is set and needs verified certificates")
        return found


def load(cls: type[_T], environ: Mapping[str, str] | None = None) -> _T:
    """`cls` filled from `environ` (default: the process's own). Raises SettingsError naming every problem."""
    environ = os.environ if environ is None else environ
    fields = {PREFIX + f.name.upper(): f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    types_of = typing.get_type_hints(cls)
    found = {name: value for name, value in environ.items() if name.startswith(PREFIX)}
    elsewhere = {PREFIX + name for name in names.known_elsewhere()}
    values: dict[str, Any] = {}
    problems: list[str] = []
    ignored: list[str] = []
    for name, text in sorted(found.items()):
        if _is_service_link(name, text) or (name not in fields and name in elsewhere):
            ignored.append(name)
        elif name not in fields:
            problems.append(f"{name} is not a setting{_closest(name, fields)}")
        else:
            field = fields[name]
            try:
                values[field.name] = _checked(_parse(types_of[field.name], text), field)
            except ValueError as error:
                problems.append(f"{name}={text!r}: {error} ({field.metadata.get('doc', '')})")
    for name, field in fields.items():
        unset = field.name not in values and not any(p.startswith(name + "=") for p in problems)
        if unset and field.default is MISSING and field.default_factory is MISSING:
            problems.append(f"{name} is required ({field.metadata.get('doc', '')})")
    if ignored:
        log.warning("ignored settings of other services and Kubernetes service links: %s", ", ".join(ignored))
    return _build(cls, values, problems)


def _build(cls: type[_T], values: dict[str, Any], problems: list[str]) -> _T:
    settings = None if problems else cls(**values)
    more = getattr(settings, "problems", None)
    problems = problems or (more() if more else [])
    if problems or settings is None:
        raise SettingsError("settings:\n  " + "\n  ".join(problems))
    return settings


def inherited(overrides: Mapping[str, str], names_to_drop: tuple[str, ...] = ()) -> dict[str, str]:
    """The environment for a child process: ours, less `names_to_drop`, with `overrides`."""
    return {**{k: v for k, v in os.environ.items() if k not in names_to_drop}, **overrides}


def from_environment(name: str) -> str:
    """A setting of a command that also has a flag; empty when unset."""
    return os.environ.get(name, "")


def no_color() -> bool:
    """Whether the user asked for plain text (https://no-color.org) or the terminal cannot do better."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.fullmatch(name)) or (name.endswith("_PORT") and value.startswith("tcp://"))


def _closest(name: str, fields: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name.removeprefix(PREFIX), [known.removeprefix(PREFIX) for known in fields], n=1)
    return f"; did you mean {PREFIX}{near[0]}?" if near else f"; known are {', '.join(sorted(fields))}"


def _parse(kind: Any, text: str) -> Any:
    """Raises ValueError that says what would be accepted."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        inner = next(a for a in typing.get_args(kind) if a is not type(None))
        return None if text == "" else _parse(inner, text)
    if origin is tuple:
        inner = typing.get_args(kind)[0]
        return tuple(_parse(inner, part.strip()) for part in text.split(",")) if text.strip() else ()
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        accepted = {str(member.value): member for member in kind}
        if text not in accepted:
            raise ValueError(f"must be one of {', '.join(accepted)}")
        return accepted[text]
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise ValueError("must be true or false")
        return _BOOLS[text.lower()]
    if kind in (int, float):
        return _number(kind, text)
    if kind is Path:
        if not text:
            raise ValueError("must be a path")
        return Path(text)
    if kind is str:
        return text
    raise TypeError(f"settings cannot hold {kind}")


def _number(kind: type[int] | type[float], text: str) -> int | float:
    try:
        value = kind(text)
    except ValueError:
        raise ValueError("must be a whole number" if kind is int else "must be a number") from None
    if not math.isfinite(value):
        raise ValueError("must be finite")
    return value


def _checked(value: Any, field: dataclasses.Field[Any]) -> Any:
    low, high, choices = (field.metadata.get(key) for key in ("low", "high", "choices"))
    for entry in value if isinstance(value, tuple) else (value,):
        if entry is None:
            continue
        if choices and entry not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        if (low is not None and entry < low) or (high is not None and entry > high):
            raise ValueError(f"must be {_range(low, high)}")
    return value


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f"at least {low:g}" if low is not None else f"at most {high:g}"

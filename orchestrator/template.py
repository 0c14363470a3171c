"""Chat templates: messages to the text the model was trained on. Knows no tokenizer, no ids.

Templates are written for the environment that transformers gives them (Jinja with trimmed blocks, `raise_exception`, `strftime_now`,
a `tojson` that leaves HTML characters alone, loop controls, the `generation` tag); this is that environment without transformers. It
is sandboxed, since a template comes with the weights and what it reads comes from strangers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.errors import InvalidRequest
from specdec.vocabulary import read_json

RESERVED = frozenset({"messages", "add_generation_prompt"})  # not open to template arguments
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_REASON_CHARS = 300


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class ChatTemplate:
    """A compiled template with the special tokens of its tokenizer. `now` is what templates that print the date ask."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now) -> None:
        self._template = _environment(now).from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], add_generation_prompt: bool) -> str:
        """Raises InvalidRequest when the template refuses the messages or a variable."""
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **arguments}
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=add_generation_prompt, **variables
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            # A template is a program over the client's data: whatever it trips over is in the data.
            raise InvalidRequest("messages", f"the chat template refused them: {str(error)[:MAX_REASON_CHARS]}") from error


def load_template(folder: Path) -> ChatTemplate | None:
    """The folder's template: chat_template.jinja, else the one in tokenizer_config.json (the one named default, of several)."""
    config = read_json(folder / "tokenizer_config.json")
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if (file := folder / "chat_template.jinja").is_file():
        source = file.read_text(encoding="utf-8")
    if not isinstance(source, str):
        return None
    tokens = {name: token_text(config.get(name)) for name in SPECIAL_TOKENS}
    return ChatTemplate(source, {name: text for name, text in tokens.items() if text is not None})


def token_text(entry: object) -> str | None:
    """A special token of tokenizer_config.json: plain text, or an object with its content."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None

"""Chat templates: messages to the text the model was trained on. Knows no tokenizer, no ids.

Templates are written for the environment that transformers gives them (Jinja with trimmed blocks, `raise_exception`, `strftime_now`,
a `tojson` that leaves HTML characters alone, loop controls, the `generation` tag); this is that environment without transformers.

A template comes with the weights, and what it reads comes from strangers, so it runs in a sandbox with bounds of its own: a thread
that renders for ever would be lost to all other requests. Loops, macros and blocks look at the clock; texts that grow by `+`, `~`, `*`
and the result are measured. What one call of a filter or of a string's method makes is not: that is the template's author's to mind.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from specdec.errors import InvalidRequest, Unsupported
from specdec.vocabulary import read_json

RESERVED = frozenset({"messages", "add_generation_prompt"})  # not open to template arguments
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT, WITH_TOOLS = "default", "tool_use"  # of several named templates
MAX_REASON_CHARS = 300
MAX_RENDERED_CHARS = 8 << 20  # of a rendered chat, and of each text on the way there
MAX_EXPONENT = 64
MAX_RENDER_S = 1.0  # of the thread's own time
_SIZED = (str, list, tuple)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Names(Namespace):
    """Names that begin with an underscore belong to Python."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *given = args  # so that a template may name a value `self`
        Namespace.__init__(self)
        for name, value in dict(*given, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: names begin with a letter")
        super().__setitem__(name, value)


class _Dict:
    """`dict` as templates use it, without what else the class has."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Watched(NodeTransformer):
    """Puts a look at the clock in front of each turn of what can go on for ever, and measures what `~` joins."""

    def _repeats(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("in_time"), lineno=node.lineno))
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _repeats

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join"), node.nodes, [], None, None, lineno=node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**"])

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Names
        self._thread = threading.local()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Watched().visit(super()._parse(source, name, filename))
        return tree

    def start_the_clock(self) -> None:
        self._thread.until = time.thread_time() + MAX_RENDER_S

    @property  # since a call would pass through the sandbox, which takes ten times as long
    def in_time(self) -> bool:
        """True, or SecurityError."""
        if time.thread_time() > self._thread.until:
            raise jinja2.exceptions.SecurityError(f"it takes longer than {MAX_RENDER_S:g} s (MAX_RENDER_S)")
        return True

    def join(self, *parts: object) -> str:
        texts = [str(part) for part in parts]
        _sized(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _sized(_length(left) + _length(right))
            return left + right
        if operator == "*":
            for times, text in ((left, right), (right, left)):
                if isinstance(times, int):
                    _sized(_length(text) * times)
        elif isinstance(right, int | float) and right > MAX_EXPONENT:
            raise jinja2.exceptions.SecurityError(f"at most {MAX_EXPONENT} as an exponent (MAX_EXPONENT)")
        return super().call_binop(context, operator, left, right)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, _SIZED) else 0


def _sized(chars: int) -> None:
    if chars > MAX_RENDERED_CHARS:
        raise jinja2.exceptions.SecurityError(f"it writes more than {MAX_RENDERED_CHARS} characters (MAX_RENDERED_CHARS)")


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


class ChatTemplate:
    """A compiled template with the special tokens of its tokenizer; of several, by name, the one for tools is taken when there are any.
    `now` is what templates that print the date ask. May be used from several threads.

    Raises Unsupported for a template that is none.
    """

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        sources = {DEFAULT: source} if isinstance(source, str) else source
        self._sandbox = _Sandbox(now)
        self._templates = {name: self._compiled(name, sources[name]) for name in (DEFAULT, WITH_TOOLS) if name in sources}
        self._special_tokens = dict(special_tokens)

    def _compiled(self, name: str, source: str) -> jinja2.Template:
        try:
            return self._sandbox.from_string(source)
        except Exception as error:  # constants are computed here, so it may be any
            raise Unsupported("chat template", f"{name!r} is none: {str(error)[:MAX_REASON_CHARS]}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], add_generation_prompt: bool) -> str:
        """Raises InvalidRequest when the template refuses the messages or a variable, and beyond MAX_RENDER_S or MAX_RENDERED_CHARS."""
        name = WITH_TOOLS if WITH_TOOLS in self._templates and arguments.get("tools") is not None else DEFAULT
        if name not in self._templates:
            raise InvalidRequest("messages", "this model has no chat template for chats without tools")
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **arguments}
        variables |= {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        try:
            return self._render(self._templates[name], variables)
        except Exception as error:
            # A template is a program over the client's data: whatever it trips over is in the data.
            reason = str(error) or type(error).__name__
            raise InvalidRequest("messages", f"the chat template refused them: {reason[:MAX_REASON_CHARS]}") from error

    def _render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        self._sandbox.start_the_clock()
        pieces, chars = [], 0
        for piece in template.generate(variables):
            pieces.append(piece)
            chars += len(piece)
            _sized(chars)
        text = "".join(pieces)
        text.encode()  # half a surrogate pair has no bytes, so no tokens
        return text


def load_template(folder: Path) -> ChatTemplate | None:
    """The folder's template: chat_template.jinja and those in additional_chat_templates, else what tokenizer_config.json has, a text or
    a list of named ones. Raises Unsupported when it is none."""
    config = read_json(folder / "tokenizer_config.json")
    source = _template_files(folder) or config.get("chat_template")
    if not source:
        return None
    sources = {DEFAULT: source} if isinstance(source, str) else source
    try:
        sources = {entry["name"]: entry["template"] for entry in source} if isinstance(source, list) else dict(sources)
    except (TypeError, ValueError, LookupError) as error:
        raise Unsupported("chat template", "tokenizer_config.json must hold a text, or a list of objects with name and template") from error
    # Older checkpoints keep the special tokens in a file of their own.
    older = {} if "added_tokens_decoder" in config else read_json(folder / "special_tokens_map.json")
    tokens = {name: token_text(older.get(name, config.get(name))) for name in SPECIAL_TOKENS}
    return ChatTemplate(sources, {name: text for name, text in tokens.items() if text is not None})


def _template_files(folder: Path) -> dict[str, str]:
    files = {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if (file := folder / "chat_template.jinja").is_file():
        files[DEFAULT] = file
    return {name: file.read_text(encoding="utf-8") for name, file in files.items()}


def token_text(entry: object) -> str | None:
    """A special token of tokenizer_config.json: plain text, or an object with its content."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None

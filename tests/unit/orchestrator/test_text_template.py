"""Chat templates: what may be in a model folder, what a client may send, and what a template may not do to the others."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator import template as template_module
from orchestrator.fronts.textwork import TextWork
from orchestrator.template import MAX_RENDERED_CHARS, ChatTemplate, load_template
from orchestrator.text import TextModel, template_args
from specdec.errors import InvalidRequest, SpecdecError, Unsupported
from tests.unit.orchestrator.test_text_model import folder, reference
from tests.unit.orchestrator.tokenizers_here import byte_level

CHAT = [{"role": "system", "content": ""}, {"role": "nobody", "content": "안녕 <b>"}, {"role": "user", "content": " a\n"}]
FOR_EVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "joined": "{{ 'a' ~ 1 ~ None ~ messages[0].role ~ (1.5 + 2) ~ [1] }}{{ 'x' * 3 + 'y' }}{{ [1] + [2] }}{{ 2 ** 3 * 4 }}",
    "recursive": "{% for m in [[1, [2]], [3]] recursive %}{{ loop.depth }}{{ m if m is number else loop(m) }}{% endfor %}",
    "loops": "{% for m in messages if m.content %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.nextitem }}{% else %}none"
    "{% endfor %}{% for m in [] %}{{ m }}{% else %}none{% endfor %}"
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m }}{% break %}{% endfor %}",
    "macros": "{% macro row(m, n=2) %}[{{ m.role }}{{ varargs }}{{ caller() if caller }}]{% endmacro %}"
    "{% call row(messages[0], 3) %}inner{% endcall %}{{ row(messages[1]) }}{% call(x) row(messages[2]) %}{{ x }}{% endcall %}",
    "blocks": "{% block head %}{{ messages[0].role }}{% endblock %}{% set body %}{{ self.head() }}~{% endset %}{{ body * 2 }}"
    "{% filter upper %}x{% endfilter %}",
    "names": "{% set ns = namespace(n=0, text='', self=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.text = ns.text ~ m.role %}{% endfor %}{{ ns.n }}{{ ns.text }}{{ dict(a=1, **{'b': 2}).items() | list }}"
    "{{ dict.fromkeys(['k']) }}",
    "trimmed": "{%- for m in messages -%}\n  {{- m.content | trim -}}\n  {% if not loop.last %}\n, {% endif %}\n{%- endfor %}\n"
    "{# said #}\n",
}
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -7,
    10**30,
    1.5,
    -1e300,
    "",
    "안녕\u0000\"'<",
    "🎉",
    [],
    [1, [None, {"a": []}]],
    {},
    {"k": {"é": [True, 0.1]}, "": 1},
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("opened", [True, False])
def test_a_watched_template_writes_what_it_writes_in_transformers(tmp_path: Path, name: str, opened: bool) -> None:
    path = folder(tmp_path, byte_level(), TEMPLATES[name])
    expected = reference(path).apply_chat_template(CHAT, tokenize=False, add_generation_prompt=opened)
    assert TextModel(path).render(CHAT, {}, opened) == expected


def test_arguments_of_every_json_type(tmp_path: Path) -> None:
    path = folder(tmp_path, byte_level(), "{{ x }}|{{ x | tojson }}|{{ x is none }}|{% if x %}yes{% endif %}|{{ x is mapping }}")
    ours, theirs = TextModel(path), reference(path)
    for value in VALUES:
        arguments = template_args({"x": json.dumps(value)})
        assert ours.render(CHAT, arguments) == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, x=value)


@pytest.mark.parametrize(
    "value", ["", "{", "nul", "NaN", "[-Infinity]", "'a'", "01", '"\\ud83d"', '{"\\udc00": 1}', '["\\ude00\\ud83d"]', "1" * 5000]
)
def test_arguments_that_are_no_json_are_named(value: str) -> None:
    """Half a surrogate pair is an escape of JSON and no text: a tokenizer takes it for a defect."""
    with pytest.raises(InvalidRequest) as caught:
        template_args({"fine": "1", "x": value})
    assert caught.value.field == "messages.template_args[x]"
    assert template_args({"x": '"\\ud83c\\udf89"'}) == {"x": "🎉"}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ '%c' | format(55357) }}", "surrogates"),
        ("{{ 10 ** 65 }}", "exponent"),
        ("{% set ns = namespace(_n=1) %}", "begin with a letter"),
        ("{{ 'a' | nothing_i_know }}", "nothing_i_know"),
        ("{% include 'another' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_whatever_a_template_trips_over_is_the_clients_to_mend(source: str, reason: str) -> None:
    with pytest.raises(SpecdecError, match=reason):
        ChatTemplate(source, {}).render(CHAT, {}, True)


# --- bounds -------------------------------------------------------------------------------------------------------------

ENDLESS = {
    "loops": FOR_EVER,
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for x in [60] recursive %}{% if x %}{{ loop([x - 1]) }}{{ loop([x - 1]) }}{% endif %}{% endfor %}",
    "blocks": "{% set ns = namespace(n=0) %}{% block b %}{% if ns.n < 60 %}{% set ns.n = ns.n + 1 %}{{ self.b() }}{{ self.b() }}"
    "{% set ns.n = ns.n - 1 %}{% endif %}{% endblock %}",
    "callers": "{% macro f(n) %}{{ caller(n) }}{{ caller(n) }}{% endmacro %}"
    "{% macro g(n) %}{% call(m) f(n) %}{% if m %}{{ g(m - 1) }}{% endif %}{% endcall %}{% endmacro %}{{ g(60) }}",
}
LARGE = {
    "sums": "{% set ns = namespace(s='0123456789') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "joints": "{% set ns = namespace(s='0123456789') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "lists": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "products": "{{ ('x' * n) | length }}",
    "product the other way": "{{ (n * 'x') | length }}",
    "result": "{% for i in range(2000) %}{{ '%100000d' | format(i) }}{% endfor %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(template_module, "MAX_RENDER_S", 0.05)
    with pytest.raises(InvalidRequest, match="MAX_RENDER_S"):
        ChatTemplate(ENDLESS[name], {}).render(CHAT, {}, True)


@pytest.mark.parametrize("name", LARGE)
def test_a_text_that_grows_without_measure_is_stopped(name: str) -> None:
    with pytest.raises(InvalidRequest, match="MAX_RENDERED_CHARS"):
        ChatTemplate(LARGE[name], {}).render(CHAT, {"n": 10**11}, True)


def test_a_text_within_the_bounds_is_whole() -> None:
    text = ChatTemplate("{{ 'x' * n + 'y' }}", {}).render(CHAT, {"n": MAX_RENDERED_CHARS - 1}, True)
    assert len(text) == MAX_RENDERED_CHARS


def test_twin_nobody_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_RENDER_S", 0.02)
    monkeypatch.setattr(template_module._Watched, "visit_For", template_module._Watched.generic_visit)
    source = "{% for a in range(200000 // 4) %}{% for b in range(20) %}{% endfor %}{% endfor %}done"
    assert ChatTemplate(source, {}).render(CHAT, {}, True) == "done"


async def test_the_text_threads_survive_templates_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many endless ones as there are threads, and a chat behind them."""
    monkeypatch.setattr(template_module, "MAX_RENDER_S", 0.05)
    work, source = TextWork(threads=2), "{% if endless %}" + FOR_EVER + "{% endif %}fine"
    template = ChatTemplate(source, {})
    endless = [work.run(lambda: template.render(CHAT, {"endless": True}, True)) for _ in range(4)]
    *lost, good = await asyncio.gather(*endless, work.run(lambda: template.render(CHAT, {}, True)), return_exceptions=True)
    assert good == "fine" and all(isinstance(error, InvalidRequest) for error in lost)
    work.close()


def test_each_thread_has_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_RENDER_S", 0.1)
    template = ChatTemplate("{% for a in range(30) %}{{ pause() }}{% endfor %}{{ name }}", {})
    begun, got = threading.Barrier(2), {}

    def render(name: str) -> None:
        begun.wait()
        got[name] = template.render(CHAT, {"name": name, "pause": lambda: threading.Event().wait(0.005)}, True)

    threads = [threading.Thread(target=render, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {text[-1] for text in got.values()} == {"a", "b"}  # waiting is not computing


# --- model folders ------------------------------------------------------------------------------------------------------


def named(path: Path, **templates: str) -> None:
    (path / "additional_chat_templates").mkdir()
    for name, source in templates.items():
        (path / "additional_chat_templates" / f"{name}.jinja").write_text(source)


TOOLS = [{"type": "function", "function": {"name": "f"}}]
WRITES: dict[str, Callable[[Path], Path]] = {
    "one": lambda path: folder(path, byte_level(), chat_template="one{{ tools }}"),
    "a list": lambda path: folder(
        path,
        byte_level(),
        chat_template=[{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools{{ tools | tojson }}"}],
    ),
    "a list without tools": lambda path: folder(
        path, byte_level(), chat_template=[{"name": "default", "template": "p{{ tools }}"}, {"name": "rag", "template": "r"}]
    ),
    "a list without default": lambda path: folder(path, byte_level(), chat_template=[{"name": "tool_use", "template": "tools"}]),
    "a file": lambda path: folder(path, byte_level(), "file", chat_template="config"),
    "several files": lambda path: (folder(path, byte_level(), "file", chat_template="config"), named(path, tool_use="tools", rag="r"))[0],
    "only a file of the others": lambda path: (folder(path, byte_level(), chat_template="config"), named(path, tool_use="tools"))[0],
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("tools", [None, TOOLS, []])
def test_the_template_that_transformers_takes(tmp_path: Path, name: str, tools: Any) -> None:
    path = WRITES[name](tmp_path)
    arguments = template_args({} if tools is None else {"tools": json.dumps(tools)})
    try:
        expected = reference(path).apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, tools=tools)
    except ValueError:  # no default
        with pytest.raises(InvalidRequest, match="without tools"):
            TextModel(path).render(CHAT, arguments)
    else:
        assert TextModel(path).render(CHAT, arguments) == expected


def test_special_tokens_of_older_checkpoints(tmp_path: Path) -> None:
    path = folder(tmp_path, byte_level(), "{{ bos_token }}|{{ eos_token }}|{{ cls_token }}|{{ sep_token is defined }}")
    (path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|im_end|>", "lstrip": False}, "cls_token": "<s>"}))
    expected = reference(path).apply_chat_template(CHAT, tokenize=False)
    assert TextModel(path).render(CHAT, {}) == expected == "<|im_end|>|</s>|<s>|False"


@pytest.mark.parametrize(
    "broken", ["{% if %}", "{{ 'a' * }}", "{% trans %}a{% endtrans %}", [{"name": "default"}], ["a"], {"default": 1}, 7]
)
def test_what_is_no_template_is_refused_when_the_folder_is_read(tmp_path: Path, broken: Any) -> None:
    with pytest.raises(Unsupported, match="chat template"):
        load_template(folder(tmp_path, byte_level(), chat_template=broken))


@pytest.mark.parametrize("none", [None, "", [], {}])
def test_a_folder_without_template(tmp_path: Path, none: Any) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        TextModel(folder(tmp_path, byte_level(), chat_template=none)).render(CHAT, {})

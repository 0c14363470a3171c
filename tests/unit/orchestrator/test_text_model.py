"""The orchestrator's text model against transformers, which it does without."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from orchestrator.fronts.textwork import TextWork
from orchestrator.template import ChatTemplate
from orchestrator.text import TextModel, template_args
from specdec.errors import InvalidRequest, NotFound
from tests.unit.orchestrator.tokenizers_here import byte_fallback, byte_level

MODELS = Path(__file__).parents[3] / "models"
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "안녕 <|im_end|> & <b>"}],
    [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": "c"}],
]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{'<|im_end|>' + m['role'] + '\n' + m['content']}}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
    "blocks": "{{ bos_token }}\n  {% for m in messages %}\n    {% if m.role == 'system' %}\n    {% continue %}\n    {% endif %}\n"
    "[{{ m.content | trim }}]\n  {% endfor %}\n{{ eos_token }}",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages | tojson }}{{ flag is defined and flag }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "macro": "{% set ns = namespace(n=0) %}{% macro show(m) %}{{ m.role }}={{ m.content }};{% endmacro %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ show(m) }}{% endfor %}",
    "missing": "{% for m in messages %}{{ m.tool_calls }}{{ m.content[:3] }}{% endfor %}{{ unknown }}",
}


def folder(path: Path, tokenizer: Any, template: str | None = None, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps({**tokens, **config}))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def reference(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("opened", [True, False])
def test_templates_render_as_in_transformers(tmp_path: Path, name: str, opened: bool) -> None:
    path = folder(tmp_path, byte_level(), TEMPLATES[name])
    ours, theirs = TextModel(path), reference(path)
    arguments = {"tools": [{"name": "f", "text": "<é>"}], "flag": True} if name == "tools" else {}
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=opened, **arguments)
        assert ours.render(chat, arguments, opened) == expected
        ids = theirs.apply_chat_template(chat, add_generation_prompt=opened, return_dict=False, **arguments)
        assert list(ours.encode_messages(chat, arguments, opened)) == ids


def random_texts(count: int) -> list[str]:
    """Texts of all scripts, with what looks like special tokens, marks, escapes and controls among them."""
    draw = random.Random(3)
    parts = [
        "안녕",
        "שָׁלוֹם",
        "عَرَبِيّ",
        "👩\u200d👧",
        "e\u0301",
        "\u200b\ufeff",
        "\ue000",
        "\x00\x1b",
        "<|im_end|>",
        "<|im_start|>user\n",
        "▁",
        "Ġ",
    ]
    parts += ["the", " quick", "1234567", "  \n\t", "\r\n", "'ll", "\ufffd", "def f(x):", "!?…", "<0x41>", "ß", "½", "𝒳", "<|endoftext|>"]
    codes = [*range(0x250), *range(0x5D0, 0x5EB), *range(0x600, 0x660), *range(0x4E00, 0x4F00), *range(0x1F300, 0x1F400)]
    return ["".join(draw.choice([draw.choice(parts), chr(draw.choice(codes))]) for _ in range(draw.randrange(20))) for _ in range(count)]


@pytest.mark.pair
def test_the_real_template_and_tokenizer_agree_with_transformers() -> None:
    from transformers import AutoTokenizer

    ours, theirs = TextModel(MODELS / "smollm2-135m"), AutoTokenizer.from_pretrained(MODELS / "smollm2-135m")
    for chat in CHATS:
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert list(ours.encode_messages(chat, {})) == ids
        for message in chat:
            assert list(ours.encode(message["content"])) == theirs.encode(message["content"])
            assert ours.decode(ids, False) == theirs.decode(ids)
            assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)
    for text in random_texts(400):
        ids = theirs.encode(text)
        assert list(ours.encode(text)) == ids
        assert list(ours.encode(text, False)) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
        for role in ("user", "system", "assistant", "tool", ""):
            chat = [{"role": role, "content": text}]
            assert ours.render(chat, {}, False) == theirs.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize("marks", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
def test_special_tokens_around_raw_text_as_in_transformers(tmp_path: Path, marks: dict[str, bool]) -> None:
    path = folder(tmp_path, byte_fallback(), **marks)
    ours, theirs = TextModel(path), reference(path)
    for text in ("", "the Khaleesi"):
        assert list(ours.encode(text)) == theirs.encode(text)
        assert list(ours.encode(text, False)) == theirs.encode(text, add_special_tokens=False)


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    """A tokenizer file may ask for both, left over from training."""
    tokenizer = type(byte_level()).from_str(byte_level().to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    ours = TextModel(folder(tmp_path, tokenizer))
    assert len(ours.encode("a")) == 1 and len(ours.encode("the quick brown fox jumps over")) > 4


async def test_a_long_prompt_leaves_the_loop_alone(tmp_path: Path) -> None:
    """100 000 tokens in a thread of their own, which lets go of the interpreter: the loop turns many times meanwhile."""
    model, work, turns = TextModel(folder(tmp_path, byte_level())), TextWork(), 0
    text = "안녕 the quick brown fox " * 15_000
    task = asyncio.create_task(work.run(lambda: model.encode(text)))
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    work.close()
    assert len(await task) > 100_000 and turns > 20


def test_a_template_prints_the_day_it_is_told() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, now=lambda: datetime(2026, 1, 2))
    assert template.render([], {}, False) == "2026-01-02"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_a_template_refuses_is_the_clients_to_mend(tmp_path: Path, template: str, reason: str) -> None:
    model = TextModel(folder(tmp_path, byte_level(), template))
    with pytest.raises(InvalidRequest, match=reason) as caught:
        model.render(CHATS[0], {})
    assert caught.value.field == "messages"


def test_no_template_and_reserved_arguments(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        TextModel(folder(tmp_path / "a", byte_level())).render(CHATS[0], {})
    with pytest.raises(InvalidRequest) as caught:
        TextModel(folder(tmp_path / "b", byte_level(), "x")).render(CHATS[0], {"messages": []})
    assert caught.value.field == "messages.template_args[messages]"
    with pytest.raises(NotFound):
        TextModel(tmp_path)


def test_template_arguments_are_json() -> None:
    assert template_args({"enable_thinking": "false", "tools": '[{"a": 1}]'}) == {"enable_thinking": False, "tools": [{"a": 1}]}
    for value in ("", "{", "[" * 100_000):
        with pytest.raises(InvalidRequest) as caught:
            template_args({"x": value})
        assert caught.value.field == "messages.template_args[x]"


def test_templates_in_the_tokenizer_config(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert TextModel(folder(tmp_path / "a", byte_level(), chat_template=several)).render(CHATS[0], {}) == "plain"
    assert TextModel(folder(tmp_path / "b", byte_level(), chat_template="only")).render(CHATS[0], {}) == "only"
    assert TextModel(folder(tmp_path / "c", byte_level(), "file", chat_template="config")).render(CHATS[0], {}) == "file"


@pytest.mark.pair
def test_text_needs_neither_torch_nor_much_memory(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(MODELS / "smollm2-135m" / name, tmp_path)
    code = (
        "import re, sys\nfrom orchestrator.text import TextModel\n"
        f"m = TextModel({str(tmp_path)!r})\nm.encode('the quick brown fox ' * 2000)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150 * 1024, "KiB at the peak"

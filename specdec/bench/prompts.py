"""What is asked: prompts from JSON lines, by kind, and made as long as wanted."""

from __future__ import annotations

import codecs
import hashlib
import json
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from specdec.client import Prompt
from specdec.errors import InvalidRequest

PROMPTS = Path(__file__).with_name("prompts.jsonl")
MAX_PROMPTS = 100_000
MAX_BYTES = 1 << 28
MAX_KIND = 64  # characters
MAX_ID = (1 << 32) - 1
ALL, EACH = "all", "each"  # of --kinds
WANTED = 'a JSON object with "prompt", "messages", "text" or "token_ids", and "kind" if wanted'
Kinded = tuple[str, Prompt]
Count = Callable[[Prompt], Awaitable[int]]

# What a long prompt is filled with: it says nothing that the question asks for.
FILLER = (
    "The ferry leaves the old harbour at seven and returns before dark.",
    "Two engineers measured the bridge again and wrote the numbers down.",
    "In autumn the market moves under the arcades because of the rain.",
    "A letter from the north took nine days and arrived with a torn corner.",
    "The library keeps maps of every street, also of those that are gone.",
    "Nobody remembers who planted the row of lime trees behind the mill.",
    "On Thursdays the baker sells the dark bread at half of its price.",
    "The committee met for three hours and agreed to meet once more.",
    "A train with twelve wagons carried sand to the works by the river.",
    "The new pump moves forty litres a minute and needs little power.",
    "Children collect smooth stones and sort them by colour and weight.",
    "Every spring the water rises to the second step and then goes back.",
    "The telescope was bought second hand and still has its first lens.",
    "Her brother repairs clocks and knows each of them by its sound.",
    "The road to the quarry is closed until the snow is gone.",
    "A small museum shows the tools of coopers, weavers and smiths.",
)


def load_prompts(path: Path = PROMPTS) -> list[Kinded]:
    """(kind, prompt) of JSON lines with "messages", "prompt" (one user turn), "text" (to be continued) or "token_ids"; "kind" if wanted.
    UTF-8, with a byte order mark or without. Raises InvalidRequest that names file and line."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InvalidRequest("--prompts", f"{path}: more than {MAX_BYTES >> 20} MiB; take a sample of it")
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        text = data.decode()
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise InvalidRequest("--prompts", f"{path}:{number}: is not UTF-8; convert it, e.g. iconv -f latin1 -t utf-8") from error
    except OSError as error:
        raise InvalidRequest("--prompts", f"{path}: {error.strerror}") from error
    # Not splitlines: it ends lines at characters that JSON allows inside a text, such as U+2028.
    lines = [(number, line) for number, line in enumerate(re.split("\r\n|\n|\r", text), 1) if line.strip()]
    if not 0 < len(lines) <= MAX_PROMPTS:
        raise InvalidRequest("--prompts", f"{path}: must hold 1 to {MAX_PROMPTS} prompts, one a line, has {len(lines)}")
    return [_prompt(path, number, line) for number, line in lines]


def _prompt(path: Path, number: int, line: str) -> Kinded:
    try:
        entry = json.loads(line)
        if not isinstance(entry, dict):
            raise TypeError(f"this is {_called(entry)}")
        return _kind(entry.get("kind")), _asked(entry)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest("--prompts", f"{path}:{number}: must be {WANTED} ({error})") from error


def _kind(told: Any) -> str:
    """It becomes a name in tables, figures and --kinds."""
    if told is None:
        return ALL
    if not isinstance(told, str) or not 0 < len(told) <= MAX_KIND or not told.isprintable() or "," in told or told != told.strip():
        raise ValueError(f"kind must be a text of 1 to {MAX_KIND} printable characters without commas or spaces around it")
    if (kind := told.lower()) == EACH:
        raise ValueError(f"kind must not be {EACH}: --kinds {EACH} asks for all of them one by one")
    return kind


def _asked(entry: dict[str, Any]) -> Prompt:
    ids = entry.get("token_ids")
    if ids is not None:
        if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token <= MAX_ID for token in ids):
            raise ValueError("token_ids must be a list of one or more whole numbers, 0 or more")
        return ids
    if entry.get("text") is not None:
        return _words("a text", entry["text"])
    turns = entry.get("messages") or [{"role": "user", "content": entry.get("prompt")}]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise TypeError('messages must be a list of {"role": …, "content": …}')
    return [{"role": _words("a message's role", turn.get("role")), "content": _words("a prompt", turn.get("content"))} for turn in turns]


def _words(what: str, told: Any) -> str:
    if not isinstance(told, str) or not told:
        raise TypeError(f"{what} must be text, and not empty")
    try:
        told.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} holds half of a character, {told[error.start]!a}") from error
    return told


def _called(entry: object) -> str:
    return {list: "a list", str: "a text", type(None): "null"}.get(type(entry), "a number")


def as_text(prompt: Prompt) -> Prompt:
    """Messages as one text; what is no messages stays as it is."""
    turns: list[Any] = [] if isinstance(prompt, str) else [turn for turn in prompt if not isinstance(turn, int)]
    return "\n\n".join(str(turn["content"]) for turn in turns) if turns else prompt


def of_kind(prompts: Sequence[Kinded], kind: str) -> Sequence[Kinded]:
    """`all` = every one. Raises InvalidRequest for a kind that is not there."""
    found = prompts if kind == ALL else [one for one in prompts if one[0] == kind]
    if not found:
        raise InvalidRequest("--kinds", f"no prompt is of kind {kind!r}; there are {', '.join(kinds(prompts))}")
    return found


def kinds(prompts: Sequence[Kinded]) -> list[str]:
    return list(dict.fromkeys(kind for kind, _ in prompts))


def fingerprint(prompts: Sequence[Kinded]) -> str:
    return hashlib.blake2b(json.dumps(list(prompts)).encode(), digest_size=8).hexdigest()


async def lengthened(prompt: Prompt, tokens: int, seed: int, count: Count) -> Prompt:
    """The same question behind notes that have nothing to do with it, `tokens` long within a word or two; a longer one stays as it is.
    `count` tells a prompt's tokens."""
    if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
        ids: list[Any] = list(prompt)
        missing = max(0, tokens - len(ids))
        return [*(ids * (missing // len(ids) + 1))[:missing], *ids]
    words = " ".join(_sentences(seed, tokens)).split()
    fits, least, most = prompt, 0, len(words)
    if await count(prompt) >= tokens:
        return prompt
    while least < most:  # the longest that is not longer than wanted
        middle = (least + most + 1) // 2
        tried = _behind(words[:middle], prompt)
        if await count(tried) <= tokens:
            fits, least = tried, middle
        else:
            most = middle - 1
    return fits


def _sentences(seed: int, tokens: int) -> list[str]:
    """At least `tokens` words."""
    draw, found, words = random.Random(seed), list[str](), 0
    while words < tokens:
        round_ = list(FILLER)
        draw.shuffle(round_)
        found += round_
        words += sum(len(sentence.split()) for sentence in round_)
    return found


def _behind(words: Sequence[str], prompt: Prompt) -> Prompt:
    notes = "Notes: " + " ".join(words) + "\n\n"
    if isinstance(prompt, str):
        return notes + prompt
    turns: list[Any] = list(prompt)
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=len(turns) - 1)
    return [*turns[:last], {**turns[last], "content": notes + turns[last]["content"]}, *turns[last + 1 :]]

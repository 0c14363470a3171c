"""Text and ids: everything the orchestrator knows of a tokenizer. Needs `tokenizers` and Jinja, neither torch nor transformers.

All functions are plain and may take long for long inputs: callers run them in an executor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.detokenise import DecoderPlan, IncrementalDecoder
from orchestrator.template import RESERVED, load_template
from specdec.errors import InvalidRequest
from specdec.grammar import GrammarCompiler
from specdec.terms import Grammar
from specdec.vocabulary import describe, load_tokenizer


class TextModel:
    """The tokenizer, the chat template, the vocabulary and the grammars over it of a model folder. Immutable; one per process.

    tokenizer.json alone says which special tokens surround raw text; `add_bos_token` beside it is ignored, as in transformers 5.

    `trial`: GrammarCompiler's. Raises NotFound without a tokenizer.json and Unsupported when its decoder cannot be streamed.
    """

    def __init__(self, tokenizer_dir: str | Path, trial: Callable[[Grammar], None] | None = None) -> None:
        folder = Path(tokenizer_dir)
        self._tokenizer = load_tokenizer(folder)
        self._plan = DecoderPlan(self._tokenizer)
        self._template = load_template(folder)
        self.vocabulary = describe(self._tokenizer, folder)
        self.grammars = GrammarCompiler(self._tokenizer, trial)

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        # The batch call leaves out offsets, a third of the time, and lets go of the interpreter lock while it works.
        return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_messages(
        self, messages: Sequence[Mapping[str, str]], template_args: Mapping[str, Any], add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """A chat as the template writes it; the template itself writes all special tokens."""
        return self.encode(self.render(messages, template_args, add_generation_prompt), add_special_tokens=False)

    def render(self, messages: Sequence[Mapping[str, str]], template_args: Mapping[str, Any], add_generation_prompt: bool = True) -> str:
        """Raises InvalidRequest when there is no template, or when it refuses what it is given."""
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template; send text or token_ids")
        for name in template_args:
            if name in RESERVED:
                raise InvalidRequest(f"messages.template_args[{name}]", "is set by other fields of the request")
        return self._template.render(messages, template_args, add_generation_prompt)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def decoder(self, *, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> IncrementalDecoder:
        return IncrementalDecoder(self._plan, skip_special_tokens=skip_special_tokens, prompt=prompt)


def template_args(values: Mapping[str, str]) -> dict[str, Any]:
    """Template arguments as they travel (JSON texts) → as templates see them. Raises InvalidRequest naming the argument."""
    parsed = {}
    for name, value in values.items():
        try:
            parsed[name] = json.loads(value, parse_constant=_no_number)
            if "\\u" in value:
                json.dumps(parsed[name], ensure_ascii=False).encode()  # an escape may be half a surrogate pair
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"messages.template_args[{name}]", f"must be JSON: {error}") from error
    return parsed


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")

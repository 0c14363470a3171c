"""The slow way: a tiny model's own greedy answers, one whole forward pass of transformers in float64 per token, with loops.

The rules are those of common.proto, written down a second time without looking at how the service does it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from specdec.terms import SamplingParams
from specdec.vocabulary import token_bytes
from tests.tiny import TOKENIZER_VOCAB, tiny_llama, tiny_tokenizer

EOS = 2
SPECIAL = range(3)


@dataclass(frozen=True)
class Language:
    """A finite one: all its sentences. With `start_after` the output is free up to the end of that text."""

    sentences: Collection[str]
    start_after: str = ""

    def may_follow(self, text: bytes, token: bytes) -> bool:
        """Whether the text can become legal with the token behind it, which must not run past the end of the marker."""
        marker = self.start_after.encode()
        if marker not in text and marker not in text + token:
            return True
        if marker not in text:
            return (text + token).endswith(marker)
        rest = (text + token).split(marker, 1)[1] if marker else text + token
        return bool(token) and any(sentence.encode().startswith(rest) for sentence in self.sentences)

    def may_end(self, text: bytes) -> bool:
        marker = self.start_after.encode()
        if marker not in text:
            return True
        rest = text.split(marker, 1)[1] if marker else text
        return any(sentence.encode() == rest for sentence in self.sentences)

    def forced(self, text: bytes) -> bytes:
        """What must follow, whatever is chosen."""
        marker = self.start_after.encode()
        if marker not in text or self.may_end(text):
            return b""
        rest = text.split(marker, 1)[1] if marker else text
        return os.path.commonprefix([s.encode()[len(rest) :] for s in self.sentences if s.encode().startswith(rest)])

    def begun(self, text: bytes) -> bool:
        return self.start_after.encode() in text


class Oracle:
    """Greedy answers to one prompt by the model of seed 0."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = list(prompt)
        self._model = tiny_llama(0, vocab=TOKENIZER_VOCAB).float().double()  # the folder holds float32
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}

    @cached_property
    def words(self) -> list[bytes]:
        return [word or b"" for word in token_bytes(tiny_tokenizer())]

    def row(self, tokens: Sequence[int]) -> torch.Tensor:
        """Raw logits behind `tokens`."""
        if (key := tuple(tokens)) not in self._rows:
            with torch.no_grad():
                self._rows[key] = self._model(torch.tensor([list(tokens)])).logits[0, -1]
        return self._rows[key].clone()

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.log_softmax(self.row(tokens), -1)

    def greedy(self, params: SamplingParams) -> list[int]:
        """At most max_tokens, which must be set."""
        output: list[int] = []
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        while len(output) < (params.max_tokens or 0):
            best = int(self._scores(params, output, stops).argmax())
            if best in stops:
                break
            output.append(best)
        return output

    def check_greedy(self, params: SamplingParams, language: Language, output: list[int]) -> None:
        """Each token is the best of those that may follow, and at the end none may; what is forced may be written in any tokens.

        Without ends: ignore_eos, no stop ids.
        """
        free = 0
        for i, token in enumerate(output):
            text = b"".join(self.words[t] for t in output[:i])
            best = int(self._scores(params, output[:i], (), language).argmax())
            forced = language.forced(text)
            assert token == best or (forced and forced.startswith(self.words[token])), (text, best)
            free += not forced
        assert free, "nothing was to be chosen"
        assert torch.isneginf(self._scores(params, output, (), language)).all(), "the answer ends too early"

    def _scores(self, params: SamplingParams, output: list[int], stops: Collection[int], language: Language | None = None) -> torch.Tensor:
        row = self.row([*self.prompt, *output])
        text = b"".join(self.words[token] for token in output)
        for token in range(TOKENIZER_VOCAB):
            if params.allowed_token_ids and token not in params.allowed_token_ids:
                row[token] = -torch.inf
            if token in params.banned_token_ids or (len(output) < params.min_tokens and token in stops):
                row[token] = -torch.inf
            if language is not None and not self._legal(token, text, stops, language):
                row[token] = -torch.inf
            row[token] += params.logit_bias.get(token, 0.0)
            if token in self.prompt or token in output:
                row[token] = row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
            if token in output:
                row[token] -= output.count(token) * params.frequency_penalty + params.presence_penalty
        return row

    def _legal(self, token: int, text: bytes, stops: Collection[int], language: Language) -> bool:
        if token in stops:
            return language.may_end(text)
        if token in SPECIAL and language.begun(text):
            return False
        return language.may_follow(text, self.words[token])

"""What a request asks for: limits, methods, sampling parameters, grammars."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.errors import InvalidRequest

GREEDY_BELOW = 1e-5  # temperatures below this choose by argmax
MAX_LOGPROBS = 20  # most alternatives reported per token
MAX_ID_BYTES = 128  # of session, request and orchestrator ids
MAX_SEED = (1 << 64) - 1
MAX_GRAMMAR_BYTES = 1 << 16  # of a grammar's text, or of all its options
MAX_CHOICES = 1024
MAX_START_BYTES = 256  # of the text a grammar begins after
MAX_PROMPT_LOGPROBS = 200_000  # of one session: tokens of the prompt times (1 + alternatives); 2 MB of a message


class RejectionMethod(enum.Enum):
    COUPLED = "coupled"
    STANDARD = "standard"


class DraftMethod(enum.Enum):
    GUMBEL = "gumbel"
    GREEDY = "greedy"
    PROBABILISTIC = "probabilistic"


LEGAL_METHODS = {
    RejectionMethod.COUPLED: (DraftMethod.GUMBEL, DraftMethod.GREEDY),  # first = default
    RejectionMethod.STANDARD: (DraftMethod.PROBABILISTIC, DraftMethod.GREEDY),
}


class GrammarForm(enum.Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A formal language for the output. `text` = the schema, expression or grammar; `options` = the answers of a choice.

    `start_after` = the text after which it begins; None = from the first token on.
    """

    form: GrammarForm
    text: str = ""
    options: tuple[str, ...] = ()
    start_after: str | None = None

    def check(self) -> None:
        """Sizes only: whether it is a grammar is found out by compiling it. Raises InvalidRequest."""
        name = f"sampling.grammar.{self.form.value}"
        if self.form is GrammarForm.CHOICE:
            if not 1 <= len(self.options) <= MAX_CHOICES or not all(self.options):
                raise InvalidRequest(name, f"must hold 1 to {MAX_CHOICES} options, none of them empty")
        elif not self.text:
            raise InvalidRequest(name, "must not be empty")
        if (size := len(self.text.encode()) + sum(len(option.encode()) for option in self.options)) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(name, f"at most {MAX_GRAMMAR_BYTES} bytes (MAX_GRAMMAR_BYTES), got {size}")
        if self.start_after is not None and not 1 <= len(self.start_after.encode()) <= MAX_START_BYTES:
            raise InvalidRequest(
                "sampling.grammar.start_after", f"must be 1 to {MAX_START_BYTES} bytes long; leave it unset to begin at once"
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What shapes the target's decisions. The defaults here are the only defaults; no checkpoint's generation_config is ever read.

    Complete on every hop behind the front: `max_tokens` is resolved at admission. `logprobs` None = none at all,
    0 = the chosen token's only. Log-probabilities are those of the raw logits.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def check(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first field that is out of range. `vocab_size` = ids the target's tokenizer knows."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise InvalidRequest(f"sampling.{name}", f"must be a number in [{low:.10g}, {high:.10g}], got {value!r}")
        if self.top_p == 0.0:
            raise InvalidRequest("sampling.top_p", "must be in (0, 1]; leave it unset to keep all ids")
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("sampling.repetition_penalty", "must be in (0, 10]; 1 changes nothing")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("sampling.min_tokens", f"must not exceed max_tokens ({self.max_tokens})")
        id_lists = {n: getattr(self, n) for n in ("stop_token_ids", "allowed_token_ids", "banned_token_ids")}
        id_lists["logit_bias"] = tuple(self.logit_bias)
        for name, ids in id_lists.items():
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                bad = next(i for i in ids if not 0 <= i < vocab_size)
                raise InvalidRequest(f"sampling.{name}", f"token id {bad} is not in the vocabulary (0 to {vocab_size - 1})")
        bad_bias = next((b for b in self.logit_bias.values() if not abs(b) <= 100.0), None)
        if bad_bias is not None:
            raise InvalidRequest("sampling.logit_bias", f"values must be in [-100, 100], got {bad_bias!r}")
        if self.grammar is not None:
            self.grammar.check()


_RANGES = (
    ("temperature", 0.0, 1e4),
    ("top_k", 0, 2**31 - 1),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("frequency_penalty", -2.0, 2.0),
    ("presence_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 10.0),
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
